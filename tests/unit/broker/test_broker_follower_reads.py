"""Followers serve consumers: offset cases, high watermarks and role changes (392-01 ff.)."""

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
from tests.unit.broker.broker_cluster import CLUSTER_ID, BrokerCluster, eventually, leader_of

WAIT_MS = 60_000
"""Longer than the timeout of a call: a fetch that waits this long fails the test."""
LAG_MS = 500


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


def replica_of(cluster: BrokerCluster, broker: int, topic_id: bytes) -> Replica:
    found = cluster.brokers[broker].hosted_replicas.get(topic_id, 0)
    assert found is not None
    return found


async def wait_until_caught_up(cluster: BrokerCluster, topic_id: bytes, *brokers: int) -> None:
    """Wait until these brokers follow and have all records and the high watermark of the leader."""
    leader = replica_of(cluster, await leader_of(cluster, topic_id), topic_id)
    for broker in brokers:
        await eventually(
            lambda broker=broker: (
                (replica := cluster.brokers[broker].hosted_replicas.get(topic_id, 0)) is not None
                and replica.has_role
                and replica.high_watermark == leader.high_watermark == leader.log.log_end_offset
            ),
            f"broker {broker} has caught up",
        )


def stop_following(cluster: BrokerCluster, broker: int, topic_id: bytes) -> Replica:
    """Stop the fetches of this partition on the broker and return the replica."""
    replica = replica_of(cluster, broker, topic_id)
    for fetcher in cluster.brokers[broker].parts.replica_manager._fetchers.values():
        fetcher.unfollow(replica)
    return replica


async def follow_one_batch(cluster: BrokerCluster, broker: int, topic_id: bytes, leader: int = 1) -> None:
    """Fetch one batch as the follower would and append it to its replica."""
    replica = replica_of(cluster, broker, topic_id)
    log = replica.log
    requested = m.FetchPartition(
        0, replica.leader_epoch, log.log_end_offset, log.latest_epoch, log.log_start_offset, partition_max_bytes=1
    )
    epoch = cluster.brokers[broker].parts.broker_epoch()
    request = m.FetchRequest(CLUSTER_ID, broker, epoch, topics=[m.FetchTopic("", topic_id, [requested])])
    response = await cluster.call(leader, "Fetch", request)
    data = response.responses[0].partitions[0]
    assert data.error_code == 0, data
    assert data.diverging_epoch is None
    replica.append_from_leader(data, 1)


def case_count(cluster: BrokerCluster, broker: int, case: str, role: str = "follower") -> float:
    count = cluster.brokers[broker].registry.get_sample_value(
        "kipmesh_broker_fetch_offset_cases_total", {"case": case, "role": role}
    )
    assert count is not None
    return count


