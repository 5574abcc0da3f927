"""`python -m bench.clients`: our producers on our cluster beside aiokafka's and kafka-python's on Apache Kafka.

Both clusters have three brokers, keep three replicas and run all the time. The producers alternate, each in its own
process. A ratio compares the two producers of one round. All producers use acks=all, lz4, and batches of 256 KiB or
5 ms. Other settings are the library's defaults (ours is idempotent). The last acknowledgement ends the time.

kafka-python is not installed by `make install` (`pip install kafka-python lz4`). Pairs that are not installed are left
out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from bench import harness, workload
from bench.harness import number
from bench.kafka import KafkaCluster
from bench.workload import STEP_SECONDS_MAX, check_deliveries
from kipmesh.client import Producer
from kipmesh.client.sync import Producer as SyncProducer

TOPIC = "bench-clients"
TARGET = 1.0
BATCH_BYTES = 256 << 10
LINGER_MS = 5
_OURS: dict[str, Any] = {
    "acks": "all",
    "compression.type": "lz4",
    "linger.ms": LINGER_MS,
    "batch.size": BATCH_BYTES,
    "buffer.memory": 64 << 20,
}
_THEIRS: dict[str, Any] = {"acks": "all", "compression_type": "lz4", "linger_ms": LINGER_MS}


# -- producers


async def _timed(producer: Any, topic: str, values: Sequence[bytes], count: int) -> float:
    """Return the seconds from the first send to the last acknowledgement. Our producer and aiokafka's have the same
    interface. Raises BenchError, TimeoutError.
    """
    async with asyncio.timeout(STEP_SECONDS_MAX), producer:
        await producer.partitions_for(topic)
        begin = time.perf_counter()
        sent = [await producer.send(topic, values[i % len(values)]) for i in range(count)]
        await producer.flush()
        seconds = time.perf_counter() - begin
        check_deliveries(each.exception() for each in sent)
    return seconds


def ours_async(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """Return the seconds that `kipmesh.client.Producer` takes until the last acknowledgement. Raises BenchError,
    KafkaError, TimeoutError.
    """

    async def run() -> float:
        return await _timed(Producer(bootstrap, **_OURS), topic, values, count)

    return asyncio.run(run())


def aiokafka(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """Return the seconds that `aiokafka.AIOKafkaProducer` takes until the last acknowledgement. Raises BenchError,
    TimeoutError and errors of aiokafka.
    """
    from aiokafka import AIOKafkaProducer

    async def run() -> float:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=BATCH_BYTES, **_THEIRS)
        return await _timed(producer, topic, values, count)

    return asyncio.run(run())


def ours_sync(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """Return the seconds that `kipmesh.client.sync.Producer` takes until the last acknowledgement. Raises KafkaError,
    TimeoutError.
    """
    with SyncProducer(bootstrap, **_OURS) as producer:
        producer.partitions_for(topic)
        begin = time.perf_counter()
        sent = [producer.send(topic, values[i % len(values)]) for i in range(count)]
        producer.flush()
        seconds = time.perf_counter() - begin
        for each in sent:
            each.result(STEP_SECONDS_MAX)
    return seconds


def kafka_python(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """Return the seconds that `kafka.KafkaProducer` of kafka-python takes until the last acknowledgement. Raises
    BenchError and errors of kafka-python.
    """
    kafka: Any = importlib.import_module("kafka")
    producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, batch_size=BATCH_BYTES, **_THEIRS)
    try:
        producer.partitions_for(topic)
        begin = time.perf_counter()
        sent = [producer.send(topic, values[i % len(values)]) for i in range(count)]
        producer.flush(STEP_SECONDS_MAX)
        seconds = time.perf_counter() - begin
        check_deliveries(each.exception for each in sent)
    finally:
        producer.close(timeout=5)
    return seconds


# -- comparison


Program = Callable[[str, str, Sequence[bytes], int], float]
"""Sends `count` records with the values in rotation. Takes bootstrap, topic, values and count, and returns seconds."""


class Pair(NamedTuple):
    """Two producers to compare. `module` is the name of the other library's module, which may not be installed."""

    label: str
    ours: Program
    theirs: Program
    module: str


