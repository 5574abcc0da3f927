"""A quorum of one controller over loopback, and simple fake brokers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kipmesh import messages as m
from kipmesh.controller import ControllerNode
from kipmesh.core.config import ControllerConfig
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, MetadataDelta, MetadataImage
from kipmesh.storage.fs import FileSystem
from kipmesh.testing import until
from kipmesh.transport.grpc.client import Connection

CLUSTER_ID = "test-cluster"
SESSION_MS = 60_000


def controller_config(directory: Path, **values: Any) -> ControllerConfig:
    return ControllerConfig.parse(
        {
            "node.id": 1001,
            "cluster.id": CLUSTER_ID,
            "controller.quorum.voters": "1001@127.0.0.1:19093",
            "metadata.log.dir": str(directory),
            # Fake brokers send few heartbeats, which may be far apart on a slow machine.
            "broker.session.timeout.ms": SESSION_MS,
            **{name.replace("_", "."): value for name, value in values.items()},
        }
    )


class LiveController:
    """An active controller, the only voter of its quorum, and a connection to it."""

    def __init__(self, directory: Path, fs: FileSystem | None = None, **values: Any) -> None:
        self.node = ControllerNode(controller_config(directory, **values), fs=fs)

    async def __aenter__(self) -> LiveController:
        await self.node.start()
        await until(lambda: self.node.is_active or self.node.failed.done(), "an active controller")
        self.connection = Connection(f"127.0.0.1:{self.node.grpc_port}", "test")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.connection.close()
        await self.node.stop()

    async def call(self, service: str, method: str, request: Any, timeout_s: float = 30) -> Any:
        return await self.connection.call(service, method, request, timeout_s)

    async def create(
        self, name: str, partitions: int = 1, replicas: int = -1, **configs: str
    ) -> m.CreatableTopicResult:
        entries = [m.ConfigEntry(key.replace("_", "."), value) for key, value in configs.items()]
        request = m.CreateTopicsRequest([m.CreatableTopic(name, partitions, replicas, configs=entries)])
        response = await self.call("Admin", "CreateTopics", request)
        result: m.CreatableTopicResult = response.topics[0]
        return result


def expire_session(node: ControllerNode, broker_id: int, remaining_ms: int = 0) -> None:
    """Shorten the session of a broker to `remaining_ms` and let the active controller check its sessions."""
    active = node.active
    assert active is not None
    session = active._controller.sessions._sessions.get(broker_id)
    assert session is not None
    session.last_contact_ms = active._now_ms() - active._config.broker_session_timeout_ms + remaining_ms
    active._cancel_timer()
    active._arm_timer()


class FakeBroker:
    """The broker side of registration, heartbeats and metadata fetches."""

    def __init__(
        self, controller: LiveController, broker_id: int, *, rack: str | None = None, leads: bool = False
    ) -> None:
        self.controller = controller
        self.broker_id = broker_id
        self.rack = rack
        self.leads = leads
        self.epoch = -1
        self.incarnation = uuid.uuid4().bytes
        # Unreachable: connections are neither accepted nor refused.
        self.address = ("255.255.255.255", 9000 + broker_id)
        self.image = MetadataImage()
        self.delta = MetadataDelta()
        self.log = b""

    async def register(
        self, previous_broker_epoch: int = -1, cluster_id: str = CLUSTER_ID
    ) -> m.BrokerRegistrationResponse:
        request = m.BrokerRegistrationRequest(
            self.broker_id,
            cluster_id,
            self.incarnation,
            [m.Listener("MESH", *self.address)],
            [m.Feature("kipmesh.leader", 0, 1)] if self.leads else [],
            self.rack,
            previous_broker_epoch=previous_broker_epoch,
        )
        response: m.BrokerRegistrationResponse = await self.controller.call("Controller", "BrokerRegistration", request)
        if not response.error_code:
            self.epoch = response.broker_epoch
        return response

    async def heartbeat(
        self, *, shut_down: bool = False, log_ends: Sequence[m.PartitionLogEnd] = (), offset: int | None = None
    ) -> m.BrokerHeartbeatResponse:
        request = m.BrokerHeartbeatRequest(
            self.broker_id,
            self.epoch,
            self.image.offset if offset is None else offset,
            want_shut_down=shut_down,
            log_ends=log_ends,
        )
        response: m.BrokerHeartbeatResponse = await self.controller.call("Controller", "BrokerHeartbeat", request)
        return response

    def fetch_request(self, max_wait_ms: int = 0, min_bytes: int = 1, **values: Any) -> m.FetchRequest:
        # Fetches as a consumer, which receives only committed records.
        partition = m.FetchPartition(
            0,
            fetch_offset=self.image.offset + 1,
            last_fetched_epoch=self.image.epoch or -1,
            partition_max_bytes=1 << 20,
        )
        request = m.FetchRequest(
            CLUSTER_ID,
            -1,
            -1,
            max_wait_ms,
            min_bytes,
            topics=[m.FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [partition])],
        )
        return request._replace(**values)

    def apply(self, response: m.FetchResponse) -> m.PartitionData:
        assert response.error_code == 0
        data: m.PartitionData = response.responses[0].partitions[0]
        if not data.error_code and data.diverging_epoch is None:
            self.image.replay(data.records, self.delta)
            self.log += data.records
        return data

    async def follow(self, max_wait_ms: int = 0, min_bytes: int = 1) -> m.PartitionData:
        """Fetch and apply records once."""
        request = self.fetch_request(max_wait_ms, min_bytes)
        return self.apply(await self.controller.call("Quorum", "Fetch", request))

    async def catch_up(self) -> None:
        while (await self.follow()).records:
            pass

    async def join(self, previous_broker_epoch: int = -1) -> None:
        """Register, catch up, and send the heartbeat that unfences the broker."""
        response = await self.register(previous_broker_epoch)
        assert response.error_code == 0, response
        await self.catch_up()
        assert not (await self.heartbeat()).is_fenced
        await self.catch_up()
