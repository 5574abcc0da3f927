"""Brokers as observers of the metadata quorum: they load snapshots, make their own, and follow whoever is active."""

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
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of

SMALL = {
    "metadata.snapshot.min.changed_records.ratio": 0.01,
    "metadata.log.max.record.bytes.between.snapshots": 2000,
    "metadata.max.retention.bytes": 1,
    "metadata.log.segment.bytes": 1000,
}
"""A snapshot after a few topics, and a log that goes at once."""


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000)


def sample(node: BrokerNode, name: str) -> float:
    return node.registry.get_sample_value(name) or 0.0


def log_start(node: BrokerNode) -> int:
    return node.quorum.replica.log.log_start_offset


def metadata_folder(mesh: Mesh, broker: int) -> Path:
    return mesh.folder / f"broker-{broker}" / "__cluster_metadata-0"


async def create_many(mesh: Mesh, prefix: str, *, via: int = 1, count: int = 20) -> None:
    topics = [m.CreatableTopic(f"{prefix}-{number}", 2, 2) for number in range(count)]
    for topic in topics:  # one record batch each: a snapshot ends on one
        answer = await mesh.call(via, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")
        assert answer.topics[0].error_code == 0, answer


@pytest.fixture
async def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setattr("kipmesh.broker.membership.quorum.CLEAN_INTERVAL_S", 0.1)
    mesh = Mesh(tmp_path, **SMALL)
    mesh.controller_keys = dict(SMALL)
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, controllers=3)
    await mesh.start()
    yield mesh
    await mesh.stop()


# -- snapshots


