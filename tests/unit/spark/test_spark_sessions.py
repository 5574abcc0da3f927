"""Fetch sessions of Spark's tasks: one a broker, and none is left however a task ends (227-17)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kipmesh.client.records import encode_batch
from kipmesh.core.errors import KafkaError
from kipmesh.spark.mesh import RACK_VARIABLE, Mesh, in_rack_of_this_process
from kipmesh.spark.offsets import OffsetRange, TopicPartition
from kipmesh.spark.options import Mode, SourceOptions, parse_options
from kipmesh.spark.planning import DataLoss
from kipmesh.testing.fake_broker import FakeCluster

RECORDS = 200


def options(cluster: FakeCluster, **more: str) -> SourceOptions:
    given = {"subscribe": "t", "kafka.bootstrap.servers": cluster.bootstrap, "kafka.max.partition.fetch.bytes": "500"}
    return parse_options({**given, **more}, Mode.BATCH)


def sessions(cluster: FakeCluster) -> list[int]:
    return [len(list(broker.sessions.cache.list(0))) for broker in cluster.brokers.values()]


async def on_a_thread(work: Callable[[FakeCluster], Any]) -> tuple[FakeCluster, Any]:
    """What a task does, beside a cluster of two brokers with four partitions."""
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 4)
        for partition in cluster.topics["t"].partitions:
            for _ in range(RECORDS // 10):
                partition.append(encode_batch([(None, b"x")] * 10, timestamp_ms=1))
        return cluster, await asyncio.to_thread(work, cluster)


def read(mesh: Mesh, partition: int, end: int = RECORDS) -> Iterator[tuple[int, bytes]]:
    return mesh.fetch(OffsetRange(TopicPartition("t", partition), 0, end), DataLoss(fail=True))


async def test_several_partitions_one_session_a_broker() -> None:
    seen: list[list[int]] = []

    def task(cluster: FakeCluster) -> None:
        with Mesh(options(cluster)) as mesh:
            for partition in (0, 2, 0, 1, 3):  # 0 and 2 are led by one broker, 1 and 3 by the other
                assert [position for position, _ in read(mesh, partition)][-1] < RECORDS
                seen.append(sessions(cluster))

    cluster, _ = await on_a_thread(task)
    assert seen[:3] == [[1, 0]] * 3
    assert [later[1] for later in seen[3:]] == [1, 1]
    made = [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()]
    assert made == [1, 1]
    assert sessions(cluster) == [0, 0]


async def test_a_task_that_is_dropped_leaves_none() -> None:
    def task(cluster: FakeCluster) -> None:
        def rows() -> Iterator[bytes]:
            with Mesh(options(cluster)) as mesh:
                for _, data in read(mesh, 1):
                    yield data

        running = rows()
        next(running)
        assert sum(sessions(cluster)) == 1
        running.close()  # what Spark does when it needs no more rows, or the task is killed

    cluster, _ = await on_a_thread(task)
    assert sessions(cluster) == [0, 0]


async def test_a_task_that_fails_leaves_none() -> None:
    def task(cluster: FakeCluster) -> None:
        def fail(_chunk: object) -> None:
            raise ValueError("a row that cannot be read")

        with pytest.raises(ValueError, match="a row"), Mesh(options(cluster)) as mesh:
            list(map(fail, read(mesh, 1)))
        cluster.topics["t"].partitions[1].log_start_offset = 100
        with pytest.raises((KafkaError, RuntimeError)), Mesh(options(cluster)) as mesh:
            list(read(mesh, 1))

    cluster, _ = await on_a_thread(task)
    assert sessions(cluster) == [0, 0]


async def test_switched_off() -> None:
    def task(cluster: FakeCluster) -> None:
        with Mesh(options(cluster, **{"kafka.enable.incremental.fetch": "false"})) as mesh:
            assert list(read(mesh, 1))

    cluster, _ = await on_a_thread(task)
    assert [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()] == [0, 0]


def test_the_rack_is_that_of_the_process_that_reads() -> None:
    here = {RACK_VARIABLE: " rack-b "}
    assert in_rack_of_this_process({"fetch.min.bytes": "1"}, here) == {"fetch.min.bytes": "1", "client.rack": "rack-b"}
    assert in_rack_of_this_process({"client.rack": "rack-a"}, here) == {"client.rack": "rack-a"}
    assert in_rack_of_this_process({"rack.id": "rack-a"}, here) == {"rack.id": "rack-a"}
    assert in_rack_of_this_process({}, {RACK_VARIABLE: ""}) == in_rack_of_this_process({}, {}) == {}
