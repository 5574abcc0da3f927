"""Start-up of a producer of many topics: one record to each, by ours in two modes and by Apache Kafka's own.

Each producer is a process of its own. Ours have a local cluster of one broker, and the Java producer
(`bench/java/ProducerStart.java`) has a real Apache Kafka of one broker; all topics have one partition and one replica.
The clusters do not run at the same time. The shapes: one topic after the other, each record acknowledged before the
next is sent, and a burst, in which all are sent before the first acknowledgement is waited for. The time is that from
making the producer to the last acknowledgement.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, kafka, kafka_broker, system
from kipmesh.client import NewTopic, Producer
from kipmesh.client.sync import AdminClient
from kipmesh.cluster import LocalCluster

SHAPES = ("awaited", "burst")
JAVA = "Java producer, Apache Kafka"
CREATED_AT_ONCE = 500
VALUE = b"x" * 100
CONFIG = {"linger.ms": 0, "acks": "all", "max.block.ms": 600_000, "delivery.timeout.ms": 600_000}
ALL_LIMIT_S = 300.0
"""`all`, awaited, is quadratic in the topics: it stops after so long, and what it asked by then counts."""
BYTES_RATIO_TARGET = 50
"""Of `metadata.refresh=all` to `paced`, when each record is awaited."""


class Row(NamedTuple):
    """What one producer did in one shape. The cluster's CPU is that of all its processes; `load` the machine's."""

    shape: str
    who: str
    requests: int
    topics: int
    bytes: int
    total_s: float
    peak_mib: float
    client_cpu_s: float
    cluster_cpu_s: float
    load: float
    broker_requests: int | None = None
    """What Apache Kafka's broker counted, and the bytes of it, without the header of each."""
    broker_received_bytes: int | None = None


def topic_name(number: int) -> str:
    """The same in Java."""
    return f"metadata-{number:06}"


async def _produce(bootstrap: str, shape: str, mode: str, topics: int, all_limit_s: float) -> dict[str, Any]:
    names = [topic_name(number) for number in range(topics)]
    begin = time.perf_counter()
    async with Producer(bootstrap, **CONFIG, **{"metadata.refresh": mode}) as producer:
        if shape == "awaited":
            for name in names:
                await (await producer.send(name, VALUE))
                if mode == "all" and time.perf_counter() - begin > all_limit_s:
                    break
        else:
            await asyncio.gather(*await asyncio.gather(*[producer.send(name, VALUE) for name in names]))
        total_s = time.perf_counter() - begin
        metrics = producer.metrics()
    kinds = ("urgent", "non_urgent")
    return {
        "total_s": total_s,
        **{what: sum(metrics[f"metadata_{kind}_{what}"] for kind in kinds) for what in ("requests", "topics", "bytes")},
        "peak_mib": system.peak_resident_bytes() / (1 << 20),
    }


