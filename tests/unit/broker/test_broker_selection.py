"""Leaders and Metadata name the replica to read from; the selector is a line of configuration (392-11 to 392-15)."""

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
from tests.unit.broker.broker_clock import Clock, all_have_fetched
from tests.unit.broker.broker_selectors import ConfiguredSelector
from tests.unit.broker.conftest_broker import Mesh, eventually

WAIT_MS = 60_000
"""Longer than a call has: what waits for its end fails."""
RACK_AWARE = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
CONFIGURED = "tests.unit.broker.broker_selectors.ConfiguredSelector"


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


@pytest.fixture(autouse=True)
def _forget() -> None:
    ConfiguredSelector.seen.clear()
    ConfiguredSelector.closed.clear()


@pytest.fixture
async def near(tmp_path: Path) -> AsyncIterator[Mesh]:
    it = Mesh(tmp_path, **{"replica.selector.class": RACK_AWARE})
    await it.start()
    yield it
    await it.stop()


async def create(mesh: Mesh, partitions: int = 1) -> bytes:
    """A topic whose replicas all have the one record of each partition."""
    topic_id = await mesh.create("t", partitions=partitions)
    for partition in range(partitions):
        assert (await mesh.produce("t", batch(b"x"), partition=partition)).error_code == 0
        leader = mesh.brokers[1].hosted_replicas.get(topic_id, partition)
        await eventually(
            lambda leader=leader: {f.log_end_offset for f in leader.leader.followers.values()} == {1}, "all have it"
        )
    return topic_id


def value(mesh: Mesh, broker: int, name: str, **labels: str) -> float:
    return mesh.brokers[broker].registry.get_sample_value(f"kipmesh_broker_{name}_total", labels) or 0.0


async def test_leaders_send_consumers_to_the_replica_in_their_rack(near: Mesh) -> None:
    await create(near)
    for rack, replica in (("rack-b", 2), ("rack-c", 3)):
        # A redirect is answered at once.
        data = await near.fetch("t", 0, rack=rack, max_wait_ms=WAIT_MS, min_bytes=1000)
        assert (data.preferred_read_replica, data.records, data.error_code) == (replica, b"", 0)
        there = await near.fetch("t", 0, rack=rack, via=replica)
        assert there.records
        assert there.preferred_read_replica == -1, "followers do not select"
    for rack, replica_id in (("rack-a", -1), ("rack-x", -1), ("", -1), ("rack-b", -2)):
        data = await near.fetch("t", 0, rack=rack, replica_id=replica_id)
        assert data.preferred_read_replica == -1, (rack, replica_id)
        assert data.records
    assert value(near, 1, "fetch_redirects", replica="2") == value(near, 1, "fetch_redirects", replica="3") == 1
    labels = {"role": "leader", "rack": "cross"}
    assert value(near, 1, "consumer_fetched_bytes", **labels) > 0
    assert value(near, 2, "consumer_fetched_bytes", role="follower", rack="same") > 0


async def test_a_redirect_says_where_the_replica_listens_and_stays_in_the_session(near: Mesh) -> None:
    topic_id = await create(near, partitions=2)
    asked = [m.FetchPartition(p, -1, 0, partition_max_bytes=1000) for p in (0, 1)]
    request = m.FetchRequest(session_epoch=0, rack_id="rack-c", min_bytes=1, topics=[m.FetchTopic("", topic_id, asked)])
    response = await near.call(1, "Fetch", request)
    assert response.node_endpoints == (m.NodeEndpoint(3, "127.0.0.1", near.ports[3], "rack-c"),)
    for epoch in (1, 2):
        request = m.FetchRequest(
            session_id=response.session_id, session_epoch=epoch, rack_id="rack-c", max_wait_ms=WAIT_MS, min_bytes=1
        )
        again = await near.call(1, "Fetch", request)
        assert [data.preferred_read_replica for t in again.responses for data in t.partitions] == [3, 3]
        assert len(again.node_endpoints) == 1


async def test_a_replica_that_is_gone_is_not_named_until_it_is_back(near: Mesh) -> None:
    topic_id = await create(near)
    await near.brokers.pop(2).abort()
    replica = near.brokers[1].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader.isr == {1, 3}, "2 is out")
    assert (await near.fetch("t", 0, rack="rack-b")).records
    asked = m.FetchTopic("", topic_id, [m.FetchPartition(0, -1, 1, partition_max_bytes=1000)])
    first = await near.call(1, "Fetch", m.FetchRequest(session_epoch=0, rack_id="rack-b", topics=[asked]))
    assert first.session_id
    await near.start_broker(2)
    await near.ready(2)
    await eventually(lambda: replica.leader.isr == {1, 2, 3}, "2 is back")
    request = m.FetchRequest(session_id=first.session_id, session_epoch=1, rack_id="rack-b")
    (topic,) = (await near.call(1, "Fetch", request)).responses
    assert topic.partitions[0].preferred_read_replica == 2, "an idle partition of a session is looked at, too"


async def test_by_default_leaders_serve_all(mesh: Mesh) -> None:
    await create(mesh)
    data = await mesh.fetch("t", 0, rack="rack-b")
    assert data.records
    assert data.preferred_read_replica == -1


