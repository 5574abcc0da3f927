"""Fetch sessions of a live mesh: over gRPC as clients meet them, and between leaders and followers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import FetchKind
from kipmesh.core.record_batch import build
from kipmesh.node import wall_ms
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from tests.unit.broker.broker_clock import Clock, all_have_fetched
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of

WAIT_MS = 60_000
"""Longer than a call has: what waits for its end fails."""
SLOTS = "max.incremental.fetch.session.cache.slots"
QUOTA = "max.incremental.fetch.sessions.per.client.id"


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


class Session:
    """A client's side, by hand."""

    def __init__(self, mesh: Mesh, topic_id: bytes, *, pool: ConnectionPool | None = None) -> None:
        self.mesh = mesh
        self.topic_id = topic_id
        self.pool = pool or mesh.pool
        self.session_id = 0
        self.epoch = 0
        self.follower: dict[str, int] = {}
        """`replica_id` and `replica_epoch` of who pretends to be one."""

    def topics(self, asked: dict[int, int], max_bytes: int = 1 << 20) -> list[m.FetchTopic]:
        partitions = [m.FetchPartition(p, -1, offset, partition_max_bytes=max_bytes) for p, offset in asked.items()]
        return [m.FetchTopic("", self.topic_id, partitions)] if partitions else []

    async def fetch(
        self,
        asked: dict[int, int] | None = None,
        *,
        forget: tuple[int, ...] = (),
        max_wait_ms: int = 0,
        max_bytes: int = 1 << 20,
        topics: list[m.FetchTopic] | None = None,
    ) -> m.FetchResponse:
        forgotten = [m.ForgottenTopic("", self.topic_id, forget)] if forget else []
        request = m.FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            max_bytes=max_bytes,
            session_id=self.session_id,
            session_epoch=self.epoch,
            topics=self.topics(asked or {}) if topics is None else topics,
            forgotten_topics_data=forgotten,
            **self.follower,
        )
        connection = self.pool.get(f"127.0.0.1:{self.mesh.ports[1]}")
        response: m.FetchResponse = await connection.call("Broker", "Fetch", request, 20)
        if not response.error_code and self.epoch >= 0:
            self.session_id = response.session_id
            self.epoch += 1
        return response


def found(response: m.FetchResponse) -> dict[int, m.PartitionData]:
    assert not response.error_code, response
    return {data.partition_index: data for topic in response.responses for data in topic.partitions}


async def listed(mesh: Mesh, broker: int = 1) -> list[m.FetchSession]:
    response = await mesh.call(broker, "ListFetchSessions", m.ListFetchSessionsRequest())
    assert (response.error_code, response.node_id) == (0, broker)
    return list(response.sessions)


