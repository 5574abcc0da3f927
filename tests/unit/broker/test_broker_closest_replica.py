"""Consumers of a live mesh in three racks read from their own, and the leader when that is gone (392-13 to 392-16)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kipmesh.client import Consumer, Producer
from tests.unit.broker.conftest_broker import Mesh

SELECTOR = {"replica.selector.class": "RackAwareReplicaSelector"}
MAX_AGE_MS = 1500
SOON_S = 20
"""Much less than the 30 s after which a request is given up, and than the 5 min that metadata is good for."""
READ = {"auto.offset.reset": "none", "client.rack": "rack-b", "metadata.max.age.ms": MAX_AGE_MS, "client.id": "reader"}


@pytest.fixture
async def racks(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, **SELECTOR)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


class Stream:
    """A producer's records, and a consumer that has to see each of them once and in order."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer = producer
        self.consumer = consumer
        self.offset = 0

    async def go_on(self, count: int) -> None:
        """So many records there and back."""
        end = self.offset + count
        sent = [await self.producer.send("t", b"%d" % offset) for offset in range(self.offset, end)]
        async with asyncio.timeout(SOON_S):
            while self.offset < end:
                for record in await self.consumer.poll(1000):
                    assert (record.offset, record.value) == (self.offset, b"%d" % self.offset)
                    self.offset += 1
            await asyncio.gather(*sent)

    def bytes_of(self, broker: int) -> int:
        return self.consumer.fetch_stats.bytes_by_node[broker]


async def test_the_own_rack_serves_and_when_it_is_gone_the_leader(racks: Mesh) -> None:
    await racks.create("t")
    bootstrap = [f"127.0.0.1:{port}" for port in racks.ports.values()]
    async with Producer(bootstrap, **{"linger.ms": 0}) as producer, Consumer(bootstrap, **READ) as consumer:
        consumer.assign([("t", 0)])
        consumer.seek(("t", 0), 0)
        stream = Stream(producer, consumer)
        for _ in range(20):
            await stream.go_on(10)
        assert set(consumer.fetch_stats.bytes_by_node) == {2}, "all bytes are of the own rack"

        await racks.brokers[2].abort()
        await stream.go_on(10)
        assert stream.bytes_of(1) > 0
        assert consumer.high_watermark(("t", 0)) == stream.offset

        await racks.start_broker(2)
        await racks.ready(2)
        served = stream.bytes_of(2)
        async with asyncio.timeout(SOON_S):
            while stream.bytes_of(2) == served:
                await stream.go_on(1)
                await asyncio.sleep(0.02)
        elsewhere = stream.bytes_of(1)
        for _ in range(10):
            await stream.go_on(10)
        assert stream.bytes_of(1) == elsewhere
        assert consumer.fetch_stats.truncations == 0


@pytest.mark.parametrize("mode", ["metadata", "consumer"])
async def test_modes_of_the_draft(tmp_path: Path, mode: str) -> None:
    """392-15, 392-16."""
    mesh = Mesh(tmp_path, **(SELECTOR | {"replica.selection.mode": "metadata"} if mode == "metadata" else {}))
    config = READ | {"replica.selection.mode": mode, "replica.selection.policy": "preferred"}
    try:
        await mesh.start()
        await mesh.create("t")
        bootstrap = [f"127.0.0.1:{port}" for port in mesh.ports.values()]
        own = SELECTOR if mode == "consumer" else {}
        async with Producer(bootstrap) as producer, Consumer(bootstrap, **config, **own) as consumer:
            consumer.assign([("t", 0)])
            consumer.seek(("t", 0), 0)
            stream = Stream(producer, consumer)
            for _ in range(5):
                await stream.go_on(10)
            assert set(consumer.fetch_stats.bytes_by_node) == {2}
            await mesh.brokers[2].abort()
            await stream.go_on(10)
    finally:
        await mesh.stop()
