"""Who is sent away is told whom to ask, and where that is (KIP-951)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.broker.replication.replica import Replica
from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.states import PartitionState
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of

AWAY = ErrorCode.NOT_LEADER_OR_FOLLOWER
BATCH = encode_batch([(None, b"x")], timestamp_ms=0)


async def produce(mesh: Mesh, topic: str, via: int, acks: int = -1) -> m.ProduceResponse:
    data = m.TopicProduceData(topic, b"", [m.PartitionProduceData(0, BATCH), m.PartitionProduceData(9, BATCH)])
    response: m.ProduceResponse = await mesh.call(via, "Produce", m.ProduceRequest(None, acks, 10_000, [data]))
    assert response.responses[0].partition_responses[1].current_leader is None
    return response


async def fetch(mesh: Mesh, topic: str, via: int, *, epoch: int = -1, topic_id: bytes = b"") -> m.FetchResponse:
    asked = [m.FetchPartition(each, epoch, partition_max_bytes=1000) for each in (0, 9)]
    request = m.FetchRequest(topics=[m.FetchTopic(topic if not topic_id else "", topic_id, asked)])
    response: m.FetchResponse = await mesh.call(via, "Fetch", request)
    return response


def hint(mesh: Mesh, response: Any, code: ErrorCode) -> m.LeaderIdAndEpoch | None:
    """What the answer says of partition 0, with the address of whom it names."""
    (topic,) = response.responses
    first = topic.partition_responses[0] if isinstance(response, m.ProduceResponse) else topic.partitions[0]
    assert first.error_code == code
    leader: m.LeaderIdAndEpoch | None = first.current_leader
    nodes = [] if leader is None else [(leader.leader_id, "127.0.0.1", mesh.ports[leader.leader_id])]
    assert [each[:3] for each in response.node_endpoints] == nodes
    return leader


async def test_followers_and_brokers_without_a_replica_name_the_leader(mesh: Mesh) -> None:
    everywhere, here = await mesh.create("everywhere"), await mesh.create("here", replication_factor=1)
    for topic, topic_id in (("everywhere", everywhere), ("here", here)):
        leader = await leader_of(mesh, topic_id)
        other = next(each for each in mesh.brokers if each != leader)
        known = m.LeaderIdAndEpoch(leader, 0)
        assert hint(mesh, await produce(mesh, topic, other), AWAY) == known
        assert hint(mesh, await produce(mesh, topic, leader), ErrorCode.NONE) is None
        assert hint(mesh, await fetch(mesh, topic, leader), ErrorCode.NONE) is None
        assert hint(mesh, await fetch(mesh, topic, leader, epoch=3), ErrorCode.UNKNOWN_LEADER_EPOCH) is None
    for topic_id in (b"", here):
        assert hint(mesh, await fetch(mesh, "here", other, topic_id=topic_id), AWAY) == known
    assert hint(mesh, await produce(mesh, "nowhere", 1), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) is None


async def test_who_asks_in_an_old_epoch_is_told_the_new_leader(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", min_insync_replicas="1")
    old = await leader_of(mesh, topic_id)
    await mesh.brokers[old].stop()
    del mesh.brokers[old]
    new = await leader_of(mesh, topic_id)
    (other,) = set(mesh.brokers) - {new}
    epoch = mesh.brokers[new].hosted_replicas.get(topic_id, 0).leader_epoch
    known = m.LeaderIdAndEpoch(new, epoch)
    follower = mesh.brokers[other].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: follower.leader_epoch == epoch, "the other one knows it as well")
    for via in (new, other):
        assert hint(mesh, await fetch(mesh, "t", via, epoch=0), ErrorCode.FENCED_LEADER_EPOCH) == known


async def test_a_leader_that_is_deposed_while_replicas_are_waited_for(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic_id = await mesh.create("t")
    replica = mesh.brokers[1].hosted_replicas.get(topic_id, 0)
    assert replica is not None
    state: PartitionState = mesh.brokers[1].hosted_replicas.image.topics[topic_id].partitions[0]
    deposed = state._replace(leader=3, leader_epoch=state.leader_epoch + 1)
    original = Replica.when_replicated

    def when_replicated(self: Replica, *arguments: Any) -> Any:
        asyncio.get_running_loop().call_soon(self.become_follower, deposed)
        return original(self, *arguments)

    monkeypatch.setattr(Replica, "when_replicated", when_replicated)
    assert hint(mesh, await produce(mesh, "t", 1), AWAY) == m.LeaderIdAndEpoch(3, deposed.leader_epoch)


async def test_nothing_is_said_where_nobody_leads(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    replica = mesh.brokers[2].hosted_replicas.get(topic_id, 0)
    assert replica is not None
    state = mesh.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0]
    replica.become_follower(state._replace(leader=-1))
    assert hint(mesh, await produce(mesh, "t", 2), AWAY) is None
