"""Metadata responses while a leader is unreachable: they wait for an election, and keep the fenced broker listed."""

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
from tests.unit.broker.broker_cluster import BrokerCluster, leader_of, minimal_config
from tests.unit.broker.broker_images import ImageBuilder, topic_id_of

LINGER_S = 3.0
NEXT = 3
"""The broker that leads `t` after broker 1."""
PORTS = {1: 9001, 2: 9002, 3: 9003}


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def register(builder: ImageBuilder, broker_id: int) -> None:
    """Register an unfenced broker with a mesh listener and a Kafka listener."""
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
    """The gate of broker 2 in a cluster of three. Broker 1 leads topic `t`, broker 2 leads topic `own`."""

    def __init__(self) -> None:
        self.builder = ImageBuilder()
        for broker_id in PORTS:
            register(self.builder, broker_id)
        self.builder.topic("t", topic_id_of(1), [[1, 2, 3]])
        self.builder.topic("own", topic_id_of(2), [[2, 1, 3]])
        self.clock = Clock()
        self.refusing: set[int] = set()
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
        return self.probed[-1] in self.refusing

    def publish(self) -> None:
        self.gate.metadata_changed(self.builder.delta)
        self.builder.delta = MetadataDelta()

    def change(self, broker_id: int, *, fenced: int = 1, shutdown: int = 0) -> None:
        epoch = self.builder.image.brokers[broker_id].broker_epoch
        self.builder.apply(r.BrokerRegistrationChangeRecord(broker_id, epoch, fenced, shutdown))
        self.publish()

    def fence_leader(self) -> None:
        """Elect broker NEXT as leader of `t` and fence broker 1."""
        self.builder.partition(topic_id_of(1), 0, [NEXT, 1, 2], epoch=1)
        self.change(1)

    async def metadata(self, *names: str, listener: str = "KAFKA") -> m.MetadataResponse:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names] or None)
        return await self.handler.metadata(request, RequestContext("client", "peer", listener=listener))

    async def listed_brokers(self, listener: str = "KAFKA") -> list[int]:
        return [broker.node_id for broker in (await self.metadata(listener=listener)).brokers]


def leader(response: m.MetadataResponse) -> int:
    return response.topics[0].partitions[0].leader_id


