"""A broker with several log directories keeps serving when one fails, without losing acknowledged records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.client import AdminClient
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.states import LOST_DIRECTORY, is_lost
from kipmesh.core.record_batch import build, iterate, read_records
from kipmesh.storage.fs import StorageError
from kipmesh.transport.grpc.client import TransportError
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of

PARTITIONS = 4
DIRS = "/m,/b,/c"


@pytest.fixture
async def disks(tmp_path: Path) -> AsyncIterator[tuple[BrokerCluster, dict[int, FaultyFileSystem]]]:
    cluster = BrokerCluster(tmp_path, **{"replica.lag.time.max.ms": 20_000})
    systems = {broker: FaultyFileSystem() for broker in (1, 2, 3)}
    await cluster.start_controllers()
    for broker, fs in systems.items():
        await cluster.start_broker(broker, fs=fs, **{"log.dirs": DIRS})
    await cluster.ready(1, 2, 3)
    try:
        yield cluster, systems
    finally:
        await cluster.stop()


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000)


def log_dir_of(cluster: BrokerCluster, broker: int, topic_id: bytes, partition: int) -> str:
    return cluster.brokers[broker].hosted_replicas.get(topic_id, partition).log.dir.rpartition("/")[0]


def values_of(cluster: BrokerCluster, broker: int, topic_id: bytes, partition: int) -> list[bytes]:
    replica = cluster.brokers[broker].hosted_replicas.get(topic_id, partition)
    if replica is None:
        return []
    log = replica.log
    records = log.read(log.log_start_offset, 1 << 24, log.log_end_offset, True)
    return [r.value for position, header in iterate(records) for r in read_records(records, position, header)]


def state(cluster: BrokerCluster, topic_id: bytes, partition: int) -> Any:
    return cluster.controller.image.partition(topic_id, partition)


async def acknowledged(cluster: BrokerCluster, topic: str, topic_id: bytes, partition: int, value: bytes) -> None:
    """Produce a record, and retry like a client until it is acknowledged."""
    async with asyncio.timeout(60):
        while True:
            leader = state(cluster, topic_id, partition).leader
            response = None
            if leader in cluster.brokers:
                try:
                    response = await cluster.produce(topic, batch(value), partition=partition, via=leader)
                except TransportError:
                    response = None
            if response is not None and response.error_code == 0:
                return
            await asyncio.sleep(0.02)


def metric(cluster: BrokerCluster, broker: int, name: str, **labels: str) -> float | None:
    return cluster.brokers[broker].registry.get_sample_value(name, labels)


async def test_broker_keeps_serving_without_failed_log_dir(disks: tuple[BrokerCluster, Any]) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"before")
    path = log_dir_of(cluster, 1, topic_id, 1)
    if path == "/m":
        path = log_dir_of(cluster, 1, topic_id, 2)
    lost = [p for p in range(PARTITIONS) if log_dir_of(cluster, 1, topic_id, p) == path]
    assert lost
    assert len(lost) < PARTITIONS
    for operation in ("write", "sync", "read", "open"):
        systems[1].fail(operation, path=path, times=1 << 30)
    response = await cluster.produce("t", batch(b"refused"), partition=lost[0], via=1)
    assert response.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"after")
    for partition in range(PARTITIONS):
        now = state(cluster, topic_id, partition)
        assert is_lost(now, 1) == (partition in lost)
        assert (1 in now.isr) == (partition not in lost)
        if partition in lost:
            assert cluster.brokers[1].hosted_replicas.get(topic_id, partition) is None
            response = await cluster.produce("t", batch(b"refused"), partition=partition, via=1)
            assert response.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert values_of(cluster, now.leader, topic_id, partition) == [b"before", b"after"]
    assert not cluster.brokers[1].failed.done()
    assert cluster.brokers[1].ready
    await eventually(
        lambda: len(cluster.controller.image.brokers[1].log_dirs) == 2, "the controller has the failed directory"
    )
    assert metric(cluster, 1, "kafka_log_logmanager_offlinelogdirectorycount") == 1
    assert metric(cluster, 1, "kafka_log_logmanager_logdirectoryoffline", logdirectory=path) == 1
    assert metric(cluster, 2, "kafka_log_logmanager_offlinelogdirectorycount") == 0
    described = await cluster.call(1, "DescribeLogDirs", m.DescribeLogDirsRequest())
    assert {result.log_dir: result.error_code for result in described.results} == {
        directory: ErrorCode.KAFKA_STORAGE_ERROR if directory == path else 0 for directory in ("/m", "/b", "/c")
    }
    async with AdminClient(f"127.0.0.1:{cluster.ports[2]}") as admin:
        (topic,) = await admin.describe_topics(["t"])
        directories = await admin.describe_log_dirs(1)
    assert {p for p, info in topic.partitions.items() if 1 in info.offline_replicas} == set(lost)
    (bad,) = [directory for directory in directories if directory.error]
    assert (bad.log_dir, bad.replicas) == (path, {})
    assert {key.partition for directory in directories for key in directory.replicas} == set(range(PARTITIONS)) - set(
        lost
    )
    assert all(info.size_bytes > 0 for directory in directories for info in directory.replicas.values())
    # A new topic uses the remaining directories.
    other_id = await cluster.create("u", partitions=2)
    assert path not in {log_dir_of(cluster, 1, other_id, partition) for partition in range(2)}
    await acknowledged(cluster, "u", other_id, 0, b"x")


async def test_broker_detects_unmounted_log_dir(disks: tuple[BrokerCluster, Any]) -> None:
    """Writes to its open files still succeed, so no error reveals the loss."""
    cluster, systems = disks
    topic_id = await cluster.create("t", partitions=PARTITIONS)
    lost = [p for p in range(PARTITIONS) if log_dir_of(cluster, 2, topic_id, p) == "/b"]
    assert lost
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"before")
    systems[2].rename("/b", "/elsewhere")
    systems[2].make_dirs("/b")
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"after")
    for partition in lost:
        await eventually(lambda p=partition: is_lost(state(cluster, topic_id, p), 2), "lost")
        assert 2 not in state(cluster, topic_id, partition).isr
    assert not cluster.brokers[2].failed.done()
    assert systems[2].list_dir("/b") == {}


async def test_replicas_of_repaired_log_dir_catch_up_after_restart(disks: tuple[BrokerCluster, Any]) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"before")
    lost = [p for p in range(PARTITIONS) if log_dir_of(cluster, 2, topic_id, p) == "/b"]
    systems[2].fail("write", path="/b", times=1 << 30)
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"during")
    for partition in lost:
        await eventually(lambda p=partition: is_lost(state(cluster, topic_id, p), 2), "lost")
    await cluster.brokers.pop(2).stop()
    # The directory is still broken: the broker starts without it and recreates no replica elsewhere.
    systems[2].faults.clear()
    systems[2].fail("open", path="/b", times=1 << 30)
    await cluster.start_broker(2, fs=systems[2], **{"log.dirs": DIRS})
    await cluster.ready(2)
    assert metric(cluster, 2, "kafka_log_logmanager_offlinelogdirectorycount") == 1
    for partition in range(PARTITIONS):
        await eventually(
            lambda p=partition: is_lost(state(cluster, topic_id, p), 2) == (p in lost),
            "only replicas of the failed directory are lost",
        )
        assert (cluster.brokers[2].hosted_replicas.get(topic_id, partition) is None) == (partition in lost)
    await cluster.brokers.pop(2).stop()
    systems[2].faults.clear()
    await cluster.start_broker(2, fs=systems[2], **{"log.dirs": DIRS})
    for partition in range(PARTITIONS):
        await eventually(lambda p=partition: 2 in state(cluster, topic_id, p).isr, "the replica is in sync")
        assert not is_lost(state(cluster, topic_id, partition), 2)
        assert values_of(cluster, 2, topic_id, partition) == [b"before", b"during"]


async def test_replaced_empty_log_dir_is_filled_from_leader(disks: tuple[BrokerCluster, Any]) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        await acknowledged(cluster, "t", topic_id, partition, b"before")
    lost = [p for p in range(PARTITIONS) if log_dir_of(cluster, 3, topic_id, p) == "/c"]
    await cluster.brokers.pop(3).abort()
    systems[3].remove_tree("/c")
    await cluster.start_broker(3, fs=systems[3], **{"log.dirs": DIRS})
    assert lost
    for partition in range(PARTITIONS):
        await eventually(
            lambda p=partition: values_of(cluster, 3, topic_id, p) == [b"before"], "the replica has all records"
        )
        await eventually(lambda p=partition: 3 in state(cluster, topic_id, p).isr, "the replica is in sync")
        assert LOST_DIRECTORY not in state(cluster, topic_id, partition).directories


async def test_partition_stays_offline_until_log_dir_of_last_isr_member_returns(
    disks: tuple[BrokerCluster, Any],
) -> None:
    """Only that directory has the last acknowledged records: no other replica may lead, and none is recreated."""
    cluster, systems = disks
    topic_id = await cluster.create("t", partitions=PARTITIONS, min_insync_replicas="1")
    affected = next(p for p in range(PARTITIONS) if log_dir_of(cluster, 1, topic_id, p) == "/b")
    await acknowledged(cluster, "t", topic_id, affected, b"first")
    for broker in (2, 3):
        await cluster.brokers.pop(broker).abort()
    await eventually(lambda: tuple(state(cluster, topic_id, affected).isr) == (1,), "broker 1 is the only member")
    await acknowledged(cluster, "t", topic_id, affected, b"alone")
    systems[1].fail("write", path="/b", times=1 << 30)
    assert (await cluster.produce("t", batch(b"no"), partition=affected)).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    for broker in (2, 3):
        await cluster.start_broker(broker, fs=systems[broker], **{"log.dirs": DIRS})
    await cluster.ready(2, 3)
    await eventually(lambda: is_lost(state(cluster, topic_id, affected), 1), "lost")
    await asyncio.sleep(0.5)
    assert state(cluster, topic_id, affected).leader == -1
    assert cluster.controller.image.required_brokers(topic_id, affected) == (1,)
    await cluster.brokers.pop(1).abort()
    systems[1].faults.clear()
    await cluster.start_broker(1, fs=systems[1], **{"log.dirs": DIRS})
    await acknowledged(cluster, "t", topic_id, affected, b"last")
    assert values_of(cluster, 1, topic_id, affected) == [b"first", b"alone", b"last"]


async def test_log_dir_failure_during_log_creation_loses_replica(
    disks: tuple[BrokerCluster, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = disks
    manager = cluster.brokers[3].parts.replica_manager
    create, logs = manager._create, manager.log_manager

    def failing(*arguments: Any) -> Any:
        created = create(*arguments)
        for replica in created[0]:
            logs.take_offline(replica.log.dir.rpartition("/")[0], StorageError("the disk is gone"))
        return created

    monkeypatch.setattr(manager, "_create", failing)
    topic_id = await cluster.create("t", except_brokers=(3,))
    await eventually(lambda: is_lost(state(cluster, topic_id, 0), 3), "the controller has the lost replica")
    assert set(state(cluster, topic_id, 0).isr) == {1, 2}
    await acknowledged(cluster, "t", topic_id, 0, b"x")


async def test_wiped_broker_is_not_elected_with_empty_log(disks: tuple[BrokerCluster, Any]) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("t", replication_factor=1)
    leader = await leader_of(cluster, topic_id)
    await acknowledged(cluster, "t", topic_id, 0, b"only here")
    await cluster.brokers.pop(leader).abort()
    for directory in DIRS.split(","):
        systems[leader].remove_tree(directory)
    await cluster.start_broker(leader, fs=systems[leader], **{"log.dirs": DIRS})
    await cluster.ready(leader)
    await asyncio.sleep(0.5)
    assert state(cluster, topic_id, 0).leader == -1
    assert cluster.controller.image.required_brokers(topic_id, 0) == (leader,)


@pytest.mark.parametrize("path", ["/m", "/b"])
async def test_broker_stops_if_metadata_or_last_log_dir_fails(disks: tuple[BrokerCluster, Any], path: str) -> None:
    cluster, systems = disks
    node = cluster.brokers[2]
    if path != "/m":
        await cluster.brokers.pop(2).stop()
        node = await cluster.start_broker(2, fs=systems[2], **{"log.dirs": "/b", "metadata.log.dir": "/m"})
        await cluster.ready(2)
    topic_id = await cluster.create("t", partitions=3)
    affected = next(p for p in range(3) if log_dir_of(cluster, 2, topic_id, p) == path)
    systems[2].fail("write", path=f"{path}/t-{affected}", times=1 << 30)
    leader = state(cluster, topic_id, affected).leader
    producing = asyncio.create_task(cluster.produce("t", batch(b"x"), partition=affected, via=leader))
    await eventually(node.failed.done, "the broker stops")
    producing.cancel()
    await asyncio.gather(producing, return_exceptions=True)
    message = str(node.failed.exception())
    expected = "which holds the metadata log" if path == "/m" else "the last one"
    assert f"log directory {path}, {expected}, failed" in message
