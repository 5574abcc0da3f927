"""A quorum of controllers in one event loop over loopback, and a client that finds the active controller."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kipmesh import messages as m
from kipmesh.cluster import ports
from kipmesh.controller import ControllerNode
from kipmesh.core.errors import ErrorCode
from kipmesh.storage.fs import FileSystem
from kipmesh.testing import until
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from tests.unit.controller.controller_support import CLUSTER_ID, FakeBroker, controller_config

FAST = {
    "controller_quorum_fetch_timeout_ms": 300,
    "controller_quorum_election_timeout_ms": 150,
    "controller_quorum_election_backoff_max_ms": 100,
}
"""Elections take a few hundred milliseconds. A controller that is suspended for that long may start one."""
STEADY = {**FAST, "controller_quorum_fetch_timeout_ms": 60_000}
"""Only the first start and a cleanly stopped active controller cause elections."""


class ControllerQuorum:
    """Controllers 1001, 1002, ... that tests start, stop and kill."""

    def __init__(self, directory: Path, count: int = 3, **values: Any) -> None:
        self.directory = directory
        self.ids = [1001 + number for number in range(count)]
        self._held = ports.PortReservation()  # a restarted node gets the same port
        self.ports = dict(zip(self.ids, self._held.choose(count), strict=True))
        self.nodes: dict[int, ControllerNode] = {}
        self.pool = ConnectionPool("test")
        self._values = {**FAST, **values}

    def config(self, node_id: int) -> Any:
        return controller_config(
            self.directory / str(node_id),
            node_id=node_id,
            controller_quorum_voters=",".join(f"{id_}@127.0.0.1:{port}" for id_, port in self.ports.items()),
            listeners=f"MESH://127.0.0.1:{self.ports[node_id]}",
            **self._values,
        )

    async def __aenter__(self) -> ControllerQuorum:
        await self.start(*self.ids)
        await self.active()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pool.close()
        await asyncio.gather(*(self.stop(node_id) for node_id in list(self.nodes)))
        self._held.close()

    async def start(self, *ids: int, fs: FileSystem | None = None) -> None:
        for node_id in ids:
            self.nodes[node_id] = ControllerNode(self.config(node_id), fs=fs)
            await self.nodes[node_id].start()

    async def stop(self, node_id: int) -> None:
        await self.nodes.pop(node_id).stop()

    async def kill(self, node_id: int) -> None:
        await self.nodes.pop(node_id).abort()

    async def active(self) -> int:
        """Wait until all running nodes know the active controller and return its id."""

        def find() -> int:
            active = [node_id for node_id, node in self.nodes.items() if node.is_active]
            return active[0] if len(active) == 1 and all(node.ready for node in self.nodes.values()) else 0

        active_id: int = await until(find, "an active controller that all nodes know", 60)
        return active_id

    @property
    def inactive(self) -> list[int]:
        """Ids of running controllers that are not active."""
        return [node_id for node_id, node in self.nodes.items() if not node.is_active]

    async def call_at(self, node_id: int, service: str, method: str, request: Any, timeout_s: float = 30) -> Any:
        """Send a request to one controller."""
        return await self.pool.get(f"127.0.0.1:{self.ports[node_id]}").call(service, method, request, timeout_s)

    async def call(self, service: str, method: str, request: Any, timeout_s: float = 30) -> Any:
        """Try the controllers in turn until the active one responds, as brokers do."""
        async with asyncio.timeout(60):
            while True:
                for node_id in self.ids:
                    try:
                        response = await self.call_at(node_id, service, method, request, 5)
                    except TransportError:
                        continue
                    if ErrorCode.NOT_CONTROLLER not in codes(response):
                        return response
                await asyncio.sleep(0.02)

    async def create(self, name: str, partitions: int = 1) -> bytes:
        """Create a topic and return its id, or b"" if it exists because an earlier response was lost."""
        request = m.CreateTopicsRequest([m.CreatableTopic(name, partitions, -1)])
        response = await self.call("Admin", "CreateTopics", request)
        result: m.CreatableTopicResult = response.topics[0]
        assert result.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS), result
        return result.topic_id

    async def join(self, broker_id: int) -> FakeBroker:
        """Register and unfence a broker that uses the active controller."""
        broker = FakeBroker(self, broker_id)  # type: ignore[arg-type]  # only uses `call`
        assert (await broker.register()).error_code == 0
        assert not (await broker.heartbeat(offset=broker.epoch)).is_fenced
        return broker

    def value(self, node_id: int, name: str, **labels: str) -> float | None:
        """Return a metric of a node."""
        return self.nodes[node_id].registry.get_sample_value(name, labels)


def codes(response: Any) -> list[int]:
    """Return the error codes of a response and of its items."""
    inner = [*getattr(response, "topics", ()), *getattr(response, "responses", ()), *getattr(response, "results", ())]
    return [getattr(part, "error_code", 0) for part in (response, *inner)]


__all__ = ["CLUSTER_ID", "STEADY", "ControllerQuorum", "codes"]
