"""Fetch sessions of Spark's tasks: one a broker, and none is left however a task ends (227-17)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from kipmesh.client import types as client_types
from kipmesh.client.consumer import fetcher
from kipmesh.client.records import decode_columns, encode_batch
from kipmesh.core.errors import KafkaError
from kipmesh.spark.cluster import RACK_VARIABLE, ClusterConnection, with_rack_of_process
from kipmesh.spark.offsets import OffsetRange, TopicPartition
from kipmesh.spark.options import Mode, SourceOptions, parse_options
from kipmesh.spark.planning import DataLoss
from kipmesh.testing.fake_broker import FakeCluster

RECORDS = 200


@pytest.fixture(autouse=True)
def _sessions_may_take_their_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer gives that a second, in which a slow machine may stand still."""
    monkeypatch.setattr(fetcher, "CLOSE_SECONDS_MAX", 60.0)


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


def read(mesh: ClusterConnection, partition: int, end: int = RECORDS) -> Iterator[tuple[int, bytes]]:
    chunks = mesh.fetch([OffsetRange(TopicPartition("t", partition), 0, end)], DataLoss(fail=True))
    return ((first, data) for _, first, data in chunks)


async def test_several_partitions_one_session_a_broker() -> None:
    seen: list[list[int]] = []

    def task(cluster: FakeCluster) -> None:
        with ClusterConnection(options(cluster)) as mesh:
            for partition in (0, 2, 0, 1, 3):  # 0 and 2 are led by one broker, 1 and 3 by the other
                assert [position for position, _ in read(mesh, partition)][-1] < RECORDS
                seen.append(sessions(cluster))

    cluster, _ = await on_a_thread(task)
    assert seen[:3] == [[1, 0]] * 3
    assert [later[1] for later in seen[3:]] == [1, 1]
    made = [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()]
    assert made == [1, 1]
    assert sessions(cluster) == [0, 0]


async def test_a_task_of_several_partitions_has_one_session_a_broker_for_all() -> None:
    """What a reader does with maxTasks=1; the ends differ, so that partitions leave the session one after the other."""

    def task(cluster: FakeCluster) -> None:
        ranges = [OffsetRange(TopicPartition("t", number), 5, RECORDS - 30 * number) for number in range(4)]
        seen: dict[int, list[int]] = {}
        with ClusterConnection(options(cluster)) as mesh:
            chunks = list(mesh.fetch(ranges, DataLoss(fail=True)))
            assert max(sessions(cluster)) == 1
        for wanted, first, data in chunks:
            offsets = decode_columns(data, start_offset=first, end_offset=wanted.end).offsets
            seen.setdefault(wanted.topic_partition.partition, []).extend(offsets)
        assert seen == {number: list(range(5, RECORDS - 30 * number)) for number in range(4)}
        order = [wanted.topic_partition.partition for wanted, _, _ in chunks]
        assert order != sorted(order), "partitions come in turns"

    cluster, _ = await on_a_thread(task)
    assert [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()] == [1, 1]
    assert sessions(cluster) == [0, 0]


async def test_several_partitions_of_which_one_lost_its_beginning_and_one_its_end() -> None:
    def task(cluster: FakeCluster) -> None:
        cluster.topics["t"].partitions[2].log_start_offset = 100
        ranges = [OffsetRange(TopicPartition("t", number), 0, RECORDS + 10 * (number == 1)) for number in range(4)]
        with pytest.raises(RuntimeError, match="t-"), ClusterConnection(options(cluster)) as mesh:
            list(mesh.fetch(ranges, DataLoss(fail=True)))
        loss = DataLoss(fail=False)
        counts = Counter[int]()
        with ClusterConnection(options(cluster)) as mesh:
            for wanted, first, data in mesh.fetch(ranges, loss):
                columns = decode_columns(data, start_offset=first, end_offset=wanted.end)
                counts[wanted.topic_partition.partition] += len(columns.offsets)
        assert (counts, loss.offsets_lost) == ({0: RECORDS, 1: RECORDS, 2: 100, 3: RECORDS}, 110)

    await on_a_thread(task)


async def test_what_was_lost_is_not_asked_for_again_beside_the_others() -> None:
    """A range beyond the log's end: each fetch from there would be refused, and what the others fetched thrown away."""

    def task(cluster: FakeCluster) -> None:
        lost = TopicPartition("t", 1)
        ranges = [OffsetRange(TopicPartition("t", number), 0, RECORDS) for number in (0, 2, 3)]
        ranges.append(OffsetRange(lost, RECORDS + 5, RECORDS + 50))
        loss = DataLoss(fail=False)
        counts = Counter[int]()
        with ClusterConnection(options(cluster)) as mesh:
            for wanted, first, data in mesh.fetch(ranges, loss):
                columns = decode_columns(data, start_offset=first, end_offset=wanted.end)
                counts[wanted.topic_partition.partition] += len(columns.offsets)
                if loss.offsets_lost:
                    assert client_types.TopicPartition(*lost) not in mesh._open_consumer().assignment()
        assert (counts, loss.offsets_lost) == ({0: RECORDS, 2: RECORDS, 3: RECORDS}, 45)

    await on_a_thread(task)


async def test_a_task_that_is_dropped_leaves_none() -> None:
    def task(cluster: FakeCluster) -> None:
        def rows() -> Generator[bytes, None, None]:
            with ClusterConnection(options(cluster)) as mesh:
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

        with pytest.raises(ValueError, match="a row"), ClusterConnection(options(cluster)) as mesh:
            list(map(fail, read(mesh, 1)))
        cluster.topics["t"].partitions[1].log_start_offset = 100
        with pytest.raises((KafkaError, RuntimeError)), ClusterConnection(options(cluster)) as mesh:
            list(read(mesh, 1))

    cluster, _ = await on_a_thread(task)
    assert sessions(cluster) == [0, 0]


async def test_switched_off() -> None:
    def task(cluster: FakeCluster) -> None:
        with ClusterConnection(options(cluster, **{"kafka.enable.incremental.fetch": "false"})) as mesh:
            assert list(read(mesh, 1))

    cluster, _ = await on_a_thread(task)
    assert [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()] == [0, 0]


def test_the_rack_is_that_of_the_process_that_reads() -> None:
    here = {RACK_VARIABLE: " rack-b "}
    assert with_rack_of_process({"fetch.min.bytes": "1"}, here) == {"fetch.min.bytes": "1", "client.rack": "rack-b"}
    assert with_rack_of_process({"client.rack": "rack-a"}, here) == {"client.rack": "rack-a"}
    assert with_rack_of_process({"rack.id": "rack-a"}, here) == {"rack.id": "rack-a"}
    assert with_rack_of_process({}, {RACK_VARIABLE: ""}) == with_rack_of_process({}, {}) == {}