def held(mesh: Mesh) -> dict[str, float | None]:
    name, registry = "kipmesh_broker_fetch_sessions", mesh.brokers[1].registry
    return {each: registry.get_sample_value(name, {"privileged": each}) for each in ("true", "false")}


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two slots for followers and one more."""
    it = Mesh(tmp_path, **{SLOTS: 3, QUOTA: 2})
    await it.start()
    yield it
    await it.stop()


async def test_an_incremental_fetch_names_and_answers_what_changed(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", partitions=3)
    session = Session(mesh, topic_id)
    assert set(found(await session.fetch({0: 0, 1: 0, 2: 0}))) == {0, 1, 2}
    assert session.session_id > 0
    assert found(await session.fetch()) == {}
    await mesh.produce("t", batch(b"x"), partition=1)
    answer = found(await session.fetch())
    assert {p: data.high_watermark for p, data in answer.items()} == {1: 1}
    assert found(await session.fetch())[1].records == answer[1].records, "it was not moved on: it comes again"
    assert found(await session.fetch({1: 1})) == {}


async def test_a_waiting_fetch_is_woken_by_the_one_partition_that_changed(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", partitions=50)
    session = Session(mesh, topic_id)
    await session.fetch(dict.fromkeys(range(50), 0))
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await eventually(lambda: mesh.brokers[1].fetch_sessions.metrics.created >= 3, "three sessions")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await mesh.produce("t", batch(b"x"), partition=33)
    assert set(found(await waiting)) == {33}


async def test_hostile_ids_and_epochs_change_nothing(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    session = Session(mesh, topic_id)
    await session.fetch({0: 0})
    mine = session.session_id
    cases = [(mine, 2, 71), (mine, 2**31 - 1, 71), (mine, -2, 71), (mine ^ 1, 1, 70), (0, 1, 70), (-5, 7, 70)]
    for session_id, epoch, code in cases:
        other = Session(mesh, topic_id)
        other.session_id, other.epoch = session_id, epoch
        response = await other.fetch({0: 0})
        assert (response.error_code, response.responses, response.session_id) == (code, (), 0), (session_id, epoch)
    by_name = [m.FetchTopic("t", b"", [m.FetchPartition(0, partition_max_bytes=1)])]
    assert (await session.fetch(topics=by_name)).error_code == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    assert found(await session.fetch()) == {}, "the session is as it was"
    assert (await mesh.call(1, "Fetch", m.FetchRequest(cluster_id="other"))).error_code == (
        ErrorCode.INCONSISTENT_CLUSTER_ID
    )


async def test_byte_limits_starve_nobody(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", partitions=4)
    for partition in range(4):
        for _ in range(2):
            await mesh.produce("t", batch(b"x" * 1000), partition=partition)
    session, at, order = Session(mesh, topic_id), dict.fromkeys(range(4), 0), []
    answer = found(await session.fetch(at, max_bytes=1))
    for _ in range(8):
        (served,) = [p for p, data in answer.items() if data.records]
        order.append(served)
        at[served] += 1
        answer = found(await session.fetch({served: at[served]}, max_bytes=1))
    assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3]


async def test_a_topic_made_anew_is_another_one(mesh: Mesh) -> None:
    old = await mesh.create("t")
    await mesh.produce("t", batch(b"old"))
    session = Session(mesh, old)
    assert found(await session.fetch({0: 1}))[0].high_watermark == 1
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await mesh.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("t")], timeout_ms=10_000), "Admin")
    assert found(await waiting)[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    new = await mesh.create("t")
    forgotten = [m.ForgottenTopic("", old, [0])]
    request = m.FetchRequest(
        session_id=session.session_id,
        session_epoch=session.epoch,
        topics=Session(mesh, new).topics({0: 0}),
        forgotten_topics_data=forgotten,
    )
    response = await mesh.call(1, "Fetch", request)
    assert [(topic.topic, topic.topic_id) for topic in response.responses] == [("t", new)]
    assert found(response)[0].high_watermark == 0


async def test_a_client_that_is_gone_leaves_its_session_as_it_was(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", partitions=2)
    pool = ConnectionPool("gone")
    session = Session(mesh, topic_id, pool=pool)
    await session.fetch({0: 0, 1: 0})
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    mine = session.session_id

    def is_waiting() -> bool:
        return next(one for one in mesh.brokers[1].fetch_sessions.list(0) if one.session_id == mine).is_waiting

    await eventually(lambda: is_waiting() is True, "it waits")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: is_waiting() is False, "it waits no more")
    await mesh.produce("t", batch(b"x"), partition=1)
    session.epoch += 1  # the request was taken, and its answer lost
    assert set(found(await session.fetch())) == {1}
    await pool.close()


async def test_slots_quota_and_listing(small: Mesh) -> None:
    topic_id = await small.create("t", partitions=2)
    await eventually(lambda: len(small.brokers[1].fetch_sessions) == 2, "both followers have sessions")
    pools = [ConnectionPool("one"), ConnectionPool("two")]
    first, second = (Session(small, topic_id, pool=pool) for pool in pools)
    await first.fetch({0: 0})
    await second.fetch({0: 0, 1: 0})
    assert first.session_id > 0
    assert second.session_id == 0, "larger, but the other one is young"
    rows = {one.client_id: one for one in await listed(small)}
    assert set(rows) == {"broker-2", "broker-3", "one"}
    assert (rows["one"].privileged, rows["one"].partitions, rows["one"].epoch) == (False, 1, 1)
    assert (rows["broker-2"].privileged, rows["broker-2"].replica_id, rows["broker-2"].partitions) == (True, 2, 2)
    assert await listed(small, 2) == []
    text = generate_latest(small.brokers[1].registry).decode()
    assert "kafka_server_fetchsessioncache_numincrementalfetchsessions 3.0" in text
    assert "kafka_server_fetchsessioncache_numincrementalfetchpartitionscached 5.0" in text
    assert "kafka_server_fetchsessioncache_incrementalfetchsessionevictions_total 0.0" in text
    assert 'kipmesh_broker_fetch_session_refusals_total{reason="full"} 1.0' in text
    for pool in pools:
        await pool.close()


@pytest.fixture
def goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops has the time to say that its session is over, however slow the machine is."""
    monkeypatch.setattr("kipmesh.broker.replication.fetcher.CLOSE_TIMEOUT_S", 30.0)


