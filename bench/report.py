"""Figures of several runs as a table for people, for Markdown and as JSON: the median, and the range it is from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench import harness


class Figure(NamedTuple):
    """A thing that is measured; a target is the least value, or the greatest where `is_upper` is set."""

    key: str
    label: str
    unit: str
    target: float | None = None
    is_upper: bool = False

    def verdict(self, value: float) -> str:
        """The target, and whether `value` meets it; empty without a target."""
        if self.target is None:
            return ""
        met = value <= self.target if self.is_upper else value >= self.target
        return f"{'<=' if self.is_upper else '>='} {self.target:g}: {'met' if met else 'missed'}"


FIGURES: Sequence[Figure] = (
    Figure("ready_s", "start of all processes to ready", "s", 4, True),
    Figure("produce_1000B_mb_s", "produce, 1,000 B records", "MB/s", 30),
    Figure("produce_1000B_records_s", "the same", "records/s"),
    Figure("produce_100B_mb_s", "produce, 100 B records", "MB/s"),
    Figure("produce_100B_records_s", "the same", "records/s"),
    Figure("produce_mixed_mb_s", "produce, records of 1 to 4,000 B", "MB/s"),
    Figure("consume_mb_s", "consume, all of them", "MB/s", 80),
    Figure("consume_records_s", "the same", "records/s"),
    Figure("latency_p50_ms", "produce to consume, 100 B, one at a time: p50", "ms", 3, True),
    Figure("latency_p99_ms", "the same: p99", "ms"),
    Figure("memory_ready_mib", "memory of all processes when ready", "MiB"),
    Figure("memory_loaded_mib", "memory of all processes after the load", "MiB", 400, True),
    Figure("idle_cpu_percent", "idle CPU of all processes, percent of one core", "%", 50, True),
    Figure("idle_loopback_kb_s", "idle loopback traffic", "kB/s"),
    Figure("racks_off_kb_s", "consumers in two racks: read across racks", "kB/s"),
    Figure("racks_on_kb_s", "the same with RackAwareReplicaSelector", "kB/s"),
    Figure("racks_share_percent", "with it: share read in the own rack", "%", 99),
    Figure("create_s", "creating the partitions", "s"),
    Figure("burst_many_ms", "burst on 100 of them, to a consumer of all", "ms"),
    Figure("burst_few_ms", "the same on a cluster with 100 partitions", "ms"),
    Figure("burst_ratio", "the first beside the second", "x", 1.1, True),
    Figure("spark_first_records_s", "Spark batch read on local[2], first", "records/s"),
    Figure("spark_records_s", "Spark batch read on local[2], second and later", "records/s", 200_000),
)

_MANY_TARGETS = {"idle_cpu_percent": 15.0, "idle_loopback_kb_s": 10.0}
MANY_FIGURES: Sequence[Figure] = [
    figure._replace(target=_MANY_TARGETS[figure.key], is_upper=True) if figure.key in _MANY_TARGETS else figure
    for figure in FIGURES
]
"""The same for a cluster with many partitions, which is to idle as well as others: that is the promise of sessions."""


class Summary(NamedTuple):
    """One figure over all runs."""

    figure: Figure
    median: float
    least: float
    greatest: float
    runs: int


def summarize(samples: Mapping[str, Sequence[float]], figures: Sequence[Figure] = FIGURES) -> list[Summary]:
    """The figures that were measured, in the order of `figures`."""
    return [
        Summary(figure, statistics.median(values), min(values), max(values), len(values))
        for figure in figures
        if (values := samples.get(figure.key))
    ]


def number(value: float) -> str:
    """Three digits that say something, without exponents."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(summaries: Iterable[Summary], *, markdown: bool) -> str:
    """A table for docs/benchmarks.md or a terminal; empty without figures."""
    rows = [
        (
            figure.label,
            f"{number(median)} {figure.unit}",
            f"{number(least)} .. {number(greatest)}",
            str(runs),
            figure.verdict(median),
        )
        for figure, median, least, greatest, runs in summaries
    ]
    return harness.table(("what", "median", "min .. max", "runs", "target"), rows, markdown=markdown) if rows else ""


def figures(summaries: Iterable[Summary]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "figures": {
            figure.key: {"median": median, "min": least, "max": greatest, "runs": runs, "unit": figure.unit}
            for figure, median, least, greatest, runs in summaries
        }
    }
