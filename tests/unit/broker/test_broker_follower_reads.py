"""Any replica of a live mesh serves consumers: the four cases, two high watermarks, changes of role (392-01 ff.)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.replica import Replica
from kipmesh.broker.requests.reading import Consumer, ConsumerReads
from kipmesh.core.errors import ErrorCode
from kipmesh.core.record_batch import build, iterate
from kipmesh.transport.grpc.client import TransportError
from tests.unit.broker.broker_clock import Clock
from tests.unit.broker.conftest_broker import CLUSTER_ID, Mesh, eventually, leader_of

WAIT_MS = 60_000
"""Longer than a call has: what waits for its end fails."""
LAG_MS = 500


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


def replica_of(mesh: Mesh, broker: int, topic_id: bytes) -> Replica:
    found = mesh.brokers[broker].hosted_replicas.get(topic_id, 0)
    assert found is not None
    return found


async def following(mesh: Mesh, topic_id: bytes, *brokers: int) -> None:
    """Until these brokers follow and have the leader's high watermark."""
    leader = replica_of(mesh, await leader_of(mesh, topic_id), topic_id)
    for broker in brokers:
        await eventually(
            lambda broker=broker: (
                (one := mesh.brokers[broker].hosted_replicas.get(topic_id, 0)) is not None
                and one.has_role
                and one.high_watermark == leader.high_watermark == leader.log.log_end_offset
            ),
            f"{broker} has everything",
        )


def stop_following(mesh: Mesh, broker: int, topic_id: bytes) -> Replica:
    """The broker fetches the partition no more, as if it hung there."""
    replica = replica_of(mesh, broker, topic_id)
    for fetcher in mesh.brokers[broker].parts.replica_manager._fetchers.values():
        fetcher.unfollow(replica)
    return replica


async def follow_one_batch(mesh: Mesh, broker: int, topic_id: bytes, leader: int = 1) -> None:
    """One fetch of the follower by hand, with no room for more than one batch."""
    replica = replica_of(mesh, broker, topic_id)
    log = replica.log
    asked = m.FetchPartition(
        0, replica.leader_epoch, log.log_end_offset, log.latest_epoch, log.log_start_offset, partition_max_bytes=1
    )
    epoch = mesh.brokers[broker].parts.broker_epoch()
    request = m.FetchRequest(CLUSTER_ID, broker, epoch, topics=[m.FetchTopic("", topic_id, [asked])])
    response = await mesh.call(leader, "Fetch", request)
    data = response.responses[0].partitions[0]
    assert data.error_code == 0, data
    assert data.diverging_epoch is None
    replica.append_from_leader(data, 1)


def counted(mesh: Mesh, broker: int, case: str, role: str = "follower") -> float:
    found = mesh.brokers[broker].registry.get_sample_value(
        "kipmesh_broker_fetch_offset_cases_total", {"case": case, "role": role}
    )
    assert found is not None
    return found