@pytest.mark.usefixtures("goodbyes")
async def test_a_follower_that_comes_back_evicts_a_consumer(small: Mesh) -> None:
    """And logs and metrics say whose the sessions were, and whether followers' (227-02)."""
    topic_id = await small.create("t")
    await eventually(lambda: len(small.brokers[1].fetch_sessions) == 2, "both followers have sessions")
    sessions = small.brokers[1].fetch_sessions
    (before,) = [each.session_id for each in sessions.list(0) if each.replica_id == 2]
    with capture_logs() as lines:
        await small.brokers.pop(2).stop()
        await eventually(lambda: len(sessions) == 1, "its session is closed")
        consumers = [Session(small, topic_id), Session(small, topic_id)]
        for consumer in consumers:
            await consumer.fetch({0: 0})
        assert len(sessions) == 3
        assert held(small) == {"true": 1, "false": 2}
        mine = [consumer.session_id for consumer in consumers]
        await small.start_broker(2)
        await small.ready(2)
        await eventually(lambda: sessions.metrics.evictions == 1, "a consumer's session was taken")
    assert held(small) == {"true": 2, "false": 1}
    codes = [(await consumer.fetch()).error_code for consumer in consumers]
    assert sorted(codes) == [ErrorCode.NONE, ErrorCode.FETCH_SESSION_ID_NOT_FOUND]
    text = generate_latest(small.brokers[1].registry).decode()
    assert 'kipmesh_broker_fetch_session_evictions_by_evictor_total{client_id="broker-2"} 1.0' in text
    logged = [line for line in lines if line["event"] == "fetch session changed"]
    told = {(line["kind"], line["session_id"]): line for line in logged}
    lost = mine[codes.index(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)]
    consumer = {"client_id": "tests", "privileged": False, "partitions": 1, "session_id": lost, "log_level": "debug"}
    why = {"reason": "privilege", "evictor": "broker-2"}
    assert told["created", lost] == consumer | {"event": "fetch session changed", "kind": "created"}
    assert told["evicted", lost] == consumer | {"event": "fetch session changed", "kind": "evicted"} | why
    follower = ("broker-2", True)
    assert (told["closed", before]["client_id"], told["closed", before]["privileged"]) == follower
    assert follower in {(each["client_id"], each["privileged"]) for each in logged if each["kind"] == "created"}


