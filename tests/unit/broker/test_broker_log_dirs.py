"""A broker with several data folders, one of which fails: the others go on, and nothing acknowledged is lost."""

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
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of

PARTITIONS = 4
DIRS = "/m,/b,/c"


@pytest.fixture
async def disks(tmp_path: Path) -> AsyncIterator[tuple[Mesh, dict[int, FaultyFileSystem]]]:
    mesh = Mesh(tmp_path, **{"replica.lag.time.max.ms": 20_000})
    systems = {broker: FaultyFileSystem() for broker in (1, 2, 3)}
    await mesh.start_controllers()
    for broker, fs in systems.items():
        await mesh.start_broker(broker, fs=fs, **{"log.dirs": DIRS})
    await mesh.ready(1, 2, 3)
    try:
        yield mesh, systems
    finally:
        await mesh.stop()


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000)


def folder_of(mesh: Mesh, broker: int, topic_id: bytes, partition: int) -> str:
    return mesh.brokers[broker].hosted_replicas.get(topic_id, partition).log.dir.rpartition("/")[0]


def held(mesh: Mesh, broker: int, topic_id: bytes, partition: int) -> list[bytes]:
    replica = mesh.brokers[broker].hosted_replicas.get(topic_id, partition)
    if replica is None:
        return []
    log = replica.log
    records = log.read(log.log_start_offset, 1 << 24, log.log_end_offset, True)
    return [one.value for position, header in iterate(records) for one in read_records(records, position, header)]


def state(mesh: Mesh, topic_id: bytes, partition: int) -> Any:
    return mesh.controller.image.partition(topic_id, partition)


async def acknowledged(mesh: Mesh, topic: str, topic_id: bytes, partition: int, value: bytes) -> None:
    """Produce until it is acknowledged, as a client does."""
    async with asyncio.timeout(60):
        while True:
            leader = state(mesh, topic_id, partition).leader
            answer = None
            if leader in mesh.brokers:
                try:
                    answer = await mesh.produce(topic, batch(value), partition=partition, via=leader)
                except TransportError:
                    answer = None
            if answer is not None and answer.error_code == 0:
                return
            await asyncio.sleep(0.02)


def metric(mesh: Mesh, broker: int, name: str, **labels: str) -> float | None:
    return mesh.brokers[broker].registry.get_sample_value(name, labels)


async def test_a_folder_that_fails_is_left_out_and_the_broker_goes_on(disks: tuple[Mesh, Any]) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"before")
    path = folder_of(mesh, 1, topic_id, 1)
    if path == "/m":
        path = folder_of(mesh, 1, topic_id, 2)
    lost = [p for p in range(PARTITIONS) if folder_of(mesh, 1, topic_id, p) == path]
    assert lost
    assert len(lost) < PARTITIONS
    for operation in ("write", "sync", "read", "open"):
        systems[1].fail(operation, path=path, times=1 << 30)
    answer = await mesh.produce("t", batch(b"refused"), partition=lost[0], via=1)
    assert answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"after")
    for partition in range(PARTITIONS):
        now = state(mesh, topic_id, partition)
        assert is_lost(now, 1) == (partition in lost)
        assert (1 in now.isr) == (partition not in lost)
        if partition in lost:
            assert mesh.brokers[1].hosted_replicas.get(topic_id, partition) is None
            answer = await mesh.produce("t", batch(b"refused"), partition=partition, via=1)
            assert answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert held(mesh, now.leader, topic_id, partition) == [b"before", b"after"]
    assert not mesh.brokers[1].failed.done()
    assert mesh.brokers[1].ready
    await eventually(lambda: len(mesh.controller.image.brokers[1].log_dirs) == 2, "the folder is told as well")
    assert metric(mesh, 1, "kafka_log_logmanager_offlinelogdirectorycount") == 1
    assert metric(mesh, 1, "kafka_log_logmanager_logdirectoryoffline", logdirectory=path) == 1
    assert metric(mesh, 2, "kafka_log_logmanager_offlinelogdirectorycount") == 0
    described = await mesh.call(1, "DescribeLogDirs", m.DescribeLogDirsRequest())
    assert {result.log_dir: result.error_code for result in described.results} == {
        folder: ErrorCode.KAFKA_STORAGE_ERROR if folder == path else 0 for folder in ("/m", "/b", "/c")
    }
    async with AdminClient(f"127.0.0.1:{mesh.ports[2]}") as admin:
        (topic,) = await admin.describe_topics(["t"])
        folders = await admin.describe_log_dirs(1)
    assert {p for p, one in topic.partitions.items() if 1 in one.offline_replicas} == set(lost)
    (bad,) = [folder for folder in folders if folder.error]
    assert (bad.log_dir, bad.replicas) == (path, {})
    assert {one.partition for folder in folders for one in folder.replicas} == set(range(PARTITIONS)) - set(lost)
    assert all(info.size_bytes > 0 for folder in folders for info in folder.replicas.values())
    # A topic that is new goes to the folders that are left.
    other_id = await mesh.create("u", partitions=2)
    assert path not in {folder_of(mesh, 1, other_id, partition) for partition in range(2)}
    await acknowledged(mesh, "u", other_id, 0, b"x")


