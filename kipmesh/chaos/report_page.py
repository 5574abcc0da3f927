"""The page of a run: HTML with drawings in SVG, made here; it loads nothing and runs no script."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import Any

from kipmesh.chaos.experiment import Experiment
from kipmesh.chaos.report import Story
from kipmesh.testing.history import Phase
from kipmesh.testing.history_checker import Verdict

WIDTH, LEFT, RIGHT = 1100, 130, 12
LANE, CHART = 20, 130
_TICKS = 10


def render(told: Story, verdict: Verdict, experiment: Experiment, about: dict[str, Any]) -> str:
    """The whole page."""
    page = resources.files(__package__).joinpath("report.html").read_text("utf-8")
    word = "no anomaly" if verdict.is_clean else f"{sum(verdict.counts.values())} anomalies"
    parts = {
        "TITLE": escape(experiment.name),
        "HYPOTHESIS": escape(experiment.hypothesis),
        "VERDICT": f'<span class="{"good" if verdict.is_clean else "bad"}">{word}</span>',
        "FIGURES": _figures(about),
        "TIMELINE": _Drawing(told).timeline(),
        "FINDINGS": _findings(verdict),
        "NOTES": _rows(("s", "note"), [(f"{t:.2f}", text) for t, text in told.notes]),
        "EXPERIMENT": escape(json.dumps(experiment.model_dump(mode="json", exclude_defaults=True), indent=2)),
        "SEED": str(about["seed"]),
    }
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def _figures(about: dict[str, Any]) -> str:
    shown = [
        ("faults", about["faults"]),
        ("seconds under faults", f"{about['faults_s']:.1f}"),
        ("acknowledged", f"{about['acknowledged']:,}"),
        ("outcome unknown", f"{about['unknown']:,}"),
        ("written again by retries", f"{about['repeated']:,}"),
        ("records read", f"{about['read']:,}"),
        *_group_figures(about),
        ("longest write gap", f"{about['longest_write_gap_s']:.2f} s"),
        ("longest read delay", f"{about['longest_read_delay_s']:.2f} s"),
    ]
    return "".join(f"<div><b>{escape(str(value))}</b>{escape(name)}</div>" for name, value in shown)


def _group_figures(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Of runs with a consumer group."""
    if not about["generations"]:
        return []
    return [
        ("generations of the group", f"{about['generations']:,}"),
        ("commits acknowledged", f"{about['commits']:,}"),
        ("read again after a rebalance", f"{about['read_again']:,}"),
    ]


def _findings(verdict: Verdict) -> str:
    if verdict.is_clean:
        return "<p>The checker found nothing.</p>"
    counts = ", ".join(f"{escape(kind)}: {count}" for kind, count in sorted(verdict.counts.items()))
    rows = [
        (f"{one.t:.2f}", one.kind.value, "" if one.partition < 0 else str(one.partition), one.text)
        for one in verdict.findings
    ]
    return f"<p>{counts}</p>{_rows(('s', 'kind', 'partition', 'what'), rows)}"


