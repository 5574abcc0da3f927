"""Who asks for metadata while a leader dies: the answer waits for news, and the dead broker stays listed a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kipmesh import messages as m
from kipmesh.broker.requests.metadata import MetadataHandler
from kipmesh.broker.requests.unreachable_leaders import (
    FRESH_S,
    PROBES_MAX,
    SLOW_S,
    LeaderProbes,
    UnreachableLeaderGate,
    UnreachableLeaders,
)
from kipmesh.core.context import RequestContext
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta
from kipmesh.node.liveness_probe import Address
from kipmesh.testing import until as eventually
from kipmesh.transport.grpc.client import TransportError
from tests.unit.broker.broker_images import ImageBuilder, topic_id_of
from tests.unit.broker.conftest_broker import Mesh, leader_of, minimal_config

LINGER_S = 3.0
NEXT = 3
"""Leads `t` after broker 1."""
PORTS = {1: 9001, 2: 9002, 3: 9003}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def register(builder: ImageBuilder, broker_id: int) -> None:
    """With a listener for brokers and one for Kafka's clients."""
    endpoints = [r.BrokerEndpoint(name, "127.0.0.1", PORTS[broker_id], 0) for name in ("MESH", "KAFKA")]
    epoch = builder.image.offset + 1
    builder.apply(
        r.RegisterBrokerRecord(
            broker_id=broker_id,
            incarnation_id=bytes(16),
            broker_epoch=epoch,
            end_points=tuple(endpoints),
            fenced=False,
        )
    )


class Cluster:
    """Broker 2's view of three brokers; broker 1 leads `t`, broker 2 `own`."""

    def __init__(self) -> None:
        self.builder = ImageBuilder()
        for broker_id in PORTS:
            register(self.builder, broker_id)
        self.builder.topic("t", topic_id_of(1), [[1, 2, 3]])
        self.builder.topic("own", topic_id_of(2), [[2, 1, 3]])
        self.clock = Clock()
        self.gone: set[int] = set()
        self.probed: list[int] = []
        self.unreachable = UnreachableLeaders(time.monotonic, hold_s=60)
        builder: Any = self.builder
        self.gate = UnreachableLeaderGate(
            broker_id=2,
            hosted_replicas=builder,
            unreachable=self.unreachable,
            probes=LeaderProbes(
                lambda broker_id: ("h", PORTS[broker_id]), self.unreachable.record_probe, self.clock, self._refuses
            ),
            now_s=self.clock,
            linger_s=LINGER_S,
            listeners=["KAFKA"],
        )
        self.handler = MetadataHandler(
            minimal_config(2), lambda: self.builder.image, controller_id=lambda: 100, gate=self.gate
        )
        self.publish()

    async def _refuses(self, address: Address, timeout_s: float) -> bool:
        self.probed.append(address[1] - 9000)
        await asyncio.sleep(0)
        return self.probed[-1] in self.gone

    def publish(self) -> None:
        self.gate.metadata_changed(self.builder.delta)
        self.builder.delta = MetadataDelta()

    def change(self, broker_id: int, *, fenced: int = 1, shutdown: int = 0) -> None:
        epoch = self.builder.image.brokers[broker_id].broker_epoch
        self.builder.apply(r.BrokerRegistrationChangeRecord(broker_id, epoch, fenced, shutdown))
        self.publish()

    def die(self) -> None:
        """Broker 1 is fenced, and another one elected."""
        self.builder.partition(topic_id_of(1), 0, [NEXT, 1, 2], epoch=1)
        self.change(1)

    async def ask(self, *names: str, listener: str = "KAFKA") -> m.MetadataResponse:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names] or None)
        return await self.handler.metadata(request, RequestContext("client", "peer", listener=listener))

    async def listed(self, listener: str = "KAFKA") -> list[int]:
        return [broker.node_id for broker in (await self.ask(listener=listener)).brokers]


def leader(response: m.MetadataResponse) -> int:
    return response.topics[0].partitions[0].leader_id