async def test_a_new_broker_joins_by_snapshot_and_serves(small: Mesh) -> None:
    await create_many(small, "before")
    await eventually(lambda: small.brokers[1].quorum.driver.machine.leader_log_start > 0, "the log starts above 0")
    joined = await small.start_broker(4)
    await small.ready(4)
    assert log_start(joined) > 0
    assert sample(joined, "kafka_controller_kafkacontroller_loadsnapshotlatencyms_count") >= 1
    assert len(joined.hosted_replicas.image.topics) == 20
    assignment = [m.CreatableReplicaAssignment(0, [4, 1])]
    topic = m.CreatableTopic("here", -1, -1, assignment)
    answer = await small.call(4, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")
    topic_id = answer.topics[0].topic_id
    await eventually(lambda: (it := joined.hosted_replicas.get(topic_id, 0)) and it.leader, "the new broker leads")
    assert (await small.produce("here", batch(b"x"), via=4)).error_code == 0
    assert (await small.fetch("here", 0, via=4)).high_watermark == 1


async def test_brokers_make_and_clean_their_own_snapshots_and_start_from_them(small: Mesh) -> None:
    await create_many(small, "t")
    await eventually(lambda: log_start(small.brokers[3]) > 0, "its log begins at a snapshot of its own")
    folder = metadata_folder(small, 3)
    await eventually(lambda: not list(folder.glob("00000000000000000000.log")), "the first segment is gone")
    before = small.brokers.pop(3)
    await before.abort()
    assert not before.failed.done()
    restarted = await small.start_broker(3)
    await small.ready(3)
    assert sample(restarted, "kafka_controller_kafkacontroller_loadsnapshotlatencyms_count") >= 1
    await eventually(lambda: restarted.hosted_replicas.image == small.brokers[1].hosted_replicas.image, "equal images")
    assert all(restarted.hosted_replicas.get(*key) for key in restarted.hosted_replicas.image.partitions_of_broker(3))


async def test_a_corrupt_snapshot_is_set_aside_and_fetched_anew(small: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    await create_many(small, "t")
    await eventually(lambda: log_start(small.brokers[3]) > 0, "its log begins at a snapshot of its own")
    await small.brokers.pop(3).abort()
    folder = metadata_folder(small, 3)
    snapshots = sorted(folder.glob("*.checkpoint"))
    for path in snapshots:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        restarted = await small.start_broker(3)
    await small.ready(3)
    assert sample(restarted, "kafka_controller_kafkacontroller_loadsnapshotlatencyms_count") >= 1
    assert sorted(path.name for path in folder.glob("*.corrupt*"))
    lines = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert len(lines) == len(snapshots), lines
    await eventually(lambda: len(restarted.hosted_replicas.image.topics) == 20, "everything is there")


async def test_a_broker_that_was_away_for_a_snapshot_catches_up(small: Mesh) -> None:
    """Topics deleted, and made again under their names, while its log's next record went."""
    old_id = await small.create("again", replication_factor=3)
    await small.create("gone", replication_factor=3)
    await small.brokers.pop(3).abort()
    names = [m.DeleteTopicState("again"), m.DeleteTopicState("gone")]
    await small.call(1, "DeleteTopics", m.DeleteTopicsRequest(names, timeout_ms=10_000), "Admin")
    new_id = await small.create("again", replication_factor=2)
    end = small.brokers[1].quorum.replica.log.log_end_offset
    await create_many(small, "more")
    await eventually(lambda: small.brokers[1].quorum.driver.machine.leader_log_start >= end, "the log went on")
    restarted = await small.start_broker(3)
    await small.ready(3)
    await eventually(lambda: restarted.hosted_replicas.image.topic_by_name("more-19"), "it has all")
    assert restarted.hosted_replicas.get(old_id, 0) is None
    names_there = set(restarted.hosted_replicas.image.topic_names)
    assert "again" in names_there
    assert "gone" not in names_there
    assert restarted.hosted_replicas.image.topic_names["again"] == new_id


# -- starting


async def test_a_broker_without_a_controller_is_starting_and_not_dead(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    node = await mesh.start_broker(1)
    try:
        answer = await mesh.call(1, "Metadata", m.MetadataRequest())
        assert answer.error_code == ErrorCode.BROKER_NOT_AVAILABLE
        assert not node.ready
        assert not node.failed.done()
        await mesh.start_controller()
        await mesh.ready(1)
    finally:
        await mesh.stop()


async def test_who_knows_no_topics_yet_does_not_say_that_there_is_no_such_topic(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    await mesh.start_broker(1)

    async def answers() -> list[int]:
        asked = m.ListOffsetsTopic("t", b"", [m.ListOffsetsPartition(0, -1, -1)])
        listed = await mesh.call(1, "ListOffsets", m.ListOffsetsRequest(topics=[asked]))
        return [
            (await mesh.produce("t", batch(b"x"))).error_code,
            (await mesh.fetch("t", 0)).error_code,
            (await mesh.fetch("", 0, topic_id=bytes(range(16)))).error_code,
            listed.topics[0].partitions[0].error_code,
        ]

    try:
        assert await answers() == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 4
        await mesh.start_controller()
        await mesh.ready(1)
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await answers() == [unknown, unknown, ErrorCode.UNKNOWN_TOPIC_ID, unknown]
    finally:
        await mesh.stop()


# -- the active controller


async def test_the_quorum_is_described_by_any_broker_and_its_leader_is_the_controller(three: Mesh) -> None:
    active = three.controller.config.node_id
    for broker in (1, 2, 3):
        answer = await three.call(broker, "DescribeQuorum", m.DescribeQuorumRequest(), "Quorum")
        partition = answer.topics[0].partitions[0]
        assert partition.error_code == 0
        assert partition.leader_id == active
        assert {each.replica_id for each in partition.current_voters} == {100, 101, 102}
        assert (await three.call(broker, "Metadata", m.MetadataRequest())).controller_id == active
        node = three.brokers[broker]
        assert sample(node, "kafka_server_raftmetrics_current_leader") == active
        assert sample(node, "kafka_server_raftmetrics_high_watermark") > 0


async def test_brokers_follow_the_next_controller(three: Mesh) -> None:
    await three.create("before")
    before = await eventually(lambda: three.active, "an active controller")
    await three.controllers.pop(before.config.node_id).stop()
    created = await three.create("between", via=2)
    assert created
    assert await eventually(lambda: three.active, "another active controller") is not before
    await leader_of(three, created)
    assert (await three.produce("between", batch(b"x"), via=await leader_of(three, created))).error_code == 0
    await three.start_controller(before.config.node_id)
    await three.create("after", via=3)
    assert all(node.ready for node in three.brokers.values())


async def test_topics_that_are_created_while_controllers_change_are_acknowledged_once(three: Mesh) -> None:
    """Each is created through a broker; none is refused as its own double."""
    stopping = asyncio.Event()
    created: dict[str, bytes] = {}

    async def steadily(broker: int) -> None:
        number = 0
        while not stopping.is_set():
            name = f"steady-{broker}-{number}"
            request = m.CreateTopicsRequest([m.CreatableTopic(name, 1, 2)], 35_000)
            answer = (await three.call(broker, "CreateTopics", request, "Admin")).topics[0]
            assert answer.error_code == 0, answer
            created[name] = answer.topic_id
            number += 1

    tasks = [asyncio.create_task(steadily(broker)) for broker in (1, 2, 3)]
    for is_killed in (True, False, True):
        done = len(created)
        await eventually(lambda done=done: len(created) > done + 3, "topics are created", 60)
        active = await eventually(lambda: three.active, "an active controller")
        node = three.controllers.pop(active.config.node_id)
        await (node.abort() if is_killed else node.stop())
        done = len(created)
        await eventually(lambda done=done: len(created) > done + 3, "topics are created again", 60)
        await three.start_controller(node.config.node_id)
        await eventually(lambda: three.active, "an active controller")
    stopping.set()
    await asyncio.gather(*tasks)
    for node in three.brokers.values():
        await eventually(
            lambda node=node: dict(node.hosted_replicas.image.topic_names) == created,
            "every broker has them, each once",
        )


async def test_without_an_active_controller_requests_wait_for_their_time(
    three: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node_id in list(three.controllers)[:2]:
        await three.controllers.pop(node_id).abort()
    await eventually(lambda: not three.active, "the last one gives up, if it was the active one")
    request = m.CreateTopicsRequest([m.CreatableTopic("later", 1, 2)], 300)
    began = time.monotonic()
    answer = await three.call(1, "CreateTopics", request, "Admin")
    assert answer.topics[0].error_code == ErrorCode.REQUEST_TIMED_OUT
    assert "no metadata controller is active" in answer.topics[0].error_message
    assert time.monotonic() - began < 30  # which is less than the caller's own patience
    # What the request does not bound, the caller's own patience does: the answer comes before that is over.
    # Here it comes soon, so that it does however slow the machine is.
    monkeypatch.setattr("kipmesh.core.context._RESPONSE_SHARE", 0.02)
    configs = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, "later", ())])
    described = await three.connection(1).call("Admin", "DescribeConfigs", configs, 30)
    assert "no metadata controller is active" in described.results[0].error_message
    partition = m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,))
    quorum = await three.connection(1).call("Quorum", "DescribeQuorum", m.DescribeQuorumRequest([partition]), 30)
    assert quorum.error_code == ErrorCode.REQUEST_TIMED_OUT
    monkeypatch.undo()
    await three.start_controller(100)
    await eventually(lambda: three.active, "an active controller")
    again = (await three.call(2, "CreateTopics", request._replace(timeout_ms=30_000), "Admin")).topics[0]
    assert again.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS), "the first attempt may have been taken"