async def test_a_follower_that_was_killed_takes_no_second_slot(small: Mesh) -> None:
    topic_id = await small.create("t")
    sessions = small.brokers[1].fetch_sessions
    await eventually(lambda: len(sessions) == 2, "both followers have sessions")
    (before,) = [each.session_id for each in await listed(small) if each.replica_id == 2]

    def has(session_id: int) -> bool:
        return session_id in {each.session_id for each in sessions.list(0)}

    consumer = Session(small, topic_id)
    await consumer.fetch({0: 0})
    await small.brokers.pop(2).abort()  # nobody closes its session, until it is back
    await small.start_broker(2)
    await small.ready(2)
    await eventually(lambda: {2, 3} <= {each.replica_id for each in sessions.list(0)} and not has(before), "it is back")
    assert [each.replica_id for each in await listed(small)].count(2) == 1
    assert sessions.metrics.evictions == 0
    assert (await consumer.fetch()).error_code == ErrorCode.NONE


async def test_the_quota_is_one_client_s_own(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **{QUOTA: 1})
    await mesh.start()
    topic_id = await mesh.create("t")
    pool = ConnectionPool("other")
    first, second, other = Session(mesh, topic_id), Session(mesh, topic_id), Session(mesh, topic_id, pool=pool)
    for session in (first, second, other):
        await session.fetch({0: 0})
    assert first.session_id > 0
    assert second.session_id == 0
    assert other.session_id > 0
    text = generate_latest(mesh.brokers[1].registry).decode()
    assert 'kipmesh_broker_fetch_session_quota_refusals_total{client_id="tests"} 1.0' in text
    await pool.close()
    await mesh.stop()


async def test_followers_use_sessions_and_are_told_the_high_watermark_at_once(tmp_path: Path) -> None:
    """392-02: not only at the end of a long poll, which here is longer than the test waits."""
    mesh = Mesh(tmp_path, **{"replica.fetch.wait.max.ms": 60_000, "replica.socket.timeout.ms": 120_000})
    await mesh.start()
    topic_id = await mesh.create("t", partitions=8)
    await eventually(lambda: len(mesh.brokers[1].fetch_sessions) == 2, "two sessions")
    assert (await mesh.produce("t", batch(b"x"), partition=5)).error_code == 0
    followers = [mesh.brokers[broker].hosted_replicas.get(topic_id, 5) for broker in (2, 3)]
    for number in range(2, 7):
        await mesh.produce("t", batch(b"x"), partition=5)
        await eventually(lambda: all(r.high_watermark == number for r in followers), "told")  # noqa: B023
    metrics = mesh.brokers[1].fetch_sessions.metrics
    assert {name.value: count for name, count in metrics.fetches.items()}["incremental"] > 10
    await mesh.stop()


async def test_without_the_wakeup_a_follower_learns_the_high_watermark_with_the_next_fetch(tmp_path: Path) -> None:
    """Records alone end its fetches, whose waits are longer than the test: each batch is one answer for each."""
    keys = {"replica.fetch.wait.max.ms": 300_000, "replica.socket.timeout.ms": 600_000}
    mesh = Mesh(tmp_path, **keys, **{"replica.fetch.high.watermark.wakeup": False})
    await mesh.start()
    topic_id = await mesh.create("t")
    assert (await mesh.produce("t", batch(b"x"))).error_code == 0
    followers = [mesh.brokers[broker].hosted_replicas.get(topic_id, 0) for broker in (2, 3)]
    answered = mesh.brokers[1].fetch_sessions.metrics.fetches
    for number in range(1, 6):  # are committed, and both followers wait at the leader again
        before = sum(answered.values())
        assert (await mesh.produce("t", batch(b"x"))).error_code == 0
        assert sum(answered.values()) - before == 2
        assert [follower.high_watermark for follower in followers] == [number, number]
    await mesh.stop()


async def test_without_slots_there_are_no_sessions(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **{SLOTS: 0})
    await mesh.start()
    topic_id = await mesh.create("t")
    session = Session(mesh, topic_id)
    await session.fetch({0: 0})
    assert session.session_id == 0
    assert (await mesh.produce("t", batch(b"x"))).error_code == 0
    assert await listed(mesh) == []
    await mesh.stop()


