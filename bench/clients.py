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
import json
import multiprocessing
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from bench import client_programs, system, workload
from bench.kafka import KafkaMissingError
from bench.kafka_broker import KafkaCluster
from bench.report import number
from kipmesh.cluster import ClusterError, LocalCluster

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
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="turns of each pair and size (3)")
    parser.add_argument("--quick", action="store_true", help="one turn of a tenth of the records")
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="which (both)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="a table for docs/benchmarks.md")
    options = parser.parse_args(given)
    if not 1 <= options.runs <= 100:
        parser.error("runs from 1 to 100")
    return options


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"bench.clients: {text}\n")
    sys.stderr.flush()


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
        say(f"{PAIRS[name].label} is left out: it is not installed")
    share, runs = (10, 1) if options.quick else (1, options.runs)
    for _, pair in pairs:
        say(f"{pair.label}: warming up ...")
        run(pair.ours, ours, 1000, 20_000)
        run(pair.theirs, theirs, 1000, 20_000)
    for turn in range(1, runs + 1):
        for name, pair in pairs:
            for size, count in COUNTS.items():
                rates = run(pair.ours, ours, size, count // share), run(pair.theirs, theirs, size, count // share)
                found[name, size].append(rates)
                say(f"turn {turn}/{runs}: {pair.label}, {size} B: {rates[0]:,.0f} and {rates[1]:,.0f} records/s")


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


def _interrupted(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of what was measured."""
    options = arguments(given)
    signal.signal(signal.SIGTERM, _interrupted)
    found: Found = defaultdict(list)
    status = 0
    try:
        with ExitStack() as stack:
            say("starting Apache Kafka ...")
            theirs = stack.enter_context(KafkaCluster(brokers=workload.REPLICAS))
            theirs.create_topic(TOPIC, workload.PARTITIONS, workload.REPLICAS)
            say("starting ours ...")
            ours = stack.enter_context(LocalCluster(mode="processes", controllers=1, leaders=1, followers=2))
            asyncio.run(workload.create_topic(ours.bootstrap, TOPIC, workload.PARTITIONS))
            measure(ours.bootstrap, theirs.bootstrap, options, found)
    except KeyboardInterrupt:
        say("interrupted")
        status = 130
    except (ClusterError, KafkaMissingError, workload.BenchError, TimeoutError) as error:
        say(f"failed: {error or 'out of time'}")
        status = 1
    rows = rows_of(found)
    if options.json:
        sys.stdout.write(f"{json.dumps({'machine': system.describe_machine(), 'rows': rows})}\n")
    elif rows:
        sys.stdout.write(f"{as_markdown(rows)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
