"""A cluster in one event loop: controllers and three brokers with real files and real gRPC on loopback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kipmesh import messages as m
from kipmesh.broker import BrokerNode
from kipmesh.cluster.ports import PortReservation
from kipmesh.controller import ControllerNode
from kipmesh.core.config import BrokerConfig, ControllerConfig
from kipmesh.storage.fs import FileSystem
from kipmesh.testing import until as eventually
from kipmesh.transport.grpc.client import Connection, ConnectionPool

CLUSTER_ID = "broker-tests"
TIMEOUT_S = 40.0


def minimal_config(node_id: int, **keys: Any) -> BrokerConfig:
    """Return a configuration for a component that is tested without a broker."""
    needed = {
        "node.id": node_id,
        "cluster.id": "c",
        "controller.quorum.voters": "100@127.0.0.1:1",
        "log.dirs": "/unused",
    }
    return BrokerConfig.parse(needed | keys)


def hosts(node: BrokerNode, name: str) -> bool:
    """Whether the broker's image has the topic and the broker hosts all its replicas of it."""
    topic = node.hosted_replicas.image.topic_by_name(name)
    return topic is not None and all(
        node.hosted_replicas.get(topic.topic_id, index) is not None
        for index, partition in topic.partitions.items()
        if node.config.node_id in partition.replicas
    )


