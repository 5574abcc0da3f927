"""The cost of reading a record does not depend on the number of assigned partitions."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType

from kipmesh.client import Consumer
from kipmesh.client.records import encode_batch
from kipmesh.testing.fake_broker import FakeCluster

CONFIG = {"auto.offset.reset": "earliest", "fetch.max.wait.ms": 20, "max.partition.fetch.bytes": 1000}


async def calls_per_record(partitions: int) -> float:
    """Count function calls of the consumer modules per record, with one buffered record in each partition."""
    calls = 0
    modules = ("fetcher.py", "broker_fetches.py", "consumer.py")
    hold = asyncio.Event()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith(modules)

    async def hook(method: str, _node: int, _request: object) -> None:
        if method == "Fetch" and consumer._fetcher.buffered_bytes:
            await hold.wait()

    batch = encode_batch([(None, b"x")], timestamp_ms=1)
    async with FakeCluster() as cluster:
        cluster.create_topic("t", partitions)
        for partition in cluster.topics["t"].partitions:
            partition.append(batch)
        async with Consumer(cluster.bootstrap, **CONFIG) as consumer, asyncio.timeout(60):
            consumer.subscribe(["t"])
            cluster.hook = hook
            while consumer._fetcher.buffered_bytes < len(batch) * partitions:
                await consumer._wait(1)
            sys.setprofile(count)
            try:
                for _ in range(partitions):
                    assert await consumer.poll(60_000, max_records=1)
            finally:
                sys.setprofile(None)
            assert consumer._fetcher.buffered_bytes == 0
            hold.set()
    return calls / partitions


async def test_record_cost_is_independent_of_assigned_partitions() -> None:
    few, many = await calls_per_record(50), await calls_per_record(800)
    assert many < 1.5 * few, (few, many)


async def test_paused_partitions_are_skipped_until_resumed() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 20)
        for partition in cluster.topics["t"].partitions:
            partition.append(encode_batch([(None, b"x")] * 3, timestamp_ms=1))
        async with Consumer(cluster.bootstrap, **CONFIG) as consumer:
            consumer.assign([("t", partition) for partition in range(20)])
            (first,) = await consumer.poll(60_000, max_records=1)
            paused = [("t", partition) for partition in range(20) if partition % 2 == 0]
            consumer.pause(paused)
            seen = [first]
            async with asyncio.timeout(60):
                while sum(each.partition % 2 for each in seen) < 30:
                    seen += await consumer.poll(5000)
            assert await consumer.poll(200) == []
            counts = {partition: sum(each.partition == partition for each in seen) for partition in range(20)}
            assert all(counts[partition] == 3 for partition in range(1, 20, 2))
            assert not any(counts[partition] == 3 for partition in range(0, 20, 2))
            consumer.resume(paused)
            async with asyncio.timeout(60):
                while len(seen) < 60:
                    seen += await consumer.poll(5000)
            assert len({(each.partition, each.offset) for each in seen}) == 60
