"""The load: producing, consuming and single records through `kipmesh.client`, each bounded in time.

Values are 257 different random ones, so that nothing on the way can profit from repetition, and every step ends with a
check that all records were acknowledged or read.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.harness import BenchError
from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.client.types import NewTopic

PARTITIONS = 6
REPLICAS = 3
STEP_SECONDS_MAX = 180
_VALUES = 257

PRODUCER: dict[str, Any] = {"acks": "all", "linger.ms": 5, "batch.size": 262_144, "buffer.memory": 64 << 20}


class Rate(NamedTuple):
    """What was moved in how long."""

    records: int
    volume_bytes: int
    seconds: float

    @property
    def records_s(self) -> float:
        """Records a second."""
        return self.records / self.seconds

    @property
    def mb_s(self) -> float:
        """Megabytes (10^6) of values a second."""
        return self.volume_bytes / self.seconds / 1e6


def values_of(size_bytes: int) -> list[bytes]:
    """257 random values of one size."""
    return [random.randbytes(size_bytes) for _ in range(_VALUES)]


def mixed_values(size_bytes_max: int) -> list[bytes]:
    """257 random values of sizes from 1 up."""
    return [random.randbytes(random.randint(1, size_bytes_max)) for _ in range(_VALUES)]


async def create_topic(bootstrap: str, name: str, partitions: int, replicas: int = REPLICAS) -> None:
    """Create a topic, and return when each partition has a leader and a full ISR."""
    async with asyncio.timeout(STEP_SECONDS_MAX), AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(name, partitions, replicas)])
        while True:
            (described,) = await admin.describe_topics([name])
            found = described.partitions.values()
            if len(found) == partitions and all(len(p.isr) == replicas and p.leader_id >= 0 for p in found):
                return
            await asyncio.sleep(0.1)


async def produce(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> Rate:
    """Send `count` records, the values in turn; the clock stops when the last one is acknowledged."""
    waiting: deque[Any] = deque()
    volume = 0
    async with asyncio.timeout(STEP_SECONDS_MAX), Producer(bootstrap, **PRODUCER) as producer:
        await producer.partitions_for(topic)
        begin = time.perf_counter()
        for i in range(count):
            value = values[i % _VALUES]
            waiting.append(await producer.send(topic, value))
            volume += len(value)
            if not i % 5000:
                while waiting and waiting[0].done():
                    _check(waiting.popleft())
        await producer.flush()
        seconds = time.perf_counter() - begin
        for delivery in waiting:
            _check(delivery)
    return Rate(count, volume, seconds)


def _check(delivery: Any) -> None:
    error = delivery.exception()
    if error is not None:
        raise BenchError(f"produce: {error}")


async def consume(bootstrap: str, topic: str, partitions: int, count: int) -> Rate:
    """Read `count` records of a topic from its beginning; the clock starts before the first request."""
    config = {"fetch.max.bytes": 50 << 20, "max.poll.records": 10_000, "auto.offset.reset": "earliest"}
    seen = volume = 0
    async with asyncio.timeout(STEP_SECONDS_MAX), Consumer(bootstrap, **config) as consumer:
        consumer.assign([(topic, partition) for partition in range(partitions)])
        begin = time.perf_counter()
        while seen < count:
            records = await consumer.poll(timeout_ms=10_000)
            if not records:
                raise BenchError(f"consume: {seen} of {count} records came")
            seen += len(records)
            volume += sum([len(record.value or b"") for record in records])
        seconds = time.perf_counter() - begin
    if seen != count:
        raise BenchError(f"consume: {seen} records where {count} were sent")
    return Rate(seen, volume, seconds)


async def latencies_ms(bootstrap: str, topic: str, count: int) -> list[float]:
    """Send one record of 100 B at a time and wait until it is read; sorted, without the first eighth."""
    times: list[float] = []
    values = values_of(100)
    async with (
        asyncio.timeout(STEP_SECONDS_MAX),
        Producer(bootstrap, **{"acks": "all", "linger.ms": 0}) as producer,
        Consumer(bootstrap, **{"auto.offset.reset": "earliest"}) as consumer,
    ):
        consumer.assign([(topic, 0)])
        await producer.partitions_for(topic)
        for i in range(count):
            begin = time.perf_counter()
            delivery = await producer.send(topic, values[i % _VALUES], partition=0)
            records = await consumer.poll(timeout_ms=30_000)
            times.append((time.perf_counter() - begin) * 1e3)
            if len(records) != 1 or records[0].value != values[i % _VALUES]:
                raise BenchError(f"latency: {len(records)} records where one was sent")
            await delivery
    return sorted(times[count // 8 :])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values are below."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
