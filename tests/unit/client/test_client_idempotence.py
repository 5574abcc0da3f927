"""An idempotent producer under broken connections, lost responses and reordered requests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kipmesh.client import Producer
from kipmesh.client.producer.sender import Sender
from kipmesh.client.records import decode_columns
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer.sequences import PRODUCER_EPOCH_MAX
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeBroker, FakeCluster

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "linger.ms": 0, "batch.size": 0}


def sender_of(producer: Producer) -> Sender:
    assert producer._sender is not None
    return producer._sender


def values(cluster: FakeCluster, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    batches = cluster.topics[topic].partitions[partition].batches
    return [value for _, batch in batches for value in decode_columns(batch).values]


def epochs(cluster: FakeCluster) -> list[tuple[int, int, int]]:
    return [
        (header.producer_id, header.producer_epoch, header.base_sequence)
        for header, _ in cluster.topics["t"].partitions[0].batches
    ]


async def test_batches_carry_producer_id_epoch_and_partition_sequence() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        async with Producer(cluster.bootstrap, **FAST) as producer:
            for number in range(6):
                await (await producer.send("t", b"%d" % number, partition=number % 2))
        assert epochs(cluster) == [(1000, 0, 0), (1000, 0, 1), (1000, 0, 2)]


async def test_five_batches_of_a_partition_are_in_flight() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        together = maximum = 0
        full = asyncio.Event()

        async def hold(method: str, _node: int, _request: Any) -> None:
            nonlocal together, maximum
            if method == "Produce":
                together += 1
                maximum = max(maximum, together)
                if together == 5:
                    full.set()
                await full.wait()
                together -= 1

        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"first"))
            cluster.hook = hold
            sent = [await producer.send("t", b"%d" % number) for number in range(40)]
            await asyncio.gather(*sent)
        assert maximum == 5
        assert values(cluster) == [b"first", *[b"%d" % number for number in range(40)]]


async def test_written_but_unacknowledged_batches_are_not_duplicated() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"first"))
            cluster.inject("Produce", after=True, times=5)
            sent = [await producer.send("t", b"%d" % number) for number in range(5)]
            assert [done.offset for done in await asyncio.gather(*sent)] == [1, 2, 3, 4, 5]
        assert values(cluster) == [b"first", *[b"%d" % number for number in range(5)]]


@pytest.mark.parametrize("seed", range(4))
async def test_records_are_written_once_and_in_order_over_faulty_network(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2)

        async def disturb(method: str, _node: int, _request: Any) -> None:
            if method != "Produce":
                return
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.02)
            if rng.random() < 0.1:
                code = rng.choice([None, ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND])
                cluster.inject("Produce", code, after=rng.random() < 0.6)
            if rng.random() < 0.05:
                cluster.move_leader("t", rng.randrange(2), rng.choice([1, 2]))

        cluster.hook = disturb
        config = {**FAST, "batch.size": rng.choice([0, 300])}
        async with Producer(cluster.bootstrap, **config) as producer:
            sent = []
            for number in range(300):
                sent.append(await producer.send("t", b"%d" % number, partition=number % 2))
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
            done = await asyncio.gather(*sent)
        for partition in range(2):
            expected = [b"%d" % number for number in range(partition, 300, 2)]
            assert values(cluster, "t", partition) == expected
            assert [each.offset for each in done if each.partition == partition] == list(range(150))


async def test_batches_after_refused_batch_continue_in_next_epoch() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")

        async def refuse(method: str, _node: int, request: Any) -> None:
            if method == "Produce" and decode_columns(request.topic_data[0].partition_data[0].records).values == [b"0"]:
                cluster.inject("Produce", ErrorCode.INVALID_RECORD)

        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"first"))
            cluster.hook = refuse
            sent = [await producer.send("t", b"%d" % number) for number in range(6)]
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
        assert [isinstance(each, KafkaError) for each in outcomes] == [True, *[False] * 5]
        assert values(cluster) == [b"first", *[b"%d" % number for number in range(1, 6)]]
        assert epochs(cluster) == [(1000, 0, 0), *[(1000, 1, sequence) for sequence in range(5)]]


async def test_expired_batch_leaves_no_sequence_gap() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        tried = asyncio.Event()

        async def refuse_lost(method: str, _node: int, request: Any) -> None:
            if method == "Produce" and b"lost" in request.topic_data[0].partition_data[0].records:
                tried.set()
                cluster.inject("Produce", ErrorCode.NOT_ENOUGH_REPLICAS)

        cluster.hook = refuse_lost
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"first"))
            lost = await producer.send("t", b"lost")
            await tried.wait()
            usual = sender_of(producer)._delivery_timeout_s
            sender_of(producer)._delivery_timeout_s = 0.0  # The batch has its sequence. The next check expires it.
            with pytest.raises(KafkaError) as caught:
                await lost
            assert caught.value.code == ErrorCode.REQUEST_TIMED_OUT
            sender_of(producer)._delivery_timeout_s = usual
            await (await producer.send("t", b"next"))
        assert values(cluster) == [b"first", b"next"]
        assert epochs(cluster) == [(1000, 0, 0), (1000, 1, 0)]


async def test_split_batch_is_numbered_like_the_original() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.message_bytes_max = 300
        async with Producer(cluster.bootstrap, **{**FAST, "batch.size": 5000, "linger.ms": 5}) as producer:
            sent = [await producer.send("t", b"%03d" % number * 20) for number in range(20)]
            assert [done.offset for done in await asyncio.gather(*sent)] == list(range(20))
        assert values(cluster) == [b"%03d" % number * 20 for number in range(20)]
        assert {(pid, epoch) for pid, epoch, _ in epochs(cluster)} == {(1000, 0)}


async def test_last_epoch_is_followed_by_new_producer_id() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"a"))
            sender_of(producer)._sequences.set_identity(1000, PRODUCER_EPOCH_MAX)
            await (await producer.send("t", b"b"))
            cluster.inject("Produce", ErrorCode.INVALID_RECORD)
            with pytest.raises(KafkaError):
                await (await producer.send("t", b"refused"))
            await (await producer.send("t", b"c"))
        assert epochs(cluster) == [(1000, 0, 0), (1000, PRODUCER_EPOCH_MAX, 0), (1001, 0, 0)]


async def test_records_wait_for_a_producer_id() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.inject("InitProducerId", ErrorCode.COORDINATOR_NOT_AVAILABLE, times=3)
        cluster.inject("InitProducerId", times=2)
        async with Producer(cluster.bootstrap, **FAST) as producer:
            assert (await (await producer.send("t", b"x"))).offset == 0


async def test_expiry_without_producer_id_names_the_cause() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.inject("InitProducerId", ErrorCode.COORDINATOR_NOT_AVAILABLE, times=1 << 30)
        async with Producer(cluster.bootstrap, **{**FAST, "delivery.timeout.ms": 200}) as producer:
            await until(lambda: sender_of(producer)._ids.error, "a broker's refusal")
            with pytest.raises(KafkaError, match=r"no producer id.*COORDINATOR_NOT_AVAILABLE") as caught:
                await (await producer.send("t", b"x"))
            assert caught.value.code == ErrorCode.REQUEST_TIMED_OUT


async def test_refused_producer_id_fails_records_with_broker_error() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.inject("InitProducerId", ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        async with Producer(cluster.bootstrap, **FAST) as producer:
            with pytest.raises(KafkaError) as caught:
                await (await producer.send("t", b"x"))
            assert caught.value.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


async def test_broker_without_init_producer_id_requires_disabled_idempotence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeBroker, "init_producer_id", None)
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            with pytest.raises(KafkaError, match=r"enable\.idempotence=false") as caught:
                await (await producer.send("t", b"x"))
            assert caught.value.code == ErrorCode.UNSUPPORTED_VERSION
        async with Producer(cluster.bootstrap, **FAST, enable_idempotence=False) as producer:
            assert (await (await producer.send("t", b"x"))).offset == 0
        assert epochs(cluster) == [(-1, -1, -1)]
