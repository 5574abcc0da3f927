"""Fetch sessions of consumers: incremental requests, recovery and close (227-07, 227-17 to 227-19)."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from kipmesh.client import Consumer, ConsumerRecord, TopicPartition
from kipmesh.client.consumer import fetcher
from kipmesh.client.consumer.broker_fetches import BrokerFetches
from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import FetchSessionDescription
from kipmesh.messages import FetchableTopicResponse, FetchPartition, FetchRequest, FetchResponse, PartitionData
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster

CONFIG = {
    "retry.backoff.ms": 5,
    "retry.backoff.max.ms": 20,
    "fetch.max.wait.ms": 100,
    "auto.offset.reset": "earliest",
    "client.id": "tester",
}
LONG = {**CONFIG, "fetch.max.wait.ms": 600_000}


def fill(cluster: FakeCluster, partition: int, batches: int = 1, records: int = 10) -> None:
    log = cluster.topics["t"].partitions[partition]
    for _ in range(batches):
        log.append(encode_batch([(None, b"x")] * records, timestamp_ms=1))
    cluster.appended.set()
    cluster.appended = asyncio.Event()


async def take(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(60):
        while len(records) < count:
            records += await consumer.poll(60_000)
    return records


def fetches(cluster: FakeCluster, node_id: int = 1) -> list[FetchRequest]:
    return [request for method, node, request in cluster.calls if method == "Fetch" and node == node_id]


def in_session(cluster: FakeCluster, since: int = 0) -> list[FetchRequest]:
    return [request for request in fetches(cluster)[since:] if (request.session_id, request.session_epoch) != (0, -1)]


def named(request: FetchRequest) -> dict[int, int]:
    return {each.partition: each.fetch_offset for topic in request.topics for each in topic.partitions}


def forgotten(request: FetchRequest) -> list[int]:
    return [each for topic in request.forgotten_topics_data for each in topic.partitions]


def sessions(cluster: FakeCluster, node_id: int = 1) -> list[FetchSessionDescription]:
    return list(cluster.brokers[node_id].sessions.cache.list(0))


def messages_above_debug(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return messages of kipmesh above debug level. Ignores grpc, which logs the injected faults."""
    records = [record for record in caplog.records if record.name.startswith("kipmesh")]
    return [record.getMessage() for record in records if record.levelno > logging.DEBUG]


async def test_incremental_fetch_names_moved_partitions_only() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 40)
        async with Consumer(cluster.bootstrap, **CONFIG) as consumer:
            consumer.assign([("t", partition) for partition in range(40)])
            await until(lambda: consumer.fetch_stats.incremental_fetches > 1)
            (session,) = sessions(cluster)
            assert (session.client_id, session.privileged, session.partitions) == ("tester", False, 40)
            fill(cluster, 7)
            assert {record.partition for record in await take(consumer, 10)} == {7}
            count = len(fetches(cluster))
            await until(lambda: len(fetches(cluster)) > count + 1)
            first, *others = fetches(cluster)
            assert (first.session_id, first.session_epoch, len(named(first))) == (0, 0, 40)
            assert [other.session_epoch for other in others] == list(range(1, len(others) + 1))
            assert {other.session_id for other in others} == {session.session_id}
            assert [named(other) for other in others if other.topics] == [{7: 10}]
            stats = consumer.fetch_stats
            assert (stats.sessions, stats.partitions, stats.full_fetches, stats.fetches_aside) == (1, 40, 1, 0)
            assert not stats.resets
            assert consumer.high_watermark(("t", 7)) == 10
            assert consumer.high_watermark(("t", 39)) == 0


