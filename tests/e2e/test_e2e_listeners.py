"""Brokers with two gRPC listeners: responses advertise addresses of the requested listener only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, Producer
from kipmesh.cluster import ports
from kipmesh.cluster.layout import Counts, NodeInfo
from kipmesh.cluster.single import SingleCluster
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError
from kipmesh.messages import Coordinator, FindCoordinatorRequest, MetadataRequest, MetadataResponse
from kipmesh.transport.grpc.client import ConnectionPool

HOST = "localhost"
"""Host that the second listener advertises: another name of the same address."""


class _TwoListeners:
    """A cluster in this process whose brokers have listeners MESH and MESH_HOST."""

    def __init__(self, directory: Path) -> None:
        self.reservation = ports.PortReservation()
        self._ports = dict(zip(["leader-1", "follower-1"], self.reservation.choose(2), strict=True))
        self.nodes = SingleCluster(directory, properties=self._listeners)

    def _listeners(self, node: NodeInfo) -> dict[str, str]:
        if not node.role.is_broker:
            return {}
        port = self._ports[node.name]
        return {
            "listeners": f"MESH://{node.grpc},MESH_HOST://127.0.0.1:{port}",
            "advertised.listeners": f"MESH_HOST://{HOST}:{port}",
        }

    @property
    def mesh_addresses(self) -> set[str]:
        return set(self.nodes.state().bootstrap.split(","))

    @property
    def host_addresses(self) -> set[str]:
        return {f"{HOST}:{port}" for port in self._ports.values()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[_TwoListeners]:
    running = _TwoListeners(tmp_path)
    with closing(running.reservation):
        running.nodes.up(Counts(1, 1, 1, 0), {"offsets.topic.replication.factor": "2"})
        yield running
        running.nodes.down()


async def test_responses_advertise_addresses_of_the_requested_listener(cluster: _TwoListeners) -> None:
    pool = ConnectionPool("tester")
    try:
        for addresses in (cluster.mesh_addresses, cluster.host_addresses):
            for address in addresses:
                metadata = MetadataResponse()
                while len(metadata.brokers) < len(addresses):  # brokers observe registrations at different times
                    metadata = await pool.get(address).call("Broker", "Metadata", MetadataRequest(), 60)
                    await asyncio.sleep(0.05)
                assert {f"{broker.host}:{broker.port}" for broker in metadata.brokers} == addresses
                request = FindCoordinatorRequest(coordinator_keys=["readers"])
                found = Coordinator(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
                while found.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE:  # until __consumer_offsets exists
                    response = await pool.get(address).call("Groups", "FindCoordinator", request, 60)
                    (found,) = response.coordinators
                    await asyncio.sleep(0.05)
                assert f"{found.host}:{found.port}" in addresses, found
    finally:
        await pool.close()


def test_clients_of_the_second_listener_find_the_new_leader(cluster: _TwoListeners) -> None:
    bootstrap = ",".join(sorted(cluster.host_addresses))
    with AdminClient(bootstrap) as admin:
        admin.create_topics([NewTopic("greetings", 3, 2, {"min.insync.replicas": "1"})])
    with Producer(bootstrap) as producer:
        for number in range(30):
            producer.send("greetings", b"%d" % number, partition=number % 3).result()
        cluster.nodes.kill("leader-1")
        for number in range(30, 60):
            producer.send("greetings", b"%d" % number, partition=number % 3).result()
    with Consumer(bootstrap, group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["greetings"])
        values: list[bytes] = []
        while len(values) < 60:
            values += [record.value for record in consumer.poll(timeout_ms=5000) if record.value is not None]
    assert sorted(map(int, values)) == list(range(60))


@pytest.mark.parametrize(
    ("listeners", "advertised", "text"),
    [
        ("MESH://0.0.0.0:9092", "", "clients cannot reach MESH://0.0.0.0:9092"),
        ("MESH://0.0.0.0:9092,MESH_HOST://[::]:9094", "MESH://a:9092", "clients cannot reach MESH_HOST://"),
        ("MESH://a:9092", "MESH_HOST://a:9092", "listeners has no MESH_HOST"),
        ("MESH://a:9092,MESH://a:9094", "", "has more than one listener MESH"),
        ("MESH://a:9092", "MESH://a:1,MESH://a:2", "has more than one listener MESH"),
    ],
)
def test_invalid_listeners_are_refused_with_the_reason(listeners: str, advertised: str, text: str) -> None:
    values = {
        "node.id": "1",
        "cluster.id": "c",
        "controller.quorum.voters": "1001@a:9093",
        "log.dirs": "data",
        "listeners": listeners,
    }
    if advertised:
        values["advertised.listeners"] = advertised
    with pytest.raises(InvalidConfigError, match=text.replace("[", r"\[")):
        BrokerConfig.parse(values)
