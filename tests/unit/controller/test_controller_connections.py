"""Broken heartbeat streams: which brokers a running controller fences."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.cluster import ports
from kipmesh.controller import ControllerNode
from kipmesh.controller.active import PROBES, BrokerProbes
from kipmesh.core.errors import ErrorCode
from kipmesh.node.liveness_probe import LivenessProber
from kipmesh.testing import until
from kipmesh.transport.grpc.client import Connection
from tests.unit.controller.controller_quorum import STEADY, ControllerQuorum
from tests.unit.controller.controller_support import FakeBroker, LiveController

LOSS_MS = 200
LONG_MS = 60_000
"""A session timeout that outlasts the tests."""


class HeartbeatStream:
    """Heartbeats of a broker over a separate connection that tests can cut, as if the broker died."""

    def __init__(self, address: str, broker: FakeBroker) -> None:
        self.broker = broker
        self._connection = Connection(address, f"broker-{broker.broker_id}")

    async def heartbeat(self, *, shut_down: bool = False) -> m.BrokerHeartbeatResponse:
        broker = self.broker
        request = m.BrokerHeartbeatRequest(
            broker.broker_id, broker.epoch, broker.image.offset, want_shut_down=shut_down
        )
        response: m.BrokerHeartbeatResponse = await self._connection.exchange(
            "Controller", "BrokerHeartbeatStream", request, 30
        )
        return response

    async def cut(self) -> None:
        await self._connection.close()


def address_of(node: ControllerNode) -> str:
    return f"127.0.0.1:{node.grpc_port}"


async def join(controller: LiveController, broker_id: int) -> tuple[FakeBroker, HeartbeatStream]:
    broker = FakeBroker(controller, broker_id)
    await broker.join()
    stream = HeartbeatStream(address_of(controller.node), broker)
    assert (await stream.heartbeat()).error_code == 0
    return broker, stream


def fenced(node: ControllerNode, broker_id: int) -> Callable[[], bool]:
    return lambda: node.image.brokers[broker_id].fenced


def lost(node: ControllerNode) -> Any:
    return node.registry.get_sample_value("kipmesh_controller_lost_brokers_total")


async def test_controller_fences_broker_with_broken_heartbeat_stream(tmp_path: Path) -> None:
    async with LiveController(tmp_path, broker_session_timeout_ms=LONG_MS) as controller:
        _, first = await join(controller, 1)
        _, second = await join(controller, 2)
        began = time.monotonic()
        await first.cut()
        await until(fenced(controller.node, 1), "broker 1 fenced")
        assert time.monotonic() - began >= LOSS_MS / 1000
        assert not controller.node.image.brokers[2].fenced
        await until(lambda: lost(controller.node) == 1, "the lost broker is counted")
        await second.cut()


async def test_controller_keeps_broker_that_reconnects_in_time(tmp_path: Path) -> None:
    # Long enough for reconnects on a slow machine; shortened below for the broker that stays away.
    values: dict[str, Any] = {"broker_session_timeout_ms": LONG_MS, "broker_connection_loss_timeout_ms": LONG_MS}
    async with LiveController(tmp_path, **values) as controller:
        broker, stream = await join(controller, 1)
        _, other = await join(controller, 2)
        for _ in range(3):
            await stream.cut()
            stream = HeartbeatStream(address_of(controller.node), broker)
            assert (await stream.heartbeat()).error_code == 0
        active = controller.node.active
        assert active is not None
        active._controller.sessions.loss_timeout_ms = LOSS_MS
        active._controller.sessions.check_interval_ms = LOSS_MS // 4
        await other.cut()
        await until(fenced(controller.node, 2), "broker 2 fenced")
        assert not controller.node.image.brokers[1].fenced
        await stream.cut()


async def test_loss_timeout_0_fences_broker_only_after_session_timeout(tmp_path: Path) -> None:
    values: dict[str, Any] = {"broker_session_timeout_ms": 1000, "broker_connection_loss_timeout_ms": 0}
    async with LiveController(tmp_path, **values) as controller:
        _, stream = await join(controller, 1)
        await stream.cut()
        await until(fenced(controller.node, 1), "broker 1 fenced")
        name = "kafka_controller_kafkacontroller_timedoutbrokerheartbeatcount_total"
        await until(lambda: controller.node.registry.get_sample_value(name), "the expired session is counted")
        assert lost(controller.node) == 0


async def test_controlled_shutdown_is_not_counted_as_lost_broker(tmp_path: Path) -> None:
    async with LiveController(tmp_path, broker_session_timeout_ms=LONG_MS) as controller:
        broker, stream = await join(controller, 1)
        response = await stream.heartbeat(shut_down=True)
        while not response.should_shut_down:
            await broker.catch_up()
            response = await stream.heartbeat(shut_down=True)
        _, other = await join(controller, 2)
        await stream.cut()
        await other.cut()
        await until(fenced(controller.node, 2), "broker 2 fenced")
        await until(lambda: lost(controller.node) == 1, "the lost broker is counted")
        assert lost(controller.node) == 1


async def test_restarted_broker_registers_before_old_session_expires(tmp_path: Path) -> None:
    values: dict[str, Any] = {"broker_session_timeout_ms": LONG_MS, "broker_connection_loss_timeout_ms": 10_000}
    async with LiveController(tmp_path, **values) as controller:
        _, stream = await join(controller, 1)
        restarted = FakeBroker(controller, 1)
        assert (await restarted.register()).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
        await stream.cut()
        async with asyncio.timeout(30):
            while (await restarted.register()).error_code:  # noqa: ASYNC110 - until the controller sees the broken stream
                await asyncio.sleep(0.01)


async def test_suspended_controller_fences_no_broker_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"broker_session_timeout_ms": LONG_MS, "broker_connection_loss_timeout_ms": LONG_MS // 6}
    async with LiveController(tmp_path, **values) as controller:
        broker, stream = await join(controller, 1)
        seen = asyncio.Event()
        node = controller.node
        active = node.active
        assert active is not None
        disconnected = active.disconnected

        def on_disconnect(broker_id: int, connection: int) -> None:
            disconnected(broker_id, connection)
            seen.set()

        active.disconnected = on_disconnect  # type: ignore[method-assign]
        await stream.cut()
        await seen.wait()
        ahead_ns = LONG_MS // 3 * 1_000_000  # twice the timeout of a lost connection
        clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + ahead_ns, time_ns=time.time_ns)
        monkeypatch.setattr("kipmesh.node.time", clock)
        active._cancel_timer()
        active._timer_fired()  # the first check after the pause
        assert not node.image.brokers[1].fenced
        stream = HeartbeatStream(address_of(node), broker)
        assert not (await stream.heartbeat()).is_fenced
        active._cancel_timer()
        active._timer_fired()
        assert not node.image.brokers[1].fenced
        assert lost(node) == 0
        await stream.cut()


async def test_new_active_controller_ignores_broken_streams_to_old_controller(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, **STEADY) as quorum:
        first = await quorum.active()
        client: Any = _ActiveControllerClient(quorum)
        brokers = [FakeBroker(client, broker_id) for broker_id in (1, 2, 3)]
        for broker in brokers:
            assert (await broker.register()).error_code == 0
            await broker.catch_up()
        streams = [HeartbeatStream(f"127.0.0.1:{quorum.ports[first]}", broker) for broker in brokers]
        for stream in streams:
            assert not (await stream.heartbeat()).is_fenced
        await quorum.stop(first)
        second = await quorum.active()
        node = quorum.nodes[second]
        for stream in streams:
            await stream.cut()
        watched = HeartbeatStream(address_of(node), brokers[2])
        assert (await watched.heartbeat()).error_code == 0
        await watched.cut()  # a stream to the new controller
        await until(fenced(node, 3), "broker 3 fenced")
        assert [broker_id for broker_id, broker in node.image.brokers.items() if broker.fenced] == [3]


async def test_new_active_controller_fences_broker_whose_address_refuses(tmp_path: Path) -> None:
    """Broker 1 is silent but its port is open. Broker 2 is dead. Broker 3 refuses but sends heartbeats."""
    # Long enough for a slow machine.
    values = {**STEADY, "broker_connection_loss_timeout_ms": 2000}
    async with ControllerQuorum(tmp_path, **values) as quorum:
        first = await quorum.active()
        client: Any = _ActiveControllerClient(quorum)
        brokers = [FakeBroker(client, broker_id) for broker_id in (1, 2, 3)]
        with socket.create_server(("127.0.0.1", 0)) as open_socket:
            addresses = [open_socket.getsockname(), *(("127.0.0.1", port) for port in ports.choose(2))]
            for broker, address in zip(brokers, addresses, strict=True):
                broker.address = address
                await broker.join()
            await quorum.stop(first)
            node = quorum.nodes[await quorum.active()]
            alive = HeartbeatStream(address_of(node), brokers[2])
            assert not (await alive.heartbeat()).is_fenced
            await until(fenced(node, 2), "broker 2 fenced")
            assert not node.image.brokers[1].fenced
            assert not node.image.brokers[3].fenced
            await until(lambda: lost(node) == 1, "the lost broker is counted")
            assert lost(node) == 1
            await alive.cut()


async def test_broker_probes_report_only_brokers_that_always_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    # A long timeout, so that a slow machine still reports a refusal.
    refuses, prober = LivenessProber.refuses, LivenessProber()
    monkeypatch.setattr(LivenessProber, "refuses", lambda self, address, _timeout_s: refuses(self, address, 30))
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_, (closed, opening) = server.getsockname(), [("127.0.0.1", port) for port in ports.choose(2)]
        addresses = open_, closed, ("no.such.host.invalid", 1)
        assert [await prober.refuses(address, 30) for address in addresses] == [False, True, False]
        refused: list[int] = []
        rounds: list[list[int]] = []
        unconfirmed = {1: [open_], 2: [closed], 3: [closed, open_], 4: [], 5: [opening], 6: [closed], 7: [closed]}

        def unconfirmed_brokers() -> dict[int, Any]:
            rounds.append(list(unconfirmed))
            if len(rounds) == PROBES:
                del unconfirmed[6]  # sent a heartbeat between two probes
                unconfirmed[5] = [open_]  # started to listen
            return unconfirmed

        probes = BrokerProbes(unconfirmed=unconfirmed_brokers, refused=refused.append, interval_s=0.05)
        await asyncio.wait_for(probes.run(), 60)
        prober.close()
    assert refused == [2, 7]
    assert len(rounds) == PROBES


class _ActiveControllerClient:
    """The part of a controller that `FakeBroker` uses; sends requests to the active controller."""

    def __init__(self, quorum: ControllerQuorum) -> None:
        self._quorum = quorum

    async def call(self, service: str, method: str, request: Any) -> Any:
        active = await self._quorum.active()
        address = f"127.0.0.1:{self._quorum.ports[active]}"
        return await self._quorum.pool.get(address).call(service, method, request, 10)
