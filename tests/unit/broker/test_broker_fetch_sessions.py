"""Fetch sessions in a running cluster: of clients over gRPC, and of followers."""

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
from tests.unit.broker.broker_clock import Clock, wait_for_fetches
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of

WAIT_MS = 60_000
"""Longer than the timeout of a call: a fetch that waits this long fails the test."""
SLOTS = "max.incremental.fetch.session.cache.slots"
QUOTA = "max.incremental.fetch.sessions.per.client.id"


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


class Session:
    """The client side of a fetch session at broker 1."""

    def __init__(self, cluster: BrokerCluster, topic_id: bytes, *, pool: ConnectionPool | None = None) -> None:
        self.cluster = cluster
        self.topic_id = topic_id
        self.pool = pool or cluster.pool
        self.session_id = 0
        self.epoch = 0
        self.follower: dict[str, int] = {}
        """`replica_id` and `replica_epoch` of a client that poses as a follower."""

    def topics(self, requested: dict[int, int], max_bytes: int = 1 << 20) -> list[m.FetchTopic]:
        partitions = [m.FetchPartition(p, -1, offset, partition_max_bytes=max_bytes) for p, offset in requested.items()]
        return [m.FetchTopic("", self.topic_id, partitions)] if partitions else []

    async def fetch(
        self,
        requested: dict[int, int] | None = None,
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
            topics=self.topics(requested or {}) if topics is None else topics,
            forgotten_topics_data=forgotten,
            **self.follower,
        )
        connection = self.pool.get(f"127.0.0.1:{self.cluster.ports[1]}")
        response: m.FetchResponse = await connection.call("Broker", "Fetch", request, 20)
        if not response.error_code and self.epoch >= 0:
            self.session_id = response.session_id
            self.epoch += 1
        return response


def partitions_of(response: m.FetchResponse) -> dict[int, m.PartitionData]:
    assert not response.error_code, response
    return {data.partition_index: data for topic in response.responses for data in topic.partitions}


async def list_sessions(cluster: BrokerCluster, broker: int = 1) -> list[m.FetchSession]:
    response = await cluster.call(broker, "ListFetchSessions", m.ListFetchSessionsRequest())
    assert (response.error_code, response.node_id) == (0, broker)
    return list(response.sessions)


def session_counts(cluster: BrokerCluster) -> dict[str, float | None]:
    name, registry = "kipmesh_broker_fetch_sessions", cluster.brokers[1].registry
    return {value: registry.get_sample_value(name, {"privileged": value}) for value in ("true", "false")}


