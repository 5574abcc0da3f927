"""A steady load with a consumer in each of two racks, and what they read from where: for `python -m bench.closest`.

Everything is on one loop; `async with Load(...)` produces and reads until its end. Which broker a consumer read from it
knows itself (`Consumer.fetch_stats`); what brokers say of the same is in their metrics (392-18).
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from math import nan
from types import TracebackType
from typing import Any, NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families

from bench.harness import BenchError
from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.cluster.layout import NodeInfo

TOPIC = "near"
PARTITIONS = 4
RECORD_BYTES = 1000
STEP_S = 0.02
METRIC = "kipmesh_broker_consumer_fetched_bytes"
HTTP_TIMEOUT_S = 10.0
WAIT_S = 60.0
NEAR_READS = 10
"""Of each partition, one after the other, before it is taken to be read nearby: time alone passes in a stall, too."""


class Bytes(NamedTuple):
    """What consumers read in their own rack and in others."""

    own: float = 0
    other: float = 0

    @property
    def share(self) -> float:
        """Percent of all that were read in the own rack; nan if nothing was read."""
        return 100 * self.own / (self.own + self.other) if self.own + self.other else nan

    def since(self, before: Bytes) -> Bytes:
        """What came since then."""
        return Bytes(self.own - before.own, self.other - before.other)


def scrape(url: str) -> str:
    """What a page of metrics has."""
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text


async def of_brokers(nodes: Iterable[NodeInfo]) -> Bytes:
    """What brokers have counted so far, of fetches that name a rack: `replica.selection.mode=fetch` alone."""
    found: Counter[str] = Counter()
    for node in nodes:
        for family in text_string_to_metric_families(await asyncio.to_thread(scrape, f"http://{node.http}/metrics")):
            if family.name == METRIC:
                for sample in family.samples:
                    if sample.name == f"{METRIC}_total":
                        found[sample.labels["rack"]] += int(sample.value)
    return Bytes(found["same"], found["cross"])


class Reader:
    """A consumer of all partitions in a rack."""

    def __init__(self, bootstrap: str, rack: str, near: Sequence[int], config: Mapping[str, Any]) -> None:
        """`near` are the brokers of its rack."""
        given = {"client.id": f"reader-{rack}", "client.rack": rack, "auto.offset.reset": "earliest", **config}
        self.consumer = Consumer(bootstrap, **given)
        self.rack = rack
        self.times: dict[int, list[float]] = {partition: [] for partition in range(PARTITIONS)}
        """When records of each partition were returned, by `time.monotonic`."""
        self.near_at = self.other_at = 0.0
        """When bytes from the own rack and from another came last."""
        self._near = frozenset(near)
        self._news = asyncio.Event()

    @property
    def bytes(self) -> Bytes:
        """What it has fetched so far."""
        by_node = self.consumer.fetch_stats.bytes_by_node
        own = sum(count for node, count in by_node.items() if node in self._near)
        return Bytes(own, sum(by_node.values()) - own)

    async def read(self) -> None:
        """Until cancelled."""
        self.consumer.assign([(TOPIC, partition) for partition in range(PARTITIONS)])
        before = self.bytes
        while True:
            records = await self.consumer.poll(timeout_ms=1000)
            now, after = time.monotonic(), self.bytes
            for partition in {record.partition for record in records}:
                self.times[partition].append(now)
            self.near_at = now if after.own > before.own else self.near_at
            self.other_at = now if after.other > before.other else self.other_at
            before = after
            self._news.set()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Look at the condition whenever something was read; BenchError."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise BenchError(f"closest: {self.rack}: no {what} in {WAIT_S:g} s") from None

    async def goes_on(self, since: float) -> None:
        """Return when every partition was read after that time; BenchError."""
        await self.until(lambda: all(times and times[-1] > since for times in self.times.values()), "records")

    async def is_near(self, quiet_s: float) -> None:
        """Return when for so long everything has come from the own rack, of all partitions; BenchError."""
        began = time.monotonic()

        def is_near() -> bool:
            since = max(self.other_at, began)
            return self.near_at - since >= quiet_s and all(
                len(times) >= NEAR_READS and times[-NEAR_READS] > since for times in self.times.values()
            )

        await self.until(is_near, f"{quiet_s:g} s with its own rack alone")

    def gap_s(self, since: float) -> float:
        """The longest time that a partition had no records, of those times that ended after `since`."""
        return max(
            after - before for times in self.times.values() for before, after in pairwise(times) if after >= since
        )


class Load:
    """`async with Load(...)`: a producer with acks=all at a steady rate, and a reader in each rack."""

    def __init__(
        self, nodes: Sequence[NodeInfo], racks: Sequence[str], records_s: float, config: Mapping[str, Any]
    ) -> None:
        self.bootstrap = ",".join(node.grpc for node in nodes if node.grpc)
        near = {rack: [node.node_id for node in nodes if node.rack == rack and node.node_id] for rack in racks}
        self.readers = [Reader(self.bootstrap, rack, near[rack], config) for rack in racks]
        self._records_s = records_s
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(
                Producer(self.bootstrap, **{"acks": "all", "linger.ms": 0, "buffer.memory": 64 << 20})
            )
            for reader in self.readers:
                await stack.enter_async_context(reader.consumer)
            self._stack = stack.pop_all()
        self._tasks = [asyncio.create_task(work) for work in [self._produce(producer), *self._reads()]]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        failures = [one for one in results if isinstance(one, Exception)]
        if failures:
            raise failures[0]

    @property
    def bytes(self) -> Bytes:
        """What all readers have fetched so far."""
        return Bytes(sum(one.bytes.own for one in self.readers), sum(one.bytes.other for one in self.readers))

    def _reads(self) -> list[Any]:
        return [reader.read() for reader in self.readers]

    async def _produce(self, producer: Producer) -> None:
        began, sent, value = time.monotonic(), 0, b"x" * RECORD_BYTES
        while True:
            while sent < (time.monotonic() - began) * self._records_s:
                await producer.send(TOPIC, value, partition=sent % PARTITIONS)
                sent += 1
            await asyncio.sleep(STEP_S)


async def in_sync(bootstrap: str, replicas: int) -> float:
    """Wait until every partition has so many replicas in sync; when that was seen; BenchError."""
    deadline = time.monotonic() + WAIT_S
    async with AdminClient(bootstrap) as admin:
        while True:
            (topic,) = await admin.describe_topics([TOPIC])
            now = time.monotonic()
            if all(len(one.isr) == replicas for one in topic.partitions.values()):
                return now
            if now > deadline:
                raise BenchError(f"closest: not {replicas} replicas in sync in {WAIT_S:g} s")
            await asyncio.sleep(STEP_S)
