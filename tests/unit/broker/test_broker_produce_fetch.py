"""What a mesh answers to Produce, Fetch and the offset requests: the good, the bad and the late."""

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


async def test_what_is_produced_is_fetched_and_replicated_byte_for_byte(mesh) -> None:
    topic_id = await mesh.create("orders")
    first = await mesh.produce("orders", batch(b"a", b"b"))
    second = await mesh.produce("orders", batch(b"c"))
    assert (first.error_code, first.base_offset) == (0, 0)
    assert (second.error_code, second.base_offset) == (0, 2)
    data = await mesh.fetch("orders", 0)
    assert data.high_watermark == 3
    assert [header.base_offset for _, header in iterate(data.records)] == [0, 2]
    assert data.records == mesh.brokers[1].hosted_replicas.get(topic_id, 0).log.read(0, 1 << 20, 3, True)
    for broker in (2, 3):
        assert mesh.brokers[broker].hosted_replicas.get(topic_id, 0).log.read(0, 1 << 20, 3, True) == data.records


async def test_every_way_to_acknowledge(mesh) -> None:
    await mesh.create("acks")
    for acks in (0, 1, -1):
        answer = await mesh.produce("acks", batch(b"x"), acks=acks)
        assert answer.error_code == 0
    assert (await mesh.produce("acks", batch(b"x"), acks=2)).error_code == ErrorCode.INVALID_REQUIRED_ACKS


async def test_bad_batches_get_the_field_s_error_and_change_nothing(mesh) -> None:
    await mesh.create("strict", max_message_bytes="1000")
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
            answer = await mesh.produce("strict", payload)
            assert answer.error_code == code, (payload[:70], answer)
            assert answer.error_message
    assert (await mesh.produce("strict", bytes(old))).error_code != 0
    assert (await mesh.produce("strict", b"")).error_code != 0
    assert (await mesh.produce("strict", good + good)).error_code == ErrorCode.INVALID_RECORD
    assert (await mesh.produce("strict", good + b"tail")).error_code == ErrorCode.INVALID_RECORD
    assert (await mesh.produce("strict", good)).base_offset == 0


def _changed(good: bytes, **changes: int) -> bytes:
    """The same batch with another header, and the CRC of that."""
    header = record_batch.parse_header(good)._replace(**changes)
    return record_batch.join(header, good[record_batch.HEADER_BYTES :])


async def test_headers_that_no_log_can_take_at_their_word_are_refused(mesh) -> None:
    await mesh.create("headers")
    good = batch(b"payload")
    many = _changed(good, record_count=2**31 - 1, last_offset_delta=2**31 - 2)
    assert (await mesh.produce("headers", many)).error_code == ErrorCode.INVALID_RECORD
    assert (await mesh.produce("headers", _changed(good, attributes=0x10))).error_code == ErrorCode.INVALID_REQUEST
    flipped = bytearray(_changed(good, attributes=0x10))
    flipped[-1] ^= 1
    assert (await mesh.produce("headers", bytes(flipped))).error_code == ErrorCode.CORRUPT_MESSAGE
    smallest = record_batch.build([(None, None)] * 300, base_offset=0, leader_epoch=-1, timestamp_ms=1)
    assert (await mesh.produce("headers", smallest)).base_offset == 0
    assert (await mesh.produce("headers", good)).base_offset == 300


@pytest.mark.parametrize("codec", COMPRESSIONS[1:])
async def test_compressed_batches_hold_no_more_records_than_they_can(mesh, codec: str) -> None:
    await mesh.create("dense")
    number = 100_000
    plain = build([(None, None)] * number, base_offset=0, leader_epoch=-1, timestamp_ms=1)
    compression = default_compression(codec)
    records = compress(memoryview(plain)[record_batch.HEADER_BYTES :], compression)
    header = record_batch.parse_header(plain).with_records(len(records), compression.number)
    dense = record_batch.join(header, records)
    answer = await mesh.produce("dense", _changed(dense, record_count=2**31 - 1, last_offset_delta=2**31 - 2))
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert (await mesh.produce("dense", dense)).base_offset == 0
    assert (await mesh.produce("dense", dense)).base_offset == number


async def test_unknown_topics_partitions_and_ids(mesh) -> None:
    await mesh.create("known")
    assert (await mesh.produce("absent", batch(b"x"))).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await mesh.produce("known", batch(b"x"), partition=7)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await mesh.produce("known", batch(b"x"), via=2)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await mesh.fetch("absent", 0)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await mesh.fetch("known", 0, topic_id=b"x" * 16)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    await mesh.create("elsewhere", replication_factor=1)
    assert (await mesh.fetch("elsewhere", 0, via=3)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await mesh.fetch("known", 0, epoch=99)).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


async def test_offsets_out_of_range_say_where_the_log_is(mesh) -> None:
    await mesh.create("short")
    await mesh.produce("short", batch(b"a"))
    for offset in (-1, 2, 99):
        data = await mesh.fetch("short", offset)
        assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert (data.log_start_offset, data.high_watermark) == (0, 1)


