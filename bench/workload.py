"""Load through `kipmesh.client`: producing, consuming and single records, each with a time limit.

Values are 257 random ones, so that no cache or compression profits from repetition. Each step checks that all records
were acknowledged or read, and raises BenchError otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bench.harness import BenchError
from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.client.types import NewTopic

PARTITIONS = 6
REPLICAS = 3
STEP_SECONDS_MAX = 180
_VALUES = 257
_WORDS = ("carrier", "origin", "destination", "delay", "departure", "arrival", "minutes", "aircraft", "weather", "gate")

PRODUCER: dict[str, Any] = {"acks": "all", "linger.ms": 5, "batch.size": 262_144, "buffer.memory": 64 << 20}


class Rate(NamedTuple):
    """Number of records, bytes of their values, and the seconds that their transfer took."""

    records: int
    volume_bytes: int
    seconds: float

    @property
    def records_s(self) -> float:
        """Records per second."""
        return self.records / self.seconds

    @property
    def mb_s(self) -> float:
        """Megabytes (10^6) of values per second."""
        return self.volume_bytes / self.seconds / 1e6


def values_of(size_bytes: int) -> list[bytes]:
    """Return 257 random values of one size."""
    return [random.randbytes(size_bytes) for _ in range(_VALUES)]


def mixed_values(size_bytes_max: int) -> list[bytes]:
    """Return 257 random values of 1 to `size_bytes_max` bytes."""
    return [random.randbytes(random.randint(1, size_bytes_max)) for _ in range(_VALUES)]


def json_values(size_bytes: int, count: int = 997) -> list[bytes]:
    """Return `count` JSON-like values of 0.5 to 1.5 times `size_bytes`, always the same ones. lz4 halves their size."""
    source = random.Random(7)
    values = []
    for _ in range(count):
        wanted, text = source.randint(size_bytes // 2, size_bytes * 3 // 2), "{"
        while len(text) < wanted:
            text += f'"{source.choice(_WORDS)}":"{source.randbytes(8).hex()}",'
        values.append(text[:wanted].encode())
    return values


async def create_topic(bootstrap: str, name: str, partitions: int, replicas: int = REPLICAS) -> None:
    """Create a topic, and wait until each partition has a leader and a full ISR. Raises KafkaError, TimeoutError after
    180 s.
    """
    async with asyncio.timeout(STEP_SECONDS_MAX), AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(name, partitions, replicas)])
        while True:
            (described,) = await admin.describe_topics([name])
            found = described.partitions.values()
            if len(found) == partitions and all(len(p.isr) == replicas and p.leader_id >= 0 for p in found):
                return
            await asyncio.sleep(0.1)


async def produce(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> Rate:
    """Send `count` records with the 257 values in rotation, and return the rate. The time ends when the last record is
    acknowledged. Raises BenchError if a delivery fails, KafkaError, TimeoutError after 180 s.
    """
    pending: deque[Any] = deque()
    volume = 0
    async with asyncio.timeout(STEP_SECONDS_MAX), Producer(bootstrap, **PRODUCER) as producer:
        await producer.partitions_for(topic)
        begin = time.perf_counter()
        for i in range(count):
            value = values[i % _VALUES]
            pending.append(await producer.send(topic, value))
            volume += len(value)
            if not i % 5000:
                while pending and pending[0].done():
                    check_deliveries([pending.popleft().exception()])
        await producer.flush()
        seconds = time.perf_counter() - begin
        check_deliveries(delivery.exception() for delivery in pending)
    return Rate(count, volume, seconds)


def check_deliveries(errors: Iterable[BaseException | None]) -> None:
    """Raise BenchError with the first error of the deliveries, if there is one."""
    for error in errors:
        if error is not None:
            raise BenchError(f"produce: {error!r}")


async def consume(bootstrap: str, topic: str, partitions: int, count: int) -> Rate:
    """Read the `count` records of a topic from its beginning, and return the rate. The time begins before the first
    request. Raises BenchError if the number of records differs, TimeoutError after 180 s, or KafkaError.
    """
    config = {"fetch.max.bytes": 50 << 20, "max.poll.records": 10_000, "auto.offset.reset": "earliest"}
    seen = volume = 0
    async with asyncio.timeout(STEP_SECONDS_MAX), Consumer(bootstrap, **config) as consumer:
        consumer.assign([(topic, partition) for partition in range(partitions)])
        begin = time.perf_counter()
        while seen < count:
            records = await consumer.poll(timeout_ms=10_000)
            if not records:
                raise BenchError(f"consume: only {seen} of {count} records within 10 s of the last one")
            seen += len(records)
            volume += sum([len(record.value or b"") for record in records])
        seconds = time.perf_counter() - begin
    if seen != count:
        raise BenchError(f"consume: read {seen} records, sent {count}")
    return Rate(seen, volume, seconds)


async def latencies_ms(bootstrap: str, topic: str, count: int) -> list[float]:
    """Send single records of 100 B to partition 0, each after the previous one was read. Raises BenchError, KafkaError,
    TimeoutError after 180 s.

    Returns the sorted milliseconds from sending to reading, without the first eighth, which is a warm-up.
    """
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
                raise BenchError(f"latency: read {len(records)} records after sending one, or another value")
            await delivery
    return sorted(times[count // 8 :])


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the element of the sorted values at `share` (0 to 1) of their number, at most the last one. Raises
    IndexError if there are no values.
    """
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
