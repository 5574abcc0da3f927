"""`python -m bench.spark`: records/s of a Spark batch read of a topic of flights on `local[2]`.

The topic is what `make demo` makes: flights as JSON keyed by carrier, 6 partitions, 3 replicas. The first read starts
Python workers and compiles; the figure is that of the later ones. Every read counts the records and adds up their
lengths, so that all of them go through Arrow into Spark, and is checked against what was sent.

With `--kafka` it is another benchmark (`bench.spark_beside`): our source on our mesh beside Spark's own Kafka connector
on Apache Kafka.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import harness, report, spark_beside, workload
from kipmesh.client import Producer
from kipmesh.spark.session import local_session
from kipmesh_jobs.flights import dataset

MODULE = "bench.spark"

_TOPIC = "flights"


def _flights(scale: int, limit: int | None) -> Iterator[dataset.Flight]:
    year = dataset.load_flights(dataset.find_directory(), limit=limit)
    for shift in range(scale):
        yield from dataset.encode(dataset.shift_years(year, shift))


async def fill(bootstrap: str, scale: int, limit: int | None) -> workload.Rate:
    """Create the topic and produce the flights into it."""
    await workload.create_topic(bootstrap, _TOPIC, workload.PARTITIONS)
    records = volume = 0
    begin = time.perf_counter()
    async with Producer(bootstrap, **workload.PRODUCER) as producer:
        deliveries: list[Any] = []
        for flight in _flights(scale, limit):
            deliveries.append(await producer.send(_TOPIC, flight.value, key=flight.key))
            records += 1
            volume += len(flight.value)
        await producer.flush()
        for delivery in deliveries:
            if delivery.exception() is not None:
                raise harness.BenchError(f"produce: {delivery.exception()}")
    return workload.Rate(records, volume, time.perf_counter() - begin)


def read(session: Any, bootstrap: str) -> tuple[int, int, float]:
    """Read the whole topic once: records, bytes of their values, seconds."""
    begin = time.perf_counter()
    source = session.read.format("kipmesh").option("kafka.bootstrap.servers", bootstrap).option("subscribe", _TOPIC)
    sums = source.load().selectExpr("count(*) AS records", "sum(length(value)) AS volume", "max(offset) AS last")
    row = sums.collect()[0]
    return row["records"], row["volume"], time.perf_counter() - begin


def measure(options: argparse.Namespace, samples: dict[str, list[float]]) -> None:
    """Start a cluster, fill it, read it several times, stop it; BenchError."""
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-bench-") as folder,
        harness.three_brokers() as cluster,
    ):
        sent = asyncio.run(fill(cluster.bootstrap, options.scale, options.limit))
        harness.say(MODULE, f"produced {sent.records:,} flights at {sent.mb_s:.1f} MB/s")
        session = local_session("kipmesh-bench", Path(folder))
        try:
            for run in range(options.runs):
                records, volume, seconds = read(session, cluster.bootstrap)
                if (records, volume) != (sent.records, sent.volume_bytes):
                    raise harness.BenchError(f"spark: read {records} records of {volume} bytes, sent {sent}")
                harness.say(MODULE, f"read {run + 1}: {records / seconds:,.0f} records/s")
                samples["spark_records_s" if run else "spark_first_records_s"].append(records / seconds)
        finally:
            session.stop()


def main(given: Sequence[str]) -> int:
    """Run, and print the figures."""
    parser = harness.parser(MODULE, __doc__, markdown=harness.TABLE)
    parser.add_argument("--runs", type=int, default=4, help="reads, the first of which is reported by itself (4)")
    parser.add_argument("--scale", type=int, default=3, help="years of 336,776 flights (3)")
    parser.add_argument("--limit", type=int, default=None, help="flights of each year")
    parser.add_argument("--kafka", action="store_true", help="beside Spark's Kafka connector on Apache Kafka")
    sizes, partitions = tuple(spark_beside.SIZES), spark_beside.PARTITIONS
    parser.add_argument("--sizes", type=int, nargs="+", choices=sizes, default=sizes, help="--kafka: bytes of values")
    parser.add_argument("--partitions", type=int, nargs="+", default=partitions, help="--kafka: of the topics (6 60)")
    parser.add_argument("--share", type=float, default=1.0, help="--kafka: of 2,000,000 (500,000) records (1)")
    options = parser.parse_args(given)
    if options.runs < 2 or not 1 <= options.scale <= 30:
        parser.error("runs from 2, scale from 1 to 30")
    if options.kafka:
        return spark_beside.run_all(MODULE, options)
    samples: dict[str, list[float]] = {"spark_first_records_s": [], "spark_records_s": []}
    return harness.run(
        MODULE,
        options,
        lambda: measure(options, samples),
        figures=lambda: {"scale": options.scale, **report.figures(report.summarize(samples))},
        text=lambda: report.table(report.summarize(samples), markdown=options.markdown),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