async def started(*tasks: asyncio.Task[m.MetadataResponse]) -> None:
    """Let them go as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_an_answer_that_would_name_a_leader_that_is_gone_waits_for_the_next_one() -> None:
    cluster = Cluster()
    cluster.unreachable.reachability_changed(1, True)
    by_kafka = asyncio.create_task(cluster.ask("own", "t"))
    by_mesh = asyncio.create_task(cluster.ask("t", listener=""))
    await started(by_kafka, by_mesh)
    assert leader(await cluster.ask("own")) == 2  # nobody waits for a leader that was not asked for
    assert len((await cluster.ask()).topics) == 2
    cluster.die()
    assert [topic.partitions[0].leader_id for topic in (await by_kafka).topics] == [2, NEXT]
    assert leader(await by_mesh) == NEXT


async def test_a_leader_that_answers_again_is_named_at_once() -> None:
    cluster = Cluster()
    cluster.unreachable.reachability_changed(1, True)
    asked = asyncio.create_task(cluster.ask("t", listener=""))
    await started(asked)
    cluster.unreachable.reachability_changed(1, False)
    assert leader(await asked) == 1


async def test_waiting_ends_and_does_not_begin_again_until_there_is_news() -> None:
    clock = Clock()
    lost = UnreachableLeaders(clock, hold_s=1)
    lost.add(1)
    clock.now_s += 1
    lost.add(1)
    await lost.wait(lambda: {1}, 60)
    waiting = asyncio.create_task(UnreachableLeaders(clock, hold_s=60).wait(lambda: {1}, 60))
    await waiting  # of another that has lost nobody
    lost.remove({1})
    assert not lost
    lost.add(1)
    again = asyncio.create_task(lost.wait(lambda: {1}, 60))
    await asyncio.sleep(0)
    assert not again.done()
    lost.remove({1})
    await again


async def test_waiting_ends_by_itself() -> None:
    lost = UnreachableLeaders(time.monotonic, hold_s=0.02)
    lost.add(1)
    await lost.wait(lambda: {1}, 60)
    lost = UnreachableLeaders(time.monotonic, hold_s=60)
    lost.add(1)
    await lost.wait(lambda: {1}, 0.02)


async def test_a_leader_that_refuses_is_found_gone_before_it_is_named() -> None:
    cluster = Cluster()
    assert leader(await cluster.ask("t")) == 1
    assert cluster.probed == [1]
    cluster.gone.add(1)
    cluster.clock.now_s += 2 * FRESH_S
    tasks = [asyncio.create_task(cluster.ask("t")) for _ in range(3)]
    await started(*tasks)
    assert cluster.probed == [1, 1]  # one for all who ask at the same time
    cluster.die()
    assert [leader(await task) for task in tasks] == [NEXT] * 3


async def test_no_probe_for_brokers_nor_of_itself_nor_of_many_leaders() -> None:
    cluster = Cluster()
    await cluster.ask("t", listener="")
    await cluster.ask("own")
    await cluster.ask()
    assert cluster.probed == []
    await cluster.ask("t")
    await cluster.ask("t")  # it accepted a moment ago
    assert cluster.probed == [1]
    await cluster.gate.probes.probe(range(PROBES_MAX + 1))
    assert cluster.probed == [1]


async def test_a_silent_leader_is_not_probed_again_for_a_while() -> None:
    clock, probed, results = Clock(), [], []

    async def silent(address: Address, timeout_s: float) -> bool:
        probed.append(address)
        clock.now_s += timeout_s
        return False

    asker = LeaderProbes(lambda _: ("h", 1), lambda *result: results.append(result), clock, silent)
    for pause_s, total in ((0.0, 1), (2 * FRESH_S, 1), (SLOW_S, 2)):
        clock.now_s += pause_s
        await asker.probe([1])
        assert len(probed) == total
    assert results == [(1, False)] * 2


async def test_who_was_gone_and_accepts_again_is_waited_for_when_gone_once_more() -> None:
    clock = Clock()
    lost = UnreachableLeaders(clock, hold_s=1)
    lost.record_probe(1, has_refused=True)
    lost.record_probe(1, has_refused=False)
    assert lost  # within the time nothing but news ends it: a socket that is just closing may accept
    clock.now_s += 2
    lost.record_probe(1, has_refused=False)
    assert not lost
    lost.record_probe(1, has_refused=True)
    again = asyncio.create_task(lost.wait(lambda: {1}, 60))
    await asyncio.sleep(0)
    assert not again.done()
    lost.remove({1})
    await again


async def test_probes_end_with_the_node() -> None:
    async def forever(_address: Address, _timeout_s: float) -> bool:
        await asyncio.Event().wait()
        return True

    probed: list[int] = []
    probes = LeaderProbes(lambda _broker_id: ("h", 1), lambda number, _: probed.append(number), time.monotonic, forever)
    asking = asyncio.create_task(probes.probe([1]))
    await asyncio.sleep(0)
    await probes.stop()
    await asking
    assert probed == []


async def test_a_fenced_broker_is_listed_for_kafkas_clients_as_long_as_its_session_might_last() -> None:
    cluster = Cluster()
    cluster.die()
    assert await cluster.listed() == [1, 2, 3]
    assert await cluster.listed("") == [2, 3]
    response = await cluster.ask("t")
    assert (leader(response), response.topics[0].partitions[0].offline_replicas) == (NEXT, [1])
    cluster.clock.now_s += LINGER_S
    assert await cluster.listed() == [2, 3]


End = Callable[[Cluster], Coroutine[Any, Any, None]]


async def end_by_shutdown(cluster: Cluster) -> None:
    cluster.change(1, fenced=0, shutdown=1)
    cluster.change(1)


async def end_for_good(cluster: Cluster) -> None:
    cluster.change(1)
    cluster.builder.apply(r.UnregisterBrokerRecord(1, cluster.builder.image.brokers[1].broker_epoch))
    cluster.publish()


async def end_of_oneself(cluster: Cluster) -> None:
    cluster.change(1)
    cluster.change(2)


@pytest.mark.parametrize(("end", "left"), [(end_by_shutdown, [2, 3]), (end_for_good, [2, 3]), (end_of_oneself, [3])])
async def test_who_is_not_listed_after_the_end(
    end: Callable[[Cluster], Coroutine[Any, Any, None]], left: list[int]
) -> None:
    cluster = Cluster()
    await end(cluster)
    assert await cluster.listed() == left


async def test_a_broker_that_is_back_is_listed_as_any_other() -> None:
    cluster = Cluster()
    cluster.change(1)
    register(cluster.builder, 1)
    cluster.publish()
    cluster.clock.now_s += 2 * LINGER_S
    assert await cluster.listed() == [1, 2, 3]


@pytest.fixture
async def trusting(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A mesh that fences nobody while a test runs."""
    it = Mesh(tmp_path, **{"broker.session.timeout.ms": 60_000})
    it.controller_keys = {"broker.connection.loss.timeout.ms": 0}
    await it.start()
    yield it
    await it.stop()


