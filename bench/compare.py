"""`python -m bench.compare`: kipmesh beside Apache Kafka on one machine, with the same third-party clients.

Each round starts, measures and stops each shape of `bench.compare_figures`, one after the other. A ratio compares two
clusters of one round. The table has the median and range of the ratios of all rounds.

Samples are kept in a file (`build/compare.json`). An interrupted run, or one that measures other figures (`--only`),
resumes from that file; `--fresh` discards it. Needs Java, Maven and confluent-kafka.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import charts, harness, system
from bench.compare_figures import GROUPS, QUICK, SHAPES, TUNED, Samples, Shape, Sizes, measure
from bench.harness import Figure, number
from bench.kafka import HEAP, ROOT, prepare, version

KEPT = ROOT / "build" / "compare.json"
KEPT_QUICK = ROOT / "build" / "compare-quick.json"
MINUTES_MAX = 25

OURS, OTHERS = ("ours", "ours3"), ("kafka", "tuned")
LABELS = {"ours": "1 leader, 2 followers", "ours3": "3 leaders"}
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
    Figure("failover_gap_max_s", "the same: longest of a round's kills", "s"),
    Figure("many_create_s", "creating 3,000 partitions x 3", "s"),
    Figure("many_loopback_kb_s", "idle loopback traffic with them", "kB/s"),
)
"""Targets apply to the ratio of kipmesh to Apache Kafka."""


class Kept:
    """Samples by round, shape and group, kept in a file that each addition replaces atomically. With `is_fresh`, an
    existing file is ignored.
    """

    def __init__(self, path: Path, is_fresh: bool) -> None:
        self._path = path
        self.rounds: list[dict[str, dict[str, Samples]]] = []
        self.problems: dict[str, str] = {}
        """Errors by shape and group, which have no samples."""
        if path.exists() and not is_fresh:
            self.rounds = json.loads(path.read_text()).get("rounds", [])

    def missing(self, index: int, shape: Shape, groups: Sequence[str]) -> list[str]:
        """Return the `groups` that belong to the shape but have no samples in round `index` (from 0)."""
        while len(self.rounds) <= index:
            self.rounds.append({})
        present = self.rounds[index].get(shape.key, {})
        return [name for name in groups if name in shape.groups and name not in present]

    def add(self, index: int, shape: Shape, group: str, samples: Samples | None, problem: str) -> None:
        """Store the samples of a group in round `index` and in the file. If `samples` is None, keep only `problem`,
        which is not written to the file.
        """
        if samples is None:
            self.problems[f"{shape.label}: {group}"] = problem
            return
        self.rounds[index].setdefault(shape.key, {})[group] = samples
        self._path.parent.mkdir(exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"rounds": self.rounds}, indent=1))
        new.replace(self._path)

    def flat(self) -> list[dict[str, Samples]]:
        """Return for each round the samples by shape and key, with the groups merged."""
        return [
            {
                shape: {key: value for samples in groups.values() for key, value in samples.items()}
                for shape, groups in each.items()
            }
            for each in self.rounds
        ]


# -- report


class Ratio(NamedTuple):
    """Median and range of the ratios of two clusters, over the `rounds` that have both."""

    median: float
    least: float
    most: float
    rounds: int


class Row(NamedTuple):
    """A figure with the median of each shape, and the ratio for each (kipmesh shape, Apache Kafka shape)."""

    figure: Figure
    medians: Mapping[str, float]
    ratios: Mapping[tuple[str, str], Ratio]


def rows_of(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """Return a row for each figure that has samples. Each round maps shapes to their samples by key."""
    rows = []
    for figure in FIGURES:
        key = figure.key
        samples = {
            shape: [each[shape][key] for each in rounds if key in each.get(shape, {})] for shape in (*OURS, *OTHERS)
        }
        ratios = {}
        for pair in ((ours, other) for ours in OURS for other in OTHERS):
            both = [
                [each[shape][key] for shape in pair] for each in rounds if all(key in each.get(s, {}) for s in pair)
            ]
            found = [one / other for one, other in both if other]
            if found:
                ratios[pair] = Ratio(statistics.median(found), min(found), max(found), len(found))
        if any(samples.values()):
            medians = {shape: statistics.median(values) for shape, values in samples.items() if values}
            rows.append(Row(figure, medians, ratios))
    return rows


def _ratio(row: Row, ours: str, other: str) -> str:
    found = row.ratios.get((ours, other))
    return "" if found is None else f"{found.median:.2f} ({found.least:.2f} .. {found.most:.2f})"


def as_markdown(rows: Sequence[Row], shapes: Sequence[Shape]) -> str:
    """Format two Markdown tables: the ratios with verdicts, and the medians by shape."""
    head = [
        "kipmesh / Apache Kafka",
        "ratio (min .. max)",
        "3 leaders",
        "to our timeouts",
        "target of the first",
        "rounds",
    ]
    ratios = []
    for row in rows:
        first = row.ratios.get(("ours", "kafka"))
        ratios.append(
            [
                row.figure.label,
                *(_ratio(row, *pair) for pair in (("ours", "kafka"), ("ours3", "kafka"), ("ours", "tuned"))),
                row.figure.verdict(first.median) if first else "",
                first.rounds if first else 0,
            ]
        )
    medians = [
        [
            row.figure.label,
            row.figure.unit,
            *(number(row.medians[shape.key]) if shape.key in row.medians else "" for shape in shapes),
        ]
        for row in rows
    ]
    heads = ["medians", "unit", *(shape.label for shape in shapes)]
    return f"{harness.table([*head, 'rounds'], ratios, left=5)}\n\n{harness.table(heads, medians, left=2)}"


def chart(rows: Sequence[Row]) -> str:
    """Return an SVG with the ratios of kipmesh to an Apache Kafka that has its own timeouts."""
    shown = []
    for row in rows:
        found = {key: row.ratios[key, "kafka"] for key in OURS if (key, "kafka") in row.ratios}
        spans = [charts.Span(LABELS[key], one.least, one.median, one.most) for key, one in found.items()]
        if spans:
            shown.append(charts.Ratios(row.figure.label, spans, row.figure.target))
    return charts.ratios("kipmesh / Apache Kafka on one machine (the green bar is the target)", shown)


def as_text(kept: Kept) -> str:
    """Format the tables, followed by versions, timeouts, machine and groups that were not measured."""
    rounds = kept.flat()
    tuned = ", ".join(f"{key} {value}" for key, value in TUNED.items())
    lines = [
        as_markdown(rows_of(rounds), SHAPES),
        "",
        f"Apache Kafka {version()}, each JVM with {' '.join(HEAP)}. Our timeouts: {tuned}.",
        f"{len(rounds)} rounds; {system.describe_machine()}",
        *[f"Not measured: {name}: {problem}" for name, problem in kept.problems.items()],
    ]
    return "\n".join(lines)


# -- command line


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that parses a comma-separated list of `known` names. It raises ArgumentTypeError for an
    unknown name.
    """

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {', '.join(unknown)}")
        return names

    return parse


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser(
        "bench.compare",
        __doc__,
        "run one round of a tenth of the load, kept in another file",
        f"{harness.TABLE} (the default)",
    )
    shapes = [shape.key for shape in SHAPES]
    parser.number("--turns", "rounds", 3, 1, most=100)
    parser.add_argument("--only", type=names_of(GROUPS), default=GROUPS, help=f"groups, of {','.join(GROUPS)}")
    parser.add_argument("--shapes", type=names_of(shapes), default=shapes, help=f"clusters, of {','.join(shapes)}")
    parser.number("--minutes", "start no cluster after so many minutes", float(MINUTES_MAX), least=0.01, most=1000)
    parser.add_argument("--fresh", action="store_true", help="discard kept samples")
    parser.add_argument("--report", action="store_true", help="only print the kept samples")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write the ratios as SVG")
    return parser.parse(given)


