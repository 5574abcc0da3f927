"""`python -m bench.spark --kafka`: our source on our mesh beside Spark's Kafka connector on Apache Kafka, in one Spark.

Both clusters have three brokers, keep three replicas and are up all the time; both have the same records in the same
partitions and in batches of the same size. One Spark session on `local[2]`, with the JVM's own settings, reads from
both in turns, as a batch query and as a stream with `availableNow`. The first reads of each kind warm up and do not
count. Every read counts the records and adds up their lengths, and is checked against what was sent. A ratio is of one
turn's two reads.

CPU seconds say where the time goes: of the brokers, of Spark's JVM, and of its Python workers, for each read.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench import harness, system, workload
from bench.kafka import KafkaMissingError
from bench.kafka_broker import KafkaCluster
from bench.kafka_tools import download_kafka_tools
from bench.report import number
from kipmesh.client.sync import Producer
from kipmesh.cluster import LocalCluster
from kipmesh.spark.session import local_session, stop_session

ROOT = Path(__file__).resolve().parent.parent
POM = ROOT / "bench" / "spark_kafka" / "pom.xml"
JARS = ROOT / "build" / "spark-kafka"
TARGET = 1.2
SIZES: Mapping[int, int] = {100: 2_000_000, 1000: 500_000}
"""Records by the size of their values in bytes."""
PARTITIONS = (6, 60)
KINDS = ("batch", "stream")
_SEED = 8
_SUMS = ("count(*) AS records", "sum(length(value)) AS volume")


class Workload(NamedTuple):
    """A topic, on both sides."""

    size: int
    records: int
    partitions: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.records:,} of {self.size} B"

    @property
    def topic(self) -> str:
        """Its name."""
        return f"bench-{self.size}-{self.partitions}"

    def values(self) -> list[bytes]:
        """The values, which are taken in turn."""
        source = random.Random(_SEED)
        return [source.randbytes(self.size) for _ in range(257)]

    def parts(self) -> Iterator[tuple[int, list[bytes]]]:
        """Values for one partition at a time, in portions."""
        values = self.values()
        portion = 1000
        for number_, first in enumerate(range(0, self.records, portion)):
            chosen = [values[i % 257] for i in range(first, min(first + portion, self.records))]
            yield number_ % self.partitions, chosen


class Read(NamedTuple):
    """One read: how long it took, and the CPU seconds of all who had to do with it."""

    records_s: float
    brokers_s: float
    jvm_s: float
    workers_s: float


Found = dict[tuple[Workload, str], list[tuple[Read, Read]]]


def fill_ours(bootstrap: str, load: Workload) -> None:
    """Create the topic and produce the records."""
    asyncio.run(workload.create_topic(bootstrap, load.topic, load.partitions))
    pending: list[Any] = []
    with Producer(bootstrap, **workload.PRODUCER) as producer:
        for partition, values in load.parts():
            pending += producer.send_many(load.topic, [(None, value) for value in values], partition)
            if len(pending) > 200_000:
                producer.flush()
                _check(pending)
        producer.flush()
        _check(pending)


def _check(pending: list[Any]) -> None:
    for each in pending:
        if each.exception() is not None:
            raise harness.BenchError(f"produce: {each.exception()}")
    pending.clear()


def fill_kafka(cluster: KafkaCluster, load: Workload) -> None:
    """The same on Apache Kafka."""
    cluster.create_topic(load.topic, load.partitions, workload.REPLICAS)
    asyncio.run(_produce_to_kafka(cluster.bootstrap, load))


async def _produce_to_kafka(bootstrap: str, load: Workload) -> None:
    from aiokafka import AIOKafkaProducer

    batch_bytes = int(workload.PRODUCER["batch.size"])
    waiting: list[list[bytes]] = [[] for _ in range(load.partitions)]
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", max_batch_size=batch_bytes, max_request_size=8 << 20
    ) as producer:

        async def send(partition: int) -> None:
            values = waiting[partition]
            batch = producer.create_batch()
            while values and batch.append(key=None, value=values[-1], timestamp=None) is not None:
                values.pop()
            await (await producer.send_batch(batch, load.topic, partition=partition))

        for partition, values in load.parts():
            waiting[partition] += values
            while sum(map(len, waiting[partition])) >= batch_bytes:
                await send(partition)
        for partition, values in enumerate(waiting):
            while values:
                await send(partition)


class Bench:
    """The session, and who reads from where."""

    def __init__(self, session: Any, folder: Path, broker_pids: Mapping[str, Sequence[int]]) -> None:
        self._session = session
        self._folder = folder
        self._broker_pids = broker_pids
        self._number = 0
        from pyspark import SparkContext

        gateway: Any = SparkContext._gateway
        self._jvm = psutil.Process(gateway.proc.pid)

    def read(self, source: str, bootstrap: str, load: Workload, kind: str) -> Read:
        """Read a topic once; raises BenchError when not all of it came."""
        before = self._cpu(source)
        options = {"kafka.bootstrap.servers": bootstrap, "subscribe": load.topic, "startingOffsets": "earliest"}
        begin = time.perf_counter()
        found = getattr(self, f"_{kind}")(source, options)
        seconds = time.perf_counter() - begin
        if found != (load.records, load.records * load.size):
            raise harness.BenchError(f"{source} {kind}: {found} came of {load}")
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
        checkpoint = str(self._folder / f"checkpoint-{self._number}")
        query = stream.foreachBatch(add).trigger(availableNow=True).option("checkpointLocation", checkpoint).start()
        query.awaitTermination()
        return sum(one for one, _ in found), sum(other for _, other in found)

    def _cpu(self, source: str) -> tuple[float, float, float]:
        workers = 0.0
        for process in self._jvm.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                workers += sum(process.cpu_times()[:4])  # of those that have ended, too
        own = self._jvm.cpu_times()
        workers += own.children_user + own.children_system  # planning has a process of its own each time
        return system.cpu_seconds(self._broker_pids[source]), own.user + own.system, workers


def start_session(folder: Path) -> Any:
    """Spark with both sources, the JVM as Java starts it; raises KafkaMissingError without the connector."""
    problem = download_kafka_tools(POM, JARS)
    if problem:
        raise KafkaMissingError(problem)
    settings = {
        "spark.jars": ",".join(str(jar) for jar in sorted(JARS.glob("*.jar"))),
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder}",
    }
    return local_session("kipmesh-bench", folder, memory="2g", settings=settings)


def run(loads: Sequence[Workload], runs: int, say: Callable[[str], None], found: Found) -> None:
    """Measure into `found`; raises KafkaMissingError where Apache Kafka cannot be run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kipmesh-bench-")))
        session = start_session(folder)
        stack.callback(stop_session, session)
        ours = stack.enter_context(harness.three_brokers())
        theirs = stack.enter_context(KafkaCluster(3))
        bench = Bench(
            session, folder, {"kipmesh": _broker_pids(ours), "kafka": [broker.pid for broker in theirs._brokers]}
        )
        for load in loads:
            say(f"producing {load.records:,} records of {load.size} B into {load.partitions} partitions")
            fill_ours(ours.bootstrap, load)
            fill_kafka(theirs, load)
            for kind in KINDS:
                for turn in range(runs + 1):
                    one = bench.read("kipmesh", ours.bootstrap, load, kind)
                    other = bench.read("kafka", theirs.bootstrap, load, kind)
                    say(f"  {kind} {turn or 'warm-up'}: {_text(one)} | {_text(other)} | {one[0] / other[0]:.2f}")
                    if turn:
                        found[load, kind].append((one, other))


