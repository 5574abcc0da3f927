"""Brokers whose heartbeat streams break, at live controllers: who is fenced for it, and who is not."""

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
from tests.unit.controller.controller_support import FakeBroker, LiveController
from tests.unit.controller.controllers_support import STEADY, Controllers

LOSS_MS = 200
LONG_MS = 60_000
"""A session timeout that no test waits for."""


class Link:
    """A broker's heartbeats over a connection of its own, which ends as that of a process that dies."""

    def __init__(self, address: str, broker: FakeBroker) -> None:
        self.broker = broker
        self._connection = Connection(address, f"broker-{broker.broker_id}")

    async def beat(self, *, shut_down: bool = False) -> m.BrokerHeartbeatResponse:
        broker = self.broker
        request = m.BrokerHeartbeatRequest(
            broker.broker_id, broker.epoch, broker.image.offset, want_shut_down=shut_down
        )
        answer: m.BrokerHeartbeatResponse = await self._connection.exchange(
            "Controller", "BrokerHeartbeatStream", request, 30
        )
        return answer

    async def cut(self) -> None:
        await self._connection.close()


def address_of(node: ControllerNode) -> str:
    return f"127.0.0.1:{node.grpc_port}"


async def join(controller: LiveController, broker_id: int) -> tuple[FakeBroker, Link]:
    broker = FakeBroker(controller, broker_id)
    await broker.join()
    link = Link(address_of(controller.node), broker)
    assert (await link.beat()).error_code == 0
    return broker, link


def fenced(node: ControllerNode, broker_id: int) -> Callable[[], bool]:
    return lambda: node.image.brokers[broker_id].fenced


def lost(node: ControllerNode) -> Any:
    return node.registry.get_sample_value("kipmesh_controller_lost_brokers_total")


async def test_a_broker_whose_stream_broke_is_fenced_soon(tmp_path: Path) -> None:
    async with LiveController(tmp_path, broker_session_timeout_ms=LONG_MS) as controller:
        _, first = await join(controller, 1)
        _, second = await join(controller, 2)
        began = time.monotonic()
        await first.cut()
        await until(fenced(controller.node, 1), "broker 1 fenced")
        assert time.monotonic() - began >= LOSS_MS / 1000
        assert not controller.node.image.brokers[2].fenced
        await until(lambda: lost(controller.node) == 1, "it is counted")
        await second.cut()


async def test_a_broker_that_comes_back_in_time_stays(tmp_path: Path) -> None:
    # So long that a slow machine is in time, too; who does not come back has less.
    values: dict[str, Any] = {"broker_session_timeout_ms": LONG_MS, "broker_connection_loss_timeout_ms": LONG_MS}
    async with LiveController(tmp_path, **values) as controller:
        broker, link = await join(controller, 1)
        _, other = await join(controller, 2)
        for _ in range(3):
            await link.cut()
            link = Link(address_of(controller.node), broker)
            assert (await link.beat()).error_code == 0
        active = controller.node.active
        assert active is not None
        active._controller.sessions.loss_timeout_ms = LOSS_MS
        active._controller.sessions.check_interval_ms = LOSS_MS // 4
        await other.cut()
        await until(fenced(controller.node, 2), "broker 2 fenced")
        assert not controller.node.image.brokers[1].fenced
        await link.cut()


async def test_switched_off_only_silence_counts(tmp_path: Path) -> None:
    values: dict[str, Any] = {"broker_session_timeout_ms": 1000, "broker_connection_loss_timeout_ms": 0}
    async with LiveController(tmp_path, **values) as controller:
        _, link = await join(controller, 1)
        await link.cut()
        await until(fenced(controller.node, 1), "broker 1 fenced")
        name = "kafka_controller_kafkacontroller_timedoutbrokerheartbeatcount_total"
        await until(lambda: controller.node.registry.get_sample_value(name), "it is counted as silent")
        assert lost(controller.node) == 0


async def test_a_clean_end_is_no_loss(tmp_path: Path) -> None:
    async with LiveController(tmp_path, broker_session_timeout_ms=LONG_MS) as controller:
        broker, link = await join(controller, 1)
        answer = await link.beat(shut_down=True)
        while not answer.should_shut_down:
            await broker.catch_up()
            answer = await link.beat(shut_down=True)
        _, other = await join(controller, 2)
        await link.cut()
        await other.cut()
        await until(fenced(controller.node, 2), "broker 2 fenced")
        await until(lambda: lost(controller.node) == 1, "it is counted")
        assert lost(controller.node) == 1


async def test_a_restart_does_not_wait_for_the_session_before(tmp_path: Path) -> None:
    values: dict[str, Any] = {"broker_session_timeout_ms": LONG_MS, "broker_connection_loss_timeout_ms": 10_000}
    async with LiveController(tmp_path, **values) as controller:
        _, link = await join(controller, 1)
        again = FakeBroker(controller, 1)
        assert (await again.register()).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
        await link.cut()
        async with asyncio.timeout(30):
            while (await again.register()).error_code:  # noqa: ASYNC110 - until the controller has seen it
                await asyncio.sleep(0.01)


