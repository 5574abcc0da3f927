"""Brokers that do not hear the controllers: cut links, and controllers that are gone (ADR 7).

A session ends because its broker is silent, never because the machine stood still: the tests have the nodes' clock.
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
from tests.unit.broker.broker_clock import all_have_fetched
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of

TO_LEADER = ("controller", "leader")
FROM_LEADER = ("leader", "controller")
AWAY = ErrorCode.NOT_LEADER_OR_FOLLOWER
SESSION_MS = 60_000
STEP_MS = SESSION_MS // 6
PATIENT = {
    "broker.session.timeout.ms": SESSION_MS,
    "replica.lag.time.max.ms": 100 * SESSION_MS,
    "replica.fetch.wait.max.ms": 50,
}


class SteppedClock:
    """The machine's, and steps that a test adds, in which all who can are heard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it before the nodes."""
        self._ahead_ns = 0
        fake = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + self._ahead_ns, time_ns=time.time_ns)
        monkeypatch.setattr("kipmesh.node.time", fake)

    async def until(
        self,
        mesh: Mesh,
        condition: Callable[[], object],
        what: str,
        *,
        deaf: tuple[int, ...],
        led: Replica | None = None,
    ) -> None:
        """Step on until the condition holds.

        In each step all brokers but the deaf have a heartbeat answered, and the followers of `led` fetch.
        """
        for _ in range(50):
            if condition():
                return
            before_ms = monotonic_ms()
            self._ahead_ns += STEP_MS * 1_000_000
            for node in [node for broker_id, node in mesh.brokers.items() if broker_id not in deaf]:
                await eventually(
                    lambda of=node.parts.isolation, ms=before_ms: of._responded_ms > ms, "a heartbeat is answered"
                )
            if led is not None:
                await all_have_fetched(led, before_ms + STEP_MS)
            for node in mesh.brokers.values():  # as each of them does after a tenth of the machine's time
                node.parts.isolation.check_session_timeout()
            if mesh.active is not None and mesh.active.active is not None:
                mesh.active.active._cancel_timer()  # it was set by the machine's time
                mesh.active.active._arm_timer()
            await asyncio.sleep(0.05)
        raise AssertionError(f"not in {50 * STEP_MS} ms: {what}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    return SteppedClock(monkeypatch)


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    async with Links() as it:
        yield it


@pytest.fixture
async def linked(tmp_path: Path, links: Links, clock: SteppedClock) -> AsyncIterator[Mesh]:
    """A mesh whose broker 1 reaches the controller by a link."""
    mesh = Mesh(tmp_path, **PATIENT)
    await mesh.start_controllers()
    address = await links.address("leader", "controller", f"127.0.0.1:{mesh.controller_ports[100]}")
    await mesh.start_broker(1, **{"controller.quorum.voters": f"100@{address}"})
    for broker_id in (2, 3):
        await mesh.start_broker(broker_id)
    await mesh.ready(1, 2, 3)
    yield mesh
    links.heal()
    await mesh.stop()


@pytest.fixture
async def alone(tmp_path: Path, clock: SteppedClock) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, **PATIENT)
    await mesh.start()
    yield mesh
    await mesh.stop()


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=1)


def isolated(mesh: Mesh, broker_id: int) -> float | None:
    return mesh.brokers[broker_id].registry.get_sample_value("kipmesh_broker_isolated")


async def list_latest(mesh: Mesh, via: int) -> int:
    asked = m.ListOffsetsTopic("t", b"", [m.ListOffsetsPartition(0, -1, -1)])
    response = await mesh.call(via, "ListOffsets", m.ListOffsetsRequest(-1, 0, [asked]))
    return response.topics[0].partitions[0].error_code


@pytest.mark.parametrize("cut", [(TO_LEADER,), (FROM_LEADER,), (TO_LEADER, FROM_LEADER)], ids=["deaf", "mute", "off"])
async def test_a_leader_without_answers_is_replaced_and_sends_its_clients_away(
    linked: Mesh, links: Links, clock: SteppedClock, cut: tuple[tuple[str, str], ...]
) -> None:
    topic_id = await linked.create("t")
    assert (await linked.produce("t", batch(b"before"))).error_code == 0
    assert not isolated(linked, 1)
    links.cut(cut)
    await clock.until(linked, lambda: linked.controller.image.brokers[1].fenced, "broker 1 fenced", deaf=(1,))
    leader = await leader_of(linked, topic_id, (1,))
    now = linked.brokers[leader].hosted_replicas.get(topic_id, 0)
    assert now is not None
    await eventually(lambda: now.leader is not None and not now.leader.is_under_min_isr, "it may write")
    assert (await linked.produce("t", batch(b"after"), via=leader)).error_code == 0
    old = linked.brokers[1].hosted_replicas.get(topic_id, 0)
    assert old is not None
    await clock.until(linked, lambda: old.rejects_clients, "clients sent away", deaf=(1,))
    assert isolated(linked, 1) == 1
    fetched = await linked.fetch("t", 1, max_wait_ms=60_000)  # an error is answered at once
    assert (fetched.error_code, fetched.current_leader) == (AWAY, m.LeaderIdAndEpoch(-1, old.leader_epoch))
    assert (await linked.produce("t", batch(b"lost"), acks=1)).error_code == AWAY
    assert await list_latest(linked, 1) == AWAY
    links.heal()
    await linked.ready(1)
    await eventually(lambda: not isolated(linked, 1) and not old.rejects_clients, "no more isolated")
    await eventually(lambda: old.high_watermark == 2, "what it has missed")
    assert len((await linked.fetch("t", 1, via=1)).records) > 0


async def test_a_consumer_that_waits_in_a_session_is_told(linked: Mesh, links: Links, clock: SteppedClock) -> None:
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
    while AWAY not in codes:  # the change of leaders, if it is heard of, is no error
        await clock.until(linked, waiting.done, "it is answered", deaf=(1,))
        answer = await waiting
        codes += [data.error_code for topic in answer.responses for data in topic.partitions]
        again = again._replace(session_epoch=again.session_epoch + 1)
        waiting = asyncio.create_task(linked.call(1, "Fetch", again))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_without_controllers_partitions_are_written_and_read_as_before(alone: Mesh, clock: SteppedClock) -> None:
    mesh = alone
    topic_id = await mesh.create("t")
    old, *others = [mesh.brokers[broker_id].hosted_replicas.get(topic_id, 0) for broker_id in (1, 2, 3)]
    assert old is not None
    await mesh.controllers.pop(100).stop()
    are_isolated = lambda: all(isolated(mesh, broker_id) for broker_id in (1, 2, 3))  # noqa: E731
    await clock.until(mesh, are_isolated, "all isolated", deaf=(1, 2, 3), led=old)
    for number in range(5):
        assert (await mesh.produce("t", batch(b"x"))).error_code == 0
        assert (await mesh.fetch("t", number)).records
        assert await list_latest(mesh, 1) == 0
    assert (await mesh.fetch("t", 0, via=2)).error_code == AWAY  # its leader serves
    epoch = old.leader_epoch
    await mesh.start_controller()
    await eventually(lambda: not any(isolated(mesh, broker_id) for broker_id in (1, 2, 3)), "heard again")
    await eventually(
        lambda: all(each is not None and each.high_watermark == 5 for each in others), "told what is committed"
    )
    assert (await mesh.fetch("t", 0, via=2)).records
    assert (old.leader is not None, old.leader_epoch) == (True, epoch)  # nobody was fenced for it