def _broker_pids(cluster: LocalCluster) -> list[int]:
    return system.with_children(node.pid for node in cluster.nodes if node.pid is not None)


def _text(read: Read) -> str:
    return f"{read[0]:,.0f}/s, CPU s {' '.join(f'{each:.2f}' for each in read[1:])}"


def as_markdown(found: Found) -> str:
    """The tables for docs/benchmarks.md."""
    lines = [
        "| records | partitions | query | ours, records/s | connector, records/s | ratio (min .. max) | target |",
        "|---|---:|---|---:|---:|---|---|",
    ]
    more = [
        "| records | partitions | query | whose | brokers | JVM | Python workers |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for (load, kind), pairs in found.items():
        ratios = sorted(one.records_s / other.records_s for one, other in pairs)
        ratio = statistics.median(ratios)
        what = f"{load.name} | {load.partitions} | {kind}"
        one, other = (statistics.median(pair[side].records_s for pair in pairs) for side in (0, 1))
        lines.append(
            f"| {what} | {number(one)} | {number(other)} | {ratio:.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
            f" | >= {TARGET}: {'met' if ratio >= TARGET else 'missed'} |"
        )
        for side, name in enumerate(("ours", "connector")):
            parts = [statistics.median(pair[side][part] for pair in pairs) for part in (1, 2, 3)]
            more.append(f"| {what} | {name} | {' | '.join(f'{part:.2f}' for part in parts)} |")
    return "\n".join([*lines, "", "CPU seconds of a read:", "", *more])


def run_all(module: str, options: argparse.Namespace) -> int:
    """Measure every size and number of partitions of the options, and print."""
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
        module,
        options,
        lambda: run(loads, options.runs, lambda text: harness.say(module, text), found),
        figures=figures,
        text=lambda: f"{as_markdown(found)}\n\n{system.describe_machine()}; load before {begin:.1f}" if found else "",
    )
