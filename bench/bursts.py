"""How long a burst on 100 partitions takes to a consumer of all partitions, on two clusters in turns.

A burst is a record of 100 B to each of the 100 partitions of a topic at once, acks=all; its time ends when the consumer
has returned all of them. One cluster has many partitions, idle but for these, the other one has no more than these.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench import harness, workload
from kipmesh.client import Consumer, Producer
from kipmesh.client.types import TopicPartition

BURST = 100
WARM_UP = 5
PAUSE_S = 0.2
START_S = 180


class Times(NamedTuple):
    """Of the bursts on either cluster, milliseconds, in the order of the rounds."""

    many_ms: list[float]
    few_ms: list[float]

    @property
    def ratio(self) -> float:
        """Many partitions beside few: the median of the pairs."""
        return statistics.median(many / few for many, few in zip(self.many_ms, self.few_ms, strict=True))


class Load:
    """A producer and a consumer of all partitions of one cluster."""

    def __init__(self, bootstrap: str, partitions: Sequence[TopicPartition]) -> None:
        self._partitions = partitions
        first = len(partitions) // 2 // BURST * BURST  # one topic, as on the other cluster: the messages are the same
        self._where = partitions[first : first + BURST]
        self._value = workload.values_of(100)[0]
        self._producer = Producer(bootstrap, **{"acks": "all", "linger.ms": 0})
        self._consumer = Consumer(bootstrap, **{"auto.offset.reset": "earliest"})

    async def start(self) -> None:
        """Connect, and read everything that is there."""
        await self._producer.start()
        await self._consumer.start()
        self._consumer.assign(self._partitions)
        await self._producer.partitions_for(self._where[0].topic)

    async def close(self) -> None:
        """Disconnect."""
        await self._consumer.close()
        await self._producer.close()

    async def burst_ms(self) -> float:
        """One burst."""
        begin = time.perf_counter()
        deliveries = [
            await self._producer.send(where.topic, self._value, partition=where.partition) for where in self._where
        ]
        seen = 0
        async with asyncio.timeout(START_S):
            while seen < len(self._where):
                seen += len(await self._consumer.poll(timeout_ms=START_S * 1000, max_records=1000))
        passed = (time.perf_counter() - begin) * 1e3
        await asyncio.gather(*deliveries)
        if seen != len(self._where):
            raise harness.BenchError(f"burst: {seen} records where {len(self._where)} were sent")
        return passed


async def alternate(many: Load, few: Load, rounds: int) -> Times:
    """Bursts on both in turns."""
    times = Times([], [])
    try:
        for load in (many, few):
            await load.start()
        for _ in range(WARM_UP + rounds):
            for load, into in ((many, times.many_ms), (few, times.few_ms)):
                await asyncio.sleep(PAUSE_S)
                into.append(await load.burst_ms())
    finally:
        await many.close()
        await few.close()
    return Times(times.many_ms[WARM_UP:], times.few_ms[WARM_UP:])