async def test_followers_notice_a_leader_that_dies(trusting: Mesh) -> None:
    topic_id = await trusting.create("t")
    first = await leader_of(trusting, topic_id)
    followers = [node for broker_id, node in trusting.brokers.items() if broker_id != first]
    await trusting.brokers.pop(first).abort()
    for node in followers:
        await eventually(partial(bool, node.parts.gate.unreachable), "a lost leader")
        assert node.hosted_replicas.image.brokers[first].fenced is False


async def test_a_stream_that_breaks_is_told_and_that_fetches_go_on(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    topic_id = await mesh.create("t")
    first = await leader_of(mesh, topic_id)
    other = next(broker_id for broker_id in mesh.brokers if broker_id != first)
    fetcher = mesh.brokers[other].parts.replica_manager._fetchers[first]
    told: list[tuple[int, bool]] = []
    fetcher.on_reachability_changed = lambda leader_id, is_lost: told.append((leader_id, is_lost))
    exchange = fetcher._exchange

    async def breaks(_request: m.FetchRequest) -> m.FetchResponse:
        monkeypatch.setattr(fetcher, "_exchange", exchange)
        raise TransportError("somewhere", "Fetch", grpc.StatusCode.UNAVAILABLE, "broken")

    monkeypatch.setattr(fetcher, "_exchange", breaks)
    await eventually(lambda: told[:2] == [(first, True), (first, False)], "both")