async def test_followers_can_go_without_sessions(tmp_path: Path) -> None:
    """227-18: they ask for none, and whoever does has one."""
    mesh = Mesh(tmp_path, **{"enable.incremental.fetch": False})
    await mesh.start()
    topic_id = await mesh.create("t")
    session = Session(mesh, topic_id)
    await session.fetch({0: 0})
    assert session.session_id > 0
    assert (await mesh.produce("t", batch(b"x"))).error_code == 0, "they follow"
    assert [each.session_id for each in await listed(mesh)] == [session.session_id]
    answered = mesh.brokers[1].fetch_sessions.metrics.fetches
    assert answered[FetchKind.SESSIONLESS] > 1
    assert (answered[FetchKind.FULL], answered[FetchKind.INCREMENTAL]) == (1, 0)
    await mesh.stop()


async def test_brokers_and_clients_have_reserved_slots(clock: Clock, tmp_path: Path) -> None:
    """227-15, by its own settings alone: there are no slots by those of the other policy."""
    keys = {"fetch.session.cache.policy": "reserved", SLOTS: 0, "min.incremental.fetch.session.size": 2}
    keys["incremental.fetch.session.cache.slots.per.broker"] = 1
    keys["incremental.fetch.session.consumer.cache.slots"] = 2
    keys["min.incremental.fetch.session.eviction.time.ms"] = eviction_ms = 30_000
    mesh = Mesh(tmp_path, **keys)
    await mesh.start()
    topic_id = await mesh.create("t", partitions=2)
    await eventually(lambda: len(mesh.brokers[1].fetch_sessions) == 2, "both followers have theirs")

    async def new(size: int = 2, **follower: int) -> Session:
        session = Session(mesh, topic_id)
        session.follower = follower
        await session.fetch(dict.fromkeys(range(size), 0))
        return session

    assert (await new(size=1)).session_id == 0, "too small"
    clients = [await new(), await new()]
    assert all(client.session_id > 0 for client in clients)
    assert (await new()).session_id == 0, "the clients' slots are in use"
    epoch = mesh.brokers[2].parts.broker_epoch()
    assert (await new(replica_id=2, replica_epoch=epoch)).session_id == 0, "the broker has its slot"
    clock.go_on(eviction_ms)
    assert (await new()).session_id == 0, "it was not unused for longer"
    await clients[0].fetch()
    clock.go_on(1)
    assert (await new()).session_id > 0
    codes = [(await client.fetch()).error_code for client in clients]
    assert codes == [ErrorCode.NONE, ErrorCode.FETCH_SESSION_ID_NOT_FOUND], "who was in use stays"
    rows = sorted(each.replica_id for each in await listed(mesh))
    assert rows == [-1, -1, 2, 3]
    await mesh.stop()


async def test_followers_without_a_slot_wait_all_the_same(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **{SLOTS: 0})
    await mesh.start()
    await mesh.create("t")
    counted = mesh.brokers[1].fetch_sessions.metrics.fetches
    before, began = sum(counted.values()), time.monotonic()
    await eventually(lambda: sum(counted.values()) >= before + 8, "two followers fetch")
    # Each waits for half a second; the first of these may have begun before.
    assert time.monotonic() - began > 1, "they wait"
    assert (await mesh.produce("t", batch(b"x"))).error_code == 0
    await mesh.stop()


async def test_a_leader_that_restarts_and_one_that_is_killed_are_no_news(mesh: Mesh, capsys) -> None:
    topic_id = await mesh.create("t", partitions=4)
    capsys.readouterr()
    for produced, is_clean in enumerate((True, False), 1):
        leader = await leader_of(mesh, topic_id)
        assert (await mesh.produce("t", batch(b"a"), via=leader)).error_code == 0
        node = mesh.brokers.pop(leader)
        await (node.stop() if is_clean else node.abort())
        await mesh.start_broker(leader)
        await mesh.ready(leader)
        replica = mesh.brokers[await leader_of(mesh, topic_id)].hosted_replicas.get(topic_id, 0)
        await eventually(lambda: replica.leader and replica.leader.isr == {1, 2, 3}, "all in sync")  # noqa: B023
        replicas = [node.hosted_replicas.get(topic_id, 0) for node in mesh.brokers.values()]
        await eventually(lambda: all(r.high_watermark == produced for r in replicas), "replicated")  # noqa: B023
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "fetch" in line and ("[warning" in line or "[error" in line)] == []