async def test_a_fetch_waits_for_an_event_and_no_longer(mesh) -> None:
    await mesh.create("late")
    # Longer than the call has: who waits for the end gets no answer.
    waiting = asyncio.create_task(mesh.fetch("late", 0, max_wait_ms=60_000))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await mesh.produce("late", batch(b"now"))
    data = await waiting
    assert data.records
    begin = time.monotonic()
    assert not (await mesh.fetch("late", 1, max_wait_ms=300)).records
    assert time.monotonic() - begin >= 0.3


async def test_min_bytes_gathers_batches(mesh) -> None:
    await mesh.create("gather")
    size = len(batch(b"x"))
    waiting = asyncio.create_task(mesh.fetch("gather", 0, max_wait_ms=60_000, min_bytes=3 * size))
    for _ in range(2):
        await mesh.produce("gather", batch(b"x"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await mesh.produce("gather", batch(b"x"))
    assert len((await waiting).records) == 3 * size


async def test_the_first_batch_is_whole_however_small_the_limit(mesh) -> None:
    await mesh.create("large")
    await mesh.produce("large", batch(b"x" * 5000))
    assert len((await mesh.fetch("large", 0, max_bytes=10)).records) > 5000


async def list_offset(mesh, topic: str, timestamp: int) -> m.ListOffsetsPartitionResponse:
    asked = m.ListOffsetsTopic(topic, b"", [m.ListOffsetsPartition(0, -1, timestamp)])
    response = await mesh.call(1, "ListOffsets", m.ListOffsetsRequest(topics=[asked]))
    return response.topics[0].partitions[0]


async def test_list_offsets_by_ends_and_by_time(mesh) -> None:
    await mesh.create("timed")
    now = time.time_ns() // 1_000_000
    for age in (300, 200, 100):
        await mesh.produce("timed", batch(b"x", at_ms=now - age))
    assert (await list_offset(mesh, "timed", -2)).offset == 0
    assert (await list_offset(mesh, "timed", -1)).offset == 3
    found = await list_offset(mesh, "timed", now - 250)
    assert (found.offset, found.timestamp) == (1, now - 200)
    assert (await list_offset(mesh, "timed", -3)).offset == 2
    assert (await list_offset(mesh, "timed", now)).offset == -1
    assert (await list_offset(mesh, "timed", -9)).error_code == ErrorCode.UNSUPPORTED_VERSION


async def test_delete_records_moves_every_replica_s_log_start(mesh) -> None:
    topic_id = await mesh.create("cut")
    for _ in range(3):
        await mesh.produce("cut", batch(b"x"))
    ask = m.DeleteRecordsTopic("cut", [m.DeleteRecordsPartition(0, 2)])
    response = await mesh.call(1, "DeleteRecords", m.DeleteRecordsRequest([ask], 10_000))
    (result,) = response.topics[0].partitions
    assert (result.error_code, result.low_watermark) == (0, 2)
    assert [mesh.brokers[b].hosted_replicas.get(topic_id, 0).log.log_start_offset for b in (1, 2, 3)] == [2, 2, 2]
    assert (await mesh.fetch("cut", 1)).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    beyond = m.DeleteRecordsTopic("cut", [m.DeleteRecordsPartition(0, 9)])
    response = await mesh.call(1, "DeleteRecords", m.DeleteRecordsRequest([beyond], 10_000))
    assert response.topics[0].partitions[0].error_code == ErrorCode.OFFSET_OUT_OF_RANGE


async def test_metadata_by_name_by_id_and_none(mesh) -> None:
    topic_id = await mesh.create("meta", partitions=2)
    ask = [m.MetadataRequestTopic(name="meta"), m.MetadataRequestTopic(topic_id), m.MetadataRequestTopic(name="no")]
    answer = await mesh.call(2, "Metadata", m.MetadataRequest(ask))
    by_name, by_id, unknown = answer.topics
    assert by_name == by_id
    assert {broker.rack for broker in answer.brokers} == {"rack-a", "rack-b", "rack-c"}
    assert [p.leader_id for p in by_name.partitions] == [1, 1]
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert not (await mesh.call(2, "Metadata", m.MetadataRequest())).topics
    assert len((await mesh.call(2, "Metadata", m.MetadataRequest(None))).topics) == 1


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_mutated_batches_find_no_crash(mesh, data: st.DataObject) -> None:
    """200 mutations an example: each is refused or is a batch that reads back."""
    name = "fuzz"
    if mesh.brokers[1].hosted_replicas.image.topic_by_name(name) is None:
        await mesh.create(name)
    good = batch(b"one", b"two", b"three")
    seeds = data.draw(
        st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), min_size=200, max_size=200)
    )
    cut = data.draw(st.integers(0, len(good)))
    for position, value in [*seeds, (0, 0)]:
        mutated = bytearray(good)
        mutated[position] = value
        payload = bytes(mutated[:cut]) if (position, value) == (0, 0) else bytes(mutated)
        answer = await mesh.produce(name, payload, acks=1)
        assert answer.error_code in set(ErrorCode)
        assert answer.error_code != ErrorCode.UNKNOWN_SERVER_ERROR
    assert (await mesh.produce(name, good)).error_code == 0
