"""Consumers and the closest replica, against in-memory brokers (392-08, 392-10, 392-13 to 392-17)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from kipmesh.client import Consumer
from kipmesh.client.consumer import replica_selection
from kipmesh.client.consumer.broker_fetches import FOLLOWER_TIMEOUT_MS
from kipmesh.client.consumer.replica_selection import ReplicaReturn
from kipmesh.client.consumer.rules.values import ReaderConfig
from kipmesh.client.records import encode_batch
from kipmesh.client.types import TopicPartition
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.messages import FetchRequest
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster
from kipmesh.testing.fake_partitions import FakeFollower

FAST = {
    "retry.backoff.ms": 5,
    "retry.backoff.max.ms": 50,
    "fetch.max.wait.ms": 100,
    "auto.offset.reset": "earliest",
    "client.rack": "rack-b",
}
RACKS = {1: "rack-a", 2: "rack-b", 3: "rack-c"}


@pytest.fixture(autouse=True)
def long_follower_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the follower timeout, so that a stall of the machine does not make consumers leave a follower."""
    monkeypatch.setattr(replica_selection, "ReaderConfig", partial(ReaderConfig, follower_timeout_ms=600_000))


@pytest.fixture
def default_follower_timeout(long_follower_timeout: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the default follower timeout."""
    monkeypatch.setattr(replica_selection, "ReaderConfig", ReaderConfig)


@asynccontextmanager
async def three_racks(partitions: int = 1) -> AsyncIterator[FakeCluster]:
    """Start three brokers in three racks. Broker 1 leads all partitions of `t`; 2 and 3 are followers."""
    async with FakeCluster(3) as cluster:
        cluster.racks = dict(RACKS)
        topic = cluster.create_topic("t", partitions)
        for each in topic.partitions:
            each.leader_id = 1
            each.followers = {2: FakeFollower(), 3: FakeFollower()}
        yield cluster


def follower(cluster: FakeCluster, partition: int = 0) -> FakeFollower:
    return cluster.topics["t"].partitions[partition].followers[2]


def wake_fetches(cluster: FakeCluster) -> None:
    cluster.appended.set()
    cluster.appended = asyncio.Event()


def fill(cluster: FakeCluster, count: int = 10, partition: int = 0) -> None:
    log = cluster.topics["t"].partitions[partition]
    for _ in range(count):
        log.append(encode_batch([(None, b"%d" % log.end_offset)], timestamp_ms=1))
    wake_fetches(cluster)


async def read(consumer: Consumer, first: int, count: int) -> None:
    """Read `count` records and check that they start at `first` and are consecutive."""
    offsets: list[int] = []
    async with asyncio.timeout(60):
        while len(offsets) < count:
            offsets += [record.offset for record in await consumer.poll(1000)]
    assert offsets == list(range(first, first + count))


def calls(cluster: FakeCluster, method: str, node_id: int | None = None) -> list[Any]:
    return [request for name, node, request in cluster.calls if name == method and node_id in (None, node)]


def fetches(cluster: FakeCluster, node_id: int) -> list[FetchRequest]:
    return calls(cluster, "Fetch", node_id)


async def test_leader_redirects_consumer_to_its_rack() -> None:
    async with three_racks(3) as cluster, Consumer(cluster.bootstrap, **FAST) as consumer:
        consumer.subscribe(["t"])
        for partition in range(3):
            fill(cluster, 20, partition)
        seen: set[tuple[int, int]] = set()
        while len(seen) < 60:
            seen |= {(record.partition, record.offset) for record in await consumer.poll(1000)}
        fill(cluster)
        await read(consumer, 20, 10)
        stats = consumer.fetch_stats
        assert set(stats.bytes_by_node) == {2}
        assert stats.redirects == {2: 3}
        assert not stats.returns
        await until(lambda: not cluster.brokers[1].sessions.list())  # the session at the leader is closed
        assert consumer.fetch_stats.sessions == 1
        assert {each.rack_id for each in fetches(cluster, 1)} == {"rack-b"}
        assert {each.replica_id for each in fetches(cluster, 2)} == {-1}
        assert {each.rack_id for each in calls(cluster, "Metadata")} == {""}


async def test_consumer_without_rack_reads_from_leader() -> None:
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **{**FAST, "client.rack": ""}) as consumer:
        fill(cluster)
        consumer.assign([("t", 0)])
        await read(consumer, 0, 10)
        assert set(consumer.fetch_stats.bytes_by_node) == {1}


ERRORS = [
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.FENCED_LEADER_EPOCH,
    ErrorCode.OFFSET_NOT_AVAILABLE,
    ErrorCode.OFFSET_OUT_OF_RANGE,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.CORRUPT_MESSAGE,
]


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
async def test_leader_serves_while_follower_fails(code: ErrorCode) -> None:
    """392-08, 392-14. The policy `none` would raise on a reset."""
    async with (
        three_racks() as cluster,
        Consumer(cluster.bootstrap, **{**FAST, "auto.offset.reset": "none"}) as consumer,
    ):
        consumer.assign([("t", 0)])
        consumer.seek(("t", 0), 0)
        fill(cluster)
        await read(consumer, 0, 10)
        follower(cluster).code = code
        fill(cluster)
        if code is ErrorCode.FENCED_LEADER_EPOCH:  # only metadata is stale
            await until(lambda: len(calls(cluster, "Metadata")) > 2)
            follower(cluster).code = None
            wake_fetches(cluster)
        await read(consumer, 10, 10)
        if code is not ErrorCode.FENCED_LEADER_EPOCH:
            assert consumer.fetch_stats.bytes_by_node[1] > 0
        follower(cluster).code = None
        wake_fetches(cluster)
        served = consumer.fetch_stats.bytes_by_node[2]
        offset = 20
        while consumer.fetch_stats.bytes_by_node[2] == served:
            fill(cluster, 1)
            await read(consumer, offset, 1)
            offset += 1
            await asyncio.sleep(0.02)
        assert offset < 100
        lookups = {node for name, node, _ in cluster.calls if name in ("ListOffsets", "OffsetsForLeaderEpoch")}
        assert lookups == ({1} if code is ErrorCode.OFFSET_OUT_OF_RANGE else set())


@pytest.mark.usefixtures("default_follower_timeout")
@pytest.mark.parametrize("failure", ["killed", "silent"])
async def test_consumer_leaves_failed_follower_within_two_seconds(failure: str) -> None:
    config: dict[str, Any] = {**FAST, "fetch.max.wait.ms": 500, "request.timeout.ms": 200_000}
    assert config["fetch.max.wait.ms"] + FOLLOWER_TIMEOUT_MS < 2000
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **config) as consumer:
        consumer.assign([("t", 0)])
        fill(cluster)
        await read(consumer, 0, 10)
        await until(lambda: consumer.fetch_stats.partitions == 1)
        frozen = asyncio.Event()
        if failure == "killed":
            await cluster.brokers[2].stop()
        else:

            async def freeze(method: str, node_id: int, _request: object) -> None:
                if method == "Fetch" and node_id == 2:
                    await frozen.wait()

            cluster.hook = freeze
            count = len(fetches(cluster, 2))
            await until(lambda: len(fetches(cluster, 2)) > count)
        fill(cluster)
        await read(consumer, 10, 10)
        assert sum(consumer.fetch_stats.returns.values()) >= 1
        cluster.hook = None
        frozen.set()
        if failure == "killed":
            await cluster.brokers[2].start()
        served, offset = consumer.fetch_stats.bytes_by_node[2], 20
        while consumer.fetch_stats.bytes_by_node[2] == served:
            fill(cluster, 1)
            await read(consumer, offset, 1)
            offset += 1
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("default_follower_timeout")
async def test_idle_consumer_leaves_silent_follower() -> None:
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **FAST) as consumer:
        consumer.assign([("t", 0)])
        await until(lambda: consumer.fetch_stats.redirects[2] == 1)
        frozen = asyncio.Event()

        async def freeze(method: str, node_id: int, _request: object) -> None:
            if method == "Fetch" and node_id == 2:
                await frozen.wait()

        cluster.hook = freeze
        await until(lambda: consumer.fetch_stats.returns["silent"] >= 1)
        fill(cluster)
        await read(consumer, 0, 10)
        frozen.set()


async def test_consumer_returns_to_leader_after_metadata_max_age() -> None:
    async with (
        three_racks() as cluster,
        Consumer(cluster.bootstrap, **FAST, **{"metadata.max.age.ms": 300}) as consumer,
    ):
        consumer.assign([("t", 0)])
        fill(cluster)
        await read(consumer, 0, 10)
        redirects = consumer.fetch_stats.redirects[2]
        assert redirects >= 1
        await until(lambda: consumer.fetch_stats.redirects[2] > redirects)  # even when idle
        follower(cluster).is_in_sync = False
        count = len(fetches(cluster, 1))
        await until(lambda: len(fetches(cluster, 1)) > count + 2)
        fill(cluster)
        before = consumer.fetch_stats.bytes_by_node[2]
        await read(consumer, 10, 10)
        assert consumer.fetch_stats.bytes_by_node[2] == before
        assert not consumer.fetch_stats.returns


async def test_consumer_leaves_fenced_follower() -> None:
    async with (
        three_racks() as cluster,
        Consumer(cluster.bootstrap, **FAST, **{"metadata.max.age.ms": 200}) as consumer,
    ):
        consumer.assign([("t", 0)])
        fill(cluster)
        await read(consumer, 0, 10)
        follower(cluster).is_online = False
        await until(lambda: 1 in consumer.fetch_stats.bytes_by_node or len(fetches(cluster, 1)) > 3)
        fill(cluster)
        await read(consumer, 10, 10)


async def test_lagging_follower_causes_no_reset_and_no_lower_high_watermark() -> None:
    """Offset cases 1 to 4 of 392-08, and 392-10."""
    async with (
        three_racks() as cluster,
        Consumer(cluster.bootstrap, **{**FAST, "auto.offset.reset": "none"}) as consumer,
    ):
        consumer.assign([("t", 0)])
        consumer.seek(("t", 0), 0)
        fill(cluster)
        await read(consumer, 0, 10)
        assert consumer.high_watermark(("t", 0)) == 10
        behind = follower(cluster)
        behind.end_offset, behind.known_high_watermark = 5, 5  # too large, as after an unclean election
        fill(cluster)
        await read(consumer, 10, 10)
        assert consumer.high_watermark(("t", 0)) == 20
        behind.log_start_offset, behind.end_offset, behind.known_high_watermark = 40, None, None  # too small
        fill(cluster)
        await read(consumer, 20, 10)
        behind.log_start_offset, behind.end_offset = None, 25  # not replicated yet
        fill(cluster)
        await read(consumer, 30, 10)
        assert consumer.high_watermark(("t", 0)) == 40
        assert consumer.fetch_stats.truncations == 0


async def test_leader_confirms_offset_reset() -> None:
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **FAST) as consumer:
        fill(cluster, 30)
        cluster.topics["t"].partitions[0].log_start_offset = 20
        consumer.assign([("t", 0)])
        consumer.seek(("t", 0), 5)
        await read(consumer, 20, 10)
        assert calls(cluster, "ListOffsets", 1)
        assert not calls(cluster, "ListOffsets", 2)


@pytest.mark.parametrize("policy", ["earliest", "none"])
async def test_truncation_is_reported_to_application(policy: str) -> None:
    async with (
        three_racks() as cluster,
        Consumer(cluster.bootstrap, **{**FAST, "auto.offset.reset": policy}) as consumer,
    ):
        consumer.assign([("t", 0)])
        consumer.seek(("t", 0), 0)
        fill(cluster, 30)
        await read(consumer, 0, 30)
        cluster.topics["t"].partitions[0].truncate(20)
        cluster.move_leader("t", 0, 3)
        fill(cluster, 20)
        if policy == "none":
            for _ in range(2):
                with pytest.raises(KafkaError, match="truncated to offset 20, below the position 30"):
                    await consumer.poll(60_000)
            consumer.seek(("t", 0), 20)
        await read(consumer, 20, 20)
        assert consumer.fetch_stats.truncations == 1


@pytest.mark.parametrize("mode", ["metadata", "consumer"])
@pytest.mark.parametrize("policy", ["leader", "preferred"])
async def test_draft_modes_choose_the_replica_by_policy(mode: str, policy: str) -> None:
    """392-15 to 392-17."""
    config = {
        **FAST,
        "replica.selection.mode": mode,
        "replica.selection.policy": policy,
        "replica.selector.class": "RackAwareReplicaSelector",
        "metadata.max.age.ms": 200,
    }
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **config) as consumer:
        consumer.assign([("t", 0)])
        fill(cluster)
        await read(consumer, 0, 10)
        served_by = 2 if policy == "preferred" else 1
        assert set(consumer.fetch_stats.bytes_by_node) == {served_by}
        requests = fetches(cluster, served_by)
        assert {(each.replica_id, each.rack_id) for each in requests} == {(-2 if policy == "preferred" else -1, "")}
        assert {each.rack_id for each in calls(cluster, "Metadata")} == {"rack-b" if mode == "metadata" else ""}
        if policy == "leader":
            return
        cluster.racks = {
            1: "rack-b",
            2: "rack-a",
            3: "rack-c",
        }  # the next metadata update applies it, even without reads
        await until(lambda: len(fetches(cluster, 1)) > 2)
        fill(cluster)
        await read(consumer, 10, 10)
        assert set(consumer.fetch_stats.bytes_by_node) == {1, 2}
        cluster.racks = dict(RACKS)
        count = len(fetches(cluster, 2))
        await until(lambda: len(fetches(cluster, 2)) > count + 2)
        await cluster.brokers[2].stop()
        fill(cluster)
        await read(consumer, 20, 10)


async def test_side_fetch_is_repeated_at_new_replica() -> None:
    """The new replica gets an identical request, so the fetch at the old replica must not suppress it."""
    config = {
        **FAST,
        "fetch.max.wait.ms": 600_000,
        "replica.selection.mode": "metadata",
        "replica.selection.policy": "preferred",
    }
    async with three_racks(2) as cluster, Consumer(cluster.bootstrap, **config) as consumer:
        cluster.racks = {1: "rack-a", 2: "rack-c", 3: "rack-c"}
        consumer.assign([("t", 0)])
        await until(lambda: len(fetches(cluster, 1)) == 2, "the session waits")
        consumer.assign([("t", 0), ("t", 1)])
        await until(lambda: len(fetches(cluster, 1)) == 4, "a fetch beside the session waits for the other partition")
        cluster.racks = dict(RACKS)
        consumer._metadata.request_refresh(["t"])
        await until(lambda: len(fetches(cluster, 2)) == 2, "both fetches go to broker 2")
        fill(cluster, partition=1)
        await read(consumer, 0, 10)
        assert set(consumer.fetch_stats.bytes_by_node) == {2}


@pytest.mark.parametrize("mode", ["metadata", "consumer"])
async def test_draft_modes_return_to_recovered_replica(mode: str) -> None:
    """The return does not wait for `metadata.max.age.ms`, and metadata requests back off."""
    config = {
        **FAST,
        "replica.selection.mode": mode,
        "replica.selection.policy": "preferred",
        "metadata.max.age.ms": 300_000,
    }
    if mode == "consumer":
        config["replica.selector.class"] = "RackAwareReplicaSelector"
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **config) as consumer:
        consumer.assign([("t", 0)])
        fill(cluster)
        await read(consumer, 0, 10)
        await cluster.brokers[2].stop()
        follower(cluster).is_online = False
        fill(cluster)
        await read(consumer, 10, 10)
        before = len(calls(cluster, "Metadata"))
        await asyncio.sleep(0.5)
        assert len(calls(cluster, "Metadata")) - before < 8
        await cluster.brokers[2].start()
        follower(cluster).is_online = True
        count = len(fetches(cluster, 2))
        await until(lambda: len(fetches(cluster, 2)) > count + 2)
        fill(cluster)
        await read(consumer, 20, 10)
        assert consumer.fetch_stats.bytes_by_node[2] > consumer.fetch_stats.bytes_by_node[1]
        before = len(calls(cluster, "Metadata"))
        await asyncio.sleep(0.5)
        assert len(calls(cluster, "Metadata")) - before <= 1


def test_metadata_requests_back_off_until_replica_recovers() -> None:
    away = ReplicaReturn(1, 10)
    assert away.due_s is None
    tp, other = TopicPartition("t", 0), TopicPartition("u", 0)
    away.add(tp, 100)
    away.add(tp, 100.5)
    assert away.topics(100.9, lambda _: True) == set()
    requested: list[tuple[float, set[str]]] = []
    now = 100.0
    while away.due_s is not None:
        now = away.due_s
        requested.append((now, away.topics(now, lambda _: True)))
    assert requested == [(101, {"t"}), (103, {"t"}), (107, {"t"}), (115, {"t"})]
    away.add(tp, 200)
    away.add(other, 200)
    assert away.topics(201, lambda partition: partition == other) == {"u"}
    assert away.topics(203, lambda _: False) == set()
    assert away.due_s is None


class BrokenSelector:
    """A selector that always raises."""

    seen: dict[str, Any]

    def configure(self, configs: dict[str, Any]) -> None:
        BrokenSelector.seen = dict(configs)

    def select(self, *_: object) -> object:
        raise RuntimeError("broken")

    def close(self) -> None:
        BrokenSelector.seen["closed"] = True


async def test_broken_selector_falls_back_to_leader() -> None:
    """392-11."""
    config = {
        **FAST,
        "replica.selection.mode": "consumer",
        "replica.selection.policy": "preferred",
        "replica.selector.class": f"{__name__}.BrokenSelector",
        "replica.selector.config": "a=1, b=x=y",
    }
    async with three_racks() as cluster, Consumer(cluster.bootstrap, **config) as consumer:
        consumer.assign([("t", 0)])
        fill(cluster)
        await read(consumer, 0, 10)
        assert set(consumer.fetch_stats.bytes_by_node) == {1}
        assert consumer.fetch_stats.selector_failures >= 1
    seen = BrokenSelector.seen
    assert (seen["a"], seen["b"], seen["client.rack"], seen["closed"]) == ("1", "x=y", "rack-b", True)


def test_invalid_replica_selection_is_refused_by_key() -> None:
    assert Consumer("h:1", rack_id="r").config.client_rack == "r"
    for config, words in (
        ({"rack.id": "a", "client.rack": "b"}, "set only one of them"),
        ({"replica.selection.mode": "broker"}, "replica.selection.mode"),
        ({"replica.selection.mode": "consumer", "replica.selector.class": "no.such.Thing"}, "replica.selector.class"),
        ({"replica.selection.mode": "consumer", "replica.selector.config": "x"}, "replica.selector.config"),
    ):
        with pytest.raises(InvalidConfigError, match=words):
            Consumer("h:1", **config)