async def test_pause_seek_and_assignment_update_the_session() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        fill(cluster, 0, 2)
        async with Consumer(cluster.bootstrap, **CONFIG) as consumer:
            consumer.assign([("t", partition) for partition in range(3)])
            await take(consumer, 20)

            async def after(change: Callable[[], None], *seen: object) -> list[FetchRequest]:
                """Return the session's requests after a change, up to the response to those that contain `seen`."""
                count = len(fetches(cluster))
                change()
                for content in seen:
                    await until(partial(was_sent, content, count))
                sent = len(in_session(cluster, count))
                await until(lambda: len(in_session(cluster, count)) > sent)
                return in_session(cluster, count)

            def was_sent(content: object, count: int) -> bool:
                return any(content in contents(request) for request in in_session(cluster, count))

            def contents(request: FetchRequest) -> list[object]:
                return [each for each in (named(request), forgotten(request)) if each]

            requests = await after(lambda: consumer.pause([("t", 1)]), [1])
            assert [forgotten(each) for each in requests if forgotten(each)] == [[1]]
            assert sessions(cluster)[0].partitions == 2
            requests = await after(lambda: consumer.resume([("t", 1)]), {1: 0})
            assert [named(each) for each in requests if each.topics] == [{1: 0}]
            requests = await after(lambda: consumer.assign([("t", 0), ("t", 1), ("t", 3)]), [2], {3: 0})
            assert [forgotten(each) for each in requests if forgotten(each)] == [[2]]
            assert [named(each) for each in requests if each.topics][-1] == {3: 0}
            count = len(fetches(cluster))
            consumer.seek(("t", 0), 5)  # below the high watermark: fetched immediately, beside the waiting session
            assert [record.offset for record in await take(consumer, 15)] == list(range(5, 20))
            assert {0: 5} in [named(each) for each in fetches(cluster)[count:]]
            await until(lambda: sessions(cluster)[0].partitions == 3)
            assert consumer.fetch_stats.full_fetches == 1


async def test_discarded_records_are_fetched_again() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, 0, 3)
        async with Consumer(cluster.bootstrap, **CONFIG, **{"max.poll.records": 3}) as consumer:
            consumer.assign([("t", 0)])
            for offset in [0, 0, 10, 10, 30, 5, 5, 0] * 3:
                consumer.seek(("t", 0), offset)
                assert [record.offset for record in await consumer.poll(20)] in ([], list(range(offset, offset + 3)))
            consumer.seek(("t", 0), 0)
            assert [record.offset for record in await take(consumer, 30)] == list(range(30))
            assert consumer.fetch_stats.full_fetches == 1
            assert not consumer.fetch_stats.resets


