"""Brokers isolated from the controllers by cut links or stopped controllers (ADR 7).

The tests control the clock of the nodes, so that a slow machine never ends a broker session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kipmesh import messages as m
from kipmesh.broker.replication.replica import Replica
from kipmesh.core.errors import ErrorCode
from kipmesh.core.record_batch import build
from kipmesh.node import monotonic_ms
from kipmesh_chaos.links import Links
from tests.unit.broker.broker_clock import wait_for_fetches
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of

TO_LEADER = ("controller", "leader")
FROM_LEADER = ("leader", "controller")
NOT_LEADER = ErrorCode.NOT_LEADER_OR_FOLLOWER
SESSION_MS = 60_000
STEP_MS = SESSION_MS // 6
CONFIGS = {
    "broker.session.timeout.ms": SESSION_MS,
    "replica.lag.time.max.ms": 100 * SESSION_MS,
    "replica.fetch.wait.max.ms": 50,
}


class SteppedClock:
    """The real clock plus steps that a test adds. Each step leaves time for heartbeats and fetches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clock; call this before the nodes start."""
        self._ahead_ns = 0
        fake = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + self._ahead_ns, time_ns=time.time_ns)
        monkeypatch.setattr("kipmesh.node.time", fake)

    async def until(
        self,
        cluster: BrokerCluster,
        condition: Callable[[], object],
        description: str,
        *,
        isolated_ids: tuple[int, ...],
        led: Replica | None = None,
    ) -> None:
        """Advance the clock in steps until the condition holds.

        In each step, all brokers that are not isolated receive a heartbeat response, and the followers of `led` fetch.
        """
        for _ in range(50):
            if condition():
                return
            before_ms = monotonic_ms()
            self._ahead_ns += STEP_MS * 1_000_000
            for node in [node for broker_id, node in cluster.brokers.items() if broker_id not in isolated_ids]:
                await eventually(
                    lambda of=node.parts.isolation, ms=before_ms: of._responded_ms > ms, "a heartbeat response"
                )
            if led is not None:
                await wait_for_fetches(led, before_ms + STEP_MS)
            for node in cluster.brokers.values():  # a broker does this periodically by the real clock
                node.parts.isolation.check_session_timeout()
            if cluster.active is not None and cluster.active.active is not None:
                cluster.active.active._cancel_timer()  # it was set by the real clock
                cluster.active.active._arm_timer()
            await asyncio.sleep(0.05)
        raise AssertionError(f"not in {50 * STEP_MS} ms: {description}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    return SteppedClock(monkeypatch)


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    async with Links() as running:
        yield running


@pytest.fixture
async def linked(tmp_path: Path, links: Links, clock: SteppedClock) -> AsyncIterator[BrokerCluster]:
    """A cluster whose broker 1 reaches the controller through a link that tests can cut."""
    cluster = BrokerCluster(tmp_path, **CONFIGS)
    await cluster.start_controllers()
    address = await links.address("leader", "controller", f"127.0.0.1:{cluster.controller_ports[100]}")
    await cluster.start_broker(1, **{"controller.quorum.voters": f"100@{address}"})
    for broker_id in (2, 3):
        await cluster.start_broker(broker_id)
    await cluster.ready(1, 2, 3)
    yield cluster
    links.heal()
    await cluster.stop()


@pytest.fixture
async def long_lag(tmp_path: Path, clock: SteppedClock) -> AsyncIterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path, **CONFIGS)
    await cluster.start()
    yield cluster
    await cluster.stop()


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=1)


def isolated(cluster: BrokerCluster, broker_id: int) -> float | None:
    return cluster.brokers[broker_id].registry.get_sample_value("kipmesh_broker_isolated")


async def list_latest(cluster: BrokerCluster, via: int) -> int:
    requested = m.ListOffsetsTopic("t", b"", [m.ListOffsetsPartition(0, -1, -1)])
    response = await cluster.call(via, "ListOffsets", m.ListOffsetsRequest(-1, 0, [requested]))
    return response.topics[0].partitions[0].error_code


@pytest.mark.parametrize(
    "cut",
    [(TO_LEADER,), (FROM_LEADER,), (TO_LEADER, FROM_LEADER)],
    ids=["no responses", "no requests", "no connection"],
)
async def test_isolated_leader_is_replaced_and_rejects_clients(
    linked: BrokerCluster, links: Links, clock: SteppedClock, cut: tuple[tuple[str, str], ...]
) -> None:
    topic_id = await linked.create("t")
    assert (await linked.produce("t", batch(b"before"))).error_code == 0
    assert not isolated(linked, 1)
    links.cut(cut)
    await clock.until(linked, lambda: linked.controller.image.brokers[1].fenced, "broker 1 fenced", isolated_ids=(1,))
    leader = await leader_of(linked, topic_id, (1,))
    now = linked.brokers[leader].hosted_replicas.get(topic_id, 0)
    assert now is not None
    await eventually(
        lambda: now.leader is not None and not now.leader.is_under_min_isr, "the new leader accepts writes"
    )
    assert (await linked.produce("t", batch(b"after"), via=leader)).error_code == 0
    old = linked.brokers[1].hosted_replicas.get(topic_id, 0)
    assert old is not None
    await clock.until(linked, lambda: old.rejects_clients, "the old leader rejects clients", isolated_ids=(1,))
    assert isolated(linked, 1) == 1
    fetched = await linked.fetch("t", 1, max_wait_ms=60_000)  # an error response does not wait
    assert (fetched.error_code, fetched.current_leader) == (NOT_LEADER, m.LeaderIdAndEpoch(-1, old.leader_epoch))
    assert (await linked.produce("t", batch(b"lost"), acks=1)).error_code == NOT_LEADER
    assert await list_latest(linked, 1) == NOT_LEADER
    links.heal()
    await linked.ready(1)
    await eventually(lambda: not isolated(linked, 1) and not old.rejects_clients, "broker 1 is no longer isolated")
    await eventually(lambda: old.high_watermark == 2, "broker 1 has caught up")
    assert len((await linked.fetch("t", 1, via=1)).records) > 0


async def test_isolated_broker_fails_waiting_session_fetch(
    linked: BrokerCluster, links: Links, clock: SteppedClock
) -> None:
    topic_id = await linked.create("t")
    request = m.FetchRequest(
        max_wait_ms=0,
        min_bytes=1,
        session_epoch=0,
        topics=[m.FetchTopic("", topic_id, [m.FetchPartition(0, -1, 0, -1, partition_max_bytes=1000)])],
    )
    first = await linked.call(1, "Fetch", request)
    assert first.session_id
    again = request._replace(session_id=first.session_id, session_epoch=1, max_wait_ms=15_000, topics=[])
    waiting = asyncio.create_task(linked.call(1, "Fetch", again))
    links.cut([TO_LEADER, FROM_LEADER])
    codes = []
    while NOT_LEADER not in codes:  # a leader change may come first, without an error
        await clock.until(linked, waiting.done, "a fetch response", isolated_ids=(1,))
        response = await waiting
        codes += [data.error_code for topic in response.responses for data in topic.partitions]
        again = again._replace(session_epoch=again.session_epoch + 1)
        waiting = asyncio.create_task(linked.call(1, "Fetch", again))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_leader_serves_clients_without_controllers(long_lag: BrokerCluster, clock: SteppedClock) -> None:
    cluster = long_lag
    topic_id = await cluster.create("t")
    leader, *followers = [cluster.brokers[broker_id].hosted_replicas.get(topic_id, 0) for broker_id in (1, 2, 3)]
    assert leader is not None
    await cluster.controllers.pop(100).stop()
    are_isolated = lambda: all(isolated(cluster, broker_id) for broker_id in (1, 2, 3))  # noqa: E731
    await clock.until(cluster, are_isolated, "all isolated", isolated_ids=(1, 2, 3), led=leader)
    for number in range(5):
        assert (await cluster.produce("t", batch(b"x"))).error_code == 0
        assert (await cluster.fetch("t", number)).records
        assert await list_latest(cluster, 1) == 0
    assert (await cluster.fetch("t", 0, via=2)).error_code == NOT_LEADER  # followers do not serve
    epoch = leader.leader_epoch
    await cluster.start_controller()
    await eventually(lambda: not any(isolated(cluster, broker_id) for broker_id in (1, 2, 3)), "no broker is isolated")
    await eventually(
        lambda: all(follower is not None and follower.high_watermark == 5 for follower in followers),
        "the followers have the high watermark",
    )
    assert (await cluster.fetch("t", 0, via=2)).records
    assert (leader.leader is not None, leader.leader_epoch) == (True, epoch)  # no broker was fenced
