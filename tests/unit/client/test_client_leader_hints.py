"""Leader hints (KIP-951): clients follow the leader of an error response without waiting for metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kipmesh.client import Consumer, Producer
from kipmesh.client.producer import leader_watch
from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.messages import LeaderIdAndEpoch, NodeEndpoint
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster

PATIENT = {"retry.backoff.ms": 200_000, "retry.backoff.max.ms": 200_000, "metadata.max.age.ms": 300_000}
"""A client that waits for a backoff or for metadata exceeds the test timeout."""
IN_TIME_S = 60.0


@asynccontextmanager
async def moving(brokers: int = 2) -> AsyncIterator[FakeCluster]:
    """Start a cluster with topic `t`. After `move`, metadata requests hang, so only hints name the leader."""
    async with FakeCluster(brokers) as fake:
        fake.create_topic("t", 4, replicas=2)
        yield fake


def move(fake: FakeCluster, *partitions: int, leader_id: int = 2) -> None:
    for partition in partitions:
        fake.move_leader("t", partition, leader_id)
    fake.inject("Metadata", hang=True, times=1000)


def count(fake: FakeCluster, method: str) -> int:
    return sum(name == method for name, _, _ in fake.calls)


async def test_producer_follows_leader_hint() -> None:
    async with moving() as fake, Producer(fake.bootstrap, acks="all", **PATIENT) as producer:
        assert (await (await producer.send("t", b"1", partition=0))).offset == 0
        move(fake, 0, 2)
        sent = [await producer.send("t", b"2", partition=partition) for partition in (0, 2)]
        done = await asyncio.wait_for(asyncio.gather(*sent), IN_TIME_S)
        assert [each.offset for each in done] == [1, 0]
        assert [node for name, node, _ in fake.calls if name == "Produce"][-1] == 2


async def test_producer_follows_leader_hint_to_unknown_broker() -> None:
    async with moving() as fake, Producer(fake.bootstrap, **PATIENT) as producer:
        await (await producer.send("t", b"1", partition=0))
        await fake.add_broker(7)
        move(fake, 0, leader_id=7)
        assert (await asyncio.wait_for(await producer.send("t", b"2", partition=0), IN_TIME_S)).offset == 1


async def test_producer_backs_off_without_leader_hint() -> None:
    """Only a newer leader epoch causes an immediate retry: contradicting brokers cause no loop."""
    async with moving() as fake, Producer(fake.bootstrap, **{**PATIENT, "retry.backoff.ms": 300}) as producer:
        await (await producer.send("t", b"1", partition=0))
        fake.inject("Produce", ErrorCode.NOT_LEADER_OR_FOLLOWER, times=1)  # without a hint
        before, began = count(fake, "Produce"), time.monotonic()
        await (await producer.send("t", b"2", partition=0))
        assert time.monotonic() - began > 0.2
        assert count(fake, "Produce") - before == 2


async def test_leader_change_ends_retry_backoff() -> None:
    """The leader failed. Metadata names the next leader before the retry is due."""
    async with moving() as fake, Producer(fake.bootstrap, **PATIENT) as producer:
        await (await producer.send("t", b"1", partition=0))
        fake.inject("Produce", ErrorCode.NOT_LEADER_OR_FOLLOWER, times=1)  # without a hint
        sent = await producer.send("t", b"2", partition=0)
        sender, metadata = producer._sender, producer._metadata
        assert sender is not None
        await until(lambda: bool(sender._delayed), "the batch waits")
        metadata._notify()  # unchanged metadata
        await asyncio.sleep(0.05)
        assert sender._delayed
        assert not sent.done()
        fake.move_leader("t", 0, 2)
        epoch = fake.topics["t"].partitions[0].leader_epoch
        endpoint = NodeEndpoint(2, "127.0.0.1", fake.brokers[2].port)
        assert metadata.apply_leaders([("t", 0, LeaderIdAndEpoch(2, epoch))], [endpoint])
        assert (await asyncio.wait_for(sent, IN_TIME_S)).offset == 1
        assert not sender._delayed


async def test_each_newer_leader_is_tried_once_without_backoff() -> None:
    async with moving(3) as fake, Producer(fake.bootstrap, **PATIENT) as producer:
        await (await producer.send("t", b"1", partition=0))
        move(fake, 0)
        moves = iter([3, 1, 2])

        async def on(method: str, node_id: int, request: Any) -> None:
            if method == "Produce" and (following := next(moves, None)) is not None:
                fake.move_leader("t", 0, following)

        fake.hook = on
        assert (await asyncio.wait_for(await producer.send("t", b"2", partition=0), IN_TIME_S)).offset == 1


async def test_leader_hint_requests_metadata_without_waiting() -> None:
    async with moving() as fake, Producer(fake.bootstrap, **{**PATIENT, "retry.backoff.ms": 50}) as producer:
        await (await producer.send("t", b"1", partition=0))
        fake.move_leader("t", 0, 2)
        before = count(fake, "Metadata")
        await (await producer.send("t", b"2", partition=0))
        await until(lambda: count(fake, "Metadata") > before, "a metadata request")


async def test_leader_hint_ends_wait_for_silent_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends after a time of silence, without waiting for the next periodic check."""
    monkeypatch.setattr(leader_watch, "SILENCE_S", 0.2)
    monkeypatch.setattr(leader_watch, "REFRESH_INTERVAL_S", 10_000)
    async with moving() as fake, Producer(fake.bootstrap, **PATIENT) as producer:
        metadata = producer._metadata
        await producer.partitions_for("t")
        endpoint = NodeEndpoint(2, "127.0.0.1", fake.brokers[2].port)

        async def wait(leader_id: int, epoch: int, *, is_late: bool) -> None:
            async with leader_watch.LeaderWatch(metadata, leader_id, [("t", 0)]):
                if is_late:
                    await until(lambda: len(metadata.listeners) > 1, "the silence is detected")
                metadata.apply_leaders([("t", 0, LeaderIdAndEpoch(3 - leader_id, epoch))], [endpoint])
                await asyncio.sleep(IN_TIME_S)

        for leader_id, epoch, is_late in ((1, 5, False), (2, 6, True)):
            with pytest.raises(TimeoutError):
                await wait(leader_id, epoch, is_late=is_late)
            assert len(metadata.listeners) == 1, "the watch has removed its listener"


