"""`python -m bench.spark --kafka`: our source and cluster beside Spark's Kafka connector and Apache Kafka.

Both clusters have three brokers and three replicas, run all the time, and have the same records in the same partitions,
in batches of the same size. One Spark session on `local[2]` with default JVM settings reads from both alternately, as a
batch query and as a stream with `availableNow`. The first reads of each kind warm up. Each read counts the records and
sums their lengths, and compares the result with what was produced. A ratio compares the two reads of one round.

CPU seconds of each read are those of the brokers, of Spark's JVM and of its Python workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench import harness, system, workload
from bench.harness import number
from bench.kafka import ROOT, KafkaCluster, KafkaMissingError
from bench.kafka_tools import download_kafka_tools
from kipmesh.client.sync import Producer
from kipmesh.spark.session import local_session, stop_session

POM = ROOT / "bench" / "spark_kafka" / "pom.xml"
JARS = ROOT / "build" / "spark-kafka"
TARGET = 1.2
SIZES: Mapping[int, int] = {100: 2_000_000, 1000: 500_000}
"""Number of records by the size of their values in bytes."""
PARTITIONS = (6, 60)
KINDS = ("batch", "stream")
_SEED = 8
_SUMS = ("count(*) AS records", "sum(length(value)) AS volume")


class Workload(NamedTuple):
    """A topic that both clusters have: bytes of each value, number of records, and partitions."""

    size: int
    records: int
    partitions: int

    @property
    def name(self) -> str:
        """Number and size of the records, for the table."""
        return f"{self.records:,} of {self.size} B"

    @property
    def topic(self) -> str:
        """Name of the topic."""
        return f"bench-{self.size}-{self.partitions}"

    def parts(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (partition, values), up to 1,000 values at a time, always the same ones."""
        source, portion = random.Random(_SEED), 1000
        values = [source.randbytes(self.size) for _ in range(257)]
        for index, first in enumerate(range(0, self.records, portion)):
            chosen = [values[i % 257] for i in range(first, min(first + portion, self.records))]
            yield index % self.partitions, chosen


class Read(NamedTuple):
    """Records per second of one read, and CPU seconds of brokers, JVM and Python workers."""

    records_s: float
    brokers_s: float
    jvm_s: float
    workers_s: float


Found = dict[tuple[Workload, str], list[tuple[Read, Read]]]


def fill_ours(bootstrap: str, load: Workload) -> None:
    """Create the topic and produce the records on our cluster. Raises BenchError, KafkaError, TimeoutError."""
    asyncio.run(workload.create_topic(bootstrap, load.topic, load.partitions))
    pending: list[Any] = []
    with Producer(bootstrap, **workload.PRODUCER) as producer:
        for partition, values in load.parts():
            pending += producer.send_many(load.topic, [(None, value) for value in values], partition)
            if len(pending) > 200_000:
                producer.flush()
                workload.check_deliveries(each.exception() for each in pending)
                pending.clear()
        producer.flush()
        workload.check_deliveries(each.exception() for each in pending)


def fill_kafka(cluster: KafkaCluster, load: Workload) -> None:
    """Create the topic and produce the records on Apache Kafka. Raises KafkaMissingError and errors of aiokafka."""
    cluster.create_topic(load.topic, load.partitions, workload.REPLICAS)
    asyncio.run(_produce_to_kafka(cluster.bootstrap, load))


async def _produce_to_kafka(bootstrap: str, load: Workload) -> None:
    from aiokafka import AIOKafkaProducer

    batch_bytes = int(workload.PRODUCER["batch.size"])
    pending: list[list[bytes]] = [[] for _ in range(load.partitions)]
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", max_batch_size=batch_bytes, max_request_size=8 << 20
    ) as producer:

        async def send(partition: int) -> None:
            values = pending[partition]
            batch = producer.create_batch()
            while values and batch.append(key=None, value=values[-1], timestamp=None) is not None:
                values.pop()
            await (await producer.send_batch(batch, load.topic, partition=partition))

        for partition, values in load.parts():
            pending[partition] += values
            while sum(map(len, pending[partition])) >= batch_bytes:
                await send(partition)
        for partition, values in enumerate(pending):
            while values:
                await send(partition)


