"""Record batches compared with aiokafka's independent implementation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError, KafkaError

KEY_VALUE = st.tuples(st.none() | st.binary(max_size=300), st.none() | st.binary(max_size=300))


def aiokafka_batch(
    records: list[tuple[bytes | None, bytes | None]],
    *,
    timestamp: int = 1000,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for index, (key, value) in enumerate(records):
        assert builder.append(index, timestamp + index, key, value, headers=list(headers)) is not None
    return bytes(builder.build())


@given(st.lists(KEY_VALUE, min_size=1, max_size=8))
def test_build_is_read_by_aiokafka(records: list[tuple[bytes | None, bytes | None]]) -> None:
    data = record_batch.build(records, base_offset=7, leader_epoch=3, timestamp_ms=1234)
    batch = DefaultRecordBatch(data)
    assert batch.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value) for r in batch] == [
        (7 + index, 1234, key, value) for index, (key, value) in enumerate(records)
    ]


@given(st.lists(KEY_VALUE, min_size=1, max_size=8))
def test_read_records_reads_aiokafka(records: list[tuple[bytes | None, bytes | None]]) -> None:
    data = aiokafka_batch(records, headers=[("h", b"1"), ("n", None)])
    header = record_batch.parse_header(data)
    record_batch.check_crc(data, 0, header)
    assert header.size_bytes == len(data)
    assert list(record_batch.read_records(data, 0, header)) == [
        record_batch.Record(index, 1000 + index, key, value, [("h", b"1"), ("n", None)])
        for index, (key, value) in enumerate(records)
    ]


def test_assign_patches_offset_and_epoch_only() -> None:
    data = aiokafka_batch([(b"k", b"v"), (None, b"w")])
    assigned = record_batch.assign(data, 100, 5)
    header = record_batch.parse_header(assigned)
    record_batch.check_crc(assigned, 0, header)
    assert (header.base_offset, header.last_offset, header.partition_leader_epoch) == (100, 101, 5)
    assert assigned[16:] == data[16:]


def test_assign_log_append_time_gives_every_record_that_time() -> None:
    data = aiokafka_batch([(b"k", b"v"), (None, b"w")])
    assigned = record_batch.assign(data, 100, 5, 999_999)
    header = record_batch.parse_header(assigned)
    record_batch.check_crc(assigned, 0, header)
    assert header.is_log_append_time
    assert [r.timestamp for r in record_batch.read_records(assigned, 0, header)] == [999_999] * 2
    assert [r.timestamp for r in DefaultRecordBatch(assigned)] == [999_999] * 2


def test_iterate_accepts_incomplete_batch_only_if_allowed() -> None:
    first, second = aiokafka_batch([(b"k", b"v")]), aiokafka_batch([(b"k", b"longer value")])
    for cut in range(1, len(second)):
        data = first + second[:cut]
        assert [position for position, _ in record_batch.iterate(data, allow_partial=True)] == [0]
        with pytest.raises(CorruptRecordError):
            list(record_batch.iterate(data))
    assert [position for position, _ in record_batch.iterate(first + second)] == [0, len(first)]


@given(st.data())
def test_mutated_bytes_raise_nothing_but_kafka_errors(data: st.DataObject) -> None:
    batch = bytearray(aiokafka_batch([(b"key", b"value"), (None, b"w" * 50)], headers=[("h", b"1")]))
    for _ in range(data.draw(st.integers(1, 4))):
        batch[data.draw(st.integers(0, len(batch) - 1))] = data.draw(st.integers(0, 255))
    batch = batch[: data.draw(st.integers(0, len(batch)))]
    try:
        for position, header in record_batch.iterate(bytes(batch)):
            list(record_batch.read_records(batch, position, header))
            record_batch.check_crc(batch, position, header)
    except KafkaError:
        pass