def step(given: str) -> str:
    """The figures of one of our producers, as JSON; what `_in_process` starts."""
    bootstrap, shape, mode, topics, *limit_s = given.split(",")
    all_limit_s = float(limit_s[0]) if limit_s else ALL_LIMIT_S
    return json.dumps(asyncio.run(_produce(bootstrap, shape, mode, int(topics), all_limit_s)))


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Clocks:
    """CPU time of a cluster's processes, and of those that this one started and waited for, from the making on."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._cluster_s, self._children_s = system.cpu_seconds(nodes), _cpu_of_children_s()

    def row(self, shape: str, who: str, figures: dict[str, Any]) -> Row:
        """The figures with CPU times; also told on standard error."""
        client_s = _cpu_of_children_s() - self._children_s
        cluster_s = system.cpu_seconds(self._nodes) - self._cluster_s
        row = Row(shape, who, **figures, client_cpu_s=client_s, cluster_cpu_s=cluster_s, load=os.getloadavg()[0])
        sys.stderr.write(f"bench: {json.dumps(row._asdict())}\n")
        return row


def _ours(topics: int, shapes: Sequence[str], all_limit_s: float) -> list[Row]:
    rows = []
    with LocalCluster(mode="processes", controllers=1, leaders=1, followers=0) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            for first in range(0, topics, CREATED_AT_ONCE):
                last = min(first + CREATED_AT_ONCE, topics)
                admin.create_topics([NewTopic(topic_name(number), 1, 1) for number in range(first, last)])
        nodes = system.with_children([node.pid for node in cluster.nodes if node.pid is not None])
        # What takes longest comes last: `all`, awaited.
        for shape, mode in [*((each, "paced") for each in shapes), *((each, "all") for each in reversed(shapes))]:
            clocks = _Clocks(nodes)
            figures = harness.in_process(
                "bench.metadata", "--step", ",".join(map(str, (cluster.bootstrap, shape, mode, topics, all_limit_s)))
            )
            rows.append(clocks.row(shape, f"`{mode}`", figures))
    return rows


def _java(topics: int, shapes: Sequence[str]) -> list[Row]:
    rows = []
    name = "ProducerStart"
    with tempfile.TemporaryDirectory() as folder, kafka_broker.KafkaBroker() as broker:
        classes = Path(folder)
        kafka_broker.compile_program(name, classes)
        where = (broker.bootstrap, str(broker.jmx_port))
        kafka_broker.run_program(name, classes, *where, "create", str(topics), "1")
        for shape in shapes:
            clocks = _Clocks([broker.pid])
            figures = kafka_broker.run_program(name, classes, *where, shape, str(topics))
            rows.append(clocks.row(shape, JAVA, figures))
    return rows


def start_up(
    topics: int, shapes: Sequence[str], *, with_kafka: bool = True, all_limit_s: float = ALL_LIMIT_S
) -> list[Row]:
    """What each producer did, by shape; without the Java one where it cannot be run, which is said."""
    rows: list[Row] = []
    if with_kafka:
        try:
            rows = _java(topics, shapes)
        except kafka.KafkaMissingError as error:
            sys.stderr.write(f"bench: without Apache Kafka: {error}\n")
    rows += _ours(topics, shapes, all_limit_s)
    return sorted(rows, key=lambda row: (shapes.index(row.shape), row.who == JAVA))


def as_markdown(rows: Sequence[Row], topics: int) -> list[str]:
    """A table and, for each shape, how the producers compare."""
    lines = [
        f"One record to each of {topics:,} topics.",
        "",
        "| shape | producer | metadata requests | topics asked for | bytes of metadata | total | peak memory "
        "| CPU: client, cluster | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.shape} | {row.who}{_stopped(row, topics)} | {row.requests:,} | {row.topics:,} | {row.bytes:,} "
        f"| {row.total_s:.1f} s | {row.peak_mib:.0f} MiB | {row.client_cpu_s:.1f} s, {row.cluster_cpu_s:.1f} s "
        f"| {row.load:.1f} |"
        for row in rows
    ]
    told: list[str] = []
    for shape in dict.fromkeys(row.shape for row in rows):
        by = {row.who: row for row in rows if row.shape == shape}
        told += _compared(by["`paced`"], by["`all`"], by.get(JAVA), topics)
    return [*lines, "", *told]


def _stopped(row: Row, topics: int) -> str:
    """Awaited, each new topic is a request."""
    is_stopped = row.shape == "awaited" and row.who == "`all`" and row.requests < topics
    return f", stopped after {row.requests:,} topics" if is_stopped else ""


def _compared(few: Row, every: Row, java: Row | None, topics: int) -> list[str]:
    is_stopped = bool(_stopped(every, topics))
    ratio = every.bytes / few.bytes
    text = f"- {few.shape}: `all` moved {'more than ' if is_stopped else ''}{ratio:,.1f} times the bytes of `paced`"
    if few.shape == "awaited":
        text += f" (>= {BYTES_RATIO_TARGET}: {'met' if ratio >= BYTES_RATIO_TARGET else 'missed'})"
    lines = [text + ("." if is_stopped else f", in {every.total_s / few.total_s:.2f} times its time.")]
    if java is not None:
        share = few.total_s / java.total_s
        lines.append(
            f"- {few.shape}: `paced` took {share:.2f} of the Java producer's time "
            f"(< 1: {'met' if share < 1 else 'missed'}). Apache Kafka's broker counted {java.broker_requests or 0:,} "
            f"metadata requests, the Java producer {java.requests:,}."
        )
    return lines
