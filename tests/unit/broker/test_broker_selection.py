"""Preferred read replicas in Fetch and Metadata responses, and replica selector plugins (392-11 to 392-15)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from kipmesh import messages as m
from kipmesh.broker import BrokerNode
from kipmesh.broker.requests.selection import ReplicaSelection, peer_host
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.record_batch import build
from tests.unit.broker.broker_clock import Clock, wait_for_fetches
from tests.unit.broker.broker_cluster import BrokerCluster, eventually
from tests.unit.broker.broker_selectors import ConfiguredSelector

WAIT_MS = 60_000
"""Longer than the timeout of a call: a fetch that waits this long fails the test."""
RACK_AWARE = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
CONFIGURED = "tests.unit.broker.broker_selectors.ConfiguredSelector"


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


@pytest.fixture(autouse=True)
def _clear_selector_calls() -> None:
    ConfiguredSelector.seen.clear()
    ConfiguredSelector.closed.clear()


@pytest.fixture
async def rack_aware(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path, **{"replica.selector.class": RACK_AWARE})
    await cluster.start()
    yield cluster
    await cluster.stop()


async def create(cluster: BrokerCluster, partitions: int = 1) -> bytes:
    """Create a topic with one record in each partition, replicated to all followers."""
    topic_id = await cluster.create("t", partitions=partitions)
    for partition in range(partitions):
        assert (await cluster.produce("t", batch(b"x"), partition=partition)).error_code == 0
        leader = cluster.brokers[1].hosted_replicas.get(topic_id, partition)
        await eventually(
            lambda leader=leader: {f.log_end_offset for f in leader.leader.followers.values()} == {1},
            "all followers have the record",
        )
    return topic_id


def value(cluster: BrokerCluster, broker: int, name: str, **labels: str) -> float:
    return cluster.brokers[broker].registry.get_sample_value(f"kipmesh_broker_{name}_total", labels) or 0.0


async def test_leader_redirects_consumers_to_replica_in_their_rack(rack_aware: BrokerCluster) -> None:
    await create(rack_aware)
    for rack, replica in (("rack-b", 2), ("rack-c", 3)):
        # A redirect does not wait.
        data = await rack_aware.fetch("t", 0, rack=rack, max_wait_ms=WAIT_MS, min_bytes=1000)
        assert (data.preferred_read_replica, data.records, data.error_code) == (replica, b"", 0)
        from_follower = await rack_aware.fetch("t", 0, rack=rack, via=replica)
        assert from_follower.records
        assert from_follower.preferred_read_replica == -1, "followers do not select"
    for rack, replica_id in (("rack-a", -1), ("rack-x", -1), ("", -1), ("rack-b", -2)):
        data = await rack_aware.fetch("t", 0, rack=rack, replica_id=replica_id)
        assert data.preferred_read_replica == -1, (rack, replica_id)
        assert data.records
    assert (
        value(rack_aware, 1, "fetch_redirects", replica="2")
        == value(rack_aware, 1, "fetch_redirects", replica="3")
        == 1
    )
    labels = {"role": "leader", "rack": "cross"}
    assert value(rack_aware, 1, "consumer_fetched_bytes", **labels) > 0
    assert value(rack_aware, 2, "consumer_fetched_bytes", role="follower", rack="same") > 0


async def test_session_redirect_has_endpoint_and_repeats_in_incremental_fetches(rack_aware: BrokerCluster) -> None:
    topic_id = await create(rack_aware, partitions=2)
    requested = [m.FetchPartition(p, -1, 0, partition_max_bytes=1000) for p in (0, 1)]
    request = m.FetchRequest(
        session_epoch=0, rack_id="rack-c", min_bytes=1, topics=[m.FetchTopic("", topic_id, requested)]
    )
    response = await rack_aware.call(1, "Fetch", request)
    assert response.node_endpoints == (m.NodeEndpoint(3, "127.0.0.1", rack_aware.ports[3], "rack-c"),)
    for epoch in (1, 2):
        request = m.FetchRequest(
            session_id=response.session_id, session_epoch=epoch, rack_id="rack-c", max_wait_ms=WAIT_MS, min_bytes=1
        )
        incremental = await rack_aware.call(1, "Fetch", request)
        assert [data.preferred_read_replica for t in incremental.responses for data in t.partitions] == [3, 3]
        assert len(incremental.node_endpoints) == 1


async def test_leader_does_not_redirect_to_replica_outside_isr(rack_aware: BrokerCluster) -> None:
    topic_id = await create(rack_aware)
    await rack_aware.brokers.pop(2).abort()
    replica = rack_aware.brokers[1].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader.isr == {1, 3}, "broker 2 has left the ISR")
    assert (await rack_aware.fetch("t", 0, rack="rack-b")).records
    requested = m.FetchTopic("", topic_id, [m.FetchPartition(0, -1, 1, partition_max_bytes=1000)])
    first = await rack_aware.call(1, "Fetch", m.FetchRequest(session_epoch=0, rack_id="rack-b", topics=[requested]))
    assert first.session_id
    await rack_aware.start_broker(2)
    await rack_aware.ready(2)
    await eventually(lambda: replica.leader.isr == {1, 2, 3}, "broker 2 is in the ISR")
    request = m.FetchRequest(session_id=first.session_id, session_epoch=1, rack_id="rack-b")
    (topic,) = (await rack_aware.call(1, "Fetch", request)).responses
    assert topic.partitions[0].preferred_read_replica == 2, "idle partitions of a session are redirected"


async def test_leader_serves_all_consumers_without_selector(cluster: BrokerCluster) -> None:
    await create(cluster)
    data = await cluster.fetch("t", 0, rack="rack-b")
    assert data.records
    assert data.preferred_read_replica == -1


async def preferred(cluster: BrokerCluster, via: int, rack: str) -> list[int]:
    request = m.MetadataRequest([m.MetadataRequestTopic(b"", "t")], rack_id=rack)
    response = await cluster.call(via, "Metadata", request)
    return [partition.preferred_read_replica for topic in response.topics for partition in topic.partitions]


async def test_all_brokers_return_preferred_replica_in_mode_metadata(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **{"replica.selector.class": RACK_AWARE, "replica.selection.mode": "metadata"})
    await cluster.start()
    try:
        await create(cluster, partitions=2)
        for via in (1, 2, 3):
            assert [await preferred(cluster, via, f"rack-{rack}") for rack in "abcx"] == [
                [-1, -1],
                [2, 2],
                [3, 3],
                [-1, -1],
            ]
            assert await preferred(cluster, via, "") == [-1, -1]
        response = await cluster.call(2, "Metadata", m.MetadataRequest(None, rack_id="rack-b"))
        assert response.topics[0].partitions[1].preferred_read_replica == 2
        unknown = await cluster.call(
            2, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(b"", "none")], rack_id="rack-b")
        )
        assert unknown.topics[0].error_code
        data = await cluster.fetch("t", 0, rack="rack-b")
        assert data.records, "leaders do not redirect in this mode"
        assert data.preferred_read_replica == -1
    finally:
        await cluster.stop()


async def test_brokers_load_configure_and_close_selector_plugin(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **{"replica.selector.class": CONFIGURED, "replica.selector.config": "target=3"})
    await cluster.start()
    try:
        await create(cluster)
        assert (await cluster.fetch("t", 0, rack="anywhere")).preferred_read_replica == 3
        assert (await cluster.fetch("t", 0)).records, "a fetch without a rack is not redirected"
        ((partition, client, view),) = ConfiguredSelector.seen
        assert partition == ("t", 0)
        assert client == ("anywhere", "tests", "127.0.0.1", "", "MESH")
        assert (view.leader.node_id, view.fetch_offset) == (1, 0)
        assert {(r.node_id, r.rack, r.is_in_sync, r.log_start_offset, r.log_end_offset) for r in view.replicas} == {
            (1, "rack-a", True, 0, 1),
            (2, "rack-b", True, 0, 1),
            (3, "rack-c", True, 0, 1),
        }
        assert all(r.time_since_caught_up_ms is not None for r in view.replicas)
    finally:
        await cluster.stop()
    assert sorted(ConfiguredSelector.closed) == [1, 2, 3]


@pytest.mark.parametrize(("target", "error"), [("raise", "raised"), ("unknown", "unknown-replica")])
async def test_leader_serves_fetch_and_counts_error_of_selector_plugin(tmp_path: Path, target: str, error: str) -> None:
    cluster = BrokerCluster(
        tmp_path, **{"replica.selector.class": CONFIGURED, "replica.selector.config": f"target={target}"}
    )
    await cluster.start()
    try:
        await create(cluster)
        for _ in range(3):
            assert (await cluster.fetch("t", 0, rack="rack-b")).records
        assert value(cluster, 1, "replica_selector_errors", error=error) == 3
        assert value(cluster, 2, "replica_selector_errors", error=error) == 0
    finally:
        await cluster.stop()


async def test_idle_partition_uses_session_fetches_for_time_since_caught_up(clock: Clock, tmp_path: Path) -> None:
    """A session fetch counts for all its partitions, also for those without new records."""
    cluster = BrokerCluster(
        tmp_path,
        **{
            "replica.selector.class": CONFIGURED,
            "replica.selector.config": "target=1",
            "replica.fetch.wait.max.ms": 50,
        },
    )
    await cluster.start()
    try:
        led = cluster.brokers[1].hosted_replicas.get(await create(cluster), 0)
        assert led is not None
        await wait_for_fetches(led, clock.advance(20_000))
        await cluster.fetch("t", 0, rack="rack-b")
        (_, _, view) = ConfiguredSelector.seen[-1]
        assert [replica.time_since_caught_up_ms for replica in view.replicas] == [0, 0, 0]
    finally:
        await cluster.stop()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"replica.selector.class": "no.such.Selector"}, "replica.selector.class"),
        ({"replica.selector.class": "Nearest"}, "replica.selector.class"),
        ({"replica.selector.config": "nonsense"}, "replica.selector.config"),
        ({"replica.selection.mode": "consumer"}, "replica.selection.mode"),
    ],
)
async def test_broker_refuses_invalid_selector_settings_with_one_line_error(
    tmp_path: Path, keys: dict[str, Any], text: str
) -> None:
    needed = {
        "node.id": 1,
        "cluster.id": "c",
        "controller.quorum.voters": "100@127.0.0.1:1",
        "log.dirs": str(tmp_path / "logs"),
    }
    with pytest.raises(InvalidConfigError, match=text) as raised:
        BrokerNode(BrokerConfig.parse(needed | keys), is_leader_role=False)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fe80::2]:5000", "fe80::2"),
        ("unix:socket", ""),
        ("", ""),
    ],
)
def test_peer_host_parses_grpc_peer_addresses(peer: str, host: str) -> None:
    assert peer_host(peer) == host


@pytest.mark.parametrize(
    ("settings", "warned_keys"),
    [
        ({}, []),
        ({"replica.selector.class": RACK_AWARE, "replica.selection.mode": "metadata"}, []),
        ({"replica.selection.mode": "metadata"}, ["replica.selection.mode"]),
        ({"replica.selector.config": "a=1"}, ["replica.selector.config"]),
    ],
)
@pytest.mark.usefixtures("default_structlog")
def test_broker_warns_about_selector_settings_without_effect(settings: dict[str, str], warned_keys: list[str]) -> None:
    keys = {
        "node.id": "1",
        "cluster.id": "c",
        "controller.quorum.voters": "9@127.0.0.1:1",
        "listeners": "MESH://127.0.0.1:0",
    }
    config = BrokerConfig.parse({**keys, "log.dirs": "nowhere", **settings})
    unused: Any = None
    with structlog.testing.capture_logs() as lines:
        ReplicaSelection(config, unused, unused, unused)
    assert [line["key"] for line in lines if line["log_level"] == "warning"] == warned_keys
