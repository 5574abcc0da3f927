"""The metadata cache of clients and its refresh policy."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from kipmesh.client import Consumer, ConsumerRecord, Producer
from kipmesh.client.calls import call
from kipmesh.client.cluster import Cluster
from kipmesh.client.metadata import RefreshDue, TopicEntry
from kipmesh.client.records import encode_batch
from kipmesh.core.config import ClientConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import LeaderIdAndEpoch, MetadataResponse, NodeEndpoint
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20}


@asynccontextmanager
async def connected(fake: FakeCluster, **config: object) -> AsyncIterator[Cluster]:
    cluster = Cluster(fake.bootstrap, ClientConfig.parse({**FAST, **config}), "test")
    await cluster.start(60)
    try:
        yield cluster
    finally:
        await cluster.close()


def requested_topics(fake: FakeCluster) -> list[list[str]]:
    return [[topic.name for topic in request.topics] for method, _, request in fake.calls if method == "Metadata"]


def test_refresh_policy_chooses_due_topics() -> None:
    policy = RefreshDue(max_age_s=300, backoff_s=0.1)
    assert policy.choose(10, {}) == (None, None)
    fresh, old = TopicEntry("fresh"), TopicEntry("old")
    assert policy.choose(10, {"fresh": fresh}).topics == ("fresh",)
    known = TopicEntry("known")
    known.urgent, known.refreshed_at = False, 9.0
    assert policy.choose(10, {"known": known, "fresh": fresh}).topics == ("fresh",)
    fresh.urgent = old.urgent = False
    fresh.refreshed_at, old.refreshed_at = 200.0, 100.0
    assert policy.choose(210, {"fresh": fresh, "old": old}) == (None, 190)
    assert policy.choose(400, {"fresh": fresh, "old": old}).topics == ("old",)
    assert policy.choose(500, {"fresh": fresh, "old": old}).topics == ("fresh", "old")
    fresh.urgent = True
    assert policy.choose(200.05, {"fresh": fresh}).wait_s == pytest.approx(0.05)
    fresh.retry_at = 205
    assert policy.choose(200.5, {"fresh": fresh}).wait_s == pytest.approx(4.5)


async def test_metadata_is_refreshed_by_age() -> None:
    async with FakeCluster() as fake, connected(fake, **{"metadata.max.age.ms": 50}) as cluster:
        fake.create_topic("t")
        began = time.monotonic()
        await cluster.metadata.wait_for_topic("t", 60)
        await until(lambda: len(requested_topics(fake)) >= 8)
        assert requested_topics(fake)[1:] == [["t"]] * (len(requested_topics(fake)) - 1)
        assert time.monotonic() - began > 0.25  # the first response and six more


async def test_metadata_requests_are_serialized_and_combine_topics() -> None:
    async with FakeCluster() as fake, connected(fake) as cluster:
        running = maximum = 0

        async def hook(method: str, _node: int, _request: object) -> None:
            nonlocal running, maximum
            running += 1
            maximum = max(maximum, running)
            await asyncio.sleep(0.02)
            running -= 1

        fake.hook = hook
        for index in range(20):
            fake.create_topic(f"t{index}")
        await asyncio.gather(*[cluster.metadata.wait_for_topic(f"t{index}", 60) for index in range(20)])
        assert maximum == 1
        assert len(requested_topics(fake)) <= 3


async def test_unknown_topic_is_not_requested_forever() -> None:
    async with FakeCluster() as fake, connected(fake) as cluster:
        fake.create_topic("t")
        with pytest.raises(KafkaError) as caught:
            await cluster.metadata.wait_for_topic("nope", 60)
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        await cluster.metadata.wait_for_topic("t", 60)  # requests are serialized, so earlier ones are complete
        before = len(fake.calls)
        await asyncio.sleep(0.2)
        assert len(fake.calls) == before


async def test_invalid_topic_name_is_refused_and_requested_again() -> None:
    async with FakeCluster() as fake, connected(fake) as cluster:
        fake.inject("Metadata", ErrorCode.INVALID_TOPIC_EXCEPTION)
        with pytest.raises(KafkaError) as caught:
            await cluster.metadata.wait_for_topic("a b", 60)
        assert caught.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
        fake.create_topic("a b")
        assert (await cluster.metadata.wait_for_topic("a b", 60)).name == "a b"


async def test_leader_epoch_never_decreases() -> None:
    async with FakeCluster(2) as fake, connected(fake) as cluster:
        fake.create_topic("t")
        metadata = cluster.metadata
        await metadata.wait_for_topic("t", 60)
        endpoint = NodeEndpoint(2, "127.0.0.1", fake.brokers[2].port)
        assert metadata.apply_leaders([("t", 0, LeaderIdAndEpoch(2, 5))], [endpoint])
        assert not metadata.apply_leaders([("t", 0, LeaderIdAndEpoch(1, 4))], [endpoint])
        assert not metadata.apply_leaders([], [])
        metadata.request_refresh(["t"])
        await metadata.wait_for_update(60)
        known = metadata.partition("t", 0)
        assert known is not None
        assert (known.leader_id, known.leader_epoch) == (2, 5)


async def test_stale_metadata_does_not_restore_deleted_topic() -> None:
    async with FakeCluster() as fake:
        fake.create_topic("t")
        config = {**FAST, "auto.offset.reset": "earliest", "fetch.max.wait.ms": 20}
        async with Consumer(fake.bootstrap, **config) as consumer:
            consumer.subscribe(["t"])
            await until(consumer.assignment)
            await consumer.position(("t", 0))
            request = next(request for method, _, request in fake.calls if method == "Metadata" and request.topics)
            old: MetadataResponse = await call(consumer._cluster.pool, fake.bootstrap, request, 60)
            fake.create_topic("t").partitions[0].append(encode_batch([(None, b"1")] * 10, timestamp_ms=1))
            fake.appended.set()
            fake.appended = asyncio.Event()
            records: list[ConsumerRecord] = []
            async with asyncio.timeout(60):
                while len(records) < 10:
                    records += await consumer.poll(100)
            fake.inject("Metadata", malformed=old, times=3)
            consumer._metadata.request_refresh(["t"])
            await until(lambda: not fake._faults["Metadata"], "the stale responses")
            assert await consumer.poll(200) == []
            assert await consumer.position(("t", 0)) == 10


async def test_malformed_metadata_responses_are_retried() -> None:
    async with FakeCluster() as fake, connected(fake) as cluster:
        fake.create_topic("t")
        fake.inject("Metadata", malformed=MetadataResponse(), times=2)
        fake.inject("Metadata", times=2)
        assert (await cluster.metadata.wait_for_topic("t", 60)).name == "t"


async def test_hanging_bootstrap_addresses_are_skipped() -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in silent)
        config = {**FAST, "socket.connection.setup.timeout.ms": 100}
        async with FakeCluster() as fake, Producer(f"{addresses},{fake.bootstrap}", **config) as producer:
            fake.create_topic("t")
            assert (await (await producer.send("t", b"x"))).offset == 0


async def test_silent_bootstrap_broker_does_not_delay_connection() -> None:
    """A stopped process accepts connections but does not respond. Other brokers are tried before the timeout."""
    late = {"request.timeout.ms": 200_000, "max.block.ms": 200_000, "socket.connection.setup.timeout.ms": 200_000}
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        addresses = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in silent)
        async with asyncio.timeout(60), FakeCluster() as fake:
            fake.create_topic("t")
            async with Producer(f"{addresses},{fake.bootstrap}", **late) as producer:
                assert (await (await producer.send("t", b"x"))).offset == 0


async def test_polls_with_zero_timeout_return_records() -> None:
    async with FakeCluster() as fake:
        fake.create_topic("t").partitions[0].append(encode_batch([(None, b"1")] * 10, timestamp_ms=1))
        async with Consumer(fake.bootstrap, **FAST, **{"auto.offset.reset": "earliest"}) as consumer:
            consumer.subscribe(["t"])
            async with asyncio.timeout(60):
                while not (records := await consumer.poll(0)):
                    pass
            assert len(records) == 10