async def test_a_folder_that_is_unmounted_under_a_broker_is_left_out(disks: tuple[Mesh, Any]) -> None:
    """Its files stay open and take everything, so that no error ever says so."""
    mesh, systems = disks
    topic_id = await mesh.create("t", partitions=PARTITIONS)
    lost = [p for p in range(PARTITIONS) if folder_of(mesh, 2, topic_id, p) == "/b"]
    assert lost
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"before")
    systems[2].rename("/b", "/elsewhere")
    systems[2].make_dirs("/b")
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"after")
    for partition in lost:
        await eventually(lambda p=partition: is_lost(state(mesh, topic_id, p), 2), "lost")
        assert 2 not in state(mesh, topic_id, partition).isr
    assert not mesh.brokers[2].failed.done()
    assert systems[2].list_dir("/b") == {}


async def test_a_folder_that_comes_back_with_a_restart_catches_up(disks: tuple[Mesh, Any]) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"before")
    lost = [p for p in range(PARTITIONS) if folder_of(mesh, 2, topic_id, p) == "/b"]
    systems[2].fail("write", path="/b", times=1 << 30)
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"meanwhile")
    for partition in lost:
        await eventually(lambda p=partition: is_lost(state(mesh, topic_id, p), 2), "lost")
    await mesh.brokers.pop(2).stop()
    # Still broken: the broker starts without it, and makes nothing anew elsewhere.
    systems[2].faults.clear()
    systems[2].fail("open", path="/b", times=1 << 30)
    await mesh.start_broker(2, fs=systems[2], **{"log.dirs": DIRS})
    await mesh.ready(2)
    assert metric(mesh, 2, "kafka_log_logmanager_offlinelogdirectorycount") == 1
    for partition in range(PARTITIONS):
        await eventually(
            lambda p=partition: is_lost(state(mesh, topic_id, p), 2) == (p in lost), "who has a log is not lost"
        )
        assert (mesh.brokers[2].hosted_replicas.get(topic_id, partition) is None) == (partition in lost)
    await mesh.brokers.pop(2).stop()
    systems[2].faults.clear()
    await mesh.start_broker(2, fs=systems[2], **{"log.dirs": DIRS})
    for partition in range(PARTITIONS):
        await eventually(lambda p=partition: 2 in state(mesh, topic_id, p).isr, "in sync again")
        assert not is_lost(state(mesh, topic_id, partition), 2)
        assert held(mesh, 2, topic_id, partition) == [b"before", b"meanwhile"]


async def test_a_new_disk_in_place_of_a_failed_one_is_filled_from_the_leader(disks: tuple[Mesh, Any]) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        await acknowledged(mesh, "t", topic_id, partition, b"before")
    lost = [p for p in range(PARTITIONS) if folder_of(mesh, 3, topic_id, p) == "/c"]
    await mesh.brokers.pop(3).abort()
    systems[3].remove_tree("/c")
    await mesh.start_broker(3, fs=systems[3], **{"log.dirs": DIRS})
    assert lost
    for partition in range(PARTITIONS):
        await eventually(lambda p=partition: held(mesh, 3, topic_id, p) == [b"before"], "all is there")
        await eventually(lambda p=partition: 3 in state(mesh, topic_id, p).isr, "in sync again")
        assert LOST_DIRECTORY not in state(mesh, topic_id, partition).directories


