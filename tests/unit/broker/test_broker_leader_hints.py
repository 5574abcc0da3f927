"""Errors of Produce and Fetch name the current leader and its address (KIP-951)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.broker.replication.replica import Replica
from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.states import PartitionState
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of

NOT_LEADER = ErrorCode.NOT_LEADER_OR_FOLLOWER
BATCH = encode_batch([(None, b"x")], timestamp_ms=0)


async def produce(cluster: BrokerCluster, topic: str, via: int, acks: int = -1) -> m.ProduceResponse:
    data = m.TopicProduceData(topic, b"", [m.PartitionProduceData(0, BATCH), m.PartitionProduceData(9, BATCH)])
    response: m.ProduceResponse = await cluster.call(via, "Produce", m.ProduceRequest(None, acks, 10_000, [data]))
    assert response.responses[0].partition_responses[1].current_leader is None
    return response


async def fetch(
    cluster: BrokerCluster, topic: str, via: int, *, epoch: int = -1, topic_id: bytes = b""
) -> m.FetchResponse:
    requested = [m.FetchPartition(index, epoch, partition_max_bytes=1000) for index in (0, 9)]
    request = m.FetchRequest(topics=[m.FetchTopic(topic if not topic_id else "", topic_id, requested)])
    response: m.FetchResponse = await cluster.call(via, "Fetch", request)
    return response


def hint(cluster: BrokerCluster, response: Any, code: ErrorCode) -> m.LeaderIdAndEpoch | None:
    """Return the current leader that the response names for partition 0, after checking its address."""
    (topic,) = response.responses
    first = topic.partition_responses[0] if isinstance(response, m.ProduceResponse) else topic.partitions[0]
    assert first.error_code == code
    leader: m.LeaderIdAndEpoch | None = first.current_leader
    nodes = [] if leader is None else [(leader.leader_id, "127.0.0.1", cluster.ports[leader.leader_id])]
    assert [endpoint[:3] for endpoint in response.node_endpoints] == nodes
    return leader


async def test_followers_and_brokers_without_replica_name_leader(cluster: BrokerCluster) -> None:
    everywhere, here = await cluster.create("everywhere"), await cluster.create("here", replication_factor=1)
    for topic, topic_id in (("everywhere", everywhere), ("here", here)):
        leader = await leader_of(cluster, topic_id)
        other = next(broker for broker in cluster.brokers if broker != leader)
        known = m.LeaderIdAndEpoch(leader, 0)
        assert hint(cluster, await produce(cluster, topic, other), NOT_LEADER) == known
        assert hint(cluster, await produce(cluster, topic, leader), ErrorCode.NONE) is None
        assert hint(cluster, await fetch(cluster, topic, leader), ErrorCode.NONE) is None
        assert hint(cluster, await fetch(cluster, topic, leader, epoch=3), ErrorCode.UNKNOWN_LEADER_EPOCH) is None
    for topic_id in (b"", here):
        assert hint(cluster, await fetch(cluster, "here", other, topic_id=topic_id), NOT_LEADER) == known
    assert hint(cluster, await produce(cluster, "nowhere", 1), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) is None


async def test_fetch_in_old_leader_epoch_names_new_leader(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", min_insync_replicas="1")
    old = await leader_of(cluster, topic_id)
    await cluster.brokers[old].stop()
    del cluster.brokers[old]
    new = await leader_of(cluster, topic_id)
    (other,) = set(cluster.brokers) - {new}
    epoch = cluster.brokers[new].hosted_replicas.get(topic_id, 0).leader_epoch
    known = m.LeaderIdAndEpoch(new, epoch)
    follower = cluster.brokers[other].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: follower.leader_epoch == epoch, "the follower has the new epoch")
    for via in (new, other):
        assert hint(cluster, await fetch(cluster, "t", via, epoch=0), ErrorCode.FENCED_LEADER_EPOCH) == known


async def test_leader_deposed_during_produce_names_new_leader(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic_id = await cluster.create("t")
    replica = cluster.brokers[1].hosted_replicas.get(topic_id, 0)
    assert replica is not None
    state: PartitionState = cluster.brokers[1].hosted_replicas.image.topics[topic_id].partitions[0]
    deposed = state._replace(leader=3, leader_epoch=state.leader_epoch + 1)
    original = Replica.when_replicated

    def when_replicated(self: Replica, *arguments: Any) -> Any:
        asyncio.get_running_loop().call_soon(self.become_follower, deposed)
        return original(self, *arguments)

    monkeypatch.setattr(Replica, "when_replicated", when_replicated)
    assert hint(cluster, await produce(cluster, "t", 1), NOT_LEADER) == m.LeaderIdAndEpoch(3, deposed.leader_epoch)


async def test_error_names_no_leader_if_partition_has_none(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t")
    replica = cluster.brokers[2].hosted_replicas.get(topic_id, 0)
    assert replica is not None
    state = cluster.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0]
    replica.become_follower(state._replace(leader=-1))
    assert hint(cluster, await produce(cluster, "t", 2), NOT_LEADER) is None
