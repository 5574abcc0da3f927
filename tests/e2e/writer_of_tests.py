"""Writes numbered records continuously and remembers the offsets of those acknowledged."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Self

from kipmesh.client import Consumer, Producer, TopicPartition

BURST_RECORDS = 50
BURST_INTERVAL_S = 0.01
WAITING_MAX = 5000


class Writer:
    """`async with Writer(...) as writer`: writes until the end of the block or `finish`."""

    def __init__(self, bootstrap: str, topic: str, **config: Any) -> None:
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self._topic = topic
        self._producer = Producer(bootstrap, **{"acks": "all", **config})
        self._waiting: deque[tuple[bytes, Any]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_finishing = False

    async def __aenter__(self) -> Self:
        await self._producer.start()
        self._task = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish()
        elif self._task is not None:
            self._task.cancel()
        await self._producer.close()

    async def finish(self) -> None:
        """Stop writing and wait until all sent records are acknowledged. Raises the first delivery error."""
        self._is_finishing = True
        if self._task is not None:
            await self._task
        await self._producer.flush()
        await self._collect(wait=True)

    async def until(self, count: int, timeout_s: float = 60) -> None:
        """Wait until `count` more records are acknowledged."""
        wanted = len(self.acknowledged) + count
        async with asyncio.timeout(timeout_s):
            while len(self.acknowledged) < wanted:
                assert self._task is not None
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.02)

    async def _write(self) -> None:
        number = 0
        while not self._is_finishing:
            for _ in range(BURST_RECORDS):
                value = b"record %d of this test" % number
                number += 1
                self._waiting.append((value, await self._producer.send(self._topic, value, key=b"%d" % (number % 97))))
            await self._collect(wait=len(self._waiting) > WAITING_MAX)
            await asyncio.sleep(BURST_INTERVAL_S)

    async def _collect(self, *, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0][1].done()):
            value, delivery = self._waiting.popleft()
            metadata = await delivery
            assert (metadata.partition, metadata.offset) not in self.acknowledged
            self.acknowledged[metadata.partition, metadata.offset] = value


async def read_all(bootstrap: str, topic: str, **config: Any) -> dict[tuple[int, int], bytes]:
    """Read every record of the topic, by partition and offset."""
    found: dict[tuple[int, int], bytes] = {}
    async with Consumer(bootstrap, **{"auto.offset.reset": "earliest", **config}) as consumer:
        metadata = await consumer.partitions_for(topic)
        partitions = [TopicPartition(topic, partition) for partition in metadata.partitions]
        ends = await consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning(partitions)
        while len(found) < sum(ends.values()):
            records = await consumer.poll(timeout_ms=30_000)
            assert records, f"read {len(found)} of {sum(ends.values())} records"
            for record in records:
                assert record.value is not None
                found[record.partition, record.offset] = record.value
    return found


def check_nothing_lost(acknowledged: dict[tuple[int, int], bytes], found: dict[tuple[int, int], bytes]) -> None:
    """Assert that every acknowledged record is at its acknowledged offset."""
    lost = [position for position, value in acknowledged.items() if found.get(position) != value]
    assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged records are lost, first {min(lost)}"
