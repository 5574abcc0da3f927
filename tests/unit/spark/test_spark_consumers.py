"""Consumers kept for later tasks: tasks share connections, and idle consumers are closed."""

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
def _use_long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent a slow machine from exceeding the idle time of consumers and the time to close sessions."""
    monkeypatch.setattr(consumers, "IDLE_SECONDS", 600.0)
    monkeypatch.setattr(fetcher, "CLOSE_SECONDS_MAX", 60.0)


@pytest.fixture(autouse=True)
def _close_kept_consumers() -> Iterator[None]:
    yield
    for key in list(consumers._kept):
        consumer = consumers.borrow(key)
        if consumer is not None:  # its idle time has not passed
            consumer.close()


async def run_with_cluster(work: Callable[[FakeCluster], Any]) -> None:
    async with FakeCluster(1) as cluster:
        for name in ("t", "u"):
            cluster.create_topic(name, 2)
            for partition in cluster.topics[name].partitions:
                partition.append(encode_batch([(None, name.encode())] * 10, timestamp_ms=1))
        await asyncio.to_thread(work, cluster)


def options(cluster: FakeCluster, **more: str) -> SourceOptions:
    return parse_options({"subscribe": "t", "kafka.bootstrap.servers": cluster.bootstrap, **more}, Mode.BATCH)


def task(source_options: SourceOptions, topic: str = "t", partition: int = 0) -> object:
    """Read a range like a task. Returns its consumer."""
    with ClusterConnection(source_options, keeps_consumer=True) as connection:
        chunks = list(connection.fetch([OffsetRange(TopicPartition(topic, partition), 0, 10)], DataLoss(fail=True)))
        assert topic.encode() * 2 not in chunks[0][2]
        assert topic.encode() in chunks[0][2]
        return connection._consumer


def open_sessions(cluster: FakeCluster) -> int:
    return sum(len(list(broker.sessions.cache.list(0))) for broker in cluster.brokers.values())


async def test_next_task_reuses_consumer_and_idle_sessions_close() -> None:
    def work(cluster: FakeCluster) -> None:
        first = task(options(cluster))
        assert [task(options(cluster), "u", 1), task(options(cluster), "t", 1)] == [first, first]
        assert sum(broker.sessions.cache.metrics.created for broker in cluster.brokers.values()) == 1
        deadline = time.monotonic() + 60
        while open_sessions(cluster) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert open_sessions(cluster) == 0
        assert task(options(cluster)) is first

    await run_with_cluster(work)


async def test_each_configuration_has_a_consumer_and_few_are_kept() -> None:
    def work(cluster: FakeCluster) -> None:
        task_consumers = [task(options(cluster, **{"kafka.fetch.min.bytes": str(least)})) for least in range(1, 7)]
        assert len(set(map(id, task_consumers))) == 6
        assert len(consumers._kept) == consumers.KEPT_MAX
        closed = [consumer for consumer in task_consumers if consumer._closed]  # type: ignore[attr-defined]
        assert closed == task_consumers[:2]
        assert task(options(cluster, **{"kafka.fetch.min.bytes": "6"})) is task_consumers[5]

    await run_with_cluster(work)


async def test_consumer_of_failed_task_is_not_kept() -> None:
    def work(cluster: FakeCluster) -> None:
        def fail(_chunk: object) -> None:
            raise ValueError("a malformed row")

        with (
            pytest.raises(ValueError, match="row"),
            ClusterConnection(options(cluster), keeps_consumer=True) as connection,
        ):
            list(map(fail, connection.fetch([OffsetRange(TopicPartition("t", 0), 0, 10)], DataLoss(fail=True))))
        assert (connection._consumer, consumers._kept) == (None, {})
        with ClusterConnection(options(cluster)) as connection:
            next(connection.fetch([OffsetRange(TopicPartition("t", 0), 0, 10)], DataLoss(fail=True)))
        assert consumers._kept == {}
        assert open_sessions(cluster) == 0

    await run_with_cluster(work)


async def test_consumer_is_closed_if_its_timer_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def work(cluster: FakeCluster) -> None:
        monkeypatch.setattr(threading.Timer, "start", fail_to_start)
        task_consumers: list[Any] = []
        with ClusterConnection(options(cluster), keeps_consumer=True) as connection:
            list(connection.fetch([OffsetRange(TopicPartition("t", 0), 0, 10)], DataLoss(fail=True)))
            task_consumers.append(connection._consumer)
        assert task_consumers[0]._closed
        assert consumers._kept == {}
        assert open_sessions(cluster) == 0

    await run_with_cluster(work)


async def test_kept_consumer_is_closed_after_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "IDLE_SECONDS", 0.2)

    def work(cluster: FakeCluster) -> None:
        first: Any = task(options(cluster))
        deadline = time.monotonic() + 60
        while not first._closed and time.monotonic() < deadline:
            time.sleep(0.05)
        assert first._closed
        assert task(options(cluster)) is not first

    await run_with_cluster(work)
