"""Brokers as observers of the metadata quorum: snapshots, startup, and changes of the active controller."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.broker import BrokerNode
from kipmesh.core.errors import ErrorCode, InvalidConfigError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, TOPIC_RESOURCE
from kipmesh.core.record_batch import build
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of

SMALL_SNAPSHOTS = {
    "metadata.snapshot.min.changed_records.ratio": 0.01,
    "metadata.log.max.record.bytes.between.snapshots": 2000,
    "metadata.max.retention.bytes": 1,
    "metadata.log.segment.bytes": 1000,
}
"""Creates a snapshot after a few topics and deletes the metadata log before it immediately."""


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000)


def sample(node: BrokerNode, name: str) -> float:
    return node.registry.get_sample_value(name) or 0.0


def log_start(node: BrokerNode) -> int:
    return node.quorum.replica.log.log_start_offset


def metadata_directory(cluster: BrokerCluster, broker: int) -> Path:
    return cluster.directory / f"broker-{broker}" / "__cluster_metadata-0"


async def create_many(cluster: BrokerCluster, prefix: str, *, via: int = 1, count: int = 20) -> None:
    topics = [m.CreatableTopic(f"{prefix}-{number}", 2, 2) for number in range(count)]
    for topic in topics:  # one record batch per topic: a snapshot ends at a batch
        response = await cluster.call(via, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")
        assert response.topics[0].error_code == 0, response


@pytest.fixture
async def small_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BrokerCluster]:
    monkeypatch.setattr("kipmesh.broker.membership.quorum.CLEAN_INTERVAL_S", 0.1)
    cluster = BrokerCluster(tmp_path, **SMALL_SNAPSHOTS)
    cluster.controller_keys = dict(SMALL_SNAPSHOTS)
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def three_controllers(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path, controllers=3)
    await cluster.start()
    yield cluster
    await cluster.stop()


# -- snapshots


async def test_new_broker_loads_snapshot_and_serves_partitions(small_snapshots: BrokerCluster) -> None:
    await create_many(small_snapshots, "before")
    await eventually(
        lambda: small_snapshots.brokers[1].quorum.driver.machine.leader_log_start > 0, "the log starts above 0"
    )
    joined = await small_snapshots.start_broker(4)
    await small_snapshots.ready(4)
    assert log_start(joined) > 0
    assert sample(joined, "kafka_controller_kafkacontroller_loadsnapshotlatencyms_count") >= 1
    assert len(joined.hosted_replicas.image.topics) == 20
    assignment = [m.CreatableReplicaAssignment(0, [4, 1])]
    topic = m.CreatableTopic("here", -1, -1, assignment)
    response = await small_snapshots.call(4, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")
    topic_id = response.topics[0].topic_id
    await eventually(
        lambda: (replica := joined.hosted_replicas.get(topic_id, 0)) and replica.leader, "the new broker leads"
    )
    assert (await small_snapshots.produce("here", batch(b"x"), via=4)).error_code == 0
    assert (await small_snapshots.fetch("here", 0, via=4)).high_watermark == 1


async def test_broker_creates_and_cleans_snapshots_and_starts_from_them(small_snapshots: BrokerCluster) -> None:
    await create_many(small_snapshots, "t")
    await eventually(
        lambda: log_start(small_snapshots.brokers[3]) > 0, "the metadata log of broker 3 starts at a snapshot"
    )
    directory = metadata_directory(small_snapshots, 3)
    await eventually(lambda: not list(directory.glob("00000000000000000000.log")), "the first segment is deleted")
    before = small_snapshots.brokers.pop(3)
    await before.abort()
    assert not before.failed.done()
    restarted = await small_snapshots.start_broker(3)
    await small_snapshots.ready(3)
    assert sample(restarted, "kafka_controller_kafkacontroller_loadsnapshotlatencyms_count") >= 1
    await eventually(
        lambda: restarted.hosted_replicas.image == small_snapshots.brokers[1].hosted_replicas.image, "equal images"
    )
    assert all(restarted.hosted_replicas.get(*key) for key in restarted.hosted_replicas.image.partitions_of_broker(3))


async def test_broker_sets_corrupt_snapshot_aside_and_fetches_it_again(
    small_snapshots: BrokerCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await create_many(small_snapshots, "t")
    await eventually(
        lambda: log_start(small_snapshots.brokers[3]) > 0, "the metadata log of broker 3 starts at a snapshot"
    )
    await small_snapshots.brokers.pop(3).abort()
    directory = metadata_directory(small_snapshots, 3)
    snapshots = sorted(directory.glob("*.checkpoint"))
    for path in snapshots:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        restarted = await small_snapshots.start_broker(3)
    await small_snapshots.ready(3)
    assert sample(restarted, "kafka_controller_kafkacontroller_loadsnapshotlatencyms_count") >= 1
    assert sorted(path.name for path in directory.glob("*.corrupt*"))
    lines = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert len(lines) == len(snapshots), lines
    await eventually(lambda: len(restarted.hosted_replicas.image.topics) == 20, "the image has all topics")


async def test_restarted_broker_catches_up_by_snapshot(small_snapshots: BrokerCluster) -> None:
    """While the broker was down, topics were deleted and recreated, and the records it needs next were deleted."""
    old_id = await small_snapshots.create("again", replication_factor=3)
    await small_snapshots.create("gone", replication_factor=3)
    await small_snapshots.brokers.pop(3).abort()
    names = [m.DeleteTopicState("again"), m.DeleteTopicState("gone")]
    await small_snapshots.call(1, "DeleteTopics", m.DeleteTopicsRequest(names, timeout_ms=10_000), "Admin")
    new_id = await small_snapshots.create("again", replication_factor=2)
    end = small_snapshots.brokers[1].quorum.replica.log.log_end_offset
    await create_many(small_snapshots, "more")
    await eventually(
        lambda: small_snapshots.brokers[1].quorum.driver.machine.leader_log_start >= end,
        "the leader has deleted the records",
    )
    restarted = await small_snapshots.start_broker(3)
    await small_snapshots.ready(3)
    await eventually(lambda: restarted.hosted_replicas.image.topic_by_name("more-19"), "the broker has all topics")
    assert restarted.hosted_replicas.get(old_id, 0) is None
    names = set(restarted.hosted_replicas.image.topic_names)
    assert "again" in names
    assert "gone" not in names
    assert restarted.hosted_replicas.image.topic_names["again"] == new_id


# -- starting


async def test_broker_stays_starting_until_controller_is_available(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path)
    node = await cluster.start_broker(1)
    try:
        response = await cluster.call(1, "Metadata", m.MetadataRequest())
        assert response.error_code == ErrorCode.BROKER_NOT_AVAILABLE
        assert not node.ready
        assert not node.failed.done()
        await cluster.start_controller()
        await cluster.ready(1)
    finally:
        await cluster.stop()


async def test_broker_without_metadata_returns_retriable_errors_for_topics(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path)
    await cluster.start_broker(1)

    async def error_codes() -> list[int]:
        requested = m.ListOffsetsTopic("t", b"", [m.ListOffsetsPartition(0, -1, -1)])
        listed = await cluster.call(1, "ListOffsets", m.ListOffsetsRequest(topics=[requested]))
        return [
            (await cluster.produce("t", batch(b"x"))).error_code,
            (await cluster.fetch("t", 0)).error_code,
            (await cluster.fetch("", 0, topic_id=bytes(range(16)))).error_code,
            listed.topics[0].partitions[0].error_code,
        ]

    try:
        assert await error_codes() == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 4
        await cluster.start_controller()
        await cluster.ready(1)
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await error_codes() == [unknown, unknown, ErrorCode.UNKNOWN_TOPIC_ID, unknown]
    finally:
        await cluster.stop()


# -- the active controller


async def test_all_brokers_describe_quorum_and_name_active_controller(three_controllers: BrokerCluster) -> None:
    active = three_controllers.controller.config.node_id
    for broker in (1, 2, 3):
        response = await three_controllers.call(broker, "DescribeQuorum", m.DescribeQuorumRequest(), "Quorum")
        partition = response.topics[0].partitions[0]
        assert partition.error_code == 0
        assert partition.leader_id == active
        assert {voter.replica_id for voter in partition.current_voters} == {100, 101, 102}
        assert (await three_controllers.call(broker, "Metadata", m.MetadataRequest())).controller_id == active
        node = three_controllers.brokers[broker]
        assert sample(node, "kafka_server_raftmetrics_current_leader") == active
        assert sample(node, "kafka_server_raftmetrics_high_watermark") > 0


async def test_brokers_follow_new_active_controller(three_controllers: BrokerCluster) -> None:
    await three_controllers.create("before")
    before = await eventually(lambda: three_controllers.active, "an active controller")
    await three_controllers.controllers.pop(before.config.node_id).stop()
    created = await three_controllers.create("between", via=2)
    assert created
    assert await eventually(lambda: three_controllers.active, "a new active controller") is not before
    await leader_of(three_controllers, created)
    assert (
        await three_controllers.produce("between", batch(b"x"), via=await leader_of(three_controllers, created))
    ).error_code == 0
    await three_controllers.start_controller(before.config.node_id)
    await three_controllers.create("after", via=3)
    assert all(node.ready for node in three_controllers.brokers.values())


async def test_topics_created_during_controller_changes_are_acknowledged_once(three_controllers: BrokerCluster) -> None:
    """A repeated CreateTopics request succeeds if its first attempt created the topic."""
    stopping = asyncio.Event()
    created: dict[str, bytes] = {}

    async def create_topics(broker: int) -> None:
        number = 0
        while not stopping.is_set():
            name = f"steady-{broker}-{number}"
            request = m.CreateTopicsRequest([m.CreatableTopic(name, 1, 2)], 35_000)
            response = (await three_controllers.call(broker, "CreateTopics", request, "Admin")).topics[0]
            assert response.error_code == 0, response
            created[name] = response.topic_id
            number += 1

    tasks = [asyncio.create_task(create_topics(broker)) for broker in (1, 2, 3)]
    for is_killed in (True, False, True):
        done = len(created)
        await eventually(lambda done=done: len(created) > done + 3, "topics are created", 60)
        active = await eventually(lambda: three_controllers.active, "an active controller")
        node = three_controllers.controllers.pop(active.config.node_id)
        await (node.abort() if is_killed else node.stop())
        done = len(created)
        await eventually(lambda done=done: len(created) > done + 3, "topics are created again", 60)
        await three_controllers.start_controller(node.config.node_id)
        await eventually(lambda: three_controllers.active, "an active controller")
    stopping.set()
    await asyncio.gather(*tasks)
    for node in three_controllers.brokers.values():
        await eventually(
            lambda node=node: dict(node.hosted_replicas.image.topic_names) == created,
            "every broker has exactly the created topics",
        )


async def test_requests_time_out_without_active_controller(
    three_controllers: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node_id in list(three_controllers.controllers)[:2]:
        await three_controllers.controllers.pop(node_id).abort()
    await eventually(lambda: not three_controllers.active, "no active controller")
    request = m.CreateTopicsRequest([m.CreatableTopic("later", 1, 2)], 300)
    began = time.monotonic()
    response = await three_controllers.call(1, "CreateTopics", request, "Admin")
    assert response.topics[0].error_code == ErrorCode.REQUEST_TIMED_OUT
    assert "no metadata controller is active" in response.topics[0].error_message
    assert time.monotonic() - began < 30  # less than the timeout of the call
    # DescribeConfigs and DescribeQuorum have no timeout field: the broker responds before the call times out.
    # A small response share makes the broker respond early, even on a slow machine.
    monkeypatch.setattr("kipmesh.core.context._RESPONSE_SHARE", 0.02)
    configs = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, "later", ())])
    described = await three_controllers.connection(1).call("Admin", "DescribeConfigs", configs, 30)
    assert "no metadata controller is active" in described.results[0].error_message
    partition = m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,))
    quorum = await three_controllers.connection(1).call(
        "Quorum", "DescribeQuorum", m.DescribeQuorumRequest([partition]), 30
    )
    assert quorum.error_code == ErrorCode.REQUEST_TIMED_OUT
    monkeypatch.undo()
    await three_controllers.start_controller(100)
    await eventually(lambda: three_controllers.active, "an active controller")
    created = (await three_controllers.call(2, "CreateTopics", request._replace(timeout_ms=30_000), "Admin")).topics[0]
    assert created.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS), "the first attempt may have succeeded"


# -- protected state


async def test_clients_cannot_truncate_or_configure_metadata_log(cluster: BrokerCluster) -> None:
    """630-07."""
    requested = m.DeleteRecordsTopic(CLUSTER_METADATA_TOPIC, [m.DeleteRecordsPartition(0, 1)])
    response = await cluster.call(1, "DeleteRecords", m.DeleteRecordsRequest([requested], 1000))
    assert response.topics[0].partitions[0].error_code == ErrorCode.POLICY_VIOLATION
    resource = m.DescribeConfigsResource(TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC)
    described = await cluster.call(1, "DescribeConfigs", m.DescribeConfigsRequest([resource]), "Admin")
    assert [(config.name, config.value) for config in described.results[0].configs] == [("cleanup.policy", "snapshot")]
    change = m.AlterableConfig("cleanup.policy", 0, "delete")
    altered = m.AlterConfigsResource(TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC, [change])
    request = m.IncrementalAlterConfigsRequest([altered])
    refused = await cluster.call(1, "IncrementalAlterConfigs", request, "Admin")
    assert refused.responses[0].error_code == ErrorCode.POLICY_VIOLATION


async def test_broker_with_voter_id_does_not_start(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path)  # the check needs no controller
    with pytest.raises(InvalidConfigError, match=r"node\.id must not be the id of a voter, got 100 with"):
        await cluster.start_broker(100)
    assert not (tmp_path / "broker-100").exists()
    await cluster.stop()
