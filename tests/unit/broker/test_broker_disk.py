"""A broker whose disk fails: each request gets the field's error, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import build, iterate
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of


def batch(size: int = 100) -> bytes:
    return build([(None, b"x" * size)], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000)


@pytest.fixture
async def disks(tmp_path: Path) -> AsyncIterator[tuple[Mesh, dict[int, FaultyFileSystem]]]:
    mesh = Mesh(tmp_path)
    systems = {broker: FaultyFileSystem() for broker in (1, 2, 3)}
    await mesh.start_controller()
    for broker, fs in systems.items():
        await mesh.start_broker(broker, fs=fs)
    await mesh.ready(1, 2, 3)
    yield mesh, systems
    await mesh.stop()


async def test_a_full_leader_refuses_and_goes_on_when_there_is_room(disks) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("full")
    assert (await mesh.produce("full", batch())).error_code == 0
    systems[1].fail("write", errno.ENOSPC, path="full-0", times=2, torn_bytes=17)
    for _ in range(2):
        answer = await mesh.produce("full", batch())
        assert answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "No space left" in answer.error_message
    assert (await mesh.produce("full", batch())).base_offset == 1
    data = await mesh.fetch("full", 0)
    assert [header.base_offset for _, header in iterate(data.records)] == [0, 1]
    assert mesh.brokers[1].ready
    assert not mesh.brokers[1].failed.done()
    assert mesh.brokers[1].hosted_replicas.get(topic_id, 0).log.log_end_offset == 2


async def test_a_full_follower_catches_up_when_there_is_room(disks) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("room")
    systems[3].fail("write", errno.ENOSPC, path="room-0", times=2)
    answers = await asyncio.gather(*(mesh.produce("room", batch()) for _ in range(3)))
    assert [answer.error_code for answer in answers] == [0, 0, 0]
    log = mesh.brokers[3].hosted_replicas.get(topic_id, 0).log
    await eventually(lambda: log.log_end_offset == 3, "the follower has all")


async def test_a_failed_fsync_ends_the_broker_and_another_leads(disks) -> None:
    """What the kernel dropped cannot be told from what it kept."""
    mesh, systems = disks
    topic_id = await mesh.create("synced", flush_messages="1")
    assert (await mesh.produce("synced", batch())).error_code == 0
    systems[1].fail("sync", errno.EIO, path="synced-0")
    assert (await mesh.produce("synced", batch())).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    failed = mesh.brokers[1].failed
    with pytest.raises(KafkaError, match="cannot flush synced-0"):
        await asyncio.wait_for(failed, 60)
    await mesh.brokers.pop(1).abort()
    leader = await leader_of(mesh, topic_id)
    replica = mesh.brokers[leader].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader is not None and not replica.leader.is_under_min_isr, "it may write")
    assert (await mesh.produce("synced", batch(), via=leader)).error_code == 0


async def test_a_power_cut_of_every_disk_keeps_what_was_synced(disks) -> None:
    """All three lose what they had not synced, each another part of it."""
    mesh, systems = disks
    topic_id = await mesh.create("cut", flush_messages="1")
    for _ in range(5):
        assert (await mesh.produce("cut", batch())).error_code == 0
    for broker in (1, 2, 3):
        await mesh.brokers.pop(broker).abort()
        systems[broker].crash(Random(broker))
    for broker in (1, 2, 3):
        await mesh.start_broker(broker, fs=systems[broker])
    await mesh.ready(1, 2, 3)
    leader = await leader_of(mesh, topic_id)
    replica = mesh.brokers[leader].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.high_watermark == 5, "all five are committed again")
    data = await mesh.fetch("cut", 0, via=leader)
    assert [header.base_offset for _, header in iterate(data.records)] == [0, 1, 2, 3, 4]


async def test_flush_messages_syncs_before_the_answer(disks) -> None:
    mesh, _ = disks
    topic_id = await mesh.create("durable", flush_messages="1")
    assert (await mesh.produce("durable", batch())).error_code == 0
    for broker in (1, 2, 3):
        log = mesh.brokers[broker].hosted_replicas.get(topic_id, 0).log
        assert log.recovery_point == log.log_end_offset == 1, broker


async def test_a_disk_error_ends_the_leader_and_another_leads(disks) -> None:
    mesh, systems = disks
    topic_id = await mesh.create("eio")
    assert (await mesh.produce("eio", batch())).error_code == 0
    systems[1].fail("write", errno.EIO, path="eio-0")
    assert (await mesh.produce("eio", batch())).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    with pytest.raises(KafkaError, match="cannot append to eio-0"):
        await asyncio.wait_for(mesh.brokers[1].failed, 60)
    await mesh.brokers.pop(1).abort()
    leader = await leader_of(mesh, topic_id)
    assert values_count(await mesh.fetch("eio", 0, via=leader)) == 1


def values_count(data: m.PartitionData) -> int:
    return sum(header.record_count for _, header in iterate(data.records))


async def test_a_topic_that_a_full_disk_cannot_host_comes_when_there_is_room(disks) -> None:
    """The broker goes on with what it has; nobody who leads elsewhere is hurt."""
    mesh, systems = disks
    await mesh.create("before")
    systems[1].fail("open", errno.ENOSPC, path="later-0", times=1 << 30)
    entry = m.CreatableTopic("later", 1, 3)
    answer = await mesh.call(1, "CreateTopics", m.CreateTopicsRequest([entry], 10_000), "Admin")
    assert answer.topics[0].error_code == 0
    await eventually(lambda: mesh.brokers[1].hosted_replicas.unhosted, "the disk refused")
    assert (await mesh.produce("later", batch())).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert (await mesh.produce("before", batch())).error_code == 0
    systems[1].faults.clear()
    await eventually(lambda: mesh.brokers[1].hosted_replicas.get(answer.topics[0].topic_id, 0), "hosted after all")
    assert (await mesh.produce("later", batch())).error_code == 0
    assert not mesh.brokers[1].failed.done()


async def test_a_full_disk_under_the_metadata_log_is_waited_out(disks) -> None:
    mesh, systems = disks
    systems[2].fail("write", errno.ENOSPC, path="__cluster_metadata-0", times=3)
    await mesh.create("seen")
    assert not mesh.brokers[2].failed.done()
    assert mesh.brokers[2].ready