async def preferred(mesh: Mesh, via: int, rack: str) -> list[int]:
    request = m.MetadataRequest([m.MetadataRequestTopic(b"", "t")], rack_id=rack)
    response = await mesh.call(via, "Metadata", request)
    return [partition.preferred_read_replica for topic in response.topics for partition in topic.partitions]


async def test_in_mode_metadata_any_broker_names_the_replica(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **{"replica.selector.class": RACK_AWARE, "replica.selection.mode": "metadata"})
    await mesh.start()
    try:
        await create(mesh, partitions=2)
        for via in (1, 2, 3):
            assert [await preferred(mesh, via, f"rack-{rack}") for rack in "abcx"] == [
                [-1, -1],
                [2, 2],
                [3, 3],
                [-1, -1],
            ]
            assert await preferred(mesh, via, "") == [-1, -1]
        response = await mesh.call(2, "Metadata", m.MetadataRequest(None, rack_id="rack-b"))
        assert response.topics[0].partitions[1].preferred_read_replica == 2
        unknown = await mesh.call(
            2, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(b"", "none")], rack_id="rack-b")
        )
        assert unknown.topics[0].error_code
        data = await mesh.fetch("t", 0, rack="rack-b")
        assert data.records, "leaders redirect nobody in this mode"
        assert data.preferred_read_replica == -1
    finally:
        await mesh.stop()


async def test_a_plugin_is_loaded_by_each_broker_configured_and_closed(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **{"replica.selector.class": CONFIGURED, "replica.selector.config": "target=3"})
    await mesh.start()
    try:
        await create(mesh)
        assert (await mesh.fetch("t", 0, rack="anywhere")).preferred_read_replica == 3
        assert (await mesh.fetch("t", 0)).records, "who names no rack is not redirected"
        ((where, client, view),) = ConfiguredSelector.seen
        assert where == ("t", 0)
        assert client == ("anywhere", "tests", "127.0.0.1", "", "MESH")
        assert (view.leader.node_id, view.fetch_offset) == (1, 0)
        assert {(r.node_id, r.rack, r.is_in_sync, r.log_start_offset, r.log_end_offset) for r in view.replicas} == {
            (1, "rack-a", True, 0, 1),
            (2, "rack-b", True, 0, 1),
            (3, "rack-c", True, 0, 1),
        }
        assert all(r.time_since_caught_up_ms is not None for r in view.replicas)
    finally:
        await mesh.stop()
    assert sorted(ConfiguredSelector.closed) == [1, 2, 3]


@pytest.mark.parametrize(("target", "error"), [("raise", "raised"), ("unknown", "unknown-replica")])
async def test_a_broken_plugin_means_the_leader_and_is_counted(tmp_path: Path, target: str, error: str) -> None:
    mesh = Mesh(tmp_path, **{"replica.selector.class": CONFIGURED, "replica.selector.config": f"target={target}"})
    await mesh.start()
    try:
        await create(mesh)
        for _ in range(3):
            assert (await mesh.fetch("t", 0, rack="rack-b")).records
        assert value(mesh, 1, "replica_selector_errors", error=error) == 3
        assert value(mesh, 2, "replica_selector_errors", error=error) == 0
    finally:
        await mesh.stop()


async def test_time_since_caught_up_of_an_idle_partition_is_that_of_its_session(clock: Clock, tmp_path: Path) -> None:
    """Nobody reads an idle partition of a session; its followers fetch all the same."""
    mesh = Mesh(
        tmp_path,
        **{
            "replica.selector.class": CONFIGURED,
            "replica.selector.config": "target=1",
            "replica.fetch.wait.max.ms": 50,
        },
    )
    await mesh.start()
    try:
        led = mesh.brokers[1].hosted_replicas.get(await create(mesh), 0)
        assert led is not None
        await all_have_fetched(led, clock.go_on(20_000))
        await mesh.fetch("t", 0, rack="rack-b")
        (_, _, view) = ConfiguredSelector.seen[-1]
        assert [replica.time_since_caught_up_ms for replica in view.replicas] == [0, 0, 0]
    finally:
        await mesh.stop()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"replica.selector.class": "no.such.Selector"}, "replica.selector.class"),
        ({"replica.selector.class": "Nearest"}, "replica.selector.class"),
        ({"replica.selector.config": "nonsense"}, "replica.selector.config"),
        ({"replica.selection.mode": "consumer"}, "replica.selection.mode"),
    ],
)
async def test_what_cannot_be_loaded_stops_the_service_with_one_line(
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
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert peer_host(peer) == host


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, []),
        ({"replica.selector.class": RACK_AWARE, "replica.selection.mode": "metadata"}, []),
        ({"replica.selection.mode": "metadata"}, ["replica.selection.mode"]),
        ({"replica.selector.config": "a=1"}, ["replica.selector.config"]),
    ],
)
@pytest.mark.usefixtures("logs_that_can_be_read")
def test_settings_without_effect_are_told(more: dict[str, str], told: list[str]) -> None:
    keys = {
        "node.id": "1",
        "cluster.id": "c",
        "controller.quorum.voters": "9@127.0.0.1:1",
        "listeners": "MESH://127.0.0.1:0",
    }
    config = BrokerConfig.parse({**keys, "log.dirs": "nowhere", **more})
    nothing: Any = None
    with structlog.testing.capture_logs() as lines:
        ReplicaSelection(config, nothing, nothing, nothing)
    assert [line["key"] for line in lines if line["log_level"] == "warning"] == told
