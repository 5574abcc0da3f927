"""Metadata requests of producers (KIP-526), against in-memory brokers."""

from __future__ import annotations

import asyncio
import time

import pytest

from kipmesh.client import Producer
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.producer import TopicTracker, TrackerConfig
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster
from tests.unit.client.producer_clock import advance_clock

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "linger.ms": 0}


def requested_topics(fake: FakeCluster) -> list[list[str]]:
    """Return the topics of each metadata request after the initial one."""
    requests = [request for method, _, request in fake.calls if method == "Metadata"]
    assert not any(request.topics is None for request in requests)
    assert not requests[0].topics
    return [[topic.name or "" for topic in request.topics] for request in requests[1:]]


async def test_topic_metadata_is_requested_on_first_use() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap, **FAST) as producer:
        for number in range(50):
            fake.create_topic(f"t{number}")
        for number in range(50):
            await (await producer.send(f"t{number}", b"v"))
        assert requested_topics(fake) == [[f"t{number}"] for number in range(50)]
        metrics = producer.metrics()
        assert metrics["metadata_urgent_requests"] == metrics["metadata_urgent_topics"] == 50
        assert metrics["metadata_cached_topics"] == 50
        assert metrics["metadata_non_urgent_requests"] == metrics["metadata_non_urgent_topics"] == 0
        assert metrics["metadata_urgent_bytes"] > 50 * 20
        assert metrics["metadata_blocked_s"] > 0


async def test_all_mode_requests_all_known_topics() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap, **FAST, **{"metadata.refresh": "all"}) as producer:
        for number in range(10):
            fake.create_topic(f"t{number}")
            await (await producer.send(f"t{number}", b"v"))
        assert [len(topics) for topics in requested_topics(fake)] == list(range(1, 11))


async def test_concurrent_topics_share_metadata_requests() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap, **FAST) as producer:
        names = [f"t{number}" for number in range(300)]
        for name in names:
            fake.create_topic(name)
        sent = await asyncio.gather(*[producer.send(name, b"v") for name in names])
        await asyncio.gather(*sent)
        requests = requested_topics(fake)
        assert len(requests) <= 2
        assert sorted(name for topics in requests for name in topics) == sorted(names)


async def test_missing_topics_back_off_without_blocking_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**FAST, "retry.backoff.ms": 50, "retry.backoff.max.ms": 50, "max.block.ms": 100_000}
    async with FakeCluster() as fake, Producer(fake.bootstrap, **config) as producer:
        for number in range(40):
            fake.create_topic(f"t{number}")
        began = time.monotonic()
        missing = [asyncio.create_task(producer.send(f"missing{number}", b"v")) for number in range(5)]
        await until(lambda: sum("missing0" in topics for topics in requested_topics(fake)) >= 2)
        for number in range(40):
            await (await producer.send(f"t{number}", b"v"))
        assert not any(each.done() for each in missing)
        await until(lambda: sum("missing0" in topics for topics in requested_topics(fake)) >= 6)
        assert time.monotonic() - began > 4 * 0.04  # five backoffs, each with 20 % jitter
        advance_clock(monkeypatch, 100)
        for outcome in await asyncio.gather(*missing, return_exceptions=True):
            assert isinstance(outcome, KafkaError)
            assert outcome.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        fake.create_topic("t40")
        await producer.send("t40", b"v")  # requests are serialized, so earlier ones are complete
        requests = len(requested_topics(fake))
        await asyncio.sleep(0.15)
        assert len(requested_topics(fake)) == requests  # no send waits for the missing topics
        assert producer.metrics()["metadata_cached_topics"] == 41
        assert set(producer._metadata._entries) == {f"t{number}" for number in range(41)}


async def test_moved_leader_makes_topic_urgent() -> None:
    async with FakeCluster(2) as fake, Producer(fake.bootstrap, **FAST) as producer:
        for name in ("a", "b", "c"):
            fake.create_topic(name)
            await (await producer.send(name, b"1"))
        before = len(requested_topics(fake))
        fake.move_leader("b", 0, 2)
        await (await producer.send("b", b"2"))
        await until(lambda: requested_topics(fake)[before:])
        assert set(map(tuple, requested_topics(fake)[before:])) == {
            ("b",)
        }  # two requests if the first broker responds slowly