def _rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class _Drawing:
    """One drawing over time, from top to bottom."""

    def __init__(self, told: Story) -> None:
        self._told = told
        self._parts: list[str] = []
        self._y = 24.0

    def timeline(self) -> str:
        """All lanes and curves under one axis."""
        told = self._told
        self._title("Faults")
        nodes = sorted({node for span in told.faults.values() for node in span.nodes})
        for node in nodes:
            self._lane(node, [
                (span.begin, told.end if span.end is None else span.end, "fault", span.text)
                for span in told.faults.values()
                if node in span.nodes
            ])  # fmt: skip
        self._y += 18
        self._title("Leaders")
        for partition, changes in sorted(told.leaders.items()):
            self._lane(f"partition {partition}", self._spans([(t, leader) for t, leader, _ in changes], "broker"))
        self._lane("active controller", self._spans(told.controllers, "controller"))
        self._y += 22
        per_s = 1 / told.bin_s
        self._curves("Records a second", [
            ("acknowledged", "line1", [count * per_s for count in told.acknowledged]),
            ("read by consumers", "line2", [count * per_s for count in told.read]),
        ])  # fmt: skip
        self._curves("Latency of acknowledged writes, ms (logarithmic)", [
            ("median", "line1", [_quantile(one, 0.5) for one in told.latencies_ms]),
            ("greatest", "line3", [_quantile(one, 1.0) for one in told.latencies_ms]),
        ], logarithmic=True)  # fmt: skip
        self._axis()
        height = self._y + 8
        body = "".join(self._parts)
        return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="Time line">{body}</svg>'

    # -- inside

    def _x(self, t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(t / self._told.end, 0), 1)

    def _title(self, text: str) -> None:
        self._parts.append(f'<text class="title" x="0" y="{self._y:.1f}">{escape(text)}</text>')
        self._y += 8

    def _lane(self, name: str, spans: Sequence[tuple[float, float, str, str]]) -> None:
        top = self._y
        middle = top + LANE / 2 + 4
        self._parts.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for begin, end, style, text in spans:
            left, right = self._x(begin), self._x(end)
            self._parts.append(
                f'<rect class="{style}" x="{left:.1f}" y="{top + 2:.1f}" width="{max(right - left, 2):.1f}" '
                f'height="{LANE - 4}" rx="2"><title>{begin:.2f} s to {end:.2f} s: {escape(text)}</title></rect>'
            )
            label = text if style == "fault" else text.rpartition(" ")[2]
            if right - left > 7 * len(label) + 6:
                self._parts.append(f'<text class="in" x="{left + 5:.1f}" y="{middle:.1f}">{escape(label)}</text>')
        self._y += LANE

    def _spans(self, changes: Sequence[tuple[float, int]], what: str) -> list[tuple[float, float, str, str]]:
        found = []
        for number, (t, who) in enumerate(changes):
            end = changes[number + 1][0] if number + 1 < len(changes) else self._told.end
            style = "nobody" if who < 0 else f"who{who % 6}"
            found.append((t, end, style, f"{what} {who}" if who >= 0 else "nobody"))
        return found

    def _curves(
        self, title: str, curves: Sequence[tuple[str, str, list[float | None]]], *, logarithmic: bool = False
    ) -> None:
        self._title(title)
        greatest = max((value for _, _, values in curves for value in values if value is not None), default=0) or 1.0
        scale: Callable[[float], float] = (lambda value: math.log10(1 + max(value, 0))) if logarithmic else float
        top, bottom, full = self._y + 4, self._y + CHART, scale(greatest)
        for share in (0.0, 0.5, 1.0):
            y = bottom - (bottom - top) * share
            value = 10 ** (full * share) - 1 if logarithmic else greatest * share
            self._parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self._parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
        for number, (name, style, values) in enumerate(curves):
            for first, run in _runs(values):
                points = " ".join(
                    f"{self._x((first + place + 0.5) * self._told.bin_s):.1f},"
                    f"{bottom - (bottom - top) * scale(value) / full:.1f}"
                    for place, value in enumerate(run)
                )
                self._parts.append(f'<polyline class="{style}" points="{points}"/>')
            x = WIDTH - RIGHT - 160 * (len(curves) - number)
            self._parts.append(f'<text class="{style}" x="{x}" y="{self._y - 8:.1f}">{escape(name)}</text>')
        for span in self._told.faults.values():
            left, right = self._x(span.begin), self._x(self._told.end if span.end is None else span.end)
            self._parts.insert(
                0,
                f'<rect class="shade" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 1):.1f}" '
                f'height="{bottom - top:.1f}"/>',
            )
        self._y = bottom + 28

    def _axis(self) -> None:
        y = self._y - 14
        step = _round_step(self._told.end / _TICKS)
        for number in range(int(self._told.end / step) + 1):
            x = self._x(number * step)
            self._parts.append(f'<text x="{x:.1f}" y="{y + 12:.1f}" text-anchor="middle">{number * step:g} s</text>')
        free = 0.0
        for t, name in self._told.phases:
            x = self._x(t)
            if name != Phase.END and x >= free:  # those that are too near to the last are in the history
                free = x + 60
                self._parts.append(f'<line class="phase" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{y:.1f}"/>')
                self._parts.append(f'<text class="phase" x="{x + 3:.1f}" y="12">{escape(name)}</text>')
        self._y = y + 8


def _runs(values: Sequence[float | None]) -> list[tuple[int, list[float]]]:
    """Stretches without a gap: where each begins, and its values."""
    found: list[tuple[int, list[float]]] = []
    for place, value in enumerate(values):
        if value is None:
            continue
        if place == 0 or values[place - 1] is None:
            found.append((place, []))
        found[-1][1].append(value)
    return found


def _quantile(values: Sequence[float], share: float) -> float | None:
    """None of nothing."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else None


def _round_step(rough: float) -> float:
    power = 10 ** math.floor(math.log10(max(rough, 1e-3)))
    return float(next(power * one for one in (1, 2, 5, 10) if power * one >= rough))