@pytest.fixture
async def short_lag(clock: Clock, tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """A rack-aware cluster. Slow followers leave the ISR after the test has advanced the clock by LAG_MS."""
    cluster = BrokerCluster(
        tmp_path, **{"replica.lag.time.max.ms": LAG_MS, "replica.selector.class": "RackAwareReplicaSelector"}
    )
    await cluster.start()
    yield cluster
    await cluster.stop()


async def test_followers_serve_same_bytes_as_leader(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t")
    for number in range(20):
        await cluster.produce("t", batch(b"%d" % number, b"x" * number))
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    for offset in (0, 7, 39):
        expected = await cluster.fetch("t", offset)
        assert expected.records
        for broker in (2, 3):
            for replica_id in (-1, -2):
                found = await cluster.fetch("t", offset, via=broker, replica_id=replica_id)
                assert found == expected
    small = await cluster.fetch("t", 0, via=3, max_bytes=1)
    assert [header.base_offset for _, header in iterate(small.records)] == [0]
    registry = cluster.brokers[2].registry
    assert registry.get_sample_value(
        "kipmesh_broker_consumer_fetched_bytes_total", {"role": "follower", "rack": "unknown"}
    )
    for rack, label in (("rack-b", "same"), ("rack-c", "cross")):
        read = await cluster.fetch("t", 0, via=2, rack=rack)
        labels = {"role": "follower", "rack": label}
        found_bytes = registry.get_sample_value("kipmesh_broker_consumer_fetched_bytes_total", labels)
        assert found_bytes == len(read.records)


async def test_follower_returns_no_records_above_its_high_watermark(short_lag: BrokerCluster) -> None:
    cluster = short_lag
    topic_id = await cluster.create("t")
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    stop_following(cluster, 2, topic_id)
    stop_following(cluster, 3, topic_id)
    await cluster.produce("t", batch(b"a", b"b"), acks=1)
    await follow_one_batch(cluster, 2, topic_id)
    replica = replica_of(cluster, 2, topic_id)
    assert (replica.log.log_end_offset, replica.high_watermark, replica.leader_high_watermark) == (2, 0, 0)
    for offset in (0, 1, 2):
        data = await cluster.fetch("t", offset, via=2)
        assert (data.error_code, data.records, data.high_watermark) == (0, b"", 0), offset
    assert case_count(cluster, 2, "uncommitted") == 3
    assert (await cluster.fetch("t", 1)).error_code == 0, "the leader does the same"
    assert case_count(cluster, 1, "uncommitted", "leader") == 1


async def test_offsets_for_leader_epoch_ends_at_high_watermark_for_consumers(short_lag: BrokerCluster) -> None:
    cluster = short_lag
    topic_id = await cluster.create("epochs")
    assert (await cluster.produce("epochs", batch(b"a", b"b"))).error_code == 0
    for broker in (2, 3):
        stop_following(cluster, broker, topic_id)
    assert (await cluster.produce("epochs", batch(b"c"), acks=1)).error_code == 0
    leader = replica_of(cluster, 1, topic_id)
    assert (leader.high_watermark, leader.log.log_end_offset) == (2, 3)
    requested = [m.OffsetForLeaderTopic("epochs", b"", [m.OffsetForLeaderPartition(0, -1, 0)])]
    for replica_id, end_offset in ((-1, 2), (2, 3)):
        request = m.OffsetsForLeaderEpochRequest(replica_id, requested)
        (found,) = (await cluster.call(1, "OffsetsForLeaderEpoch", request)).topics[0].partitions
        assert (found.error_code, found.leader_epoch, found.end_offset) == (0, 0, end_offset)
        (found,) = (await cluster.call(2, "OffsetsForLeaderEpoch", request)).topics[0].partitions
        assert found.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_follower_returns_offset_not_available_up_to_high_watermark_of_leader(
    clock: Clock, short_lag: BrokerCluster
) -> None:
    cluster = short_lag
    topic_id = await cluster.create("t")
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    stop_following(cluster, 2, topic_id)
    await cluster.produce("t", batch(b"0"), acks=1)
    leader = replica_of(cluster, 1, topic_id)
    assert leader.leader is not None
    in_sync = leader.leader.followers[3]
    await eventually(lambda: in_sync.log_end_offset == 1, "broker 3 has the record")
    clock.advance(LAG_MS + 1)
    await eventually(lambda: leader.leader is not None and leader.leader.isr == {1, 3}, "broker 2 has left the ISR")
    for number in range(1, 5):
        assert (await cluster.produce("t", batch(b"%d" % number))).error_code == 0
    await follow_one_batch(cluster, 2, topic_id)
    replica = replica_of(cluster, 2, topic_id)
    assert (replica.log.log_end_offset, replica.high_watermark, replica.leader_high_watermark) == (1, 1, 5)
    assert (await cluster.fetch("t", 0, via=2)).records == (await cluster.fetch("t", 0, max_bytes=1)).records
    responses = {offset: await cluster.fetch("t", offset, via=2) for offset in (1, 2, 5, 6, 99)}
    assert {offset: data.error_code for offset, data in responses.items()} == {1: 0, 2: 78, 5: 78, 6: 1, 99: 1}
    for data in responses.values():
        assert (data.records, data.log_start_offset, data.high_watermark) == (b"", 0, 5)
    # An error response does not wait.
    waited = await cluster.fetch("t", 3, via=2, max_wait_ms=WAIT_MS)
    assert waited.error_code == ErrorCode.OFFSET_NOT_AVAILABLE
    assert (case_count(cluster, 2, "unavailable"), case_count(cluster, 2, "too-large")) == (3, 2)
    # The leader redirects no consumer to a replica outside the ISR.
    assert (await cluster.fetch("t", 0, rack="rack-b")).preferred_read_replica == -1
    waiting = asyncio.create_task(cluster.fetch("t", 1, via=2, max_wait_ms=WAIT_MS))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await follow_one_batch(cluster, 2, topic_id)
    assert [header.base_offset for _, header in iterate((await waiting).records)] == [1]


async def test_follower_returns_offset_out_of_range_outside_log_of_leader(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t")
    for number in range(4):
        await cluster.produce("t", batch(b"%d" % number))
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    requested = m.DeleteRecordsTopic("t", [m.DeleteRecordsPartition(0, 2)])
    response = await cluster.call(1, "DeleteRecords", m.DeleteRecordsRequest([requested], 10_000))
    assert response.topics[0].partitions[0].error_code == 0, "all replicas have moved their log start"
    for offset, case in ((1, "too-small"), (-1, "too-small"), (5, "too-large"), (2**40, "too-large")):
        before = case_count(cluster, 2, case)
        data = await cluster.fetch("t", offset, via=2)
        assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert (data.records, data.log_start_offset, data.high_watermark) == (b"", 2, 4)
        assert case_count(cluster, 2, case) == before + 1
    assert (await cluster.fetch("t", 2, via=2)).records
    caught_up = await cluster.fetch("t", 4, via=2)
    assert (caught_up.error_code, caught_up.records, caught_up.high_watermark) == (0, b"", 4)
    assert b"unavailable" in generate_latest(cluster.brokers[2].registry)


async def test_fetch_validates_leader_epoch_client_version_and_replica_role(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t")
    await cluster.produce("t", batch(b"x"))
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    epoch = replica_of(cluster, 2, topic_id).leader_epoch
    assert (await cluster.fetch("t", 0, via=2, epoch=epoch)).records
    assert (await cluster.fetch("t", 0, via=2, epoch=epoch + 1)).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    if epoch > 0:
        assert (await cluster.fetch("t", 0, via=2, epoch=epoch - 1)).error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert (await cluster.fetch("t", 1, via=2, last_fetched_epoch=epoch)).error_code == 0
    unknown = await cluster.fetch("t", 1, via=2, last_fetched_epoch=epoch + 5)
    assert (unknown.error_code, unknown.records) == (ErrorCode.OFFSET_OUT_OF_RANGE, b"")
    reads = ConsumerReads(BrokerMetrics(CollectorRegistry()))
    for broker, code in ((1, 0), (2, ErrorCode.NOT_LEADER_OR_FOLLOWER)):
        without_rack = reads.read(
            replica_of(cluster, broker, topic_id), m.FetchPartition(0), Consumer(names_rack=False), 1000, True
        )
        assert without_rack.data.error_code == code, "only leaders serve clients that cannot send a rack"
    follower = m.FetchRequest(
        CLUSTER_ID,
        3,
        cluster.brokers[3].parts.broker_epoch(),
        topics=[m.FetchTopic("", topic_id, [m.FetchPartition(0)])],
    )
    response = await cluster.call(2, "Fetch", follower)
    assert response.responses[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER

    async def list_offset(timestamp: int, replica_id: int, via: int = 2) -> Any:
        topics = [m.ListOffsetsTopic("t", b"", [m.ListOffsetsPartition(0, -1, timestamp)])]
        response = await cluster.call(via, "ListOffsets", m.ListOffsetsRequest(replica_id, topics=topics))
        return response.topics[0].partitions[0]

    assert (await list_offset(-1, -1)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert [(await list_offset(stamp, -2)).offset for stamp in (-2, -1)] == [0, 1]
    assert [(await list_offset(stamp, -2, via=1)).offset for stamp in (-2, -1)] == [0, 1]


async def test_follower_high_watermark_never_exceeds_leader_and_never_decreases(
    cluster: BrokerCluster,
) -> None:
    topic_id = await cluster.create("t")
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    highest = {2: 0, 3: 0}
    producing = asyncio.gather(*[cluster.produce("t", batch(b"%d" % number)) for number in range(60)])
    while not producing.done():
        for broker in highest:
            at = highest[broker]
            data = await cluster.fetch("t", at, via=broker)
            assert data.error_code in (0, ErrorCode.OFFSET_NOT_AVAILABLE)
            assert at <= data.high_watermark <= replica_of(cluster, 1, topic_id).high_watermark
            for _, header in iterate(data.records):
                assert header.base_offset + header.last_offset_delta < data.high_watermark
            highest[broker] = data.high_watermark
    await producing
    await wait_until_caught_up(cluster, topic_id, 2, 3)


class Session:
    """A consumer's fetch session at one broker."""

    def __init__(self, cluster: BrokerCluster, broker: int, topic_id: bytes) -> None:
        self.cluster, self.broker, self.topic_id = cluster, broker, topic_id
        self.session_id = self.epoch = 0

    async def fetch(self, *requested: m.FetchPartition, max_wait_ms: int = 0) -> dict[int, m.PartitionData]:
        request = m.FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            session_id=self.session_id,
            session_epoch=self.epoch,
            topics=[m.FetchTopic("", self.topic_id, requested)] if requested else (),
        )
        response = await self.cluster.call(self.broker, "Fetch", request)
        assert response.error_code == 0, response
        self.session_id, self.epoch = response.session_id, self.epoch + 1
        return {data.partition_index: data for topic in response.responses for data in topic.partitions}


async def test_session_on_follower_returns_records_log_start_changes_and_elections(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t", partitions=5)
    for broker in (2, 3):
        await eventually(
            lambda broker=broker: all(
                (replica := cluster.brokers[broker].hosted_replicas.get(topic_id, p)) is not None and replica.has_role
                for p in range(5)
            ),
            "hosted",
        )
    epoch = replica_of(cluster, 3, topic_id).leader_epoch
    session = Session(cluster, 3, topic_id)
    requested = [m.FetchPartition(p, epoch if p == 0 else -1, 0, partition_max_bytes=1000) for p in range(5)]
    assert set(await session.fetch(*requested)) == set(range(5))
    assert await session.fetch() == {}
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await cluster.produce("t", batch(b"x"), partition=3)
    (data,) = (await waiting).values()
    assert (data.partition_index, data.high_watermark) == (3, 1)
    assert data.records
    assert await session.fetch(m.FetchPartition(3, -1, 1, partition_max_bytes=1000)) == {}
    deleted = m.DeleteRecordsTopic("t", [m.DeleteRecordsPartition(3, 1)])
    await cluster.call(1, "DeleteRecords", m.DeleteRecordsRequest([deleted], 10_000))
    assert (await session.fetch())[3].log_start_offset == 1
    waiting = asyncio.create_task(session.fetch(max_wait_ms=WAIT_MS))
    await cluster.brokers.pop(1).abort()
    response = await waiting
    while 0 not in response:  # the broker changes its roles partition by partition
        response = await session.fetch(max_wait_ms=WAIT_MS)
    assert response[0].error_code == ErrorCode.FENCED_LEADER_EPOCH, "the request named the old leader epoch"


class Reader:
    """Reads from one broker while it runs. Fails if an offset is repeated or missing."""

    def __init__(self, cluster: BrokerCluster, broker: int) -> None:
        self.cluster, self.broker = cluster, broker
        self.position = 0
        self.data = b""
        self.errors: set[int] = set()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            try:
                found = await self.cluster.fetch("t", self.position, via=self.broker, max_wait_ms=200)
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


async def produce_acknowledged(cluster: BrokerCluster, topic_id: bytes, records: int) -> None:
    for number in range(records):
        async with asyncio.timeout(20):
            while True:
                leader = await leader_of(cluster, topic_id)
                with contextlib.suppress(TransportError):
                    if (await cluster.produce("t", batch(b"%d" % number), via=leader)).error_code == 0:
                        break
                await asyncio.sleep(0.02)


async def test_reads_continue_across_follower_restart_promotion_and_leader_change(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("t")
    await wait_until_caught_up(cluster, topic_id, 2, 3)
    readers = {broker: Reader(cluster, broker) for broker in (1, 2, 3)}
    await produce_acknowledged(cluster, topic_id, 10)
    await cluster.brokers.pop(2).abort()  # restarted
    await produce_acknowledged(cluster, topic_id, 10)
    await cluster.start_broker(2)
    await cluster.ready(2)
    leader = replica_of(cluster, 1, topic_id)
    await eventually(lambda: leader.leader is not None and leader.leader.isr == {1, 2, 3}, "broker 2 is in the ISR")
    await readers[2].reaches(20)
    await cluster.brokers.pop(1).abort()  # a follower becomes leader
    await produce_acknowledged(cluster, topic_id, 10)
    await cluster.start_broker(1)  # as a follower
    await cluster.ready(1)
    await produce_acknowledged(cluster, topic_id, 10)
    last = replica_of(cluster, await leader_of(cluster, topic_id), topic_id)
    await eventually(lambda: last.high_watermark == last.log.log_end_offset, "all records are committed")
    expected = last.log.read(0, 1 << 24, last.high_watermark, True)
    for reader in readers.values():
        await reader.reaches(last.high_watermark)
        assert reader.data == expected, "readers of all brokers received the same bytes"
        await reader.stop()
        not_here = {ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.NOT_LEADER_OR_FOLLOWER}
        unknown = {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID}
        assert reader.errors <= not_here | unknown
    first_end = last.log.end_offset_for_epoch(0)
    for broker in (1, 2, 3):
        data = await cluster.fetch("t", last.high_watermark, via=broker, last_fetched_epoch=0)
        assert (data.diverging_epoch, data.records) == (first_end, b""), "the last fetched epoch ended earlier"