@pytest.fixture
async def impatient(clock: Clock, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Who lags is out of the ISR soon after the clock went on by LAG_MS, and not before."""
    it = Mesh(tmp_path, **{"replica.lag.time.max.ms": LAG_MS, "replica.selector.class": "RackAwareReplicaSelector"})
    await it.start()
    yield it
    await it.stop()


async def test_followers_serve_the_same_bytes(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    for number in range(20):
        await mesh.produce("t", batch(b"%d" % number, b"x" * number))
    await following(mesh, topic_id, 2, 3)
    for offset in (0, 7, 39):
        expected = await mesh.fetch("t", offset)
        assert expected.records
        for broker in (2, 3):
            for replica_id in (-1, -2):
                found = await mesh.fetch("t", offset, via=broker, replica_id=replica_id)
                assert found == expected
    small = await mesh.fetch("t", 0, via=3, max_bytes=1)
    assert [header.base_offset for _, header in iterate(small.records)] == [0]
    registry = mesh.brokers[2].registry
    assert registry.get_sample_value(
        "kipmesh_broker_consumer_fetched_bytes_total", {"role": "follower", "rack": "unknown"}
    )
    for rack, label in (("rack-b", "same"), ("rack-c", "cross")):
        read = await mesh.fetch("t", 0, via=2, rack=rack)
        labels = {"role": "follower", "rack": label}
        found_bytes = registry.get_sample_value("kipmesh_broker_consumer_fetched_bytes_total", labels)
        assert found_bytes == len(read.records)


async def test_case_1_uncommitted_is_empty_without_error(impatient: Mesh) -> None:
    mesh = impatient
    topic_id = await mesh.create("t")
    await following(mesh, topic_id, 2, 3)
    stop_following(mesh, 2, topic_id)
    stop_following(mesh, 3, topic_id)
    await mesh.produce("t", batch(b"a", b"b"), acks=1)
    await follow_one_batch(mesh, 2, topic_id)
    replica = replica_of(mesh, 2, topic_id)
    assert (replica.log.log_end_offset, replica.high_watermark, replica.leader_high_watermark) == (2, 0, 0)
    for offset in (0, 1, 2):
        data = await mesh.fetch("t", offset, via=2)
        assert (data.error_code, data.records, data.high_watermark) == (0, b"", 0), offset
    assert counted(mesh, 2, "uncommitted") == 3
    assert (await mesh.fetch("t", 1)).error_code == 0, "leaders, too"
    assert counted(mesh, 1, "uncommitted", "leader") == 1


async def test_offsets_for_leader_epoch_end_at_the_high_watermark_for_consumers(impatient: Mesh) -> None:
    mesh = impatient
    topic_id = await mesh.create("epochs")
    assert (await mesh.produce("epochs", batch(b"a", b"b"))).error_code == 0
    for broker in (2, 3):
        stop_following(mesh, broker, topic_id)
    assert (await mesh.produce("epochs", batch(b"c"), acks=1)).error_code == 0
    leader = replica_of(mesh, 1, topic_id)
    assert (leader.high_watermark, leader.log.log_end_offset) == (2, 3)
    asked = [m.OffsetForLeaderTopic("epochs", b"", [m.OffsetForLeaderPartition(0, -1, 0)])]
    for replica_id, end_offset in ((-1, 2), (2, 3)):
        request = m.OffsetsForLeaderEpochRequest(replica_id, asked)
        (found,) = (await mesh.call(1, "OffsetsForLeaderEpoch", request)).topics[0].partitions
        assert (found.error_code, found.leader_epoch, found.end_offset) == (0, 0, end_offset)
        (found,) = (await mesh.call(2, "OffsetsForLeaderEpoch", request)).topics[0].partitions
        assert found.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_case_2_unavailable_is_78_and_case_4_is_beyond_both(clock: Clock, impatient: Mesh) -> None:
    mesh = impatient
    topic_id = await mesh.create("t")
    await following(mesh, topic_id, 2, 3)
    stop_following(mesh, 2, topic_id)
    await mesh.produce("t", batch(b"0"), acks=1)
    leader = replica_of(mesh, 1, topic_id)
    assert leader.leader is not None
    in_sync = leader.leader.followers[3]
    await eventually(lambda: in_sync.log_end_offset == 1, "3 has it")
    clock.go_on(LAG_MS + 1)
    await eventually(lambda: leader.leader is not None and leader.leader.isr == {1, 3}, "2 is out")
    for number in range(1, 5):
        assert (await mesh.produce("t", batch(b"%d" % number))).error_code == 0
    await follow_one_batch(mesh, 2, topic_id)
    replica = replica_of(mesh, 2, topic_id)
    assert (replica.log.log_end_offset, replica.high_watermark, replica.leader_high_watermark) == (1, 1, 5)
    assert (await mesh.fetch("t", 0, via=2)).records == (await mesh.fetch("t", 0, max_bytes=1)).records
    answers = {offset: await mesh.fetch("t", offset, via=2) for offset in (1, 2, 5, 6, 99)}
    assert {offset: data.error_code for offset, data in answers.items()} == {1: 0, 2: 78, 5: 78, 6: 1, 99: 1}
    for data in answers.values():
        assert (data.records, data.log_start_offset, data.high_watermark) == (b"", 0, 5)
    # An error is answered at once.
    waited = await mesh.fetch("t", 3, via=2, max_wait_ms=WAIT_MS)
    assert waited.error_code == ErrorCode.OFFSET_NOT_AVAILABLE
    assert (counted(mesh, 2, "unavailable"), counted(mesh, 2, "too-large")) == (3, 2)
    # Out of the ISR, it is nobody's nearest replica.
    assert (await mesh.fetch("t", 0, rack="rack-b")).preferred_read_replica == -1
    waiting = asyncio.create_task(mesh.fetch("t", 1, via=2, max_wait_ms=WAIT_MS))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await follow_one_batch(mesh, 2, topic_id)
    assert [header.base_offset for _, header in iterate((await waiting).records)] == [1]


async def test_case_3_too_small_and_case_4_too_large(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    for number in range(4):
        await mesh.produce("t", batch(b"%d" % number))
    await following(mesh, topic_id, 2, 3)
    asked = m.DeleteRecordsTopic("t", [m.DeleteRecordsPartition(0, 2)])
    response = await mesh.call(1, "DeleteRecords", m.DeleteRecordsRequest([asked], 10_000))
    assert response.topics[0].partitions[0].error_code == 0, "every replica has done it"
    for offset, case in ((1, "too-small"), (-1, "too-small"), (5, "too-large"), (2**40, "too-large")):
        before = counted(mesh, 2, case)
        data = await mesh.fetch("t", offset, via=2)
        assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert (data.records, data.log_start_offset, data.high_watermark) == (b"", 2, 4)
        assert counted(mesh, 2, case) == before + 1
    assert (await mesh.fetch("t", 2, via=2)).records
    caught_up = await mesh.fetch("t", 4, via=2)
    assert (caught_up.error_code, caught_up.records, caught_up.high_watermark) == (0, b"", 4)
    assert b"unavailable" in generate_latest(mesh.brokers[2].registry)


async def test_who_may_read_where(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    await mesh.produce("t", batch(b"x"))
    await following(mesh, topic_id, 2, 3)
    epoch = replica_of(mesh, 2, topic_id).leader_epoch
    assert (await mesh.fetch("t", 0, via=2, epoch=epoch)).records
    assert (await mesh.fetch("t", 0, via=2, epoch=epoch + 1)).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    if epoch > 0:
        assert (await mesh.fetch("t", 0, via=2, epoch=epoch - 1)).error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert (await mesh.fetch("t", 1, via=2, last_fetched_epoch=epoch)).error_code == 0
    unknown = await mesh.fetch("t", 1, via=2, last_fetched_epoch=epoch + 5)
    assert (unknown.error_code, unknown.records) == (ErrorCode.OFFSET_OUT_OF_RANGE, b"")
    reads = ConsumerReads(BrokerMetrics(CollectorRegistry()))
    for broker, code in ((1, 0), (2, ErrorCode.NOT_LEADER_OR_FOLLOWER)):
        old = reads.read(
            replica_of(mesh, broker, topic_id), m.FetchPartition(0), Consumer(names_rack=False), 1000, True
        )
        assert old.data.error_code == code, "who cannot name a rack is served by leaders alone"
    follower = m.FetchRequest(
        CLUSTER_ID, 3, mesh.brokers[3].parts.broker_epoch(), topics=[m.FetchTopic("", topic_id, [m.FetchPartition(0)])]
    )
    response = await mesh.call(2, "Fetch", follower)
    assert response.responses[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER

    async def listed(timestamp: int, replica_id: int, via: int = 2) -> Any:
        topics = [m.ListOffsetsTopic("t", b"", [m.ListOffsetsPartition(0, -1, timestamp)])]
        answer = await mesh.call(via, "ListOffsets", m.ListOffsetsRequest(replica_id, topics=topics))
        return answer.topics[0].partitions[0]

    assert (await listed(-1, -1)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert [(await listed(stamp, -2)).offset for stamp in (-2, -1)] == [0, 1]
    assert [(await listed(stamp, -2, via=1)).offset for stamp in (-2, -1)] == [0, 1]


async def test_a_follower_s_high_watermark_is_never_beyond_the_leader_s_and_never_goes_back(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    await following(mesh, topic_id, 2, 3)
    highest = {2: 0, 3: 0}
    producing = asyncio.gather(*[mesh.produce("t", batch(b"%d" % number)) for number in range(60)])
    while not producing.done():
        for broker in highest:
            at = highest[broker]
            data = await mesh.fetch("t", at, via=broker)
            assert data.error_code in (0, ErrorCode.OFFSET_NOT_AVAILABLE)
            assert at <= data.high_watermark <= replica_of(mesh, 1, topic_id).high_watermark
            for _, header in iterate(data.records):
                assert header.base_offset + header.last_offset_delta < data.high_watermark
            highest[broker] = data.high_watermark
    await producing
    await following(mesh, topic_id, 2, 3)


class Session:
    """A consumer's session at one broker, by hand."""

    def __init__(self, mesh: Mesh, broker: int, topic_id: bytes) -> None:
        self.mesh, self.broker, self.topic_id = mesh, broker, topic_id
        self.session_id = self.epoch = 0

    async def fetch(self, *asked: m.FetchPartition, max_wait_ms: int = 0) -> dict[int, m.PartitionData]:
        request = m.FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            session_id=self.session_id,
            session_epoch=self.epoch,
            topics=[m.FetchTopic("", self.topic_id, asked)] if asked else (),
        )
        response = await self.mesh.call(self.broker, "Fetch", request)
        assert response.error_code == 0, response
        self.session_id, self.epoch = response.session_id, self.epoch + 1
        return {data.partition_index: data for topic in response.responses for data in topic.partitions}