@pytest.mark.parametrize("is_follower_there", [True, False])
@pytest.mark.parametrize("sessions", [True, False])
async def test_consumer_follows_leader_hint(*, is_follower_there: bool, sessions: bool) -> None:
    """FENCED_LEADER_EPOCH from the old leader that is now a follower, NOT_LEADER_OR_FOLLOWER without a replica."""
    config = {**PATIENT, "auto.offset.reset": "earliest", "enable.incremental.fetch": sessions}
    async with moving() as fake, Consumer(fake.bootstrap, **config) as consumer:
        log = fake.topics["t"].partitions[0]
        log.append(encode_batch([(None, b"1")], timestamp_ms=0))
        consumer.assign([("t", 0), ("t", 1)])
        assert [each.value for each in await consumer.poll(60_000)] == [b"1"]
        move(fake, 0)
        if not is_follower_there:
            log.followers.clear()
        log.append(encode_batch([(None, b"2")], timestamp_ms=0))
        assert [each.value for each in await asyncio.wait_for(consumer.poll(600_000), IN_TIME_S)] == [b"2"]


async def test_consumer_follows_leader_hint_to_unknown_broker() -> None:
    config = {**PATIENT, "auto.offset.reset": "earliest"}
    async with moving() as fake, Consumer(fake.bootstrap, **config) as consumer:
        log = fake.topics["t"].partitions[0]
        log.append(encode_batch([(None, b"1")], timestamp_ms=0))
        consumer.assign([("t", 0)])
        assert len(await consumer.poll(60_000)) == 1
        await fake.add_broker(7)
        move(fake, 0, leader_id=7)
        log.append(encode_batch([(None, b"2")], timestamp_ms=0))
        assert [each.value for each in await asyncio.wait_for(consumer.poll(600_000), IN_TIME_S)] == [b"2"]
