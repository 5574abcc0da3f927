"""The producer against in-memory brokers."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from kipmesh.client import Producer, RecordMetadata, WouldBlockError
from kipmesh.client.records import decode_columns
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import parse_header
from kipmesh.messages import ProduceResponse
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster
from tests.unit.client.producer_clock import advance_clock

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "linger.ms": 0}


def values(cluster: FakeCluster, topic: str, partition: int) -> list[bytes | None]:
    batches = cluster.topics[topic].partitions[partition].batches
    return [value for _, batch in batches for value in decode_columns(batch).values]


async def test_delivery_returns_the_record_metadata() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        async with Producer(cluster.bootstrap, **FAST) as producer:
            first = await producer.send("t", b"a", partition=1, timestamp_ms=5, headers=[("h", b"v"), ("n", None)])
            assert await first == RecordMetadata("t", 1, 0, 5)
            assert first.done()
            assert first.exception() is None
            second = await (await producer.send("t", None, key=b"k", partition=1))
            assert second.offset == 1
            assert abs(second.timestamp - time.time() * 1000) < 60_000
        columns = decode_columns(cluster.topics["t"].partitions[1].batches[0][1], with_headers=True)
        assert columns.headers == [[("h", b"v"), ("n", None)]]


async def test_key_selects_partition_by_murmur2() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 7)
        async with Producer(cluster.bootstrap, **FAST) as producer:
            done = await (await producer.send("t", b"v", key=b"foobar"))
            assert done.partition == (-790332482 & 0x7FFFFFFF) % 7


async def test_linger_collects_and_batch_size_splits() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **{**FAST, "linger.ms": 50, "batch.size": 1000}) as producer:
            small = [await producer.send("t", b"x" * 10) for _ in range(10)]
            await asyncio.gather(*small)
            assert len(cluster.topics["t"].partitions[0].batches) == 1
            large = [await producer.send("t", b"x" * 600) for _ in range(6)]
            await asyncio.gather(*large)
            assert len(cluster.topics["t"].partitions[0].batches) == 7


async def test_one_request_carries_all_ready_partitions() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 8)
        async with Producer(cluster.bootstrap, **{**FAST, "linger.ms": 20}) as producer:
            await producer.partitions_for("t")
            for partition in range(8):
                await producer.send("t", b"v", partition=partition)
            await producer.flush()
            requests = [request for method, _, request in cluster.calls if method == "Produce"]
            assert [len(request.topic_data[0].partition_data) for request in requests] == [8]
            assert requests[0].topic_data[0].topic_id == cluster.topics["t"].topic_id


async def test_requests_stay_below_max_request_size() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 8)
        config = {**FAST, "linger.ms": 20, "max.request.size": 5000}
        async with Producer(cluster.bootstrap, **config) as producer:
            for partition in range(8):
                await producer.send("t", b"v" * 2000, partition=partition)
            await producer.flush()
            requests = [request for method, _, request in cluster.calls if method == "Produce"]
            sizes = [sum(len(p.records) for p in request.topic_data[0].partition_data) for request in requests]
            assert max(sizes) <= 5000
            assert sum(map(len, (request.topic_data[0].partition_data for request in requests))) == 8


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_are_written_as_sent(compression: str) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        config = {**FAST, "linger.ms": 20, "compression.type": compression, "batch.size": 100_000}
        async with Producer(cluster.bootstrap, **config) as producer:
            sent = [b"value %d " % index * 20 for index in range(1000)]
            for value in sent:
                await producer.send("t", value)
        assert values(cluster, "t", 0) == sent
        assert parse_header(cluster.topics["t"].partitions[0].batches[0][1]).compression > 0


async def test_producer_follows_a_moved_leader() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"1"))
            cluster.move_leader("t", 0, 2)
            assert (await (await producer.send("t", b"2"))).offset == 1
        assert values(cluster, "t", 0) == [b"1", b"2"]


async def test_producer_waits_for_the_successor_of_a_dead_leader() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"1"))
            await cluster.brokers[1].stop()
            waiting = await producer.send("t", b"2")
            await asyncio.sleep(0.05)
            assert not waiting.done()
            cluster.move_leader("t", 0, 2)
            assert (await waiting).offset == 1


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.CORRUPT_MESSAGE,
        None,
    ],
)
async def test_retriable_errors_keep_record_order(code: ErrorCode | None) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **{**FAST, "batch.size": 0}) as producer:
            cluster.inject("Produce", code, times=3)
            sent = [await producer.send("t", b"%d" % index) for index in range(20)]
            assert [(await each).offset for each in sent] == list(range(20))
        assert values(cluster, "t", 0) == [b"%d" % index for index in range(20)]


async def test_fatal_error_fails_only_its_batch() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **{**FAST, "batch.size": 0}) as producer:
            cluster.inject("Produce", ErrorCode.INVALID_RECORD)
            bad = await producer.send("t", b"bad")
            with pytest.raises(KafkaError) as caught:
                await bad
            assert caught.value.code is ErrorCode.INVALID_RECORD
            assert bad.exception() is not None
            assert (await (await producer.send("t", b"good"))).offset == 0


async def test_produce_retries_are_limited() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST, retries=2) as producer:
            cluster.inject("Produce", ErrorCode.NOT_ENOUGH_REPLICAS, times=3)
            with pytest.raises(KafkaError) as caught:
                await (await producer.send("t", b"x"))
            assert caught.value.code is ErrorCode.NOT_ENOUGH_REPLICAS


async def test_delivery_timeout_ends_waiting_and_sent_batches() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        keys = {"batch.size": 0, "request.timeout.ms": 200_000, "max.in.flight.requests.per.connection": 1}
        async with Producer(cluster.bootstrap, **{**FAST, **keys}) as producer:
            await (await producer.send("t", b"0"))
            cluster.inject("Produce", ErrorCode.NONE, hang=True)
            sent = [await producer.send("t", b"x") for _ in range(3)]
            await until(lambda: sum(method == "Produce" for method, _, _ in cluster.calls) == 2, "the hanging request")
            sender = producer._sender
            assert sender is not None
            usual, sender._delivery_timeout_s = sender._delivery_timeout_s, 0.15
            sender.wake.set()
            outcomes = await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), 60)
            sender._delivery_timeout_s = usual
            assert [each.code for each in outcomes if isinstance(each, KafkaError)] == [ErrorCode.REQUEST_TIMED_OUT] * 3
            await cluster.brokers[1].stop()
            await cluster.brokers[1].start()
            assert (await (await producer.send("t", b"1"))).offset > 0


@pytest.mark.parametrize("split", [True, False])
async def test_batches_too_large_for_the_broker_are_split_or_refused(split: bool) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.message_bytes_max = 1000
        async with Producer(cluster.bootstrap, **{**FAST, "linger.ms": 20}) as producer:
            if split:
                sent = [await producer.send("t", b"%03d" % index * 50) for index in range(40)]
                assert [(await each).offset for each in sent] == list(range(40))
                assert values(cluster, "t", 0) == [b"%03d" % index * 50 for index in range(40)]
            else:
                with pytest.raises(KafkaError) as caught:
                    await (await producer.send("t", b"x" * 2000))
                assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


async def test_record_above_max_request_size_is_refused() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST, **{"max.request.size": 1000}) as producer:
            with pytest.raises(KafkaError) as caught:
                await producer.send("t", b"x" * 1000)
            assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
            assert (await (await producer.send("t", b"x" * 100))).offset == 0


async def test_non_bytes_record_is_refused_without_side_effects() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **{**FAST, "linger.ms": 10}) as producer:
            for bad in ("text", 5):
                with pytest.raises(TypeError):
                    await producer.send("t", bad)  # type: ignore[arg-type]
            good = await producer.send("t", b"1")
            with pytest.raises(TypeError):
                await producer.send("t", "text")  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                await producer.send("t", b"v", headers=[("h", "text")])  # type: ignore[list-item]
            assert (await good).offset == 0
        assert values(cluster, "t", 0) == [b"1"]


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ({"value": "text"}, TypeError, "value must be bytes or None, got str; encode it first"),
        ({"key": 5}, TypeError, "key must be bytes or None, got int; encode it first"),
        ({"partition": "1"}, TypeError, "partition must be int or None, got '1'"),
        ({"headers": [("h", 3)]}, TypeError, "headers must be (str, bytes or None) pairs, got ('h', 3)"),
        ({"headers": 7}, TypeError, "headers must be (str, bytes or None) pairs, got int"),
        ({"headers": [("\ud800", b"")]}, ValueError, r"header name '\ud800' cannot be encoded as UTF-8"),
        ({"topic": []}, TypeError, "topic must be str, got []"),
        ({"timestamp_ms": 1.5}, TypeError, "timestamp_ms must be an integer of milliseconds since 1970, got 1.5"),
    ],
)
async def test_invalid_record_error_names_the_argument(
    bad: dict[str, Any], kind: type[Exception], message: str
) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            arguments = {"topic": "t", "value": b"v", **bad}
            for _ in range(2):  # without and with metadata
                with pytest.raises(kind, match=f"^{re.escape(message)}$"):
                    await producer.send(**arguments)
                await producer.partitions_for("t")
            with pytest.raises(kind, match=f"^{re.escape(message)}$"):
                producer.send_nowait(**arguments)
            assert (await (await producer.send("t", b"v"))).offset == 0


async def test_send_nowait_succeeds_after_partitions_for() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        async with Producer(cluster.bootstrap, **FAST) as producer:
            with pytest.raises(WouldBlockError, match="partitions_for"):
                producer.send_nowait("t", b"0")
            await producer.partitions_for("t")
            assert (await producer.send_nowait("t", b"1", partition=2)).partition == 2
        assert values(cluster, "t", 2) == [b"1"]


async def test_full_buffer_blocks_send_until_max_block_ms() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        config = {**FAST, "batch.size": 1000, "buffer.memory": 3000}
        async with Producer(cluster.bootstrap, **config) as producer:
            await producer.partitions_for("t")
            hold = asyncio.Event()

            async def hook(method: str, _node: int, _request: object) -> None:
                if method == "Produce":
                    await hold.wait()

            cluster.hook = hook
            for _ in range(3):
                await producer.send("t", b"x" * 900)
            with pytest.raises(WouldBlockError):
                producer.send_nowait("t", b"x" * 900)
            usual, producer.config = producer.config, producer.config.model_copy(update={"max_block_ms": 100})
            with pytest.raises(KafkaError) as caught:
                await producer.send("t", b"x" * 900)
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
            assert "buffer.memory" in str(caught.value)
            producer.config = usual
            blocked = asyncio.create_task(producer.send("t", b"last" * 200))
            await asyncio.sleep(0.02)
            assert not blocked.done()
            hold.set()
            assert (await (await blocked)).offset == 3


async def test_buffer_waiter_sends_incomplete_batches() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        late = {"linger.ms": 600_000, "max.block.ms": 600_000}
        config = {**FAST, **late, "batch.size": 1000, "buffer.memory": 2000}
        async with Producer(cluster.bootstrap, **config) as producer, asyncio.timeout(60):
            for partition in range(3):
                await producer.send("t", b"x", partition=partition)


async def test_flush_sends_immediately_and_close_loses_no_records() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 4)
        producer = Producer(cluster.bootstrap, **{**FAST, "linger.ms": 60_000})
        await producer.start()
        sent = [await producer.send("t", b"%d" % index, partition=index % 4) for index in range(100)]
        await producer.flush()
        assert all(each.done() for each in sent)
        more = [await producer.send("t", b"%d" % index, partition=index % 4) for index in range(100)]
        cluster.inject("Produce", ErrorCode.NOT_ENOUGH_REPLICAS, times=2)
        await producer.close()
        await producer.close()
        assert all(each.exception() is None for each in more)
        assert sum(len(values(cluster, "t", index)) for index in range(4)) == 200
        with pytest.raises(RuntimeError, match="closed"):
            await producer.send("t", b"x")


async def test_cancelled_close_fails_pending_records() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        producer = Producer(cluster.bootstrap, **FAST)
        await producer.start()
        await (await producer.send("t", b"0"))
        cluster.inject("Produce", hang=True)
        stuck = await producer.send("t", b"1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await producer.close()
        assert isinstance(stuck.exception(), KafkaError)


async def test_cancelled_delivery_waiter_affects_no_other_record() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **{**FAST, "linger.ms": 600_000}) as producer:
            first, second = await producer.send("t", b"1"), await producer.send("t", b"2")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first, 0.001)
            assert first.cancelled()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await second
            flushing = asyncio.create_task(producer.flush())
            waited: list[Any] = [second]  # typeshed has no Protocol of futures
            done, _ = await asyncio.wait(waited)
            assert done == {second}
            await flushing
            assert (await second).offset == 1
            called: list[object] = []
            second.add_done_callback(called.append)
            await asyncio.sleep(0)
            assert called == [second]


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_requests_carry_the_configured_acks(acks: object) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST, acks=acks) as producer:
            done = await (await producer.send("t", b"x"))
            assert done.offset == (-1 if acks == 0 else 0)
        assert values(cluster, "t", 0) == [b"x"]
        (request,) = [request for method, _, request in cluster.calls if method == "Produce"]
        assert request.acks == {"all": -1}.get(str(acks), acks)


async def test_unknown_topics_and_partitions_raise_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        async with Producer(cluster.bootstrap, **FAST, **{"max.block.ms": 100_000}) as producer:
            missing = asyncio.create_task(producer.send("nope", b"x"))
            for partition in (2, -1):
                with pytest.raises(KafkaError, match="'t'") as caught:
                    await producer.send("t", b"x", partition=partition)
                assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            await until(lambda: producer._metadata._entries["nope"].error, "a response without the topic")
            assert not missing.done()
            advance_clock(monkeypatch, 100)
            with pytest.raises(KafkaError, match="'nope'") as caught:
                await missing
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            waiting = asyncio.create_task(producer.send("late", b"x"))
            await asyncio.sleep(0.02)
            cluster.create_topic("late")
            assert (await (await waiting)).offset == 0


async def test_producer_finds_added_partitions() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"x"))
            cluster.topics["t"].partitions.extend(cluster.partitions(3))
            assert (await (await producer.send("t", b"x", partition=2))).partition == 2


async def test_recreated_topic_is_written_from_offset_0() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"old"))
            cluster.create_topic("t")
            assert (await (await producer.send("t", b"new"))).offset == 0
        assert values(cluster, "t", 0) == [b"new"]


async def test_invalid_produce_responses_fail_their_batch_only() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            cluster.inject("Produce", malformed=ProduceResponse())
            with pytest.raises(KafkaError) as caught:
                await (await producer.send("t", b"x"))
            assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
            cluster.inject("Produce", ErrorCode(-1))
            with pytest.raises(KafkaError):
                await (await producer.send("t", b"x"))
            assert (await (await producer.send("t", b"x"))).offset == 0


async def test_start_fails_if_no_broker_responds() -> None:
    producer = Producer("127.0.0.1:1,127.0.0.1:2", **{"request.timeout.ms": 300, "retry.backoff.ms": 10})
    with pytest.raises(KafkaError) as caught:
        await asyncio.wait_for(producer.start(), 20)
    assert "127.0.0.1:1, 127.0.0.1:2" in str(caught.value)
    assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
    await producer.close()


async def test_send_before_start_is_refused() -> None:
    producer = Producer("127.0.0.1:1")
    with pytest.raises(RuntimeError, match="not started"):
        await producer.send("t", b"x")
    with pytest.raises(RuntimeError, match="not started"):
        producer.send_nowait("t", b"x")
    await producer.close()


async def test_invalid_topic_and_timestamp_are_refused_immediately() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap) as producer:
        fake.create_topic("t")
        for name in ("", "a b", "..", "x" * 300):
            with pytest.raises(KafkaError, match="INVALID_TOPIC_EXCEPTION"):
                await producer.send(name, b"v")
        for timestamp_ms in (-5, 2**63):
            with pytest.raises(KafkaError, match="INVALID_TIMESTAMP"):
                await producer.send("t", b"v", timestamp_ms=timestamp_ms)


async def test_delivery_timeout_error_names_last_failure() -> None:
    async with FakeCluster() as fake:
        fake.create_topic("t")
        fake.inject("Produce", ErrorCode.NOT_ENOUGH_REPLICAS, times=1000)
        async with Producer(fake.bootstrap, **FAST) as producer:
            delivery, sender = await producer.send("t", b"v"), producer._sender
            assert sender is not None
            await until(lambda: any(batch.retried_for for batch in sender.incomplete), "the first refusal")
            sender._delivery_timeout_s = 0.0
            with pytest.raises(KafkaError, match=r"REQUEST_TIMED_OUT.*NOT_ENOUGH_REPLICAS"):
                await delivery


async def test_each_topic_is_requested_once() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap) as producer:
        for number in range(100):
            fake.create_topic(f"t{number}")
        for number in range(100):
            await (await producer.send(f"t{number}", b"v"))
        counts = [len(request.topics) for method, _, request in fake.calls if method == "Metadata"]
        assert sum(counts) <= 110


async def test_oversized_record_is_refused_after_smaller_record() -> None:
    async with FakeCluster() as fake, Producer(fake.bootstrap, max_request_size=4000, linger_ms=50) as producer:
        fake.create_topic("t")
        first = await producer.send("t", b"small", partition=0)
        with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
            await producer.send("t", b"x" * 5000, partition=0)
        assert (await first).offset == 0
