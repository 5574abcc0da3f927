"""The consumer against in-memory brokers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from kipmesh.client import Consumer, ConsumerRecord, TopicPartition
from kipmesh.client.consumer.rules.values import EndOfEpochAtLeader, ListOffsetsAtLeader
from kipmesh.client.records import decode_columns, encode_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import (
    FetchableTopicResponse,
    FetchResponse,
    ListOffsetsResponse,
    PartitionData,
)
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "fetch.max.wait.ms": 100, "auto.offset.reset": "earliest"}


def fill(cluster: FakeCluster, topic: str, partition: int, batches: int, records: int = 10, **options: Any) -> None:
    log = cluster.topics[topic].partitions[partition]
    for _ in range(batches):
        base = log.end_offset
        pairs = [(None, b"%d-%d" % (partition, base + index)) for index in range(records)]
        log.append(encode_batch(pairs, timestamp_ms=1000 + base, **options))
    cluster.appended.set()
    cluster.appended = asyncio.Event()


async def take(consumer: Consumer, count: int, timeout_s: float = 60) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(timeout_s):
        while len(records) < count:
            records += await consumer.poll(1000)
    return records


async def test_consumer_reads_every_record_once_and_in_order() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 4)
        for partition in range(4):
            fill(cluster, "t", partition, 30, compression=("none", "gzip", "lz4", "zstd")[partition])
        async with Consumer(cluster.bootstrap, **FAST, **{"max.poll.records": 7}) as consumer:
            consumer.subscribe(["t"])
            records = await take(consumer, 1200)
            assert len(records) == 1200
            for partition in range(4):
                of_partition = [record for record in records if record.partition == partition]
                assert [record.offset for record in of_partition] == list(range(300))
                assert [record.value for record in of_partition] == [
                    b"%d-%d" % (partition, index) for index in range(300)
                ]
            assert records[0].timestamp_type == 0
            assert [await consumer.position(tp) for tp in consumer.assignment()] == [300] * 4
            assert consumer.high_watermark(("t", 0)) == 300
            assert await consumer.poll(50) == []


async def test_large_compressed_batches_are_decoded_in_thread() -> None:
    async with FakeCluster() as cluster:
        log = cluster.create_topic("t").partitions[0]
        sent = [b"".join(b"%d," % (number * number) for number in range(first, first + 30_000)) for first in range(3)]
        for value in sent:
            log.append(encode_batch([(None, value)], timestamp_ms=1, compression="gzip"))
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.assign([("t", 0)])
            assert [record.value for record in await take(consumer, 3)] == sent


async def test_new_records_complete_waiting_poll() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Consumer(cluster.bootstrap, **{**FAST, "fetch.max.wait.ms": 600_000}) as consumer:
            consumer.assign([("t", 0)])
            polling = asyncio.create_task(consumer.poll(600_000))
            await until(lambda: any(name == "Fetch" and request.max_wait_ms for name, _, request in cluster.calls))
            fill(cluster, "t", 0, 1)
            assert len(await asyncio.wait_for(polling, 60)) == 10


async def test_seek_moves_the_position() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        fill(cluster, "t", 0, 5)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            tp = TopicPartition("t", 0)
            consumer.assign([tp])
            consumer.seek(tp, 33)
            assert [record.offset for record in await take(consumer, 17)] == list(range(33, 50))
            consumer.seek_to_beginning([tp])
            assert await consumer.position(tp) == 0
            assert (await take(consumer, 1))[0].offset == 0
            consumer.seek_to_end()
            assert await consumer.position(tp) == 50
            fill(cluster, "t", 0, 1)
            assert (await take(consumer, 10))[0].offset == 50
            with pytest.raises(ValueError, match="not assigned"):
                consumer.seek(("t", 1), 0)
            for offset in (-1, 2**63):
                with pytest.raises(ValueError, match="offset must be between"):
                    consumer.seek(tp, offset)


async def test_beginning_end_and_time_offsets_are_listed() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2)
        fill(cluster, "t", 0, 3)
        cluster.topics["t"].partitions[0].log_start_offset = 5
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            both = [TopicPartition("t", 0), TopicPartition("t", 1)]
            cluster.inject("ListOffsets", ErrorCode.OFFSET_NOT_AVAILABLE)
            assert await consumer.beginning_offsets(both) == {both[0]: 5, both[1]: 0}
            assert await consumer.end_offsets(both) == {both[0]: 30, both[1]: 0}
            found = await consumer.offsets_for_times({("t", 0): 1010, ("t", 1): 1010})
            at_time = found[both[0]]
            assert at_time is not None
            assert (at_time.offset, at_time.timestamp) == (10, 1010)
            assert found[both[1]] is None
            for missing in (("nope", 0), ("t", 9)):
                with pytest.raises(KafkaError) as caught:
                    await consumer.end_offsets([missing])
                assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert sorted((await consumer.partitions_for("t")).partitions) == [0, 1]


async def test_paused_partitions_are_not_read_until_resumed() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        for partition in (0, 1):
            fill(cluster, "t", partition, 3)
        async with Consumer(cluster.bootstrap, **FAST, **{"max.poll.records": 5}) as consumer:
            consumer.subscribe(["t"])
            (first, *_) = await take(consumer, 1)
            consumer.pause([("t", 0)])
            assert consumer.paused() == [("t", 0)]
            rest = await take(consumer, 25 if first.partition == 1 else 30)
            assert {record.partition for record in rest} == {1}
            assert await consumer.poll(150) == []
            consumer.resume([("t", 0)])
            assert {record.partition for record in await take(consumer, 25)} == {0}


@pytest.mark.parametrize("policy", ["earliest", "latest", "none", "error"])
async def test_offset_out_of_range_resets_by_policy(policy: str) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        async with Consumer(cluster.bootstrap, **{**FAST, "auto.offset.reset": policy}) as consumer:
            consumer.assign([("t", 0)])
            if policy in ("none", "error"):
                with pytest.raises(KafkaError) as caught:
                    await consumer.poll(60_000)
                assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
                consumer.seek(("t", 0), 500)
                for _ in range(2):
                    with pytest.raises(KafkaError) as caught:
                        await consumer.poll(60_000)
                    assert "500 of t-0 is not between 0 and 30" in str(caught.value)
                consumer.seek(("t", 0), 20)
                assert len(await take(consumer, 10)) == 10
            else:
                assert await consumer.position(("t", 0)) == (0 if policy == "earliest" else 30)
                consumer.seek(("t", 0), 500)
                fill(cluster, "t", 0, 1)
                expected = 0 if policy == "earliest" else 40
                state = consumer._fetcher.states[TopicPartition("t", 0)]
                await until(lambda: state.position == expected, "the reset")
                fill(cluster, "t", 0, 1)
                assert (await take(consumer, 1))[0].offset == expected


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        None,
    ],
)
async def test_retriable_fetch_errors_are_hidden(code: ErrorCode | None) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        cluster.inject("Fetch", code, times=3)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.subscribe(["t"])
            assert [record.offset for record in await take(consumer, 30)] == list(range(30))


async def test_consumer_follows_a_moved_leader() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.subscribe(["t"])
            await take(consumer, 30)
            cluster.move_leader("t", 0, 2)
            fill(cluster, "t", 0, 1)
            assert [record.offset for record in await take(consumer, 10)] == list(range(30, 40))
            assert any(method == "OffsetsForLeaderEpoch" for method, _, _ in cluster.calls)
            fetches = [request for method, node, request in cluster.calls if (method, node) == ("Fetch", 2)]
            (topic,) = fetches[0].topics
            assert topic.partitions[0].current_leader_epoch == 1
            assert topic.topic_id == cluster.topics["t"].topic_id


@pytest.mark.parametrize("policy", ["earliest", "none"])
async def test_truncation_by_a_new_leader_is_raised_or_reset(policy: str) -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        async with Consumer(cluster.bootstrap, **{**FAST, "auto.offset.reset": policy}) as consumer:
            consumer.assign([("t", 0)])
            consumer.seek(("t", 0), 0)
            await take(consumer, 30)
            cluster.topics["t"].partitions[0].truncate(20)
            cluster.move_leader("t", 0, 2)
            fill(cluster, "t", 0, 3)
            if policy == "none":
                with pytest.raises(KafkaError, match="truncated to offset 20"):
                    await take(consumer, 1)
            else:
                record = (await take(consumer, 1))[0]
                assert (record.offset, record.leader_epoch) == (20, 1)


async def test_consumer_resumes_after_broker_restart() -> None:
    async with FakeCluster(1) as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.subscribe(["t"])
            await take(consumer, 30)
            await cluster.brokers[1].stop()
            assert await consumer.poll(200) == []
            await cluster.brokers[1].start()
            fill(cluster, "t", 0, 1)
            assert len(await take(consumer, 10)) == 10


@pytest.mark.parametrize("policy", ["earliest", "latest", "none"])
async def test_recreated_topic_is_raised_or_read_from_its_start(policy: str) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        async with Consumer(cluster.bootstrap, **{**FAST, "auto.offset.reset": policy}) as consumer:
            consumer.assign([("t", 0)])
            consumer.seek(("t", 0), 0)
            await take(consumer, 30)
            cluster.create_topic("t")
            fill(cluster, "t", 0, 5)
            if policy == "none":
                with pytest.raises(KafkaError, match="recreated"):
                    await take(consumer, 1)
            else:
                assert [record.offset for record in await take(consumer, 50)] == list(range(50))


@pytest.mark.parametrize("policy", ["earliest", "latest"])
async def test_topic_recreated_with_fewer_partitions_drops_missing_partitions(policy: str) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        cluster.create_topic("u", 2)
        for partition in range(3):
            fill(cluster, "t", partition, 1)
        config = {**FAST, "auto.offset.reset": policy, "metadata.max.age.ms": 50}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.subscribe(["t", "u"])
            await until(lambda: len(consumer.assignment()) == 5)
            for tp in consumer.assignment():
                await consumer.position(tp)
            if policy == "earliest":
                await take(consumer, 30)
            cluster.create_topic("t", 1)
            fill(cluster, "t", 0, 2)
            assert [record.offset for record in await take(consumer, 20)] == list(range(20))
            assert consumer.assignment() == [("t", 0), ("u", 0), ("u", 1)]
            for _ in range(5):
                assert await consumer.poll(30) == []  # raises nothing
            cluster.topics["t"].partitions.extend(cluster.partitions(1))
            fill(cluster, "t", 1, 1)
            assert {record.partition for record in await take(consumer, 10)} == {1}


async def test_partitions_missing_from_stale_metadata_are_kept() -> None:
    async with FakeCluster() as cluster:
        topic = cluster.create_topic("t", 2)
        fill(cluster, "t", 1, 1)
        config = {**FAST, "auto.offset.reset": "earliest", "metadata.max.age.ms": 50}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.subscribe(["t"])
            assert len(await take(consumer, 10)) == 10
            hidden = topic.partitions.pop()
            assert await consumer.poll(300) == []
            assert consumer.assignment() == [("t", 0), ("t", 1)]
            topic.partitions.append(hidden)
            fill(cluster, "t", 1, 1)
            assert [record.offset for record in await take(consumer, 10)] == list(range(10, 20))


async def test_unknown_topics_and_partitions_raise_errors() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.subscribe(["nope"])
            with pytest.raises(KafkaError, match="'nope' does not exist"):
                await consumer.poll(60_000)
            consumer.assign([("t", 7)])
            with pytest.raises(KafkaError, match="partition 7 of topic"):
                await consumer.poll(60_000)
            cluster.create_topic("nope")
            fill(cluster, "nope", 0, 1)
            consumer.subscribe(["nope"])
            assert len(await take(consumer, 10)) == 10
            del cluster.topics["nope"]
            with pytest.raises(KafkaError, match="'nope' does not exist"):
                await consumer.poll(60_000)


async def test_added_partitions_are_read_from_their_beginning() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        config = {**FAST, "auto.offset.reset": "latest", "metadata.max.age.ms": 50}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.subscribe(["t"])
            await until(consumer.assignment)
            assert await consumer.position(("t", 0)) == 0
            cluster.topics["t"].partitions.extend(cluster.partitions(1))
            fill(cluster, "t", 1, 1)
            assert [record.offset for record in await take(consumer, 10)] == list(range(10))


@pytest.mark.parametrize("check", [True, False])
async def test_wrong_crc_is_raised_if_checked(check: bool) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        log = cluster.topics["t"].partitions[0]
        header, batch = log.batches[1]
        log.batches[1] = (header, batch[:-2] + bytes([batch[-2] ^ 1]) + batch[-1:])
        async with Consumer(cluster.bootstrap, **FAST, **{"check.crcs": check}) as consumer:
            consumer.assign([("t", 0)])
            if not check:
                assert len(await take(consumer, 30)) == 30
                return
            assert len(await take(consumer, 10)) == 10
            for _ in range(2):
                with pytest.raises(KafkaError, match="t-0 at offset 10") as caught:
                    await consumer.poll(60_000)
                assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
            consumer.seek(("t", 0), 20)
            assert [record.offset for record in await take(consumer, 10)] == list(range(20, 30))


def fetch_response(data: PartitionData) -> FetchResponse:
    return FetchResponse(responses=[FetchableTopicResponse("t", b"", [data])])


@pytest.mark.parametrize(
    "malformed",
    [
        FetchResponse(),
        FetchResponse(error_code=999),
        FetchResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR),
        fetch_response(PartitionData(partition_index=5, records=b"x")),
        fetch_response(PartitionData(records=b"garbage")),
        fetch_response(PartitionData(records=b"\0" * 100)),
        fetch_response(PartitionData(records=encode_batch([(None, b"x")], timestamp_ms=1)[:-3])),
        fetch_response(PartitionData(error_code=12345)),
    ],
)
async def test_malformed_fetch_responses_lose_no_records(malformed: FetchResponse) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 2)
        cluster.inject("Fetch", malformed=malformed)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.assign([("t", 0)])
            records: list[ConsumerRecord] = []
            async with asyncio.timeout(60):
                while len(records) < 20:
                    with contextlib.suppress(KafkaError):
                        records += await consumer.poll(1000)
            assert [record.offset for record in records] == list(range(20))


async def test_malformed_offset_lookups_are_retried() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 1)
        cluster.inject("ListOffsets", malformed=ListOffsetsResponse(), times=2)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.assign([("t", 0)])
            assert len(await take(consumer, 10)) == 10


async def test_raw_batches_cover_every_offset() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        for partition in (0, 1):
            fill(cluster, "t", partition, 10)
        async with Consumer(cluster.bootstrap, **FAST, **{"max.partition.fetch.bytes": 500}) as consumer:
            consumer.assign([("t", 0), ("t", 1)])
            consumer.seek(("t", 0), 15)
            offsets: dict[int, list[int]] = {0: [], 1: []}
            async with asyncio.timeout(60):
                while sum(map(len, offsets.values())) < 185:
                    for batch in await consumer.fetch_batches(1000):
                        assert batch.topic_id == cluster.topics["t"].topic_id
                        assert batch.high_watermark == 100
                        columns = decode_columns(batch.records, start_offset=batch.position)
                        offsets[batch.partition] += columns.offsets
                        assert columns.offsets[-1] + 1 == batch.next_position
            assert offsets == {0: list(range(15, 100)), 1: list(range(100))}
            assert await consumer.position(("t", 1)) == 100


async def test_buffers_are_limited_and_no_partition_starves() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 6)
        for partition in range(6):
            fill(cluster, "t", partition, 200)
        size = len(cluster.topics["t"].partitions[0].batches[0][1])
        config = {**FAST, "max.partition.fetch.bytes": size * 3, "fetch.max.bytes": size * 4, "max.poll.records": 10}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.subscribe(["t"])
            seen: Counter[int] = Counter()
            for _ in range(60):
                seen.update(record.partition for record in await take(consumer, 10))
                assert consumer._fetcher.buffered_bytes <= size * 3 * 4
            assert min(seen[partition] for partition in range(6)) > 50


async def test_cancelled_poll_loses_no_records() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        log = cluster.topics["t"].partitions[0]
        for first in range(20):
            value = b"".join(b"%d," % (number * number) for number in range(first, first + 30_000))
            log.append(encode_batch([(None, value), (None, b"%d" % first)], timestamp_ms=1, compression="gzip"))
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.assign([("t", 0)])
            offsets: list[int] = []
            cancelled = 0
            async with asyncio.timeout(60):
                while len(offsets) < 40:
                    try:
                        async with asyncio.timeout(0.002):
                            offsets += [record.offset for record in await consumer.poll(1000)]
                    except TimeoutError:
                        cancelled += 1
                        if cancelled % 20 == 0:  # decoding may exceed the timeout each time
                            offsets += [record.offset for record in await consumer.poll(1000)]
                        await asyncio.sleep(0.005)
            assert offsets == list(range(40))
            assert cancelled


async def test_close_ends_polls_and_is_idempotent() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        consumer = Consumer(cluster.bootstrap, **FAST)
        with pytest.raises(RuntimeError, match="not started"):
            await consumer.poll()
        await consumer.start()
        consumer.assign([("t", 0)])
        polling = asyncio.create_task(consumer.poll(60_000))
        await asyncio.sleep(0.05)
        await consumer.close()
        await consumer.close()
        with pytest.raises(RuntimeError, match="closed"):
            await polling


async def test_iteration_yields_records_in_order() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 2)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.subscribe(["t"])
            offsets = []
            async for record in consumer:
                offsets.append(record.offset)
                if len(offsets) == 20:
                    break
            assert offsets == list(range(20))


async def test_seek_and_assignment_invalidate_pending_lookups() -> None:
    """The fetcher decides lookups and validations in one step and starts them in a later one."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        fill(cluster, "t", 0, 3)
        async with Consumer(cluster.bootstrap, **FAST) as consumer:
            consumer.assign([("t", 0)])
            await take(consumer, 30)
            fetcher = consumer._fetcher
            state = fetcher.states[TopicPartition("t", 0)]

            def start_lookups() -> list[Coroutine[None, None, None]]:
                rounds: list[Coroutine[None, None, None]] = []
                for old in (ListOffsetsAtLeader(1, 0, -2), EndOfEpochAtLeader(1, 0, 0)):
                    fetcher._leader_requests.add(state, old)
                fetcher._leader_requests.start(0, rounds.append)
                return rounds

            lookups = start_lookups()
            consumer.seek(("t", 0), 12)
            for lookup in lookups:
                await lookup
            assert (await take(consumer, 1))[0].offset == 12
            lookups = start_lookups()
            consumer.assign([])
            consumer.assign([("t", 0)])
            consumer.seek(("t", 0), 17)
            for lookup in lookups:
                await lookup
            assert (await take(consumer, 1))[0].offset == 17
