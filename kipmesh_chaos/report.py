"""What a run leaves for people and for scripts: `report.html`, one page that needs nothing else, and `summary.json`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from kipmesh_chaos import history as h
from kipmesh_chaos.experiment import Experiment
from kipmesh_chaos.history import Event, Phase, ReaderKind, read_history
from kipmesh_chaos.history_checker import Verdict

HISTORY = "history.jsonl"
SUMMARY = "summary.json"
PAGE = "report.html"
BINS = 240
WIDTH, LEFT, RIGHT = 1100, 130, 12
CHART_TOP, CHART_BOTTOM = 16.0, 146.0
_TICKS = 10


@dataclass(slots=True)
class FaultSpan:
    """A fault on the time line; `end` is None for one that was not undone."""

    kind: str
    nodes: Sequence[str]
    text: str
    begin: float
    end: float | None = None


@dataclass(slots=True)
class Story:
    """A run over time: what the page draws."""

    end: float = 1.0
    bin_s: float = 0.5
    acknowledged: list[int] = field(default_factory=list)
    """By bin; so are the others."""
    unknown: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    latencies_ms: list[list[float]] = field(default_factory=list)
    faults: dict[int, FaultSpan] = field(default_factory=dict)
    leaders: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By partition: since when, leader."""
    controllers: list[tuple[float, int]] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)


def story(events: Iterable[Event], duration_s: float) -> Story:
    """The story of a history that lasts so long."""
    told = Story(end=max(duration_s, 0.1), bin_s=max(duration_s / BINS, 0.1))
    count = int(told.end / told.bin_s) + 1
    told.acknowledged, told.unknown, told.read = [0] * count, [0] * count, [0] * count
    told.latencies_ms = [[] for _ in range(count)]
    begun: dict[int, float] = {}
    for event in events:
        place = min(int(event.t / told.bin_s), count - 1)
        match event:
            case h.Invoke():
                begun[event.operation] = event.t
            case h.Ok():
                told.acknowledged[place] += 1
                told.latencies_ms[place].append(1000 * (event.t - begun.pop(event.operation, event.t)))
            case h.Unknown():
                told.unknown[place] += 1
            case h.Read(kind=ReaderKind.CONSUMER | ReaderKind.MEMBER):
                told.read[place] += len(event.records)
            case h.FaultBegan():
                told.faults[event.fault] = FaultSpan(event.kind, event.nodes, event.text, event.t)
            case h.FaultEnded() if event.fault in told.faults:
                told.faults[event.fault].end = event.t
            case h.Led():
                told.leaders.setdefault(event.partition, []).append((event.t, event.leader))
            case h.Controller():
                told.controllers.append((event.t, event.node_id))
            case h.PhaseBegan():
                told.phases.append((event.t, event.phase.value))
            case h.Note():
                told.notes.append((event.t, event.text))
    return told


def summary(verdict: Verdict, experiment: Experiment, seed: int, told: Story) -> dict[str, Any]:
    """For scripts."""
    phases = {name: t for t, name in told.phases}
    faults_s = phases.get(Phase.RECOVERY, told.end) - phases.get(Phase.FAULTS, 0.0)
    return {
        "experiment": experiment.name,
        "hypothesis": experiment.hypothesis,
        "seed": seed,
        "clean": verdict.is_clean,
        "anomalies": verdict.counts,
        "findings": [
            {"kind": one.kind.value, "t": round(one.t, 3), "partition": one.partition, "text": one.text}
            for one in verdict.findings
        ],
        "faults_s": round(faults_s, 3),
        **verdict.figures._asdict(),
        "faults_by_kind": dict(sorted(Counter(span.kind for span in told.faults.values()).items())),
        "notes": [{"t": round(t, 3), "text": text} for t, text in told.notes],
    }


def write(folder: Path, verdict: Verdict, experiment: Experiment, seed: int) -> None:
    """Write both from the history in a run's folder."""
    last = max((event.t for event in read_history(folder / HISTORY)), default=1.0)
    told = story(read_history(folder / HISTORY), last)
    about = summary(verdict, experiment, seed, told)
    (folder / SUMMARY).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(render(told, verdict, experiment, about), encoding="utf-8")


# --- the page


class Chart(NamedTuple):
    """Curves over time: polylines by (name, style), and the heights of the grid with their values."""

    title: str
    curves: Sequence[tuple[str, str, Sequence[str]]]
    grid: Sequence[tuple[float, float]]


def render(told: Story, verdict: Verdict, experiment: Experiment, about: dict[str, Any]) -> str:
    """The page: one HTML file with drawings in SVG; it loads nothing and runs no script."""
    environment = Environment(
        loader=PackageLoader("kipmesh_chaos", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    per_s = 1 / told.bin_s
    charts = [
        _chart(
            told,
            "Records a second",
            ("acknowledged", "line1", [count * per_s for count in told.acknowledged]),
            ("read by consumers", "line2", [count * per_s for count in told.read]),
        ),
        _chart(
            told,
            "Latency of acknowledged writes, ms (logarithmic)",
            ("median", "line1", [_quantile(one, 0.5) for one in told.latencies_ms]),
            ("greatest", "line3", [_quantile(one, 1.0) for one in told.latencies_ms]),
            logarithmic=True,
        ),
    ]
    return environment.get_template(PAGE).render(
        told=told,
        verdict=verdict,
        experiment=experiment,
        about=about,
        settings=json.dumps(experiment.model_dump(mode="json", exclude_defaults=True), indent=2),
        nodes=sorted({node for span in told.faults.values() for node in span.nodes}),
        charts=charts,
        phases=_apart(told),
        ticks=_ticks(told.end),
        x=lambda t: _x(told, t),
        left=LEFT,
        width=WIDTH,
        right=WIDTH - RIGHT,
        top=CHART_TOP,
        bottom=CHART_BOTTOM,
    )


def _x(told: Story, t: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(t / told.end, 0), 1)


def _chart(
    told: Story, title: str, *curves: tuple[str, str, Sequence[float | None]], logarithmic: bool = False
) -> Chart:
    greatest = max((value for _, _, values in curves for value in values if value is not None), default=0) or 1.0

    def height(value: float) -> float:
        share = math.log1p(max(value, 0)) / math.log1p(greatest) if logarithmic else value / greatest
        return CHART_BOTTOM - (CHART_BOTTOM - CHART_TOP) * share

    def lines(values: Sequence[float | None]) -> list[str]:
        """A polyline for each stretch without a gap."""
        points = [
            value if value is None else f"{_x(told, (place + 0.5) * told.bin_s):.1f},{height(value):.1f}"
            for place, value in enumerate(values)
        ]
        stretches = groupby(points, key=lambda point: point is not None)
        return [" ".join(filter(None, stretch)) for is_drawn, stretch in stretches if is_drawn]

    marks = [0.0, math.sqrt(1 + greatest) - 1 if logarithmic else greatest / 2, greatest]
    return Chart(
        title,
        [(name, style, lines(values)) for name, style, values in curves],
        [(height(value), value) for value in marks],
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """None of nothing."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else None


def _apart(told: Story) -> list[tuple[float, str]]:
    """Phases whose names have room; those that are too near to the last are in the history."""
    found: list[tuple[float, str]] = []
    for t, name in told.phases:
        if name != Phase.END and (not found or _x(told, t) >= _x(told, found[-1][0]) + 60):
            found.append((t, name))
    return found


def _ticks(end: float) -> list[float]:
    rough = end / _TICKS
    power = 10 ** math.floor(math.log10(max(rough, 1e-3)))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    return [number * step for number in range(int(end / step) + 1)]
