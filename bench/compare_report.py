"""The figures of `bench.compare` as a table of ratios with their range, and as a chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench import charts
from bench.compare_shapes import Shape
from bench.report import Figure, number

OURS, OTHERS = ("ours", "ours3"), ("kafka", "tuned")
FIGURES: Sequence[Figure] = (
    Figure("produce_1000_mb_s", "produce, librdkafka, 1,000 B, acks=all", "MB/s", 1.5),
    Figure("produce_100_records_s", "produce, librdkafka, 100 B, acks=all", "records/s", 1.3),
    Figure("consume_mb_s", "consume, librdkafka", "MB/s", 0.95),
    Figure("java_consume_mb_s", "consume, Java", "MB/s"),
    Figure("latency_p50_ms", "produce to consume, empty cluster: p50", "ms", 0.9, True),
    Figure("latency_p99_ms", "the same: p99", "ms", 0.9, True),
    Figure("many_latency_p50_ms", "produce to consume, 3,000 partitions x 3: p50", "ms", 0.9, True),
    Figure("many_latency_p99_ms", "the same: p99", "ms", 0.9, True),
    Figure("ready_s", "from nothing to ready", "s", 0.35, True),
    Figure("memory_mib", "memory (PSS) of all processes, idle", "MiB", 0.5, True),
    Figure("many_memory_mib", "the same with 3,000 partitions x 3", "MiB", 0.35, True),
    Figure("many_cpu_percent", "idle CPU with 3,000 partitions x 3, of one core", "%", 0.5, True),
    Figure("failover_gap_s", "longest gap after SIGKILL of a leader", "s", 0.15, True),
    Figure("failover_gap_max_s", "the same: longest of a turn's kills", "s"),
    Figure("many_create_s", "creating 3,000 partitions x 3", "s"),
    Figure("many_loopback_kb_s", "idle loopback traffic with them", "kB/s"),
)
"""Targets are of the ratio, ours / Apache Kafka's."""


class Ratio(NamedTuple):
    """Of the turns that have both."""

    median: float
    least: float
    most: float
    turns: int


class Row(NamedTuple):
    """A figure: medians by shape, ratios by the two shapes that they are of."""

    figure: Figure
    medians: Mapping[str, float]
    ratios: Mapping[tuple[str, str], Ratio]


def rows_of(turns: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """The figures of which anything was measured."""
    rows = []
    for figure in FIGURES:
        samples = {
            shape: [turn[shape][figure.key] for turn in turns if figure.key in turn.get(shape, {})]
            for shape in (*OURS, *OTHERS)
        }
        medians = {shape: statistics.median(values) for shape, values in samples.items() if values}
        ratios = {}
        for ours in OURS:
            for other in OTHERS:
                both = [turn for turn in turns if all(figure.key in turn.get(shape, {}) for shape in (ours, other))]
                found = [turn[ours][figure.key] / turn[other][figure.key] for turn in both if turn[other][figure.key]]
                if found:
                    ratios[ours, other] = Ratio(statistics.median(found), min(found), max(found), len(found))
        if medians:
            rows.append(Row(figure, medians, ratios))
    return rows


def _ratio(row: Row, ours: str, other: str) -> str:
    found = row.ratios.get((ours, other))
    return "" if found is None else f"{found.median:.2f} ({found.least:.2f} .. {found.most:.2f})"


def _verdict(row: Row) -> str:
    found = row.ratios.get(("ours", "kafka"))
    return row.figure.verdict(found.median) if found else ""


def as_markdown(rows: Sequence[Row], shapes: Sequence[Shape]) -> str:
    """Two tables: ratios, and the medians that they are of."""
    lines = [
        "| kipmesh / Apache Kafka | ratio (min .. max) | 3 leaders | to our timeouts | target of the first | turns |",
        "|---|---|---|---|---|---:|",
    ]
    for row in rows:
        found = row.ratios.get(("ours", "kafka"))
        lines.append(
            f"| {row.figure.label} | {_ratio(row, 'ours', 'kafka')} | {_ratio(row, 'ours3', 'kafka')} "
            f"| {_ratio(row, 'ours', 'tuned')} | {_verdict(row)} | {found.turns if found else 0} |"
        )
    lines += [
        "",
        f"| medians | unit | {' | '.join(shape.label for shape in shapes)} |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        values = [number(row.medians[shape.key]) if shape.key in row.medians else "" for shape in shapes]
        lines.append(f"| {row.figure.label} | {row.figure.unit} | {' | '.join(values)} |")
    return "\n".join(lines)


LABELS = {"ours": "1 leader, 2 followers", "ours3": "3 leaders"}


def chart(rows: Sequence[Row]) -> str:
    """SVG of the ratios to Apache Kafka in its own configuration."""
    shown = []
    for row in rows:
        found = {key: row.ratios[key, "kafka"] for key in OURS if (key, "kafka") in row.ratios}
        spans = [charts.Span(LABELS[key], one.least, one.median, one.most) for key, one in found.items()]
        if spans:
            shown.append(charts.Ratios(row.figure.label, spans, row.figure.target))
    return charts.ratios("kipmesh / Apache Kafka on one machine (the green bar is the target)", shown)
