"""Fetch sessions of Spark tasks: one per broker, closed however the task ends (227-17)."""

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
def _use_long_close_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent a slow machine from exceeding the time to close sessions."""
    monkeypatch.setattr(fetcher, "CLOSE_SECONDS_MAX", 60.0)


def options(cluster: FakeCluster, **more: str) -> SourceOptions:
    client_options = {
        "subscribe": "t",
        "kafka.bootstrap.servers": cluster.bootstrap,
        "kafka.max.partition.fetch.bytes": "500",
    }
    return parse_options({**client_options, **more}, Mode.BATCH)


def sessions(cluster: FakeCluster) -> list[int]:
    return [len(list(broker.sessions.cache.list(0))) for broker in cluster.brokers.values()]


async def run_with_cluster(work: Callable[[FakeCluster], Any]) -> tuple[FakeCluster, Any]:
    """Run `work` in a thread with a cluster of two brokers and four partitions."""
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 4)
        for partition in cluster.topics["t"].partitions:
            for _ in range(RECORDS // 10):
                partition.append(encode_batch([(None, b"x")] * 10, timestamp_ms=1))
        return cluster, await asyncio.to_thread(work, cluster)


def read(connection: ClusterConnection, partition: int, end: int = RECORDS) -> Iterator[tuple[int, bytes]]:
    chunks = connection.fetch([OffsetRange(TopicPartition("t", partition), 0, end)], DataLoss(fail=True))
    return ((first, data) for _, first, data in chunks)


async def test_task_has_one_session_per_broker_for_its_partitions() -> None:
    counts_seen: list[list[int]] = []

    def task(cluster: FakeCluster) -> None:
        with ClusterConnection(options(cluster)) as connection:
            for partition in (0, 2, 0, 1, 3):  # one broker leads 0 and 2, the other 1 and 3
                assert [position for position, _ in read(connection, partition)][-1] < RECORDS
                counts_seen.append(sessions(cluster))

    cluster, _ = await run_with_cluster(task)
    assert counts_seen[:3] == [[1, 0]] * 3
    assert [counts[1] for counts in counts_seen[3:]] == [1, 1]
    created = [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()]
    assert created == [1, 1]
    assert sessions(cluster) == [0, 0]


async def test_ranges_of_one_fetch_share_one_session_per_broker() -> None:
    """Like a reader with maxTasks=1. The ends differ, so partitions leave the session one by one."""

    def task(cluster: FakeCluster) -> None:
        ranges = [OffsetRange(TopicPartition("t", number), 5, RECORDS - 30 * number) for number in range(4)]
        counts_seen: dict[int, list[int]] = {}
        with ClusterConnection(options(cluster)) as connection:
            chunks = list(connection.fetch(ranges, DataLoss(fail=True)))
            assert max(sessions(cluster)) == 1
        for wanted, first, data in chunks:
            offsets = decode_columns(data, start_offset=first, end_offset=wanted.end).offsets
            counts_seen.setdefault(wanted.topic_partition.partition, []).extend(offsets)
        assert counts_seen == {number: list(range(5, RECORDS - 30 * number)) for number in range(4)}
        order = [wanted.topic_partition.partition for wanted, _, _ in chunks]
        assert order != sorted(order), "chunks of partitions alternate"

    cluster, _ = await run_with_cluster(task)
    assert [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()] == [1, 1]
    assert sessions(cluster) == [0, 0]


async def test_data_loss_of_some_partitions_keeps_records_of_others() -> None:
    def task(cluster: FakeCluster) -> None:
        cluster.topics["t"].partitions[2].log_start_offset = 100
        ranges = [OffsetRange(TopicPartition("t", number), 0, RECORDS + 10 * (number == 1)) for number in range(4)]
        with pytest.raises(RuntimeError, match="t-"), ClusterConnection(options(cluster)) as connection:
            list(connection.fetch(ranges, DataLoss(fail=True)))
        loss = DataLoss(fail=False)
        counts = Counter[int]()
        with ClusterConnection(options(cluster)) as connection:
            for wanted, first, data in connection.fetch(ranges, loss):
                columns = decode_columns(data, start_offset=first, end_offset=wanted.end)
                counts[wanted.topic_partition.partition] += len(columns.offsets)
        assert (counts, loss.offsets_lost) == ({0: RECORDS, 1: RECORDS, 2: 100, 3: RECORDS}, 110)

    await run_with_cluster(task)


async def test_lost_range_is_not_fetched_again() -> None:
    """A fetch beyond the log end fails. Repeating it would discard the records of the other partitions."""

    def task(cluster: FakeCluster) -> None:
        lost = TopicPartition("t", 1)
        ranges = [OffsetRange(TopicPartition("t", number), 0, RECORDS) for number in (0, 2, 3)]
        ranges.append(OffsetRange(lost, RECORDS + 5, RECORDS + 50))
        loss = DataLoss(fail=False)
        counts = Counter[int]()
        with ClusterConnection(options(cluster)) as connection:
            for wanted, first, data in connection.fetch(ranges, loss):
                columns = decode_columns(data, start_offset=first, end_offset=wanted.end)
                counts[wanted.topic_partition.partition] += len(columns.offsets)
                if loss.offsets_lost:
                    assert client_types.TopicPartition(*lost) not in connection._open_consumer().assignment()
        assert (counts, loss.offsets_lost) == ({0: RECORDS, 2: RECORDS, 3: RECORDS}, 45)

    await run_with_cluster(task)


async def test_abandoned_task_closes_its_session() -> None:
    def task(cluster: FakeCluster) -> None:
        def rows() -> Generator[bytes, None, None]:
            with ClusterConnection(options(cluster)) as connection:
                for _, data in read(connection, 1):
                    yield data

        row_iterator = rows()
        next(row_iterator)
        assert sum(sessions(cluster)) == 1
        row_iterator.close()  # Spark does so after enough rows and when it kills a task

    cluster, _ = await run_with_cluster(task)
    assert sessions(cluster) == [0, 0]


async def test_failed_task_closes_its_session() -> None:
    def task(cluster: FakeCluster) -> None:
        def fail(_chunk: object) -> None:
            raise ValueError("a malformed row")

        with pytest.raises(ValueError, match="malformed row"), ClusterConnection(options(cluster)) as connection:
            list(map(fail, read(connection, 1)))
        cluster.topics["t"].partitions[1].log_start_offset = 100
        with pytest.raises((KafkaError, RuntimeError)), ClusterConnection(options(cluster)) as connection:
            list(read(connection, 1))

    cluster, _ = await run_with_cluster(task)
    assert sessions(cluster) == [0, 0]


async def test_disabled_sessions_create_no_session_in_tasks() -> None:
    def task(cluster: FakeCluster) -> None:
        with ClusterConnection(options(cluster, **{"kafka.enable.incremental.fetch": "false"})) as connection:
            assert list(read(connection, 1))

    cluster, _ = await run_with_cluster(task)
    assert [broker.sessions.cache.metrics.created for broker in cluster.brokers.values()] == [0, 0]


def test_client_rack_defaults_to_rack_of_the_process() -> None:
    environment = {RACK_VARIABLE: " rack-b "}
    assert with_rack_of_process({"fetch.min.bytes": "1"}, environment) == {
        "fetch.min.bytes": "1",
        "client.rack": "rack-b",
    }
    assert with_rack_of_process({"client.rack": "rack-a"}, environment) == {"client.rack": "rack-a"}
    assert with_rack_of_process({"rack.id": "rack-a"}, environment) == {"rack.id": "rack-a"}
    assert with_rack_of_process({}, {RACK_VARIABLE: ""}) == with_rack_of_process({}, {}) == {}
