"""`python -m bench.spark`: records per second of a Spark batch read of a topic of flights on `local[2]`.

The topic has the records of `make demo`: flights as JSON with the carrier as key, 6 partitions, 3 replicas. The first
read starts Python workers and compiles, so later reads have their own figure. Each read counts the records and sums
their lengths, so that all values pass through Arrow into Spark, and compares the result with what was produced.

With `--kafka`, compares our source and cluster with Spark's Kafka connector and Apache Kafka (`bench.spark_beside`).
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

from bench import harness, spark_beside, workload
from bench.harness import Figure
from kipmesh.client import Producer
from kipmesh.spark.session import local_session
from kipmesh_jobs.flights import dataset

TOPIC = "flights"
FIGURES = (
    Figure("spark_first_records_s", "Spark batch read on local[2], first", "records/s"),
    Figure("spark_records_s", "Spark batch read on local[2], second and later", "records/s", 200_000),
)


def _flights(scale: int, limit: int | None) -> Iterator[dataset.Flight]:
    year = dataset.load_flights(dataset.find_directory(), limit=limit)
    for shift in range(scale):
        yield from dataset.encode(dataset.shift_years(year, shift))


async def fill(bootstrap: str, scale: int, limit: int | None) -> workload.Rate:
    """Create the topic, produce `scale` years of flights (only the first `limit` of each year) and return the rate.
    Raises BenchError, KafkaError, TimeoutError.
    """
    await workload.create_topic(bootstrap, TOPIC, workload.PARTITIONS)
    records = volume = 0
    begin = time.perf_counter()
    async with Producer(bootstrap, **workload.PRODUCER) as producer:
        deliveries: list[Any] = []
        for flight in _flights(scale, limit):
            deliveries.append(await producer.send(TOPIC, flight.value, key=flight.key))
            records += 1
            volume += len(flight.value)
        await producer.flush()
        workload.check_deliveries(delivery.exception() for delivery in deliveries)
    return workload.Rate(records, volume, time.perf_counter() - begin)


def read(session: Any, bootstrap: str) -> tuple[int, int, float]:
    """Read the whole topic in a Spark session. Returns (records, bytes of their values, seconds)."""
    begin = time.perf_counter()
    source = session.read.format("kipmesh").option("kafka.bootstrap.servers", bootstrap).option("subscribe", TOPIC)
    sums = source.load().selectExpr("count(*) AS records", "sum(length(value)) AS volume", "max(offset) AS last")
    row = sums.collect()[0]
    return row["records"], row["volume"], time.perf_counter() - begin


def measure(options: argparse.Namespace, samples: dict[str, list[float]]) -> None:
    """Fill a new cluster, read it several times in Spark, and add the rates to `samples`. Raises BenchError,
    ClusterError, KafkaError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-bench-") as directory,
        harness.three_brokers() as cluster,
    ):
        sent = asyncio.run(fill(cluster.bootstrap, options.scale, options.limit))
        harness.say(f"produced {sent.records:,} flights at {sent.mb_s:.1f} MB/s")
        session = local_session("kipmesh-bench", Path(directory))
        try:
            for run in range(options.runs):
                records, volume, seconds = read(session, cluster.bootstrap)
                if (records, volume) != (sent.records, sent.volume_bytes):
                    raise harness.BenchError(f"spark: read {records} records of {volume} bytes, produced {sent}")
                harness.say(f"read {run + 1}: {records / seconds:,.0f} records/s")
                samples["spark_records_s" if run else "spark_first_records_s"].append(records / seconds)
        finally:
            session.stop()


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures that were measured, and return the exit code of `harness.run`."""
    parser = harness.Parser("bench.spark", __doc__, markdown=harness.TABLE)
    parser.number("--runs", "reads, of which the first has its own figure", 4, least=2)
    parser.number("--scale", "years of 336,776 flights", 3, most=30)
    parser.add_argument("--limit", type=int, default=None, help="maximum of flights of each year")
    parser.add_argument("--kafka", action="store_true", help="compare with Spark's Kafka connector on Apache Kafka")
    sizes, partitions = tuple(spark_beside.SIZES), spark_beside.PARTITIONS
    parser.add_argument("--sizes", type=int, nargs="+", choices=sizes, default=sizes, help="--kafka: bytes of values")
    parser.add_argument("--partitions", type=int, nargs="+", default=partitions, help="--kafka: of the topics (6 60)")
    parser.number("--share", "--kafka: share of 2,000,000 (500,000) records", 1.0, least=0.0001)
    options = parser.parse(given)
    if options.kafka:
        return spark_beside.run_all(options)
    samples: dict[str, list[float]] = {figure.key: [] for figure in FIGURES}

    def summaries() -> list[harness.Summary]:
        return harness.summarize(samples, FIGURES)

    return harness.run(
        options,
        lambda: measure(options, samples),
        figures=lambda: {"scale": options.scale, **harness.as_json(summaries())},
        text=lambda: harness.as_table(summaries(), markdown=options.markdown),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