PAIRS: Mapping[str, Pair] = {
    "async": Pair("async: aiokafka", ours_async, aiokafka, "aiokafka"),
    "sync": Pair("sync: kafka-python", ours_sync, kafka_python, "kafka"),
}
COUNTS: Mapping[int, int] = {100: 400_000, 1000: 150_000}
"""Records of a round by their mean size in bytes."""

Found = dict[tuple[str, int], list[tuple[float, float]]]
"""Records per second, ours and theirs, of each round by pair and size."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser("bench.clients", __doc__, "run one round of a tenth of the records", harness.TABLE)
    parser.number("--runs", "rounds of each pair and size", 3, 1, most=100)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="only these pairs")
    return parser.parse(given)


def run(program: Program, bootstrap: str, size: int, count: int) -> float:
    """Send `count` records of about `size` bytes with a producer in a new process, and return its records per second.
    Raises errors of the producer, such as BenchError and KafkaError, and TimeoutError.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        values = workload.json_values(size)
        seconds = process.submit(program, bootstrap, TOPIC, values, count).result(STEP_SECONDS_MAX * 2)
    return count / seconds


def measure(ours: str, theirs: str, options: argparse.Namespace, found: Found) -> None:
    """Run all rounds on two clusters, given by their bootstrap addresses, and add the rates to `found`. Raises the
    errors of `run`.
    """
    pairs = {name: PAIRS[name] for name in options.pairs if importlib.util.find_spec(PAIRS[name].module)}
    for name in set(options.pairs) - pairs.keys():
        harness.say(f"{PAIRS[name].label} is left out: it is not installed")
    for pair in pairs.values():
        harness.say(f"{pair.label}: warming up ...")
        run(pair.ours, ours, 1000, 20_000)
        run(pair.theirs, theirs, 1000, 20_000)
    for round_number in range(1, options.runs + 1):
        for name, pair in pairs.items():
            for size, records in COUNTS.items():
                count = records // 10 if options.quick else records
                rates = run(pair.ours, ours, size, count), run(pair.theirs, theirs, size, count)
                found[name, size].append(rates)
                text = f"{pair.label}, {size} B: {rates[0]:,.0f} and {rates[1]:,.0f} records/s"
                harness.say(f"round {round_number}/{options.runs}: {text}")


def rows_of(found: Found) -> list[dict[str, Any]]:
    """Return a row per pair and size: the median records per second of both producers, and the median and range of
    their ratios.
    """
    rows: list[dict[str, Any]] = []
    for (name, size), rounds in found.items():
        ratios = [ours / theirs for ours, theirs in rounds]
        rows.append(
            {
                "pair": PAIRS[name].label,
                "bytes": size,
                "ours_records_s": statistics.median(ours for ours, _ in rounds),
                "theirs_records_s": statistics.median(theirs for _, theirs in rounds),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "rounds": len(rounds),
            }
        )
    return rows


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    rates = ("ours, records/s", "theirs, records/s", f"ratio (>= {TARGET:g})", "min .. max")
    cells = [
        (
            row["pair"],
            f"{row['bytes']} B",
            *(number(row[key]) for key in ("ours_records_s", "theirs_records_s", "ratio")),
            f"{number(row['ratio_min'])} .. {number(row['ratio_max'])}",
            row["rounds"],
        )
        for row in rows
    ]
    return harness.table(("producers", "values", *rates, "rounds"), cells)


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures that were measured, and return the exit code of `harness.run`."""
    options = arguments(given)
    found: Found = defaultdict(list)

    def measure_all() -> None:
        harness.say("starting Apache Kafka ...")
        with KafkaCluster(brokers=workload.REPLICAS) as theirs:
            theirs.create_topic(TOPIC, workload.PARTITIONS, workload.REPLICAS)
            harness.say("starting kipmesh ...")
            with harness.three_brokers() as ours:
                asyncio.run(workload.create_topic(ours.bootstrap, TOPIC, workload.PARTITIONS))
                measure(ours.bootstrap, theirs.bootstrap, options, found)

    return harness.run(
        options,
        measure_all,
        figures=lambda: {"rows": rows_of(found)},
        text=lambda: as_markdown(rows_of(found)) if found else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
