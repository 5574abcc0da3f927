"""Consumers read from the replica in their rack, and from the leader if that replica fails (392-13 to 392-16)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kipmesh.client import Consumer, Producer
from tests.unit.broker.broker_cluster import BrokerCluster

SELECTOR = {"replica.selector.class": "RackAwareReplicaSelector"}
MAX_AGE_MS = 1500
SOON_S = 20
"""Far below the request timeout (30 s) and the default age limit of metadata (5 min)."""
CONSUMER_CONFIG = {
    "auto.offset.reset": "none",
    "client.rack": "rack-b",
    "metadata.max.age.ms": MAX_AGE_MS,
    "client.id": "reader",
}


@pytest.fixture
async def racks(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path, **SELECTOR)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


class Stream:
    """Records of a producer that a consumer must receive exactly once and in order."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer = producer
        self.consumer = consumer
        self.offset = 0

    async def exchange(self, count: int) -> None:
        """Produce `count` records and consume them."""
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


async def test_consumer_reads_from_own_rack_and_falls_back_to_leader(racks: BrokerCluster) -> None:
    await racks.create("t")
    bootstrap = [f"127.0.0.1:{port}" for port in racks.ports.values()]
    async with Producer(bootstrap, **{"linger.ms": 0}) as producer, Consumer(bootstrap, **CONSUMER_CONFIG) as consumer:
        consumer.assign([("t", 0)])
        consumer.seek(("t", 0), 0)
        stream = Stream(producer, consumer)
        for _ in range(20):
            await stream.exchange(10)
        assert set(consumer.fetch_stats.bytes_by_node) == {2}, "all bytes come from the consumer's rack"

        await racks.brokers[2].abort()
        await stream.exchange(10)
        assert stream.bytes_of(1) > 0
        assert consumer.high_watermark(("t", 0)) == stream.offset

        await racks.start_broker(2)
        await racks.ready(2)
        served = stream.bytes_of(2)
        async with asyncio.timeout(SOON_S):
            while stream.bytes_of(2) == served:
                await stream.exchange(1)
                await asyncio.sleep(0.02)
        from_leader = stream.bytes_of(1)
        for _ in range(10):
            await stream.exchange(10)
        assert stream.bytes_of(1) == from_leader
        assert consumer.fetch_stats.truncations == 0


@pytest.mark.parametrize("mode", ["metadata", "consumer"])
async def test_consumer_reads_from_own_rack_in_selection_mode(tmp_path: Path, mode: str) -> None:
    """392-15, 392-16."""
    cluster = BrokerCluster(
        tmp_path, **(SELECTOR | {"replica.selection.mode": "metadata"} if mode == "metadata" else {})
    )
    config = CONSUMER_CONFIG | {"replica.selection.mode": mode, "replica.selection.policy": "preferred"}
    try:
        await cluster.start()
        await cluster.create("t")
        bootstrap = [f"127.0.0.1:{port}" for port in cluster.ports.values()]
        selector = SELECTOR if mode == "consumer" else {}
        async with Producer(bootstrap) as producer, Consumer(bootstrap, **config, **selector) as consumer:
            consumer.assign([("t", 0)])
            consumer.seek(("t", 0), 0)
            stream = Stream(producer, consumer)
            for _ in range(5):
                await stream.exchange(10)
            assert set(consumer.fetch_stats.bytes_by_node) == {2}
            await cluster.brokers[2].abort()
            await stream.exchange(10)
    finally:
        await cluster.stop()