async def test_the_only_member_of_an_isr_is_waited_for(disks: tuple[Mesh, Any]) -> None:
    """Its folder has what was acknowledged last: nobody else leads, and its broker does not begin anew."""
    mesh, systems = disks
    topic_id = await mesh.create("t", partitions=PARTITIONS, min_insync_replicas="1")
    where = next(p for p in range(PARTITIONS) if folder_of(mesh, 1, topic_id, p) == "/b")
    await acknowledged(mesh, "t", topic_id, where, b"first")
    for broker in (2, 3):
        await mesh.brokers.pop(broker).abort()
    await eventually(lambda: tuple(state(mesh, topic_id, where).isr) == (1,), "alone")
    await acknowledged(mesh, "t", topic_id, where, b"alone")
    systems[1].fail("write", path="/b", times=1 << 30)
    assert (await mesh.produce("t", batch(b"no"), partition=where)).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    for broker in (2, 3):
        await mesh.start_broker(broker, fs=systems[broker], **{"log.dirs": DIRS})
    await mesh.ready(2, 3)
    await eventually(lambda: is_lost(state(mesh, topic_id, where), 1), "lost")
    await asyncio.sleep(0.5)
    assert state(mesh, topic_id, where).leader == -1
    assert mesh.controller.image.required_brokers(topic_id, where) == (1,)
    await mesh.brokers.pop(1).abort()
    systems[1].faults.clear()
    await mesh.start_broker(1, fs=systems[1], **{"log.dirs": DIRS})
    await acknowledged(mesh, "t", topic_id, where, b"last")
    assert held(mesh, 1, topic_id, where) == [b"first", b"alone", b"last"]


async def test_a_folder_that_fails_while_a_log_is_made_there_loses_that_replica(
    disks: tuple[Mesh, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, _ = disks
    manager = mesh.brokers[3].parts.replica_manager
    create, logs = manager._create, manager.log_manager

    def failing(*asked: Any) -> Any:
        made = create(*asked)
        for replica in made[0]:
            logs.take_offline(replica.log.dir.rpartition("/")[0], StorageError("the disk is gone"))
        return made

    monkeypatch.setattr(manager, "_create", failing)
    topic_id = await mesh.create("t", but_not_hosted_by=(3,))
    await eventually(lambda: is_lost(state(mesh, topic_id, 0), 3), "the controller knows")
    assert set(state(mesh, topic_id, 0).isr) == {1, 2}
    await acknowledged(mesh, "t", topic_id, 0, b"x")


async def test_a_wiped_broker_does_not_lead_with_nothing(disks: tuple[Mesh, Any]) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("t", replication_factor=1)
    leader = await leader_of(mesh, topic_id)
    await acknowledged(mesh, "t", topic_id, 0, b"only here")
    await mesh.brokers.pop(leader).abort()
    for folder in DIRS.split(","):
        systems[leader].remove_tree(folder)
    await mesh.start_broker(leader, fs=systems[leader], **{"log.dirs": DIRS})
    await mesh.ready(leader)
    await asyncio.sleep(0.5)
    assert state(mesh, topic_id, 0).leader == -1
    assert mesh.controller.image.required_brokers(topic_id, 0) == (leader,)


@pytest.mark.parametrize("path", ["/m", "/b"])
async def test_without_the_metadata_s_folder_or_the_last_one_the_broker_ends(
    disks: tuple[Mesh, Any], path: str
) -> None:
    mesh, systems = disks
    node = mesh.brokers[2]
    if path != "/m":
        await mesh.brokers.pop(2).stop()
        node = await mesh.start_broker(2, fs=systems[2], **{"log.dirs": "/b", "metadata.log.dir": "/m"})
        await mesh.ready(2)
    topic_id = await mesh.create("t", partitions=3)
    where = next(p for p in range(3) if folder_of(mesh, 2, topic_id, p) == path)
    systems[2].fail("write", path=f"{path}/t-{where}", times=1 << 30)
    leader = state(mesh, topic_id, where).leader
    asking = asyncio.create_task(mesh.produce("t", batch(b"x"), partition=where, via=leader))
    await eventually(node.failed.done, "it ends")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    message = str(node.failed.exception())
    expected = "which holds the metadata log" if path == "/m" else "the last one"
    assert f"log directory {path}, {expected}, failed" in message
