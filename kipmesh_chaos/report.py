"""The results of a run: `report.html`, a self-contained page, and `summary.json`."""

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
    """A fault on the time line, in seconds since the start of the run. `end` is None if it was never undone."""

    kind: str
    nodes: Sequence[str]
    text: str
    begin: float
    end: float | None = None


@dataclass(slots=True)
class Timeline:
    """Time series and events of a run that the page shows. Times are seconds since the start of the run."""

    end: float = 1.0
    bin_s: float = 0.5
    acknowledged: list[int] = field(default_factory=list)
    """Acknowledged writes per bin. `unknown`, `read` and `latencies_ms` have the same bins."""
    unknown: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    latencies_ms: list[list[float]] = field(default_factory=list)
    faults: dict[int, FaultSpan] = field(default_factory=dict)
    leaders: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """(time, leader) changes by partition."""
    controllers: list[tuple[float, int]] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)


def collect(events: Iterable[Event], duration_s: float) -> Timeline:
    """Return the Timeline of a history that lasts `duration_s` seconds."""
    timeline = Timeline(end=max(duration_s, 0.1), bin_s=max(duration_s / BINS, 0.1))
    count = int(timeline.end / timeline.bin_s) + 1
    timeline.acknowledged, timeline.unknown, timeline.read = [0] * count, [0] * count, [0] * count
    timeline.latencies_ms = [[] for _ in range(count)]
    begun: dict[int, float] = {}
    for event in events:
        place = min(int(event.t / timeline.bin_s), count - 1)
        match event:
            case h.Invoke():
                begun[event.operation] = event.t
            case h.Ok():
                timeline.acknowledged[place] += 1
                timeline.latencies_ms[place].append(1000 * (event.t - begun.pop(event.operation, event.t)))
            case h.Unknown():
                timeline.unknown[place] += 1
            case h.Read(kind=ReaderKind.CONSUMER | ReaderKind.MEMBER):
                timeline.read[place] += len(event.records)
            case h.FaultBegan():
                timeline.faults[event.fault] = FaultSpan(event.kind, event.nodes, event.text, event.t)
            case h.FaultEnded() if event.fault in timeline.faults:
                timeline.faults[event.fault].end = event.t
            case h.Led():
                timeline.leaders.setdefault(event.partition, []).append((event.t, event.leader))
            case h.Controller():
                timeline.controllers.append((event.t, event.node_id))
            case h.PhaseBegan():
                timeline.phases.append((event.t, event.phase.value))
            case h.Note():
                timeline.notes.append((event.t, event.text))
    return timeline


def summary(verdict: Verdict, experiment: Experiment, seed: int, timeline: Timeline) -> dict[str, Any]:
    """Return the contents of `summary.json`: verdict, figures, counts of faults by kind, and notes."""
    phases = {name: t for t, name in timeline.phases}
    faults_s = phases.get(Phase.RECOVERY, timeline.end) - phases.get(Phase.FAULTS, 0.0)
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
        "faults_by_kind": dict(sorted(Counter(span.kind for span in timeline.faults.values()).items())),
        "notes": [{"t": round(t, 3), "text": text} for t, text in timeline.notes],
    }


def write(directory: Path, verdict: Verdict, experiment: Experiment, seed: int) -> None:
    """Write `report.html` and `summary.json` into a run's directory, from the history there. Raises HistoryError,
    OSError.
    """
    last = max((event.t for event in read_history(directory / HISTORY)), default=1.0)
    timeline = collect(read_history(directory / HISTORY), last)
    about = summary(verdict, experiment, seed, timeline)
    (directory / SUMMARY).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (directory / PAGE).write_text(render(timeline, verdict, experiment, about), encoding="utf-8")


# --- the page


class Chart(NamedTuple):
    """A chart over time. `curves` are (name, CSS class, polylines), `grid` are (y position, value) lines."""

    title: str
    curves: Sequence[tuple[str, str, Sequence[str]]]
    grid: Sequence[tuple[float, float]]


def render(timeline: Timeline, verdict: Verdict, experiment: Experiment, about: dict[str, Any]) -> str:
    """Return the HTML page. `about` is the result of `summary`. The page has inline SVG charts, loads no resources and
    runs no script.
    """
    environment = Environment(
        loader=PackageLoader("kipmesh_chaos", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    per_s = 1 / timeline.bin_s
    charts = [
        _chart(
            timeline,
            "Records a second",
            ("acknowledged", "line1", [count * per_s for count in timeline.acknowledged]),
            ("read by consumers", "line2", [count * per_s for count in timeline.read]),
        ),
        _chart(
            timeline,
            "Latency of acknowledged writes, ms (logarithmic)",
            ("median", "line1", [_quantile(one, 0.5) for one in timeline.latencies_ms]),
            ("greatest", "line3", [_quantile(one, 1.0) for one in timeline.latencies_ms]),
            logarithmic=True,
        ),
    ]
    return environment.get_template(PAGE).render(
        timeline=timeline,
        verdict=verdict,
        experiment=experiment,
        about=about,
        settings=json.dumps(experiment.model_dump(mode="json", exclude_defaults=True), indent=2),
        nodes=sorted({node for span in timeline.faults.values() for node in span.nodes}),
        charts=charts,
        phases=_labelled_phases(timeline),
        ticks=_ticks(timeline.end),
        x=lambda t: _x(timeline, t),
        left=LEFT,
        width=WIDTH,
        right=WIDTH - RIGHT,
        top=CHART_TOP,
        bottom=CHART_BOTTOM,
    )


def _x(timeline: Timeline, t: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(t / timeline.end, 0), 1)


def _chart(
    timeline: Timeline, title: str, *curves: tuple[str, str, Sequence[float | None]], logarithmic: bool = False
) -> Chart:
    greatest = max((value for _, _, values in curves for value in values if value is not None), default=0) or 1.0

    def height(value: float) -> float:
        share = math.log1p(max(value, 0)) / math.log1p(greatest) if logarithmic else value / greatest
        return CHART_BOTTOM - (CHART_BOTTOM - CHART_TOP) * share

    def lines(values: Sequence[float | None]) -> list[str]:
        """Return a polyline for each stretch without a gap."""
        points = [
            value if value is None else f"{_x(timeline, (place + 0.5) * timeline.bin_s):.1f},{height(value):.1f}"
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
    """Return a quantile of the values, or None if there are none."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else None


def _labelled_phases(timeline: Timeline) -> list[tuple[float, str]]:
    """Return (time, name) of the phases whose labels fit beside each other, except the phase `end`."""
    found: list[tuple[float, str]] = []
    for t, name in timeline.phases:
        if name != Phase.END and (not found or _x(timeline, t) >= _x(timeline, found[-1][0]) + 60):
            found.append((t, name))
    return found


def _ticks(end: float) -> list[float]:
    rough = end / _TICKS
    power = 10 ** math.floor(math.log10(max(rough, 1e-3)))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    return [number * step for number in range(int(end / step) + 1)]
