"""`python -m bench.clients`: our producers on our cluster beside aiokafka's and kafka-python's on Apache Kafka.

Both clusters have three brokers and keep three replicas; both are up all the time, and the producers, each in a process
of its own, run in turns. A ratio is of one turn's two producers. kafka-python is not among what `make install` brings
(`pip install kafka-python lz4`); without it only the asynchronous producers are compared. Progress goes to standard
error, the figures to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from bench import client_programs, harness, workload
from bench.kafka_broker import KafkaCluster
from bench.report import number

MODULE = "bench.clients"

TOPIC = "bench-clients"
TARGET = 1.0


Program = Callable[[str, str, Sequence[bytes], int], float]
"""Bootstrap, topic, values and how many records to the seconds they took."""


class Pair(NamedTuple):
    """Ours, and theirs."""

    label: str
    ours: Program
    theirs: Program
    module: str


PAIRS: Mapping[str, Pair] = {
    "async": Pair("async: aiokafka", client_programs.ours_async, client_programs.aiokafka, "aiokafka"),
    "sync": Pair("sync: kafka-python", client_programs.ours_sync, client_programs.kafka_python, "kafka"),
}
COUNTS: Mapping[int, int] = {100: 400_000, 1000: 150_000}
"""Records of a run by their mean size in bytes."""

Found = dict[tuple[str, int], list[tuple[float, float]]]
"""Records a second, ours and theirs, by pair and size."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(MODULE, __doc__, "one round of a tenth of the records", harness.TABLE)
    parser.add_argument("--runs", type=int, default=3, help="turns of each pair and size (3)")
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="which (both)")
    options = parser.parse_args(given)
    if not 1 <= options.runs <= 100:
        parser.error("runs from 1 to 100")
    return options


def run(program: Program, bootstrap: str, size: int, count: int) -> float:
    """Records a second of a producer in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        values = client_programs.values_of(size)
        seconds = process.submit(program, bootstrap, TOPIC, values, count).result(workload.STEP_SECONDS_MAX * 2)
    return count / seconds


def measure(ours: str, theirs: str, options: argparse.Namespace, found: Found) -> None:
    """All turns on two clusters."""
    pairs = [(name, PAIRS[name]) for name in options.pairs if importlib.util.find_spec(PAIRS[name].module)]
    for name in set(options.pairs) - {name for name, _ in pairs}:
        harness.say(MODULE, f"{PAIRS[name].label} is left out: it is not installed")
    share, runs = (10, 1) if options.quick else (1, options.runs)
    for _, pair in pairs:
        harness.say(MODULE, f"{pair.label}: warming up ...")
        run(pair.ours, ours, 1000, 20_000)
        run(pair.theirs, theirs, 1000, 20_000)
    for turn in range(1, runs + 1):
        for name, pair in pairs:
            for size, count in COUNTS.items():
                rates = run(pair.ours, ours, size, count // share), run(pair.theirs, theirs, size, count // share)
                found[name, size].append(rates)
                harness.say(
                    MODULE, f"turn {turn}/{runs}: {pair.label}, {size} B: {rates[0]:,.0f} and {rates[1]:,.0f} records/s"
                )


def rows_of(found: Found) -> list[dict[str, object]]:
    """Medians and ratios."""
    rows: list[dict[str, object]] = []
    for (name, size), turns in found.items():
        ratios = [ours / theirs for ours, theirs in turns]
        rows.append(
            {
                "pair": PAIRS[name].label,
                "bytes": size,
                "ours_records_s": statistics.median(ours for ours, _ in turns),
                "theirs_records_s": statistics.median(theirs for _, theirs in turns),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "turns": len(turns),
            }
        )
    return rows


def as_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """A table, also for a terminal."""
    lines = [
        f"| producers | values | ours, records/s | theirs, records/s | ratio (>= {TARGET:g}) | min .. max | turns |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        ours, theirs, ratio, least, most = (
            number(float(str(row[key])))
            for key in ("ours_records_s", "theirs_records_s", "ratio", "ratio_min", "ratio_max")
        )
        lines.append(
            f"| {row['pair']} | {row['bytes']} B | {ours} | {theirs} | {ratio} | {least} .. {most} | {row['turns']} |"
        )
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of what was measured."""
    options = arguments(given)
    found: Found = defaultdict(list)

    def measure_all() -> None:
        harness.say(MODULE, "starting Apache Kafka ...")
        with KafkaCluster(brokers=workload.REPLICAS) as theirs:
            theirs.create_topic(TOPIC, workload.PARTITIONS, workload.REPLICAS)
            harness.say(MODULE, "starting ours ...")
            with harness.three_brokers() as ours:
                asyncio.run(workload.create_topic(ours.bootstrap, TOPIC, workload.PARTITIONS))
                measure(ours.bootstrap, theirs.bootstrap, options, found)

    return harness.run(
        MODULE,
        options,
        measure_all,
        figures=lambda: {"rows": rows_of(found)},
        text=lambda: as_markdown(rows_of(found)) if found else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