async def test_an_evicted_follower_goes_on_at_once(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", partitions=3)
    sessions = mesh.brokers[1].fetch_sessions
    await eventually(lambda: len(sessions) == 2, "two sessions")
    for one in await listed(mesh):  # as an eviction does
        sessions._remove(sessions._sessions[one.session_id], "evicted", None)
    assert (await mesh.produce("t", batch(b"x"))).error_code == 0
    await eventually(lambda: len(sessions) == 2, "two others")
    follower = mesh.brokers[3].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: follower.high_watermark == 1, "replicated")
    text = generate_latest(mesh.brokers[3].registry).decode()
    assert 'kipmesh_broker_fetcher_session_resets_total{cause="FETCH_SESSION_ID_NOT_FOUND"}' in text


@pytest.mark.usefixtures("goodbyes")
async def test_a_clean_stop_closes_the_session(mesh: Mesh) -> None:
    await mesh.create("t")
    sessions = mesh.brokers[1].fetch_sessions
    await eventually(lambda: len(sessions) == 2, "two sessions")
    await mesh.brokers.pop(3).stop()
    await eventually(lambda: len(sessions) == 1, "closed by its client")
    assert sessions.metrics.closed >= 1


async def test_an_idle_follower_stays_in_the_isr_and_a_dead_one_leaves_it(clock: Clock, tmp_path: Path) -> None:
    """Far beyond `replica.lag.time.max.ms` without a read of the partition: it was caught up all the same."""
    lag_ms = 500  # of the clock that stands still; half of it of the machine's is how often the leader looks
    mesh = Mesh(tmp_path, **{"replica.lag.time.max.ms": lag_ms, "replica.fetch.wait.max.ms": 50})
    mesh.controller_keys["broker.connection.loss.timeout.ms"] = 0  # who is in sync is the leader's business here
    await mesh.start()
    topic_id = await mesh.create("t", partitions=3)
    replica = mesh.brokers[1].hosted_replicas.get(topic_id, 0)
    shrinks, behind = mesh.brokers[1].parts.metrics._isr_shrinks, mesh.brokers[1].parts.dirty_replicas.behind
    await eventually(lambda: replica not in behind, "nobody is behind")
    await all_have_fetched(replica, clock.go_on(10 * lag_ms))
    replica.append(batch(b"x"), 1, wall_ms())
    assert replica.check_lag(clock.go_on(0)) == (True, None), "behind since this moment only"
    for _ in range(3):
        assert (await mesh.produce("t", batch(b"x"), acks=1)).error_code == 0
    assert replica in behind
    await eventually(lambda: replica not in behind, "the leader has looked")
    assert replica.leader.isr == {1, 2, 3}
    assert shrinks._value.get() == 0
    await mesh.brokers.pop(3).abort()
    assert (await mesh.produce("t", batch(b"x"), acks=1)).error_code == 0
    follower = replica.leader.followers[2]
    await eventually(lambda: follower.log_end_offset == replica.log.log_end_offset, "the other one has it")
    clock.go_on(lag_ms + 1)
    await eventually(lambda: replica.leader.isr == {1, 2}, "the dead one has left")
    assert mesh.brokers[1].hosted_replicas.get(topic_id, 1).leader.isr == {1, 2, 3}, (
        "as at Kafka: nothing to miss there"
    )
    with pytest.raises(TransportError):
        await mesh.pool.get(f"127.0.0.1:{mesh.ports[3]}").call("Broker", "Fetch", m.FetchRequest(), 1)
    await mesh.stop()
