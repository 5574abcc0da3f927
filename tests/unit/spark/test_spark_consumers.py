"""Consumers that tasks leave to one another: one connection for many tasks, and none for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kipmesh.client.consumer import fetcher
from kipmesh.client.records import encode_batch
from kipmesh.spark import consumers
from kipmesh.spark.cluster import ClusterConnection
from kipmesh.spark.offsets import OffsetRange, TopicPartition
from kipmesh.spark.options import Mode, SourceOptions, parse_options
from kipmesh.spark.planning import DataLoss
from kipmesh.testing.fake_broker import FakeCluster


@pytest.fixture(autouse=True)
def _times_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no slow machine meets them: how long a consumer is kept, and how long its sessions may take to end."""
    monkeypatch.setattr(consumers, "IDLE_SECONDS", 600.0)
    monkeypatch.setattr(fetcher, "CLOSE_SECONDS_MAX", 60.0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    for key in list(consumers._kept):
        consumer = consumers.borrow(key)
        if consumer is not None:  # its time was not over just now
            consumer.close()


async def beside_a_cluster(work: Callable[[FakeCluster], Any]) -> None:
    async with FakeCluster(1) as cluster:
        for name in ("t", "u"):
            cluster.create_topic(name, 2)
            for partition in cluster.topics[name].partitions:
                partition.append(encode_batch([(None, name.encode())] * 10, timestamp_ms=1))
        await asyncio.to_thread(work, cluster)


def options(cluster: FakeCluster, **more: str) -> SourceOptions:
    return parse_options({"subscribe": "t", "kafka.bootstrap.servers": cluster.bootstrap, **more}, Mode.BATCH)


def task(given: SourceOptions, topic: str = "t", partition: int = 0) -> object:
    """Reads a range; the consumer that it had."""
    with ClusterConnection(given, keeps_consumer=True) as mesh:
        chunks = list(mesh.fetch([OffsetRange(TopicPartition(topic, partition), 0, 10)], DataLoss(fail=True)))
        assert topic.encode() * 2 not in chunks[0][2]
        assert topic.encode() in chunks[0][2]
        return mesh._consumer


def open_sessions(cluster: FakeCluster) -> int:
    return sum(len(list(broker.sessions.cache.list(0))) for broker in cluster.brokers.values())


async def test_the_next_task_goes_on_with_it_and_its_sessions_end_by_themselves() -> None:
    def work(cluster: FakeCluster) -> None:
        first = task(options(cluster))
        assert [task(options(cluster), "u", 1), task(options(cluster), "t", 1)] == [first, first]
        assert sum(broker.sessions.cache.metrics.created for broker in cluster.brokers.values()) == 1
        deadline = time.monotonic() + 60
        while open_sessions(cluster) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert open_sessions(cluster) == 0
        assert task(options(cluster)) is first

    await beside_a_cluster(work)


async def test_other_settings_have_another_one_and_few_wait() -> None:
    def work(cluster: FakeCluster) -> None:
        found = [task(options(cluster, **{"kafka.fetch.min.bytes": str(least)})) for least in range(1, 7)]
        assert len(set(map(id, found))) == 6
        assert len(consumers._kept) == consumers.KEPT_MAX
        closed = [one for one in found if one._closed]  # type: ignore[attr-defined]
        assert closed == found[:2]
        assert task(options(cluster, **{"kafka.fetch.min.bytes": "6"})) is found[5]

    await beside_a_cluster(work)


async def test_one_that_failed_is_not_kept() -> None:
    def work(cluster: FakeCluster) -> None:
        def fail(_chunk: object) -> None:
            raise ValueError("a row that cannot be read")

        with pytest.raises(ValueError, match="row"), ClusterConnection(options(cluster), keeps_consumer=True) as mesh:
            list(map(fail, mesh.fetch([OffsetRange(TopicPartition("t", 0), 0, 10)], DataLoss(fail=True))))
        assert (mesh._consumer, consumers._kept) == (None, {})
        with ClusterConnection(options(cluster)) as mesh:
            next(mesh.fetch([OffsetRange(TopicPartition("t", 0), 0, 10)], DataLoss(fail=True)))
        assert consumers._kept == {}
        assert open_sessions(cluster) == 0

    await beside_a_cluster(work)


async def test_one_that_cannot_be_left_in_order_is_closed_and_the_task_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def work(cluster: FakeCluster) -> None:
        monkeypatch.setattr(threading.Timer, "start", refuse)
        found: list[Any] = []
        with ClusterConnection(options(cluster), keeps_consumer=True) as mesh:
            list(mesh.fetch([OffsetRange(TopicPartition("t", 0), 0, 10)], DataLoss(fail=True)))
            found.append(mesh._consumer)
        assert found[0]._closed
        assert consumers._kept == {}
        assert open_sessions(cluster) == 0

    await beside_a_cluster(work)


async def test_after_a_while_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "IDLE_SECONDS", 0.2)

    def work(cluster: FakeCluster) -> None:
        first: Any = task(options(cluster))
        deadline = time.monotonic() + 60
        while not first._closed and time.monotonic() < deadline:
            time.sleep(0.05)
        assert first._closed
        assert task(options(cluster)) is not first

    await beside_a_cluster(work)
