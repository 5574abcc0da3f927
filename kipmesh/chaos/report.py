"""What a run leaves for people and for scripts: `report.html`, one page that needs nothing else, and `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kipmesh.chaos.experiment import Experiment
from kipmesh.testing.history import (
    Controller,
    Event,
    FaultBegan,
    FaultEnded,
    Invoke,
    Led,
    Note,
    Ok,
    Phase,
    PhaseBegan,
    Read,
    ReaderKind,
    Unknown,
    read_history,
)
from kipmesh.testing.history_checker import Verdict

HISTORY = "history.jsonl"
SUMMARY = "summary.json"
PAGE = "report.html"
BINS = 240


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
    leaders: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict)
    """By partition: since when, leader, leader epoch."""
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
            case Invoke():
                begun[event.operation] = event.t
            case Ok():
                told.acknowledged[place] += 1
                told.latencies_ms[place].append(1000 * (event.t - begun.pop(event.operation, event.t)))
            case Unknown():
                told.unknown[place] += 1
            case Read(kind=ReaderKind.CONSUMER | ReaderKind.MEMBER):
                told.read[place] += len(event.records)
            case FaultBegan():
                told.faults[event.fault] = FaultSpan(event.kind, event.nodes, event.text, event.t)
            case FaultEnded() if event.fault in told.faults:
                told.faults[event.fault].end = event.t
            case Led():
                told.leaders.setdefault(event.partition, []).append((event.t, event.leader, event.leader_epoch))
            case Controller():
                told.controllers.append((event.t, event.node_id))
            case PhaseBegan():
                told.phases.append((event.t, event.phase.value))
            case Note():
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
        "faults_by_kind": _counted(span.kind for span in told.faults.values()),
        "notes": [{"t": round(t, 3), "text": text} for t, text in told.notes],
    }


def _counted(kinds: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


def write(folder: Path, verdict: Verdict, experiment: Experiment, seed: int) -> None:
    """Write both from the history in a run's folder."""
    from kipmesh.chaos import report_page

    last = max((event.t for event in read_history(folder / HISTORY)), default=1.0)
    told = story(read_history(folder / HISTORY), last)
    about = summary(verdict, experiment, seed, told)
    (folder / SUMMARY).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(report_page.render(told, verdict, experiment, about), encoding="utf-8")