# -- what nobody may change


async def test_the_metadata_log_is_not_for_clients_to_cut_or_configure(mesh: Mesh) -> None:
    """630-07."""
    asked = m.DeleteRecordsTopic(CLUSTER_METADATA_TOPIC, [m.DeleteRecordsPartition(0, 1)])
    answer = await mesh.call(1, "DeleteRecords", m.DeleteRecordsRequest([asked], 1000))
    assert answer.topics[0].partitions[0].error_code == ErrorCode.POLICY_VIOLATION
    resource = m.DescribeConfigsResource(TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC)
    described = await mesh.call(1, "DescribeConfigs", m.DescribeConfigsRequest([resource]), "Admin")
    assert [(each.name, each.value) for each in described.results[0].configs] == [("cleanup.policy", "snapshot")]
    change = m.AlterableConfig("cleanup.policy", 0, "delete")
    altered = m.AlterConfigsResource(TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC, [change])
    request = m.IncrementalAlterConfigsRequest([altered])
    refused = await mesh.call(1, "IncrementalAlterConfigs", request, "Admin")
    assert refused.responses[0].error_code == ErrorCode.POLICY_VIOLATION


async def test_a_broker_with_a_voters_id_does_not_start(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)  # no controller has to run for that
    with pytest.raises(InvalidConfigError, match=r"node\.id must not be the id of a voter, got 100 with"):
        await mesh.start_broker(100)
    assert not (tmp_path / "broker-100").exists()
    await mesh.stop()