async def test_idle_topics_are_evicted_and_busy_topics_kept() -> None:
    async with FakeCluster() as fake:
        producer = Producer(fake.bootstrap, **FAST)
        config = TrackerConfig(300_000, 150, 5, lambda _: 5.0)
        producer._metadata._tracker = TopicTracker(config)
        async with producer:
            for name in ("busy", "idle"):
                fake.create_topic(name)
                await (await producer.send(name, b"1"))
            fake.inject("Produce", ErrorCode.NOT_ENOUGH_REPLICAS, times=10_000, topic="busy")
            busy = await producer.send("busy", b"2")

            def kept() -> list[set[str]]:
                return [set(each) for each in (producer._known, producer._topics, producer._metadata._entries)]

            await until(lambda: kept() == [{"busy"}] * 3)
            await asyncio.sleep(0.3)
            assert kept() == [{"busy"}] * 3
            assert producer.metrics()["metadata_evictions"] >= 1
            fake._faults.clear()
            assert (await busy).offset == 1
            before = len(requested_topics(fake))
            assert (await (await producer.send("idle", b"2"))).offset == 1
            assert ["idle"] in requested_topics(fake)[before:]


async def test_split_batches_release_their_topic() -> None:
    async with FakeCluster() as fake:
        fake.create_topic("t")
        fake.message_bytes_max = 1000
        async with Producer(fake.bootstrap, **{**FAST, "linger.ms": 20}) as producer:
            sent = [await producer.send("t", b"%03d" % index * 50) for index in range(40)]
            assert [(await each).offset for each in sent] == list(range(40))
            assert list(producer._metadata._tracker._idle) == ["t"]


async def test_metadata_is_refreshed_before_maximum_age() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap, **FAST, **{"metadata.max.age.ms": 400}) as producer:
        fake.create_topic("t")
        await (await producer.send("t", b"1"))
        await until(lambda: len(requested_topics(fake)) >= 4)
        assert set(map(tuple, requested_topics(fake))) == {("t",)}


async def test_close_fails_sends_that_wait_for_metadata() -> None:
    async with FakeCluster() as fake:
        producer = Producer(fake.bootstrap, **FAST)
        await producer.start()
        waiting = asyncio.create_task(producer.send("missing", b"v"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await producer.close()
            with pytest.raises(RuntimeError, match="closed"):
                await waiting


async def test_producer_recovers_once_a_broker_responds_again() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap, **FAST) as producer:
        fake.create_topic("t")
        port, config = fake.brokers[1].port, producer.config
        await fake.brokers[1].stop()
        waiting = asyncio.create_task(producer.send("t", b"0"))
        await until(lambda: producer.last_failure)
        producer.config = config.model_copy(update={"max_block_ms": 100})
        with pytest.raises(KafkaError, match="no broker responds") as caught:
            await producer.send("t", b"1")
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        assert producer.metrics()["metadata_failed_requests"] >= 1
        await fake.brokers[1].start(port)
        producer.config = config
        async with asyncio.timeout(60):
            assert (await (await waiting)).offset == 0
            assert (await (await producer.send("t", b"1"))).offset == 1


def test_metadata_keys_have_defaults_and_limits() -> None:
    assert ProducerConfig.parse({}).metadata_evict_ms == 300_000
    assert ProducerConfig.parse({}).metadata_refresh == "paced"
    assert ProducerConfig.parse({"metadata.max.idle.ms": "6000"}).metadata_evict_ms == 6000
    for bad, message in (
        ({"metadata.evict.ms": 4999}, "metadata.evict.ms"),
        ({"metadata.max.idle.ms": 6000, "metadata.evict.ms": 6000}, "is an alias of"),
        ({"metadata.refresh": "some"}, "metadata.refresh"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            ProducerConfig.parse(bad)