async def test_reassigned_partition_keeps_its_high_watermark() -> None:
    """The broker never received the removal, so it does not return the watermarks again."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        fill(cluster, 0)
        config = {**LONG, "fetch.max.bytes": 500, "max.partition.fetch.bytes": 5000}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.assign([("t", 0), ("t", 1)])
            await take(consumer, 10)
            consumer.seek(("t", 0), 10)
            after_seek = FetchPartition(0, 0, 10, -1, -1, 5000)
            await until(
                lambda: any(after_seek in topic.partitions for each in fetches(cluster) for topic in each.topics)
            )
            fill(cluster, 1, 50)
            await until(lambda: consumer._fetcher.buffered_bytes >= 500)
            assert consumer.high_watermark(("t", 0)) == 10
            count = len(fetches(cluster))
            consumer.assign([("t", 1)])
            await asyncio.sleep(0.01)
            consumer.assign([("t", 0), ("t", 1)])
            consumer.seek(("t", 0), 10)
            assert consumer.high_watermark(("t", 0)) is None
            await take(consumer, 500)
            await until(lambda: len(fetches(cluster)) > count)
            assert all(0 not in named(each) and not forgotten(each) for each in fetches(cluster)[count:])
            assert consumer.high_watermark(("t", 0)) == 10


async def test_response_for_unassigned_partition_is_ignored() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        async with Consumer(cluster.bootstrap, **LONG) as consumer:
            consumer.assign([("t", 0), ("t", 1)])
            await until(lambda: consumer.fetch_stats.incremental_fetches == 1)
            lookups = sum(method == "ListOffsets" for method, _, _ in cluster.calls)
            consumer.assign([("t", 1)])
            fill(cluster, 0)  # the waiting request still contains the partition
            await until(lambda: consumer.fetch_stats.incremental_fetches >= 2)
            fill(cluster, 1)
            assert {record.partition for record in await take(consumer, 10)} == {1}
            assert sum(method == "ListOffsets" for method, _, _ in cluster.calls) == lookups
            assert consumer._fetcher.buffered_bytes == 0


async def test_disabled_sessions_send_full_fetches_only() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        fill(cluster, 0)
        async with Consumer(cluster.bootstrap, **CONFIG, **{"enable.incremental.fetch": False}) as consumer:
            consumer.subscribe(["t"])
            await take(consumer, 10)
            count = len(fetches(cluster))
            await until(lambda: len(fetches(cluster)) > count + 1)
            assert {(each.session_id, each.session_epoch) for each in fetches(cluster)} == {(0, -1)}
            assert consumer.fetch_stats.incremental_fetches == consumer.fetch_stats.sessions == 0
            assert len(sessions(cluster)) == 0


async def test_broker_without_session_slots_is_not_polled_faster() -> None:
    async with FakeCluster(session_slots=0) as cluster:
        cluster.create_topic("t", 3)
        async with Consumer(cluster.bootstrap, **CONFIG) as consumer:
            consumer.subscribe(["t"])
            await until(lambda: len(fetches(cluster)) > 2)
            count, started = len(fetches(cluster)), time.monotonic()
            await until(lambda: len(fetches(cluster)) >= count + 4)
            assert time.monotonic() - started > 0.25
            fill(cluster, 1)
            assert len(await take(consumer, 10)) == 10
            assert {(each.session_id, each.session_epoch) for each in fetches(cluster)} == {(0, 0)}


MALFORMED = FetchResponse(responses=[FetchableTopicResponse("t", b"?" * 16, [PartitionData(77)])])
CASES = {
    "FETCH_SESSION_ID_NOT_FOUND": lambda cluster: cluster.brokers[1].sessions.evict(),
    "INVALID_FETCH_SESSION_EPOCH": lambda cluster: cluster.brokers[1].sessions.overtake(),
    "FETCH_SESSION_TOPIC_ID_ERROR": lambda cluster: cluster.inject(
        "Fetch", malformed=FetchResponse(error_code=ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
    ),
    "KAFKA_STORAGE_ERROR": lambda cluster: cluster.inject(
        "Fetch", malformed=FetchResponse(error_code=ErrorCode.KAFKA_STORAGE_ERROR)
    ),
    "MALFORMED": lambda cluster: cluster.inject("Fetch", malformed=MALFORMED),
    "TRANSPORT": lambda cluster: cluster.inject("Fetch"),
}


@pytest.mark.parametrize("cause", CASES)
async def test_lost_session_is_replaced_without_backoff(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    """227-19. The backoff exceeds the test timeout."""
    slow = {**CONFIG, "retry.backoff.ms": 60_000, "retry.backoff.max.ms": 60_000}
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 5)
        with caplog.at_level(logging.DEBUG):
            async with Consumer(cluster.bootstrap, **slow) as consumer:
                consumer.subscribe(["t"])
                await until(lambda: consumer.fetch_stats.incremental_fetches > 1)
                old = sessions(cluster)[0].session_id
                CASES[cause](cluster)
                await until(lambda: consumer.fetch_stats.full_fetches == 2)
                fill(cluster, 3)
                assert len(await take(consumer, 10)) == 10
                assert consumer.fetch_stats.resets == {cause: 1}
                requests = [(each.session_id, each.session_epoch) for each in fetches(cluster)]
                replacement = (0, 0) if cause == "FETCH_SESSION_ID_NOT_FOUND" else (old, 0)
                assert replacement in requests[1:]
                (session,) = sessions(cluster)
                assert session.session_id != old
    assert messages_above_debug(caplog) == []
    assert any(f"fetch session reset session_id={old} " in record.getMessage() for record in caplog.records)


async def test_broker_restarts_under_load_lose_no_records(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 10)
        stopping = False

        async def load() -> None:
            partition = 0
            while not stopping:
                partition = (partition + 1) % 10
                fill(cluster, partition)
                await asyncio.sleep(0.002)

        with caplog.at_level(logging.DEBUG):
            async with Consumer(cluster.bootstrap, **CONFIG) as consumer:
                consumer.subscribe(["t"])
                loading = asyncio.create_task(load())
                read: dict[int, list[int]] = {partition: [] for partition in range(10)}

                def has_fetched_more_than(full: int) -> bool:
                    return consumer.fetch_stats.full_fetches > full

                async def read_on(count: int) -> None:
                    for record in await take(consumer, count):
                        read[record.partition].append(record.offset)

                await read_on(500)
                for node_id in (1, 2, 1):
                    full = consumer.fetch_stats.full_fetches
                    await cluster.brokers[node_id].stop()
                    await cluster.brokers[node_id].start()
                    await until(partial(has_fetched_more_than, full))
                    await read_on(500)
                stopping = True
                await loading
                logs = cluster.topics["t"].partitions
                while any(len(read[each]) < logs[each].end_offset for each in read):
                    await read_on(1)
                assert all(offsets == list(range(len(offsets))) for offsets in read.values())
                assert sum(consumer.fetch_stats.resets.values()) >= 3
    assert messages_above_debug(caplog) == []


# -- closing


@pytest.fixture
def long_close_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the close timeout, so that a stall of the machine does not end the close."""
    monkeypatch.setattr(fetcher, "CLOSE_SECONDS_MAX", 60.0)


