"""An idempotent producer writes each record once and in order while leaders are killed, paused and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.quorum_cluster import QuorumCluster
from kipmesh.client import AdminClient, Consumer, NewTopic, Producer, TopicPartition
from kipmesh.testing import until as eventually

TOPIC = "once"
PARTITIONS = 2
BROKERS = 3
CONFIG = {
    "batch.size": 500,
    "linger.ms": 0,
    "request.timeout.ms": 1500,
    "delivery.timeout.ms": 180_000,
    "retry.backoff.ms": 20,
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def quorum(tmp_path: Path) -> Iterator[QuorumCluster]:
    config = {"broker.session.timeout.ms": "2000"}
    with QuorumCluster(tmp_path, controllers=1, brokers=BROKERS, config=config) as cluster:
        yield cluster


class Stream:
    """Sends numbered records to each partition in turn until it is ended."""

    def __init__(self, producer: Producer) -> None:
        self.sent: list[Any] = []
        self._producer = producer
        self._is_ended = False
        self._completed = 0

    async def run(self) -> None:
        while not self._is_ended:
            for _ in range(20):
                number = len(self.sent)
                self.sent.append(await self._producer.send(TOPIC, b"%d" % number, partition=number % PARTITIONS))
            await asyncio.sleep(0.005)

    async def more(self, count: int) -> None:
        """Wait until `count` more records are acknowledged."""
        wanted = self.completed() + count
        await eventually(lambda: self.completed() >= wanted, "records acknowledged", 90)

    def completed(self) -> int:
        """Return the number of records up to the first pending one."""
        while self._completed < len(self.sent) and self.sent[self._completed].done():
            self._completed += 1
        return self._completed

    def end(self) -> None:
        self._is_ended = True


async def read_all(bootstrap: str, counts: dict[int, int]) -> dict[int, list[bytes | None]]:
    """Read all values by partition. Asserts that the end offsets are `counts`."""
    found: dict[int, list[bytes | None]] = {partition: [] for partition in counts}
    async with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(TOPIC, partition) for partition in counts])
        consumer.seek_to_beginning()
        async with asyncio.timeout(120):
            while any(len(found[partition]) < count for partition, count in counts.items()):
                for record in await consumer.poll(500):
                    found[record.partition].append(record.value)
        ends = await consumer.end_offsets(consumer.assignment())
        assert {partition.partition: end for partition, end in ends.items()} == counts
    return found


async def leader_once_in_sync(admin: AdminClient) -> int:
    """Wait until every replica is in sync and return the leader of partition 0."""
    async with asyncio.timeout(90):
        while True:
            partitions = (await admin.describe_topics([TOPIC]))[0].partitions.values()
            if all(each.leader_id >= 0 and len(each.isr) == BROKERS for each in partitions):
                return next(each.leader_id for each in partitions)
            await asyncio.sleep(0.05)


async def run(quorum: QuorumCluster) -> None:
    names = {node.node_id: node.name for node in quorum.brokers}
    async with AdminClient(quorum.bootstrap) as admin, Producer(quorum.bootstrap, **CONFIG) as producer:
        await admin.create_topics([NewTopic(TOPIC, PARTITIONS, BROKERS)])
        stream = Stream(producer)
        task = asyncio.create_task(stream.run())
        for fault in ("kill", "pause", "stop", "kill"):
            await stream.more(1000)
            name = names[await leader_once_in_sync(admin)]
            await asyncio.to_thread(getattr(quorum, fault), name)
            if fault == "pause":  # requests time out and are sent again while the broker still holds the first ones
                await asyncio.sleep(4)
                await asyncio.to_thread(quorum.resume, name)
            else:
                await stream.more(500)
                await asyncio.to_thread(quorum.start, name)
            await stream.more(500)
        stream.end()
        await task
        await producer.flush()
        count = len(stream.sent)
        for number, delivery in enumerate(stream.sent):
            assert delivery.result().partition == number % PARTITIONS
    counts = {partition: len(range(partition, count, PARTITIONS)) for partition in range(PARTITIONS)}
    found = await read_all(quorum.bootstrap, counts)
    for partition, values in found.items():
        assert values == [b"%d" % number for number in range(partition, count, PARTITIONS)]


def test_idempotent_producer_survives_killed_paused_and_stopped_leaders(quorum: QuorumCluster) -> None:
    asyncio.run(run(quorum))
