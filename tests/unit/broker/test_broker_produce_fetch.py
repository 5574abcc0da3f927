"""Produce, Fetch, ListOffsets, DeleteRecords and Metadata requests to a running cluster."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kipmesh import messages as m
from kipmesh.client.compression import COMPRESSIONS, compress, default_compression
from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.core.record_batch import build, iterate


def batch(*values: bytes, at_ms: int | None = None) -> bytes:
    stamp = time.time_ns() // 1_000_000 if at_ms is None else at_ms
    return build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


async def test_fetch_and_replicas_return_produced_bytes(cluster) -> None:
    topic_id = await cluster.create("orders")
    first = await cluster.produce("orders", batch(b"a", b"b"))
    second = await cluster.produce("orders", batch(b"c"))
    assert (first.error_code, first.base_offset) == (0, 0)
    assert (second.error_code, second.base_offset) == (0, 2)
    data = await cluster.fetch("orders", 0)
    assert data.high_watermark == 3
    assert [header.base_offset for _, header in iterate(data.records)] == [0, 2]
    assert data.records == cluster.brokers[1].hosted_replicas.get(topic_id, 0).log.read(0, 1 << 20, 3, True)
    for broker in (2, 3):
        assert cluster.brokers[broker].hosted_replicas.get(topic_id, 0).log.read(0, 1 << 20, 3, True) == data.records


async def test_produce_accepts_acks_0_1_and_all(cluster) -> None:
    await cluster.create("acks")
    for acks in (0, 1, -1):
        response = await cluster.produce("acks", batch(b"x"), acks=acks)
        assert response.error_code == 0
    assert (await cluster.produce("acks", batch(b"x"), acks=2)).error_code == ErrorCode.INVALID_REQUIRED_ACKS


async def test_invalid_batches_are_refused_and_not_appended(cluster) -> None:
    await cluster.create("strict", max_message_bytes="1000")
    good = batch(b"payload")
    flipped = bytearray(good)
    flipped[-1] ^= 1
    old = bytearray(good)
    old[16] = 1
    cases = {
        ErrorCode.CORRUPT_MESSAGE: [bytes(flipped), good[:-3], b"nonsense"],
        ErrorCode.MESSAGE_TOO_LARGE: [batch(b"x" * 2000)],
    }
    for code, payloads in cases.items():
        for payload in payloads:
            response = await cluster.produce("strict", payload)
            assert response.error_code == code, (payload[:70], response)
            assert response.error_message
    assert (await cluster.produce("strict", bytes(old))).error_code != 0
    assert (await cluster.produce("strict", b"")).error_code != 0
    assert (await cluster.produce("strict", good + good)).error_code == ErrorCode.INVALID_RECORD
    assert (await cluster.produce("strict", good + b"tail")).error_code == ErrorCode.INVALID_RECORD
    assert (await cluster.produce("strict", good)).base_offset == 0


def _changed(good: bytes, **changes: int) -> bytes:
    """Return the batch with changed header fields and a valid CRC."""
    header = record_batch.parse_header(good)._replace(**changes)
    return record_batch.join(header, good[record_batch.HEADER_BYTES :])


async def test_batches_with_invalid_header_fields_are_refused(cluster) -> None:
    await cluster.create("headers")
    good = batch(b"payload")
    many = _changed(good, record_count=2**31 - 1, last_offset_delta=2**31 - 2)
    assert (await cluster.produce("headers", many)).error_code == ErrorCode.INVALID_RECORD
    assert (await cluster.produce("headers", _changed(good, attributes=0x10))).error_code == ErrorCode.INVALID_REQUEST
    flipped = bytearray(_changed(good, attributes=0x10))
    flipped[-1] ^= 1
    assert (await cluster.produce("headers", bytes(flipped))).error_code == ErrorCode.CORRUPT_MESSAGE
    smallest = record_batch.build([(None, None)] * 300, base_offset=0, leader_epoch=-1, timestamp_ms=1)
    assert (await cluster.produce("headers", smallest)).base_offset == 0
    assert (await cluster.produce("headers", good)).base_offset == 300


@pytest.mark.parametrize("codec", COMPRESSIONS[1:])
async def test_compressed_batch_with_impossible_record_count_is_refused(cluster, codec: str) -> None:
    await cluster.create("dense")
    number = 100_000
    plain = build([(None, None)] * number, base_offset=0, leader_epoch=-1, timestamp_ms=1)
    compression = default_compression(codec)
    records = compress(memoryview(plain)[record_batch.HEADER_BYTES :], compression)
    header = record_batch.parse_header(plain).with_records(len(records), compression.number)
    dense = record_batch.join(header, records)
    response = await cluster.produce("dense", _changed(dense, record_count=2**31 - 1, last_offset_delta=2**31 - 2))
    assert response.error_code == ErrorCode.INVALID_RECORD
    assert (await cluster.produce("dense", dense)).base_offset == 0
    assert (await cluster.produce("dense", dense)).base_offset == number


async def test_unknown_topics_partitions_ids_and_epochs_are_refused(cluster) -> None:
    await cluster.create("known")
    assert (await cluster.produce("absent", batch(b"x"))).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await cluster.produce("known", batch(b"x"), partition=7)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await cluster.produce("known", batch(b"x"), via=2)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await cluster.fetch("absent", 0)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await cluster.fetch("known", 0, topic_id=b"x" * 16)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    await cluster.create("elsewhere", replication_factor=1)
    assert (await cluster.fetch("elsewhere", 0, via=3)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await cluster.fetch("known", 0, epoch=99)).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


async def test_offset_out_of_range_response_has_log_start_and_high_watermark(cluster) -> None:
    await cluster.create("short")
    await cluster.produce("short", batch(b"a"))
    for offset in (-1, 2, 99):
        data = await cluster.fetch("short", offset)
        assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert (data.log_start_offset, data.high_watermark) == (0, 1)


async def test_fetch_waits_until_records_arrive_or_max_wait_passes(cluster) -> None:
    await cluster.create("late")
    # Longer than the timeout of the call: a fetch that waits for its end fails the test.
    waiting = asyncio.create_task(cluster.fetch("late", 0, max_wait_ms=60_000))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await cluster.produce("late", batch(b"now"))
    data = await waiting
    assert data.records
    begin = time.monotonic()
    assert not (await cluster.fetch("late", 1, max_wait_ms=300)).records
    assert time.monotonic() - begin >= 0.3


async def test_fetch_waits_for_min_bytes(cluster) -> None:
    await cluster.create("gather")
    size = len(batch(b"x"))
    waiting = asyncio.create_task(cluster.fetch("gather", 0, max_wait_ms=60_000, min_bytes=3 * size))
    for _ in range(2):
        await cluster.produce("gather", batch(b"x"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await cluster.produce("gather", batch(b"x"))
    assert len((await waiting).records) == 3 * size


async def test_fetch_returns_whole_first_batch_above_max_bytes(cluster) -> None:
    await cluster.create("large")
    await cluster.produce("large", batch(b"x" * 5000))
    assert len((await cluster.fetch("large", 0, max_bytes=10)).records) > 5000


async def list_offset(cluster, topic: str, timestamp: int) -> m.ListOffsetsPartitionResponse:
    requested = m.ListOffsetsTopic(topic, b"", [m.ListOffsetsPartition(0, -1, timestamp)])
    response = await cluster.call(1, "ListOffsets", m.ListOffsetsRequest(topics=[requested]))
    return response.topics[0].partitions[0]


async def test_list_offsets_by_special_and_real_timestamps(cluster) -> None:
    await cluster.create("timed")
    now = time.time_ns() // 1_000_000
    for age in (300, 200, 100):
        await cluster.produce("timed", batch(b"x", at_ms=now - age))
    assert (await list_offset(cluster, "timed", -2)).offset == 0
    assert (await list_offset(cluster, "timed", -1)).offset == 3
    found = await list_offset(cluster, "timed", now - 250)
    assert (found.offset, found.timestamp) == (1, now - 200)
    assert (await list_offset(cluster, "timed", -3)).offset == 2
    assert (await list_offset(cluster, "timed", now)).offset == -1
    assert (await list_offset(cluster, "timed", -9)).error_code == ErrorCode.UNSUPPORTED_VERSION


async def test_delete_records_moves_log_start_of_all_replicas(cluster) -> None:
    topic_id = await cluster.create("cut")
    for _ in range(3):
        await cluster.produce("cut", batch(b"x"))
    partition = m.DeleteRecordsTopic("cut", [m.DeleteRecordsPartition(0, 2)])
    response = await cluster.call(1, "DeleteRecords", m.DeleteRecordsRequest([partition], 10_000))
    (result,) = response.topics[0].partitions
    assert (result.error_code, result.low_watermark) == (0, 2)
    assert [cluster.brokers[b].hosted_replicas.get(topic_id, 0).log.log_start_offset for b in (1, 2, 3)] == [2, 2, 2]
    assert (await cluster.fetch("cut", 1)).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    beyond = m.DeleteRecordsTopic("cut", [m.DeleteRecordsPartition(0, 9)])
    response = await cluster.call(1, "DeleteRecords", m.DeleteRecordsRequest([beyond], 10_000))
    assert response.topics[0].partitions[0].error_code == ErrorCode.OFFSET_OUT_OF_RANGE


async def test_metadata_of_topics_by_name_and_id_no_topics_and_all_topics(cluster) -> None:
    topic_id = await cluster.create("meta", partitions=2)
    topics = [m.MetadataRequestTopic(name="meta"), m.MetadataRequestTopic(topic_id), m.MetadataRequestTopic(name="no")]
    response = await cluster.call(2, "Metadata", m.MetadataRequest(topics))
    by_name, by_id, unknown = response.topics
    assert by_name == by_id
    assert {broker.rack for broker in response.brokers} == {"rack-a", "rack-b", "rack-c"}
    assert [p.leader_id for p in by_name.partitions] == [1, 1]
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert not (await cluster.call(2, "Metadata", m.MetadataRequest())).topics
    assert len((await cluster.call(2, "Metadata", m.MetadataRequest(None))).topics) == 1


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_mutated_batches_never_cause_unknown_server_error(cluster, data: st.DataObject) -> None:
    """200 mutations per example; the topic accepts a valid batch afterwards."""
    name = "fuzz"
    if cluster.brokers[1].hosted_replicas.image.topic_by_name(name) is None:
        await cluster.create(name)
    good = batch(b"one", b"two", b"three")
    seeds = data.draw(
        st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), min_size=200, max_size=200)
    )
    cut = data.draw(st.integers(0, len(good)))
    for position, value in [*seeds, (0, 0)]:
        mutated = bytearray(good)
        mutated[position] = value
        payload = bytes(mutated[:cut]) if (position, value) == (0, 0) else bytes(mutated)
        response = await cluster.produce(name, payload, acks=1)
        assert response.error_code in set(ErrorCode)
        assert response.error_code != ErrorCode.UNKNOWN_SERVER_ERROR
    assert (await cluster.produce(name, good)).error_code == 0
