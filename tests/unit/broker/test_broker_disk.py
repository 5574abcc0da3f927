"""Disk errors of a broker: requests fail with KAFKA_STORAGE_ERROR, and acknowledged records survive."""

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
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of


def batch(size: int = 100) -> bytes:
    return build([(None, b"x" * size)], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000)


@pytest.fixture
async def disks(tmp_path: Path) -> AsyncIterator[tuple[BrokerCluster, dict[int, FaultyFileSystem]]]:
    cluster = BrokerCluster(tmp_path)
    systems = {broker: FaultyFileSystem() for broker in (1, 2, 3)}
    await cluster.start_controller()
    for broker, fs in systems.items():
        await cluster.start_broker(broker, fs=fs)
    await cluster.ready(1, 2, 3)
    yield cluster, systems
    await cluster.stop()


async def test_leader_with_full_disk_refuses_writes_until_space_is_free(disks) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("full")
    assert (await cluster.produce("full", batch())).error_code == 0
    systems[1].fail("write", errno.ENOSPC, path="full-0", times=2, torn_bytes=17)
    for _ in range(2):
        response = await cluster.produce("full", batch())
        assert response.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "No space left" in response.error_message
    assert (await cluster.produce("full", batch())).base_offset == 1
    data = await cluster.fetch("full", 0)
    assert [header.base_offset for _, header in iterate(data.records)] == [0, 1]
    assert cluster.brokers[1].ready
    assert not cluster.brokers[1].failed.done()
    assert cluster.brokers[1].hosted_replicas.get(topic_id, 0).log.log_end_offset == 2


async def test_follower_with_full_disk_catches_up_when_space_is_free(disks) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("room")
    systems[3].fail("write", errno.ENOSPC, path="room-0", times=2)
    responses = await asyncio.gather(*(cluster.produce("room", batch()) for _ in range(3)))
    assert [response.error_code for response in responses] == [0, 0, 0]
    log = cluster.brokers[3].hosted_replicas.get(topic_id, 0).log
    await eventually(lambda: log.log_end_offset == 3, "the follower has all records")


async def test_failed_fsync_stops_broker_and_moves_leadership(disks) -> None:
    """After a failed fsync, the broker cannot know which pages the kernel has dropped."""
    cluster, systems = disks
    topic_id = await cluster.create("synced", flush_messages="1")
    assert (await cluster.produce("synced", batch())).error_code == 0
    systems[1].fail("sync", errno.EIO, path="synced-0")
    assert (await cluster.produce("synced", batch())).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    failed = cluster.brokers[1].failed
    with pytest.raises(KafkaError, match="cannot flush synced-0"):
        await asyncio.wait_for(failed, 60)
    await cluster.brokers.pop(1).abort()
    leader = await leader_of(cluster, topic_id)
    replica = cluster.brokers[leader].hosted_replicas.get(topic_id, 0)
    await eventually(
        lambda: replica.leader is not None and not replica.leader.is_under_min_isr, "the new leader accepts writes"
    )
    assert (await cluster.produce("synced", batch(), via=leader)).error_code == 0


async def test_power_cut_of_all_brokers_keeps_synced_records(disks) -> None:
    """Each broker loses a different part of its unsynced data."""
    cluster, systems = disks
    topic_id = await cluster.create("cut", flush_messages="1")
    for _ in range(5):
        assert (await cluster.produce("cut", batch())).error_code == 0
    for broker in (1, 2, 3):
        await cluster.brokers.pop(broker).abort()
        systems[broker].crash(Random(broker))
    for broker in (1, 2, 3):
        await cluster.start_broker(broker, fs=systems[broker])
    await cluster.ready(1, 2, 3)
    leader = await leader_of(cluster, topic_id)
    replica = cluster.brokers[leader].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.high_watermark == 5, "all five records are committed again")
    data = await cluster.fetch("cut", 0, via=leader)
    assert [header.base_offset for _, header in iterate(data.records)] == [0, 1, 2, 3, 4]


async def test_replicas_sync_batch_before_produce_response_with_flush_messages_1(disks) -> None:
    cluster, _ = disks
    topic_id = await cluster.create("durable", flush_messages="1")
    assert (await cluster.produce("durable", batch())).error_code == 0
    for broker in (1, 2, 3):
        log = cluster.brokers[broker].hosted_replicas.get(topic_id, 0).log
        assert log.recovery_point == log.log_end_offset == 1, broker


async def test_disk_error_stops_broker_and_moves_leadership(disks) -> None:
    cluster, systems = disks
    topic_id = await cluster.create("eio")
    assert (await cluster.produce("eio", batch())).error_code == 0
    systems[1].fail("write", errno.EIO, path="eio-0")
    assert (await cluster.produce("eio", batch())).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    with pytest.raises(KafkaError, match="cannot append to eio-0"):
        await asyncio.wait_for(cluster.brokers[1].failed, 60)
    await cluster.brokers.pop(1).abort()
    leader = await leader_of(cluster, topic_id)
    assert count_records(await cluster.fetch("eio", 0, via=leader)) == 1


def count_records(data: m.PartitionData) -> int:
    return sum(header.record_count for _, header in iterate(data.records))


async def test_broker_hosts_new_topic_after_its_full_disk_has_space_again(disks) -> None:
    """The broker still serves its other topics."""
    cluster, systems = disks
    await cluster.create("before")
    systems[1].fail("open", errno.ENOSPC, path="later-0", times=1 << 30)
    entry = m.CreatableTopic("later", 1, 3)
    response = await cluster.call(1, "CreateTopics", m.CreateTopicsRequest([entry], 10_000), "Admin")
    assert response.topics[0].error_code == 0
    await eventually(lambda: cluster.brokers[1].hosted_replicas.unhosted, "the disk refused the log")
    assert (await cluster.produce("later", batch())).error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert (await cluster.produce("before", batch())).error_code == 0
    systems[1].faults.clear()
    await eventually(
        lambda: cluster.brokers[1].hosted_replicas.get(response.topics[0].topic_id, 0), "the topic is hosted"
    )
    assert (await cluster.produce("later", batch())).error_code == 0
    assert not cluster.brokers[1].failed.done()


async def test_broker_survives_full_disk_of_metadata_log(disks) -> None:
    cluster, systems = disks
    systems[2].fail("write", errno.ENOSPC, path="__cluster_metadata-0", times=3)
    await cluster.create("seen")
    assert not cluster.brokers[2].failed.done()
    assert cluster.brokers[2].ready