async def test_a_session_on_a_follower_hears_of_records_log_starts_and_elections(mesh: Mesh) -> None:
    topic_id = await mesh.create("t", partitions=5)
    for broker in (2, 3):
        await eventually(
            lambda broker=broker: all(
                (one := mesh.brokers[broker].hosted_replicas.get(topic_id, p)) is not None and one.has_role
                for p in range(5)
            ),
            "hosted",
        )
    epoch = replica_of(mesh, 3, topic_id).leader_epoch
    session = Session(mesh, 3, topic_id)
    asked = [m.FetchPartition(p, epoch if p == 0 else -1, 0, partition_max_bytes=1000) for p in range(5)]
    assert set(await session.fetch(*asked)) == set(range(5))
    assert await session.fetch() == {}
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await mesh.produce("t", batch(b"x"), partition=3)
    (data,) = (await waiting).values()
    assert (data.partition_index, data.high_watermark) == (3, 1)
    assert data.records
    assert await session.fetch(m.FetchPartition(3, -1, 1, partition_max_bytes=1000)) == {}
    deleted = m.DeleteRecordsTopic("t", [m.DeleteRecordsPartition(3, 1)])
    await mesh.call(1, "DeleteRecords", m.DeleteRecordsRequest([deleted], 10_000))
    assert (await session.fetch())[3].log_start_offset == 1
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await mesh.brokers.pop(1).abort()
    answer = await waiting
    while 0 not in answer:  # the broker takes up its roles one by one
        answer = await session.fetch(max_wait_ms=WAIT_MS)
    assert answer[0].error_code == ErrorCode.FENCED_LEADER_EPOCH, "the leadership that it named is over"