class Bench:
    """Reads topics in a Spark session and measures the CPU. `broker_pids` are process ids by source: `kipmesh` and
    `kafka`.
    """

    def __init__(self, session: Any, directory: Path, broker_pids: Mapping[str, Sequence[int]]) -> None:
        self._session = session
        self._directory = directory
        self._broker_pids = broker_pids
        self._number = 0
        from pyspark import SparkContext

        gateway: Any = SparkContext._gateway
        self._jvm = psutil.Process(gateway.proc.pid)

    def read(self, source: str, bootstrap: str, load: Workload, kind: str) -> Read:
        """Read a topic from `source` as a `batch` or `stream` query, and return the figures. Raises BenchError if a
        record is missing or repeated.
        """
        before = self._cpu(source)
        options = {"kafka.bootstrap.servers": bootstrap, "subscribe": load.topic, "startingOffsets": "earliest"}
        begin = time.perf_counter()
        found = getattr(self, f"_{kind}")(source, options)
        seconds = time.perf_counter() - begin
        if found != (load.records, load.records * load.size):
            raise harness.BenchError(f"{source} {kind}: read (records, bytes) {found} of {load}")
        after = self._cpu(source)
        return Read(load.records / seconds, *[late - early for late, early in zip(after, before, strict=True)])

    def _batch(self, source: str, options: Mapping[str, str]) -> tuple[int, int]:
        row = self._session.read.format(source).options(**options).load().selectExpr(*_SUMS).collect()[0]
        return row["records"], row["volume"]

    def _stream(self, source: str, options: Mapping[str, str]) -> tuple[int, int]:
        found: list[tuple[int, int]] = []

        def add(frame: Any, _number: int) -> None:
            row = frame.selectExpr(*_SUMS).collect()[0]
            found.append((row["records"], row["volume"] or 0))

        self._number += 1
        stream = self._session.readStream.format(source).options(**options).load().writeStream
        checkpoint = str(self._directory / f"checkpoint-{self._number}")
        query = stream.foreachBatch(add).trigger(availableNow=True).option("checkpointLocation", checkpoint).start()
        query.awaitTermination()
        return sum(one for one, _ in found), sum(other for _, other in found)

    def _cpu(self, source: str) -> tuple[float, float, float]:
        workers = 0.0
        for process in self._jvm.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                workers += sum(process.cpu_times()[:4])  # includes ended children
        own = self._jvm.cpu_times()
        workers += own.children_user + own.children_system  # each planning starts a process
        return system.cpu_seconds(self._broker_pids[source]), own.user + own.system, workers


def start_session(directory: Path) -> Any:
    """Start Spark with both sources and return the session. Raises JavaMissingError, or KafkaMissingError if the
    connector cannot be downloaded.
    """
    problem = download_kafka_tools(POM, JARS)
    if problem:
        raise KafkaMissingError(problem)
    settings = {
        "spark.jars": ",".join(str(jar) for jar in sorted(JARS.glob("*.jar"))),
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={directory}",
    }
    return local_session("kipmesh-bench", directory, memory="2g", settings=settings)


def run(loads: Sequence[Workload], runs: int, found: Found) -> None:
    """Measure all workloads, `runs` rounds of each kind after a warm-up, and add the reads to `found`. Raises
    BenchError (KafkaMissingError without Apache Kafka), ClusterError, KafkaError.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kipmesh-bench-")))
        session = start_session(directory)
        stack.callback(stop_session, session)
        ours = stack.enter_context(harness.three_brokers())
        theirs = stack.enter_context(KafkaCluster(3))
        pids = {"kipmesh": harness.pids(ours), "kafka": [broker.pid for broker in theirs.brokers]}
        bench = Bench(session, directory, pids)
        for load in loads:
            harness.say(f"producing {load.records:,} records of {load.size} B into {load.partitions} partitions")
            fill_ours(ours.bootstrap, load)
            fill_kafka(theirs, load)
            for kind in KINDS:
                for index in range(runs + 1):
                    one = bench.read("kipmesh", ours.bootstrap, load, kind)
                    other = bench.read("kafka", theirs.bootstrap, load, kind)
                    ratio = f"{one.records_s / other.records_s:.2f}"
                    harness.say(f"  {kind} {index or 'warm-up'}: {_text(one)} | {_text(other)} | {ratio}")
                    if index:
                        found[load, kind].append((one, other))


def _text(read: Read) -> str:
    return f"{read[0]:,.0f}/s, CPU s {' '.join(f'{each:.2f}' for each in read[1:])}"


def as_markdown(found: Found) -> str:
    """Format Markdown tables of rates and of CPU seconds."""
    rates, cpu = [], []
    for (load, kind), pairs in found.items():
        ratios = [one.records_s / other.records_s for one, other in pairs]
        topic = (load.name, load.partitions, kind)
        sides = [number(statistics.median(pair[side].records_s for pair in pairs)) for side in (0, 1)]
        verdict = f">= {TARGET}: {harness.met(statistics.median(ratios) >= TARGET)}"
        rates.append((*topic, *sides, harness.spread(ratios), verdict))
        for side, name in enumerate(("ours", "connector")):
            parts = [statistics.median(pair[side][part] for pair in pairs) for part in (1, 2, 3)]
            cpu.append((*topic, name, *(f"{part:.2f}" for part in parts)))
    head = ("records", "partitions", "query")
    sides_head = ("ours, records/s", "connector, records/s", "ratio (min .. max)", "target")
    return "\n\n".join(
        [
            harness.table((*head, *sides_head), rates),
            "CPU seconds of a read:",
            harness.table((*head, "source", "brokers", "JVM", "Python workers"), cpu),
        ]
    )


def run_all(options: argparse.Namespace) -> int:
    """Measure all record sizes and partition counts that the options select, print the figures, and return the exit
    code of `harness.run`.
    """
    loads = [
        Workload(size, int(SIZES[size] * options.share), count)
        for size in options.sizes
        for count in options.partitions
    ]
    found: Found = defaultdict(list)
    begin = os.getloadavg()[0]

    def figures() -> dict[str, Any]:
        return {
            "load_1min_before": begin,
            "reads": [
                {
                    **load._asdict(),
                    "query": kind,
                    "ours": [one._asdict() for one, _ in pairs],
                    "connector": [other._asdict() for _, other in pairs],
                }
                for (load, kind), pairs in found.items()
            ],
        }

    return harness.run(
        options,
        lambda: run(loads, options.runs, found),
        figures=figures,
        text=lambda: f"{as_markdown(found)}\n\n{system.describe_machine()}; load before {begin:.1f}" if found else "",
    )