@pytest.mark.usefixtures("long_close_timeout")
async def test_close_ends_fetch_sessions() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 4)
        async with Consumer(cluster.bootstrap, **LONG) as consumer:
            consumer.subscribe(["t"])
            await until(lambda: consumer.fetch_stats.incremental_fetches >= 2)
            ids = {node_id: sessions(cluster, node_id)[0].session_id for node_id in (1, 2)}
        for node_id in (1, 2):
            assert sessions(cluster, node_id) == []
            last = fetches(cluster, node_id)[-1]
            assert (last.session_id, last.session_epoch, last.topics) == (ids[node_id], -1, ())


@pytest.mark.usefixtures("long_close_timeout")
async def test_close_before_first_response_leaves_no_session() -> None:
    for steps in range(0, 40, 3):
        async with FakeCluster() as cluster:
            cluster.create_topic("t", 4)
            async with Consumer(cluster.bootstrap, **LONG) as consumer:
                consumer.subscribe(["t"])
                for _ in range(steps):
                    await asyncio.sleep(0.0005)
            assert sessions(cluster) == []


@pytest.mark.parametrize("failure", ["stopped", "silent"])
async def test_close_does_not_wait_for_unreachable_broker(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    close = BrokerFetches.close

    async def close_with_timeout(broker: BrokerFetches, timeout_s: float) -> None:
        await close(broker, timeout_s if broker.node_id == 1 else 60.0)

    monkeypatch.setattr(BrokerFetches, "close", close_with_timeout)
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2)
        consumer = Consumer(cluster.bootstrap, **CONFIG)
        await consumer.start()
        consumer.subscribe(["t"])
        await until(lambda: consumer.fetch_stats.incremental_fetches >= 2)
        if failure == "stopped":
            await cluster.brokers[1].stop()
        else:

            async def silence(_method: str, node_id: int, _request: object) -> None:
                if node_id == 1:
                    await asyncio.Event().wait()

            cluster.hook = silence
        await asyncio.wait_for(consumer.close(), 20)  # less than the request timeout of 30 s
        assert sessions(cluster, 2) == []
        cluster.hook = None