async def test_a_controller_that_stood_still_fences_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"broker_session_timeout_ms": LONG_MS, "broker_connection_loss_timeout_ms": LONG_MS // 6}
    async with LiveController(tmp_path, **values) as controller:
        broker, link = await join(controller, 1)
        seen = asyncio.Event()
        node = controller.node
        active = node.active
        assert active is not None
        disconnected = active.disconnected

        def told(broker_id: int, connection: int) -> None:
            disconnected(broker_id, connection)
            seen.set()

        active.disconnected = told  # type: ignore[method-assign]
        await link.cut()
        await seen.wait()
        ahead_ns = LONG_MS // 3 * 1_000_000  # for twice as long as a lost connection may take to come back
        clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + ahead_ns, time_ns=time.time_ns)
        monkeypatch.setattr("kipmesh.node.time", clock)
        active._cancel_timer()
        active._timer_fired()  # it is late, and the first to look
        assert not node.image.brokers[1].fenced
        link = Link(address_of(node), broker)
        assert not (await link.beat()).is_fenced
        active._cancel_timer()
        active._timer_fired()
        assert not node.image.brokers[1].fenced
        assert lost(node) == 0
        await link.cut()


async def test_another_active_controller_fences_nobody_for_streams_of_the_one_before(tmp_path: Path) -> None:
    async with Controllers(tmp_path, **STEADY) as controllers:
        first = await controllers.active()
        voice: Any = _Voice(controllers)
        brokers = [FakeBroker(voice, broker_id) for broker_id in (1, 2, 3)]
        for broker in brokers:
            assert (await broker.register()).error_code == 0
            await broker.catch_up()
        links = [Link(f"127.0.0.1:{controllers.ports[first]}", broker) for broker in brokers]
        for link in links:
            assert not (await link.beat()).is_fenced
        await controllers.stop(first)
        second = await controllers.active()
        node = controllers.nodes[second]
        for link in links:
            await link.cut()
        watched = Link(address_of(node), brokers[2])
        assert (await watched.beat()).error_code == 0
        await watched.cut()  # this one it has seen itself
        await until(fenced(node, 3), "broker 3 fenced")
        assert [broker_id for broker_id, broker in node.image.brokers.items() if broker.fenced] == [3]


async def test_a_broker_that_died_with_the_controller_is_found_by_its_address(tmp_path: Path) -> None:
    """The first is held, and its listener with it; the second is gone; the third only seems to be."""
    # So long that a slow machine is in time, too.
    values = {**STEADY, "broker_connection_loss_timeout_ms": 2000}
    async with Controllers(tmp_path, **values) as controllers:
        first = await controllers.active()
        voice: Any = _Voice(controllers)
        brokers = [FakeBroker(voice, broker_id) for broker_id in (1, 2, 3)]
        with socket.create_server(("127.0.0.1", 0)) as held:
            addresses = [held.getsockname(), *(("127.0.0.1", port) for port in ports.choose(2))]
            for broker, address in zip(brokers, addresses, strict=True):
                broker.address = address
                await broker.join()
            await controllers.stop(first)
            node = controllers.nodes[await controllers.active()]
            alive = Link(address_of(node), brokers[2])
            assert not (await alive.beat()).is_fenced
            await until(fenced(node, 2), "broker 2 fenced")
            assert not node.image.brokers[1].fenced
            assert not node.image.brokers[3].fenced
            await until(lambda: lost(node) == 1, "it is counted")
            assert lost(node) == 1
            await alive.cut()


async def test_only_who_is_refused_everywhere_and_every_time_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who is refused is told so, however slow the machine is.
    refuses, prober = LivenessProber.refuses, LivenessProber()
    monkeypatch.setattr(LivenessProber, "refuses", lambda self, address, _timeout_s: refuses(self, address, 30))
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_, (closed, opening) = server.getsockname(), [("127.0.0.1", port) for port in ports.choose(2)]
        everywhere = open_, closed, ("no.such.host.invalid", 1)
        assert [await prober.refuses(one, 30) for one in everywhere] == [False, True, False]
        found: list[int] = []
        asked: list[list[int]] = []
        unconfirmed = {1: [open_], 2: [closed], 3: [closed, open_], 4: [], 5: [opening], 6: [closed], 7: [closed]}

        def unheard_brokers() -> dict[int, Any]:
            asked.append(list(unconfirmed))
            if len(asked) == PROBES:
                del unconfirmed[6]  # was heard of between two probes
                unconfirmed[5] = [open_]  # is there by now
            return unconfirmed

        probes = BrokerProbes(unconfirmed=unheard_brokers, refused=found.append, interval_s=0.05)
        await asyncio.wait_for(probes.run(), 60)
        prober.close()
    assert found == [2, 7]
    assert len(asked) == PROBES


class _Voice:
    """What `FakeBroker` asks of a controller, of whichever is active."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers

    async def call(self, service: str, method: str, request: Any) -> Any:
        active = await self._controllers.active()
        address = f"127.0.0.1:{self._controllers.ports[active]}"
        return await self._controllers.pool.get(address).call(service, method, request, 10)