@pytest.fixture
async def three_slots(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """A cluster with three slots: two for the followers and one for a consumer."""
    cluster = BrokerCluster(tmp_path, **{SLOTS: 3, QUOTA: 2})
    await cluster.start()
    yield cluster
    await cluster.stop()


async def test_incremental_fetch_names_and_returns_changed_partitions(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", partitions=3)
    session = Session(cluster, topic_id)
    assert set(partitions_of(await session.fetch({0: 0, 1: 0, 2: 0}))) == {0, 1, 2}
    assert session.session_id > 0
    assert partitions_of(await session.fetch()) == {}
    await cluster.produce("t", batch(b"x"), partition=1)
    response = partitions_of(await session.fetch())
    assert {p: data.high_watermark for p, data in response.items()} == {1: 1}
    assert partitions_of(await session.fetch())[1].records == response[1].records, (
        "records repeat until the offset advances"
    )
    assert partitions_of(await session.fetch({1: 1})) == {}


async def test_changed_partition_wakes_waiting_session_fetch(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", partitions=50)
    session = Session(cluster, topic_id)
    await session.fetch(dict.fromkeys(range(50), 0))
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await eventually(lambda: cluster.brokers[1].fetch_sessions.metrics.created >= 3, "three sessions")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await cluster.produce("t", batch(b"x"), partition=33)
    assert set(partitions_of(await waiting)) == {33}


async def test_invalid_session_ids_and_epochs_leave_session_unchanged(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t")
    session = Session(cluster, topic_id)
    await session.fetch({0: 0})
    own_id = session.session_id
    cases = [(own_id, 2, 71), (own_id, 2**31 - 1, 71), (own_id, -2, 71), (own_id ^ 1, 1, 70), (0, 1, 70), (-5, 7, 70)]
    for session_id, epoch, code in cases:
        other = Session(cluster, topic_id)
        other.session_id, other.epoch = session_id, epoch
        response = await other.fetch({0: 0})
        assert (response.error_code, response.responses, response.session_id) == (code, (), 0), (session_id, epoch)
    by_name = [m.FetchTopic("t", b"", [m.FetchPartition(0, partition_max_bytes=1)])]
    assert (await session.fetch(topics=by_name)).error_code == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    assert partitions_of(await session.fetch()) == {}, "the session is unchanged"
    assert (await cluster.call(1, "Fetch", m.FetchRequest(cluster_id="other"))).error_code == (
        ErrorCode.INCONSISTENT_CLUSTER_ID
    )


async def test_session_with_byte_limit_serves_partitions_in_turn(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", partitions=4)
    for partition in range(4):
        for _ in range(2):
            await cluster.produce("t", batch(b"x" * 1000), partition=partition)
    session, offsets, order = Session(cluster, topic_id), dict.fromkeys(range(4), 0), []
    response = partitions_of(await session.fetch(offsets, max_bytes=1))
    for _ in range(8):
        (served,) = [p for p, data in response.items() if data.records]
        order.append(served)
        offsets[served] += 1
        response = partitions_of(await session.fetch({served: offsets[served]}, max_bytes=1))
    assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3]


async def test_session_keeps_old_and_recreated_topic_apart(cluster: BrokerCluster) -> None:
    old = await cluster.create("t")
    await cluster.produce("t", batch(b"old"))
    session = Session(cluster, old)
    assert partitions_of(await session.fetch({0: 1}))[0].high_watermark == 1
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await cluster.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("t")], timeout_ms=10_000), "Admin")
    assert partitions_of(await waiting)[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    new = await cluster.create("t")
    forgotten = [m.ForgottenTopic("", old, [0])]
    request = m.FetchRequest(
        session_id=session.session_id,
        session_epoch=session.epoch,
        topics=Session(cluster, new).topics({0: 0}),
        forgotten_topics_data=forgotten,
    )
    response = await cluster.call(1, "Fetch", request)
    assert [(topic.topic, topic.topic_id) for topic in response.responses] == [("t", new)]
    assert partitions_of(response)[0].high_watermark == 0


async def test_lost_response_leaves_session_unchanged(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", partitions=2)
    pool = ConnectionPool("gone")
    session = Session(cluster, topic_id, pool=pool)
    await session.fetch({0: 0, 1: 0})
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    own_id = session.session_id

    def is_waiting() -> bool:
        return next(s for s in cluster.brokers[1].fetch_sessions.list(0) if s.session_id == own_id).is_waiting

    await eventually(lambda: is_waiting() is True, "the fetch waits")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: is_waiting() is False, "the fetch has ended")
    await cluster.produce("t", batch(b"x"), partition=1)
    session.epoch += 1  # the broker processed the request; the response was lost
    assert set(partitions_of(await session.fetch())) == {1}
    await pool.close()


async def test_session_is_refused_when_cache_is_full_and_sessions_are_listed(three_slots: BrokerCluster) -> None:
    topic_id = await three_slots.create("t", partitions=2)
    await eventually(lambda: len(three_slots.brokers[1].fetch_sessions) == 2, "both followers have sessions")
    pools = [ConnectionPool("one"), ConnectionPool("two")]
    first, second = (Session(three_slots, topic_id, pool=pool) for pool in pools)
    await first.fetch({0: 0})
    await second.fetch({0: 0, 1: 0})
    assert first.session_id > 0
    assert second.session_id == 0, "a new session does not evict a young one"
    rows = {session.client_id: session for session in await list_sessions(three_slots)}
    assert set(rows) == {"broker-2", "broker-3", "one"}
    assert (rows["one"].privileged, rows["one"].partitions, rows["one"].epoch) == (False, 1, 1)
    assert (rows["broker-2"].privileged, rows["broker-2"].replica_id, rows["broker-2"].partitions) == (True, 2, 2)
    assert await list_sessions(three_slots, 2) == []
    text = generate_latest(three_slots.brokers[1].registry).decode()
    assert "kafka_server_fetchsessioncache_numincrementalfetchsessions 3.0" in text
    assert "kafka_server_fetchsessioncache_numincrementalfetchpartitionscached 5.0" in text
    assert "kafka_server_fetchsessioncache_incrementalfetchsessionevictions_total 0.0" in text
    assert 'kipmesh_broker_fetch_session_refusals_total{reason="full"} 1.0' in text
    for pool in pools:
        await pool.close()


@pytest.fixture
def long_close_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers that stop have time to close their sessions, even on a slow machine."""
    monkeypatch.setattr("kipmesh.broker.replication.fetcher.CLOSE_TIMEOUT_S", 30.0)


@pytest.mark.usefixtures("long_close_timeout")
async def test_restarted_follower_evicts_consumer_session(three_slots: BrokerCluster) -> None:
    """Logs and metrics name the client of each session and its privilege (227-02)."""
    topic_id = await three_slots.create("t")
    await eventually(lambda: len(three_slots.brokers[1].fetch_sessions) == 2, "both followers have sessions")
    sessions = three_slots.brokers[1].fetch_sessions
    (before,) = [session.session_id for session in sessions.list(0) if session.replica_id == 2]
    with capture_logs() as lines:
        await three_slots.brokers.pop(2).stop()
        await eventually(lambda: len(sessions) == 1, "the session of broker 2 is closed")
        consumers = [Session(three_slots, topic_id), Session(three_slots, topic_id)]
        for consumer in consumers:
            await consumer.fetch({0: 0})
        assert len(sessions) == 3
        assert session_counts(three_slots) == {"true": 1, "false": 2}
        consumer_ids = [consumer.session_id for consumer in consumers]
        await three_slots.start_broker(2)
        await three_slots.ready(2)
        await eventually(lambda: sessions.metrics.evictions == 1, "a consumer session is evicted")
    assert session_counts(three_slots) == {"true": 2, "false": 1}
    codes = [(await consumer.fetch()).error_code for consumer in consumers]
    assert sorted(codes) == [ErrorCode.NONE, ErrorCode.FETCH_SESSION_ID_NOT_FOUND]
    text = generate_latest(three_slots.brokers[1].registry).decode()
    assert 'kipmesh_broker_fetch_session_evictions_by_evictor_total{client_id="broker-2"} 1.0' in text
    logged = [line for line in lines if line["event"] == "fetch session changed"]
    by_kind_and_id = {(line["kind"], line["session_id"]): line for line in logged}
    lost = consumer_ids[codes.index(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)]
    consumer = {"client_id": "tests", "privileged": False, "partitions": 1, "session_id": lost, "log_level": "debug"}
    cause = {"reason": "privilege", "evictor": "broker-2"}
    assert by_kind_and_id["created", lost] == consumer | {"event": "fetch session changed", "kind": "created"}
    assert by_kind_and_id["evicted", lost] == consumer | {"event": "fetch session changed", "kind": "evicted"} | cause
    follower = ("broker-2", True)
    assert (by_kind_and_id["closed", before]["client_id"], by_kind_and_id["closed", before]["privileged"]) == follower
    assert follower in {(line["client_id"], line["privileged"]) for line in logged if line["kind"] == "created"}


async def test_killed_follower_reuses_its_slot_after_restart(three_slots: BrokerCluster) -> None:
    topic_id = await three_slots.create("t")
    sessions = three_slots.brokers[1].fetch_sessions
    await eventually(lambda: len(sessions) == 2, "both followers have sessions")
    (before,) = [session.session_id for session in await list_sessions(three_slots) if session.replica_id == 2]

    def has(session_id: int) -> bool:
        return session_id in {session.session_id for session in sessions.list(0)}

    consumer = Session(three_slots, topic_id)
    await consumer.fetch({0: 0})
    await three_slots.brokers.pop(2).abort()  # its session stays open until the restart
    await three_slots.start_broker(2)
    await three_slots.ready(2)
    await eventually(
        lambda: {2, 3} <= {s.replica_id for s in sessions.list(0)} and not has(before), "a new session replaces it"
    )
    assert [session.replica_id for session in await list_sessions(three_slots)].count(2) == 1
    assert sessions.metrics.evictions == 0
    assert (await consumer.fetch()).error_code == ErrorCode.NONE


async def test_session_quota_applies_to_each_client_id(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **{QUOTA: 1})
    await cluster.start()
    topic_id = await cluster.create("t")
    pool = ConnectionPool("other")
    first, second, other = Session(cluster, topic_id), Session(cluster, topic_id), Session(cluster, topic_id, pool=pool)
    for session in (first, second, other):
        await session.fetch({0: 0})
    assert first.session_id > 0
    assert second.session_id == 0
    assert other.session_id > 0
    text = generate_latest(cluster.brokers[1].registry).decode()
    assert 'kipmesh_broker_fetch_session_quota_refusals_total{client_id="tests"} 1.0' in text
    await pool.close()
    await cluster.stop()


async def test_high_watermark_change_wakes_fetch_of_follower(tmp_path: Path) -> None:
    """392-02: a follower receives the high watermark before its long poll, here 60 s, ends."""
    cluster = BrokerCluster(tmp_path, **{"replica.fetch.wait.max.ms": 60_000, "replica.socket.timeout.ms": 120_000})
    await cluster.start()
    topic_id = await cluster.create("t", partitions=8)
    await eventually(lambda: len(cluster.brokers[1].fetch_sessions) == 2, "two sessions")
    assert (await cluster.produce("t", batch(b"x"), partition=5)).error_code == 0
    followers = [cluster.brokers[broker].hosted_replicas.get(topic_id, 5) for broker in (2, 3)]
    for number in range(2, 7):
        await cluster.produce("t", batch(b"x"), partition=5)
        await eventually(lambda: all(r.high_watermark == number for r in followers), "the high watermark")  # noqa: B023
    metrics = cluster.brokers[1].fetch_sessions.metrics
    assert {name.value: count for name, count in metrics.fetches.items()}["incremental"] > 10
    await cluster.stop()


async def test_follower_gets_high_watermark_with_next_records_if_wakeup_is_disabled(tmp_path: Path) -> None:
    """Only records end the long polls, here 300 s: each batch causes one response to each follower."""
    keys = {"replica.fetch.wait.max.ms": 300_000, "replica.socket.timeout.ms": 600_000}
    cluster = BrokerCluster(tmp_path, **keys, **{"replica.fetch.high.watermark.wakeup": False})
    await cluster.start()
    topic_id = await cluster.create("t")
    assert (await cluster.produce("t", batch(b"x"))).error_code == 0
    followers = [cluster.brokers[broker].hosted_replicas.get(topic_id, 0) for broker in (2, 3)]
    fetch_counts = cluster.brokers[1].fetch_sessions.metrics.fetches
    for number in range(1, 6):  # after each round, both followers wait at the leader again
        before = sum(fetch_counts.values())
        assert (await cluster.produce("t", batch(b"x"))).error_code == 0
        assert sum(fetch_counts.values()) - before == 2
        assert [follower.high_watermark for follower in followers] == [number, number]
    await cluster.stop()


async def test_broker_without_session_slots_serves_sessionless_fetches(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **{SLOTS: 0})
    await cluster.start()
    topic_id = await cluster.create("t")
    session = Session(cluster, topic_id)
    await session.fetch({0: 0})
    assert session.session_id == 0
    assert (await cluster.produce("t", batch(b"x"))).error_code == 0
    assert await list_sessions(cluster) == []
    await cluster.stop()


async def test_followers_fetch_without_sessions_if_disabled(tmp_path: Path) -> None:
    """227-18: clients may still create sessions."""
    cluster = BrokerCluster(tmp_path, **{"enable.incremental.fetch": False})
    await cluster.start()
    topic_id = await cluster.create("t")
    session = Session(cluster, topic_id)
    await session.fetch({0: 0})
    assert session.session_id > 0
    assert (await cluster.produce("t", batch(b"x"))).error_code == 0, "the followers replicate"
    assert [listed.session_id for listed in await list_sessions(cluster)] == [session.session_id]
    fetch_counts = cluster.brokers[1].fetch_sessions.metrics.fetches
    assert fetch_counts[FetchKind.SESSIONLESS] > 1
    assert (fetch_counts[FetchKind.FULL], fetch_counts[FetchKind.INCREMENTAL]) == (1, 0)
    await cluster.stop()


async def test_reserved_policy_separates_slots_of_brokers_and_clients(clock: Clock, tmp_path: Path) -> None:
    """227-15: only the settings of this policy apply; the adopted policy has no slots here."""
    keys = {"fetch.session.cache.policy": "reserved", SLOTS: 0, "min.incremental.fetch.session.size": 2}
    keys["incremental.fetch.session.cache.slots.per.broker"] = 1
    keys["incremental.fetch.session.consumer.cache.slots"] = 2
    keys["min.incremental.fetch.session.eviction.time.ms"] = eviction_ms = 30_000
    cluster = BrokerCluster(tmp_path, **keys)
    await cluster.start()
    topic_id = await cluster.create("t", partitions=2)
    await eventually(lambda: len(cluster.brokers[1].fetch_sessions) == 2, "both followers have sessions")

    async def new(size: int = 2, **follower: int) -> Session:
        session = Session(cluster, topic_id)
        session.follower = follower
        await session.fetch(dict.fromkeys(range(size), 0))
        return session

    assert (await new(size=1)).session_id == 0, "too small"
    clients = [await new(), await new()]
    assert all(client.session_id > 0 for client in clients)
    assert (await new()).session_id == 0, "the client slots are in use"
    epoch = cluster.brokers[2].parts.broker_epoch()
    assert (await new(replica_id=2, replica_epoch=epoch)).session_id == 0, "the broker has its slot"
    clock.advance(eviction_ms)
    assert (await new()).session_id == 0, "no session has been unused for longer"
    await clients[0].fetch()
    clock.advance(1)
    assert (await new()).session_id > 0
    codes = [(await client.fetch()).error_code for client in clients]
    assert codes == [ErrorCode.NONE, ErrorCode.FETCH_SESSION_ID_NOT_FOUND], "the used session stays"
    rows = sorted(session.replica_id for session in await list_sessions(cluster))
    assert rows == [-1, -1, 2, 3]
    await cluster.stop()


async def test_followers_without_session_slots_use_long_polls(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **{SLOTS: 0})
    await cluster.start()
    await cluster.create("t")
    counted = cluster.brokers[1].fetch_sessions.metrics.fetches
    before, began = sum(counted.values()), time.monotonic()
    await eventually(lambda: sum(counted.values()) >= before + 8, "two followers fetch")
    # Each fetch waits for 500 ms. The first of the eight may have started before the measurement.
    assert time.monotonic() - began > 1, "the fetches are long polls"
    assert (await cluster.produce("t", batch(b"x"))).error_code == 0
    await cluster.stop()


async def test_leader_restart_logs_no_fetch_warnings(cluster: BrokerCluster, capsys) -> None:
    topic_id = await cluster.create("t", partitions=4)
    capsys.readouterr()
    for produced, is_clean in enumerate((True, False), 1):
        leader = await leader_of(cluster, topic_id)
        assert (await cluster.produce("t", batch(b"a"), via=leader)).error_code == 0
        node = cluster.brokers.pop(leader)
        await (node.stop() if is_clean else node.abort())
        await cluster.start_broker(leader)
        await cluster.ready(leader)
        replica = cluster.brokers[await leader_of(cluster, topic_id)].hosted_replicas.get(topic_id, 0)
        await eventually(lambda: replica.leader and replica.leader.isr == {1, 2, 3}, "all in sync")  # noqa: B023
        replicas = [node.hosted_replicas.get(topic_id, 0) for node in cluster.brokers.values()]
        await eventually(lambda: all(r.high_watermark == produced for r in replicas), "replicated")  # noqa: B023
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "fetch" in line and ("[warning" in line or "[error" in line)] == []


async def test_follower_recreates_evicted_session(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", partitions=3)
    sessions = cluster.brokers[1].fetch_sessions
    await eventually(lambda: len(sessions) == 2, "two sessions")
    for session in await list_sessions(cluster):
        sessions._remove(sessions._sessions[session.session_id], "evicted", None)
    assert (await cluster.produce("t", batch(b"x"))).error_code == 0
    await eventually(lambda: len(sessions) == 2, "two new sessions")
    follower = cluster.brokers[3].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: follower.high_watermark == 1, "replicated")
    text = generate_latest(cluster.brokers[3].registry).decode()
    assert 'kipmesh_broker_fetcher_session_resets_total{cause="FETCH_SESSION_ID_NOT_FOUND"}' in text


@pytest.mark.usefixtures("long_close_timeout")
async def test_cleanly_stopped_follower_closes_its_session(cluster: BrokerCluster) -> None:
    await cluster.create("t")
    sessions = cluster.brokers[1].fetch_sessions
    await eventually(lambda: len(sessions) == 2, "two sessions")
    await cluster.brokers.pop(3).stop()
    await eventually(lambda: len(sessions) == 1, "the follower has closed its session")
    assert sessions.metrics.closed >= 1


async def test_idle_follower_stays_in_isr_and_dead_follower_leaves(clock: Clock, tmp_path: Path) -> None:
    """A caught-up follower stays in the ISR although the partition had no fetch for `replica.lag.time.max.ms`."""
    lag_ms = 500  # by the test clock; the leader checks every 250 ms of real time
    cluster = BrokerCluster(tmp_path, **{"replica.lag.time.max.ms": lag_ms, "replica.fetch.wait.max.ms": 50})
    cluster.controller_keys["broker.connection.loss.timeout.ms"] = 0  # only the leader changes the ISR
    await cluster.start()
    topic_id = await cluster.create("t", partitions=3)
    replica = cluster.brokers[1].hosted_replicas.get(topic_id, 0)
    shrinks, behind = cluster.brokers[1].parts.metrics._isr_shrinks, cluster.brokers[1].parts.dirty_replicas.behind
    await eventually(lambda: replica not in behind, "no follower is behind")
    await wait_for_fetches(replica, clock.advance(10 * lag_ms))
    replica.append(batch(b"x"), 1, wall_ms())
    assert replica.check_lag(clock.advance(0)) == (True, None), "behind since now"
    for _ in range(3):
        assert (await cluster.produce("t", batch(b"x"), acks=1)).error_code == 0
    assert replica in behind
    await eventually(lambda: replica not in behind, "the leader has checked the followers")
    assert replica.leader.isr == {1, 2, 3}
    assert shrinks._value.get() == 0
    await cluster.brokers.pop(3).abort()
    assert (await cluster.produce("t", batch(b"x"), acks=1)).error_code == 0
    follower = replica.leader.followers[2]
    await eventually(lambda: follower.log_end_offset == replica.log.log_end_offset, "broker 2 has the records")
    clock.advance(lag_ms + 1)
    await eventually(lambda: replica.leader.isr == {1, 2}, "broker 3 has left the ISR")
    assert cluster.brokers[1].hosted_replicas.get(topic_id, 1).leader.isr == {1, 2, 3}, (
        "as in Apache Kafka: the follower misses no records there"
    )
    with pytest.raises(TransportError):
        await cluster.pool.get(f"127.0.0.1:{cluster.ports[3]}").call("Broker", "Fetch", m.FetchRequest(), 1)
    await cluster.stop()