async def run_until_waiting(*tasks: asyncio.Task[m.MetadataResponse]) -> None:
    """Run the tasks until all wait."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_response_naming_unreachable_leader_waits_for_election() -> None:
    cluster = Cluster()
    cluster.unreachable.reachability_changed(1, True)
    kafka_client = asyncio.create_task(cluster.metadata("own", "t"))
    mesh_client = asyncio.create_task(cluster.metadata("t", listener=""))
    await run_until_waiting(kafka_client, mesh_client)
    assert leader(await cluster.metadata("own")) == 2  # the response does not name the unreachable leader
    assert len((await cluster.metadata()).topics) == 2
    cluster.fence_leader()
    assert [topic.partitions[0].leader_id for topic in (await kafka_client).topics] == [2, NEXT]
    assert leader(await mesh_client) == NEXT


async def test_pending_response_names_leader_that_is_reachable_again() -> None:
    cluster = Cluster()
    cluster.unreachable.reachability_changed(1, True)
    pending = asyncio.create_task(cluster.metadata("t", listener=""))
    await run_until_waiting(pending)
    cluster.unreachable.reachability_changed(1, False)
    assert leader(await pending) == 1


async def test_expired_hold_does_not_restart_until_leader_was_reachable() -> None:
    clock = Clock()
    lost = UnreachableLeaders(clock, hold_s=1)
    lost.add(1)
    clock.now_s += 1
    lost.add(1)
    await lost.wait(lambda: {1}, 60)
    waiting = asyncio.create_task(UnreachableLeaders(clock, hold_s=60).wait(lambda: {1}, 60))
    await waiting  # an instance without unreachable leaders does not wait
    lost.remove({1})
    assert not lost
    lost.add(1)
    second = asyncio.create_task(lost.wait(lambda: {1}, 60))
    await asyncio.sleep(0)
    assert not second.done()
    lost.remove({1})
    await second


async def test_hold_ends_after_hold_time_or_timeout() -> None:
    lost = UnreachableLeaders(time.monotonic, hold_s=0.02)
    lost.add(1)
    await lost.wait(lambda: {1}, 60)
    lost = UnreachableLeaders(time.monotonic, hold_s=60)
    lost.add(1)
    await lost.wait(lambda: {1}, 0.02)


async def test_probe_detects_refusing_leader_before_response() -> None:
    cluster = Cluster()
    assert leader(await cluster.metadata("t")) == 1
    assert cluster.probed == [1]
    cluster.refusing.add(1)
    cluster.clock.now_s += 2 * FRESH_S
    tasks = [asyncio.create_task(cluster.metadata("t")) for _ in range(3)]
    await run_until_waiting(*tasks)
    assert cluster.probed == [1, 1]  # concurrent requests share a probe
    cluster.fence_leader()
    assert [leader(await task) for task in tasks] == [NEXT] * 3


async def test_gate_probes_only_few_remote_leaders_for_kafka_clients() -> None:
    cluster = Cluster()
    await cluster.metadata("t", listener="")
    await cluster.metadata("own")
    await cluster.metadata()
    assert cluster.probed == []
    await cluster.metadata("t")
    await cluster.metadata("t")  # the last probe is fresh
    assert cluster.probed == [1]
    await cluster.gate.probes.probe(range(PROBES_MAX + 1))
    assert cluster.probed == [1]


async def test_unresponsive_leader_is_not_probed_again_before_slow_interval() -> None:
    clock, probed, results = Clock(), [], []

    async def time_out(address: Address, timeout_s: float) -> bool:
        probed.append(address)
        clock.now_s += timeout_s
        return False

    probes = LeaderProbes(lambda _: ("h", 1), lambda *result: results.append(result), clock, time_out)
    for pause_s, total in ((0.0, 1), (2 * FRESH_S, 1), (SLOW_S, 2)):
        clock.now_s += pause_s
        await probes.probe([1])
        assert len(probed) == total
    assert results == [(1, False)] * 2


async def test_leader_is_held_again_if_it_refuses_after_accepting() -> None:
    clock = Clock()
    lost = UnreachableLeaders(clock, hold_s=1)
    lost.record_probe(1, has_refused=True)
    lost.record_probe(1, has_refused=False)
    assert lost  # a probe does not end the hold early: a closing socket may accept
    clock.now_s += 2
    lost.record_probe(1, has_refused=False)
    assert not lost
    lost.record_probe(1, has_refused=True)
    second = asyncio.create_task(lost.wait(lambda: {1}, 60))
    await asyncio.sleep(0)
    assert not second.done()
    lost.remove({1})
    await second


async def test_stop_cancels_running_probes() -> None:
    async def forever(_address: Address, _timeout_s: float) -> bool:
        await asyncio.Event().wait()
        return True

    probed: list[int] = []
    probes = LeaderProbes(lambda _broker_id: ("h", 1), lambda number, _: probed.append(number), time.monotonic, forever)
    probing = asyncio.create_task(probes.probe([1]))
    await asyncio.sleep(0)
    await probes.stop()
    await probing
    assert probed == []


async def test_fenced_broker_stays_listed_for_kafka_clients_until_session_timeout() -> None:
    cluster = Cluster()
    cluster.fence_leader()
    assert await cluster.listed_brokers() == [1, 2, 3]
    assert await cluster.listed_brokers("") == [2, 3]
    response = await cluster.metadata("t")
    assert (leader(response), response.topics[0].partitions[0].offline_replicas) == (NEXT, [1])
    cluster.clock.now_s += LINGER_S
    assert await cluster.listed_brokers() == [2, 3]


Ending = Callable[[Cluster], Coroutine[Any, Any, None]]


async def stop_cleanly(cluster: Cluster) -> None:
    cluster.change(1, fenced=0, shutdown=1)
    cluster.change(1)


async def unregister(cluster: Cluster) -> None:
    cluster.change(1)
    cluster.builder.apply(r.UnregisterBrokerRecord(1, cluster.builder.image.brokers[1].broker_epoch))
    cluster.publish()


async def fence_both(cluster: Cluster) -> None:
    cluster.change(1)
    cluster.change(2)


@pytest.mark.parametrize(("end", "left"), [(stop_cleanly, [2, 3]), (unregister, [2, 3]), (fence_both, [3])])
async def test_fenced_broker_is_not_listed_after_shutdown_or_unregistration(
    end: Callable[[Cluster], Coroutine[Any, Any, None]], left: list[int]
) -> None:
    cluster = Cluster()
    await end(cluster)
    assert await cluster.listed_brokers() == left


async def test_reregistered_broker_is_listed() -> None:
    cluster = Cluster()
    cluster.change(1)
    register(cluster.builder, 1)
    cluster.publish()
    cluster.clock.now_s += 2 * LINGER_S
    assert await cluster.listed_brokers() == [1, 2, 3]


@pytest.fixture
async def long_session(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """A cluster whose controller fences no broker during the test."""
    cluster = BrokerCluster(tmp_path, **{"broker.session.timeout.ms": 60_000})
    cluster.controller_keys = {"broker.connection.loss.timeout.ms": 0}
    await cluster.start()
    yield cluster
    await cluster.stop()


async def test_followers_detect_killed_leader_before_it_is_fenced(long_session: BrokerCluster) -> None:
    topic_id = await long_session.create("t")
    first = await leader_of(long_session, topic_id)
    followers = [node for broker_id, node in long_session.brokers.items() if broker_id != first]
    await long_session.brokers.pop(first).abort()
    for node in followers:
        await eventually(partial(bool, node.parts.gate.unreachable), "an unreachable leader")
        assert node.hosted_replicas.image.brokers[first].fenced is False


async def test_fetcher_reports_broken_stream_and_recovery(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic_id = await cluster.create("t")
    first = await leader_of(cluster, topic_id)
    other = next(broker_id for broker_id in cluster.brokers if broker_id != first)
    fetcher = cluster.brokers[other].parts.replica_manager._fetchers[first]
    reports: list[tuple[int, bool]] = []
    fetcher.on_reachability_changed = lambda leader_id, is_lost: reports.append((leader_id, is_lost))
    exchange = fetcher._exchange

    async def fail_once(_request: m.FetchRequest) -> m.FetchResponse:
        monkeypatch.setattr(fetcher, "_exchange", exchange)
        raise TransportError("somewhere", "Fetch", grpc.StatusCode.UNAVAILABLE, "broken")

    monkeypatch.setattr(fetcher, "_exchange", fail_once)
    await eventually(lambda: reports[:2] == [(first, True), (first, False)], "both reports")
