"""The figures of `bench.compare` as a table of ratios with their range, and as a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

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


WIDTH, LEFT, RIGHT, ROW, TOP = 860, 330, 110, 30, 64
COLOURS = {"ours": "#0072b2", "ours3": "#e69f00"}
LABELS = {"ours": "1 leader, 2 followers", "ours3": "3 leaders"}
INK, GRID, TARGET = "#333333", "#dddddd", "#009e73"


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def picture(rows: Sequence[Row]) -> str:
    """A line a figure on one logarithmic axis: medians as dots on the range of the turns; a green bar is the target."""
    shown = [row for row in rows if any(other == "kafka" for _, other in row.ratios)]
    values = [
        value for row in shown for ratio in row.ratios.values() for value in (ratio.least, ratio.most) if value > 0
    ]
    values += [row.figure.target for row in shown if row.figure.target]
    first = math.floor(math.log10(min(values, default=1)) * 2) / 2
    last = max(math.ceil(math.log10(max(values, default=1)) * 2) / 2, first + 0.5)
    height = TOP + ROW * len(shown) + 30

    def x_of(value: float) -> float:
        return LEFT + (math.log10(max(value, 1e-6)) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, "kipmesh / Apache Kafka on one machine (log scale; the bar is the target)", size=14),
    ]
    for place, key in enumerate(OURS):
        parts.append(f'<circle cx="{22 + place * 190}" cy="42" r="5" fill="{COLOURS[key]}"/>')
        parts.append(_text(32 + place * 190, 46, LABELS[key]))
    ticks = [value for value in (0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 3, 10, 30) if first <= math.log10(value) <= last]
    for tick in ticks:
        parts.append(_line(x_of(tick), TOP, x_of(tick), height - 24, INK if tick == 1 else GRID))
        parts.append(_text(x_of(tick), height - 8, f"{tick:g}", "middle"))
    for place, row in enumerate(shown):
        y = TOP + ROW * place + ROW / 2
        parts.append(_text(16, y + 4, row.figure.label))
        if row.figure.target is not None:
            x = x_of(row.figure.target)
            parts.append(_line(x, y - 11, x, y + 11, TARGET, 3))
        for turn, key in enumerate(OURS):
            ratio = row.ratios.get((key, "kafka"))
            if ratio is None:
                continue
            at = y - 5 + 10 * turn
            parts.append(_line(x_of(ratio.least), at, x_of(ratio.most), at, COLOURS[key], 2))
            parts.append(f'<circle cx="{x_of(ratio.median):.1f}" cy="{at:.1f}" r="4" fill="{COLOURS[key]}"/>')
        told = row.ratios.get(("ours", "kafka"))
        if told:
            parts.append(_text(WIDTH - 16, y + 4, f"{told.median:.2f}", "end"))
    return "\n".join([*parts, "</svg>", ""])
