"""Three controllers in one event loop over loopback, and a client that finds the active one."""

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
from tests.unit.controller.controller_support import CLUSTER, FakeBroker, controller_config

FAST = {
    "controller_quorum_fetch_timeout_ms": 300,
    "controller_quorum_election_timeout_ms": 150,
    "controller_quorum_election_backoff_max_ms": 100,
}
"""So that elections take some tenths of a second. Any may begin for a process that stood still as long."""
STEADY = {**FAST, "controller_quorum_fetch_timeout_ms": 60_000}
"""So that there is no election but the first one, and those after an active controller that is stopped."""


class Controllers:
    """Nodes 1001, 1002, ...; each may be started, stopped and killed."""

    def __init__(self, folder: Path, count: int = 3, **values: Any) -> None:
        self.folder = folder
        self.ids = [1001 + number for number in range(count)]
        self._held = ports.PortReservation()  # who is stopped finds its own port again
        self.ports = dict(zip(self.ids, self._held.choose(count), strict=True))
        self.nodes: dict[int, ControllerNode] = {}
        self.pool = ConnectionPool("test")
        self._values = {**FAST, **values}

    def config(self, node_id: int) -> Any:
        return controller_config(
            self.folder / str(node_id),
            node_id=node_id,
            controller_quorum_voters=",".join(f"{id_}@127.0.0.1:{port}" for id_, port in self.ports.items()),
            listeners=f"MESH://127.0.0.1:{self.ports[node_id]}",
            **self._values,
        )

    async def __aenter__(self) -> Controllers:
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
        """The id of the active controller, once every node that runs knows it."""

        def one() -> int:
            active = [node_id for node_id, node in self.nodes.items() if node.is_active]
            return active[0] if len(active) == 1 and all(node.ready for node in self.nodes.values()) else 0

        found: int = await until(one, "one active controller that all know", 60)
        return found

    @property
    def others(self) -> list[int]:
        """Those that run and are not active."""
        return [node_id for node_id, node in self.nodes.items() if not node.is_active]

    async def call_at(self, node_id: int, service: str, method: str, request: Any, timeout_s: float = 30) -> Any:
        """Ask one controller."""
        return await self.pool.get(f"127.0.0.1:{self.ports[node_id]}").call(service, method, request, timeout_s)

    async def call(self, service: str, method: str, request: Any, timeout_s: float = 30) -> Any:
        """Ask one after the other until one is active; as brokers do."""
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
        """Until it is acknowledged, or known to be there after an answer that was lost; the topic's id, or b""."""
        request = m.CreateTopicsRequest([m.CreatableTopic(name, partitions, -1)])
        response = await self.call("Admin", "CreateTopics", request)
        result: m.CreatableTopicResult = response.topics[0]
        assert result.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS), result
        return result.topic_id

    async def join(self, broker_id: int) -> FakeBroker:
        """A broker of them all."""
        broker = FakeBroker(self, broker_id)  # type: ignore[arg-type]  # it calls the active one
        assert (await broker.register()).error_code == 0
        assert not (await broker.heartbeat(offset=broker.epoch)).is_fenced
        return broker

    def value(self, node_id: int, name: str, **labels: str) -> float | None:
        """A metric of a node."""
        return self.nodes[node_id].registry.get_sample_value(name, labels)


def codes(response: Any) -> list[int]:
    """The errors of an answer, wherever its form has them."""
    inner = [*getattr(response, "topics", ()), *getattr(response, "responses", ()), *getattr(response, "results", ())]
    return [getattr(one, "error_code", 0) for one in (response, *inner)]


__all__ = ["CLUSTER", "STEADY", "Controllers", "codes"]