class Reader:
    """Reads on from one broker, as long as it is there: what comes twice or is left out is an error."""

    def __init__(self, mesh: Mesh, broker: int) -> None:
        self.mesh, self.broker = mesh, broker
        self.position = 0
        self.data = b""
        self.errors: set[int] = set()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            try:
                found = await self.mesh.fetch("t", self.position, via=self.broker, max_wait_ms=200)
            except TransportError:
                await asyncio.sleep(0.02)
                continue
            if found.error_code:
                self.errors.add(found.error_code)
                await asyncio.sleep(0.02)
            for _, header in iterate(found.records):
                assert header.base_offset == self.position
                self.position += header.last_offset_delta + 1
                assert self.position <= found.high_watermark
            self.data += found.records

    async def reaches(self, offset: int) -> None:
        await eventually(lambda: self.task.done() or self.position >= offset, f"{self.broker} read up to {offset}")
        assert not self.task.done(), self.task.result()

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def produce_acknowledged(mesh: Mesh, topic_id: bytes, records: int) -> None:
    for number in range(records):
        async with asyncio.timeout(20):
            while True:
                leader = await leader_of(mesh, topic_id)
                with contextlib.suppress(TransportError):
                    if (await mesh.produce("t", batch(b"%d" % number), via=leader)).error_code == 0:
                        break
                await asyncio.sleep(0.02)


async def test_reading_goes_on_while_followers_restart_are_promoted_and_leaders_deposed(mesh: Mesh) -> None:
    topic_id = await mesh.create("t")
    await following(mesh, topic_id, 2, 3)
    readers = {broker: Reader(mesh, broker) for broker in (1, 2, 3)}
    await produce_acknowledged(mesh, topic_id, 10)
    await mesh.brokers.pop(2).abort()  # restarted
    await produce_acknowledged(mesh, topic_id, 10)
    await mesh.start_broker(2)
    await mesh.ready(2)
    leader = replica_of(mesh, 1, topic_id)
    await eventually(lambda: leader.leader is not None and leader.leader.isr == {1, 2, 3}, "2 is back")
    await readers[2].reaches(20)
    await mesh.brokers.pop(1).abort()  # another one is promoted
    await produce_acknowledged(mesh, topic_id, 10)
    await mesh.start_broker(1)  # the deposed leader follows
    await mesh.ready(1)
    await produce_acknowledged(mesh, topic_id, 10)
    last = replica_of(mesh, await leader_of(mesh, topic_id), topic_id)
    await eventually(lambda: last.high_watermark == last.log.log_end_offset, "all is committed")
    expected = last.log.read(0, 1 << 24, last.high_watermark, True)
    for reader in readers.values():
        await reader.reaches(last.high_watermark)
        assert reader.data == expected, "whatever role it had: the same bytes"
        await reader.stop()
        not_here = {ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.NOT_LEADER_OR_FOLLOWER}
        unknown = {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID}
        assert reader.errors <= not_here | unknown
    first_end = last.log.end_offset_for_epoch(0)
    for broker in (1, 2, 3):
        data = await mesh.fetch("t", last.high_watermark, via=broker, last_fetched_epoch=0)
        assert (data.diverging_epoch, data.records) == (first_end, b""), "read in an epoch that ended before"