async def test_session_is_closed_when_broker_leads_no_partition() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 4)
        async with Consumer(cluster.bootstrap, **CONFIG) as consumer:
            consumer.subscribe(["t"])
            await until(lambda: consumer.fetch_stats.sessions == 2)
            for partition in range(4):
                cluster.move_leader("t", partition, 2)
            fill(cluster, 0)
            assert len(await take(consumer, 10)) == 10
            await until(lambda: len(sessions(cluster, 1)) == 0)
            await until(lambda: sessions(cluster, 2)[0].partitions == 4)
            assert consumer.fetch_stats.sessions == 1


# -- fetches beside the session


async def test_full_buffers_are_not_fetched_and_idle_partitions_delay_no_others() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 50)
        fill(cluster, 0, 300)
        size = len(cluster.topics["t"].partitions[0].batches[0][1])
        config = {**LONG, "max.partition.fetch.bytes": 2 * size, "max.poll.records": 10}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.subscribe(["t"])
            await take(consumer, 10)
            await until(lambda: consumer._fetcher.buffered_bytes >= 2 * size)
            count = len(fetches(cluster))
            await asyncio.sleep(0.05)
            assert len(fetches(cluster)) <= count + 1
            offsets = [record.offset for record in await take(consumer, 2990)]
            assert offsets == list(range(10, 3000))
            assert consumer._fetcher.buffered_bytes <= 4 * size
            aside = [each for each in fetches(cluster) if (each.session_id, each.session_epoch) == (0, -1)]
            assert len(aside) > 50
            assert all(set(named(each)) == {0} for each in aside)
            fill(cluster, 0)  # fully read; the waiting session does not contain it
            assert len(await take(consumer, 10)) == 10
            fill(cluster, 1)  # the session's response adds it again
            assert len(await take(consumer, 10)) == 10
            await until(lambda: sessions(cluster)[0].partitions == 50)
            count = consumer.fetch_stats.fetches_aside
            for _ in range(5):
                fill(cluster, 0)
                assert len(await take(consumer, 10)) == 10
            assert consumer.fetch_stats.fetches_aside == count


async def test_total_buffers_are_limited() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 10)
        for partition in range(10):
            fill(cluster, partition, 50)
        size = len(cluster.topics["t"].partitions[0].batches[0][1])
        config = {**CONFIG, "max.partition.fetch.bytes": 3 * size, "fetch.max.bytes": 5 * size}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.subscribe(["t"])
            await until(lambda: consumer._fetcher.buffered_bytes >= 5 * size)
            await asyncio.sleep(0.05)
            assert consumer._fetcher.buffered_bytes <= 10 * size
            assert len(await take(consumer, 5000)) == 5000


# -- costs


async def calls_per_round(partitions: int) -> float:
    """Count function calls of the client per round. In each of ten rounds, one partition gets a record."""
    calls = 0
    names = ("fetcher.py", "consumer.py", "broker_fetches.py", "handler.py")

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith(names)

    async with FakeCluster() as cluster:
        cluster.create_topic("t", partitions)
        async with Consumer(cluster.bootstrap, **LONG) as consumer:
            consumer.subscribe(["t"])
            await until(lambda: consumer.fetch_stats.partitions == partitions)
            try:
                for round_ in range(11):
                    if round_ == 1:
                        sys.setprofile(count)
                    fill(cluster, round_, 1, 1)
                    (record,) = await take(consumer, 1)
                    assert record.partition == round_
            finally:
                sys.setprofile(None)
            assert consumer.fetch_stats.full_fetches == 1
            assert max(len(named(each)) for each in fetches(cluster)[1:]) <= 2
    return calls / 10


async def test_fetch_cost_is_independent_of_assigned_partitions() -> None:
    few, many = await calls_per_round(20), await calls_per_round(1000)
    assert many < 1.5 * few, (few, many)


def test_topic_partition_equals_plain_tuple() -> None:
    """Dictionaries keyed by TopicPartition accept plain tuples."""
    assert {TopicPartition("t", 1): 1}.get(("t", 1)) == 1  # type: ignore[call-overload]