class BrokerCluster:
    """Brokers 1 (leader role), 2 and 3 in three racks, and controllers with ids from 100."""

    def __init__(self, directory: Path, *, controllers: int = 1, **broker_keys: Any) -> None:
        self.directory = directory
        # The session is long so that a slow machine fences no broker: a broken connection reveals a dead broker.
        self.broker_keys = {"broker.heartbeat.interval.ms": 100, "broker.session.timeout.ms": 60_000} | broker_keys
        self.controller_keys: dict[str, Any] = {}
        self.controllers: dict[int, ControllerNode] = {}
        self._held = PortReservation()  # a restarted node gets the same port
        self.controller_ports = dict(zip(range(100, 100 + controllers), self._held.choose(controllers), strict=True))
        self.brokers: dict[int, BrokerNode] = {}
        self.ports: dict[int, int] = {}
        self.pool = ConnectionPool("tests")

    @property
    def voters(self) -> str:
        """`controller.quorum.voters`."""
        return ",".join(f"{node_id}@127.0.0.1:{port}" for node_id, port in self.controller_ports.items())

    @property
    def active(self) -> ControllerNode | None:
        """The active controller, or None."""
        return next((node for node in self.controllers.values() if node.is_active), None)

    @property
    def controller(self) -> ControllerNode:
        """The active controller."""
        assert self.active is not None
        return self.active

    async def start_controller(self, node_id: int = 100) -> ControllerNode:
        config = ControllerConfig.parse(
            {
                "node.id": node_id,
                "cluster.id": CLUSTER_ID,
                "controller.quorum.voters": self.voters,
                "listeners": f"MESH://127.0.0.1:{self.controller_ports[node_id]}",
                "metadata.log.dir": str(self.directory / f"controller-{node_id}"),
                "broker.session.timeout.ms": self.broker_keys["broker.session.timeout.ms"],
            }
            | self.controller_keys
        )
        node = ControllerNode(config)
        await node.start()
        self.controllers[node_id] = node
        return node

    async def start_controllers(self) -> None:
        for node_id in self.controller_ports:
            await self.start_controller(node_id)
        await eventually(lambda: self.active, "an active controller")

    def port_of(self, broker_id: int) -> int:
        """Return the port of the broker, which stays the same across restarts."""
        if broker_id not in self.ports:
            (self.ports[broker_id],) = self._held.choose(1)
        return self.ports[broker_id]

    async def start_broker(self, broker_id: int, *, fs: FileSystem | None = None, **more: Any) -> BrokerNode:
        config = BrokerConfig.parse(
            {
                "node.id": broker_id,
                "cluster.id": CLUSTER_ID,
                "controller.quorum.voters": self.voters,
                "listeners": f"MESH://127.0.0.1:{self.port_of(broker_id)}",
                "log.dirs": str(self.directory / f"broker-{broker_id}"),
                "broker.rack": f"rack-{'abc'[(broker_id - 1) % 3]}",
            }
            | self.broker_keys
            | more
        )
        node = BrokerNode(config, is_leader_role=broker_id == 1, fs=fs)
        await node.start()
        self.brokers[broker_id] = node
        return node

    async def ready(self, *broker_ids: int) -> None:
        for broker_id in broker_ids:
            await eventually(lambda node=self.brokers[broker_id]: node.ready, f"broker {broker_id} ready")

    async def start(self) -> None:
        await self.start_controllers()
        for broker_id in (1, 2, 3):
            await self.start_broker(broker_id)
        await self.ready(1, 2, 3)

    async def stop(self) -> None:
        for node in self.brokers.values():
            await node.abort()
        for controller in self.controllers.values():
            await controller.stop()
        await self.pool.close()
        self._held.close()

    def connection(self, broker_id: int) -> Connection:
        return self.pool.get(f"127.0.0.1:{self.ports[broker_id]}")

    async def call(self, broker_id: int, method: str, request: Any, service: str = "Broker") -> Any:
        return await self.connection(broker_id).call(service, method, request, TIMEOUT_S)

    async def create(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 3,
        via: int = 1,
        except_brokers: Sequence[int] = (),
        **configs: str,
    ) -> bytes:
        """Create a topic, wait until all brokers host their replicas, and return the topic id."""
        entries = [m.ConfigEntry(key.replace("_", "."), value) for key, value in configs.items()]
        topic = m.CreatableTopic(name, partitions, replication_factor, configs=entries)
        response = await self.call(via, "CreateTopics", m.CreateTopicsRequest([topic], 30_000), "Admin")
        (result,) = response.topics
        assert result.error_code == 0, result
        for node in [node for broker_id, node in self.brokers.items() if broker_id not in except_brokers]:
            await eventually(lambda node=node: hosts(node, name), f"{name} hosted")
        return result.topic_id

    async def produce(
        self, topic: str, batch: bytes, *, partition: int = 0, acks: int = -1, via: int = 1, timeout_ms: int = 10_000
    ) -> m.PartitionProduceResponse:
        data = m.TopicProduceData(topic, b"", [m.PartitionProduceData(partition, batch)])
        response = await self.call(via, "Produce", m.ProduceRequest(None, acks, timeout_ms, [data]))
        return response.responses[0].partition_responses[0]

    async def fetch(
        self,
        topic: str,
        offset: int,
        *,
        partition: int = 0,
        via: int = 1,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
        epoch: int = -1,
        topic_id: bytes = b"",
        last_fetched_epoch: int = -1,
        replica_id: int = -1,
        rack: str = "",
    ) -> m.PartitionData:
        requested = m.FetchPartition(partition, epoch, offset, last_fetched_epoch, partition_max_bytes=max_bytes)
        request = m.FetchRequest(
            replica_id=replica_id,
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            topics=[m.FetchTopic(topic, topic_id, [requested])],
            rack_id=rack,
        )
        response = await self.call(via, "Fetch", request)
        assert response.error_code == 0, response
        return response.responses[0].partitions[0]


async def leader_of(cluster: BrokerCluster, topic_id: bytes, excluded: tuple[int, ...] = ()) -> int:
    """Wait for a ready leader of partition 0 and return its broker id."""

    def find() -> int:
        for broker, node in cluster.brokers.items():
            replica = node.hosted_replicas.get(topic_id, 0)
            if broker not in excluded and replica is not None and replica.leader is not None and node.ready:
                return broker
        return 0

    return await eventually(find, "a leader")