def run(options: argparse.Namespace, kept: Kept) -> None:
    """Measure all missing samples and add them to `kept`. No cluster is started after `--minutes`."""
    sizes: Sizes = QUICK if options.quick else Sizes()
    begin = time.monotonic()
    for index in range(options.turns):
        for shape in SHAPES:
            wanted = kept.missing(index, shape, options.only) if shape.key in options.shapes else []
            if not wanted:
                continue
            if time.monotonic() - begin > options.minutes * 60:
                harness.say(f"out of time: skipping {shape.label} of round {index + 1}; run again to resume")
                continue
            harness.say(f"round {index + 1}/{options.turns}, {shape.label}: {', '.join(wanted)}")

            def keep(group: str, samples: Samples | None, why: str, index: int = index, shape: Shape = shape) -> None:
                kept.add(index, shape, group, samples, why)

            measure(shape, wanted, sizes, harness.say, keep)
    harness.say(f"done after {(time.monotonic() - begin) / 60:.1f} minutes")


def main(given: Sequence[str]) -> int:
    """Measure the missing samples, print all figures, write the chart if an option names it, and return the exit code
    of `harness.run`.
    """
    options = arguments(given)
    kept = Kept(KEPT_QUICK if options.quick else KEPT, options.fresh)

    def measure_missing() -> None:
        if not options.report:
            prepare()
            run(options, kept)

    status = harness.run(
        options,
        measure_missing,
        figures=lambda: {"rounds": kept.flat(), "problems": kept.problems},
        text=lambda: as_text(kept),
        problems=lambda: [f"{name}: {problem}" for name, problem in kept.problems.items()],
    )
    if options.chart:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        options.chart.write_text(chart(rows_of(kept.flat())))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
