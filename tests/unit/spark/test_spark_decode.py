"""Decoding of record batches to Arrow: ranges, gaps, control batches, corrupt bytes and timestamps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import pyarrow as pa
from crc32c import crc32c

from kipmesh.client.compression import default_compression
from kipmesh.client.records import encode_batch, new_builder, seal
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import assign, build, iterate
from kipmesh.spark import decode as decoding
from kipmesh.spark.offsets import OffsetRange, TopicPartition
from kipmesh.spark.readers import arrow_schema
from kipmesh.spark.row_ids import BATCH_HEADER, ROW_HEADER

SCHEMA = arrow_schema(include_headers=False)


def decode_range(
    chunks: Iterable[tuple[int, bytes]], wanted: OffsetRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Decode chunks of one range."""
    return decoding.decode(((wanted, first, chunk) for first, chunk in chunks), schema)


def batch(first: int, count: int, compression: str = "none") -> bytes:
    records = [(b"k%d" % i if i % 3 else None, b"v%d" % i) for i in range(first, first + count)]
    return encode_batch(records, timestamp_ms=1_700_000_000_123, base_offset=first, compression=compression)


def decoded(chunks: list[tuple[int, bytes]], start: int, end: int) -> list[dict[str, object]]:
    wanted = OffsetRange(TopicPartition("t", 7), start, end)
    return [row for part in decode_range(iter(chunks), wanted, SCHEMA) for row in part.to_pylist()]


def test_decoded_row_has_all_columns() -> None:
    (row, *_) = decoded([(4, batch(4, 3))], 4, 7)
    assert {**row, "timestamp": row["timestamp"].isoformat()} == {  # type: ignore[attr-defined]
        "key": b"k4",
        "value": b"v4",
        "topic": "t",
        "partition": 7,
        "offset": 4,
        "timestamp": "2023-11-14T22:13:20.123000+00:00",
        "timestampType": 0,
    }


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_decoder_returns_the_range_in_order(compression: str) -> None:
    data = b"".join(batch(first, 100, compression) for first in range(0, 1000, 100))
    rows = decoded([(150, data)], 150, 873)
    assert [row["offset"] for row in rows] == list(range(150, 873))
    assert [row["value"] for row in rows] == [b"v%d" % i for i in range(150, 873)]


def test_records_before_first_offset_of_chunk_are_skipped() -> None:
    rows = decoded([(0, batch(0, 10)), (16, batch(10, 10))], 0, 20)
    assert [row["offset"] for row in rows] == [*range(10), *range(16, 20)]


def test_control_batches_yield_no_rows() -> None:
    control = build([(b"\0\0\0\0", b"")], base_offset=5, leader_epoch=0, timestamp_ms=0, is_control=True)
    rows = decoded([(0, batch(0, 5) + control + batch(6, 2))], 0, 8)
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4, 6, 7]


def test_large_range_is_split_into_arrow_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_ROWS", 10_500)
    chunks = [(first, batch(first, 1000)) for first in range(0, 25_000, 1000)]
    parts = list(decode_range(iter(chunks), OffsetRange(TopicPartition("t", 0), 0, 25_000), SCHEMA))
    assert [part.num_rows for part in parts] == [10_000, 10_000, 5_000]
    assert all(part.schema.equals(SCHEMA) for part in parts)


def test_empty_range_yields_no_rows() -> None:
    assert decoded([], 0, 0) == []


@pytest.mark.parametrize("position", [30, 70, 100])
def test_corrupt_batch_is_rejected(position: int) -> None:
    data = bytearray(batch(0, 10))
    data[position] ^= 0xFF
    with pytest.raises(CorruptRecordError):
        decoded([(0, bytes(data))], 0, 10)


def batch_with_timestamps(*times_ms: int) -> bytes:
    """Return a batch at offset 3, whose base timestamp is the first one."""
    builder = new_builder(1 << 20)
    for number, time_ms in enumerate(times_ms):
        builder.append(number, time_ms, None, b"v", [])
    return assign(seal(builder, default_compression("none")), 3, 0)


def test_extreme_timestamps_of_spark_are_decoded() -> None:
    maximum_ms = (2**63 - 1) // 1000
    wanted = OffsetRange(TopicPartition("t", 7), 3, 6)
    (part,) = decode_range([(3, batch_with_timestamps(0, maximum_ms, -maximum_ms))], wanted, SCHEMA)
    assert part.column("timestamp").cast(pa.int64()).to_pylist() == [0, maximum_ms * 1000, -maximum_ms * 1000]


@pytest.mark.parametrize("beyond", [(2**63 - 1) // 1000 + 1, -((2**63 - 1) // 1000) - 1, 2**63 - 1])
def test_timestamp_out_of_range_of_spark_names_the_record(beyond: int) -> None:
    data = batch_with_timestamps(0, beyond, 5)
    error = rf"offset 3 of t-7 .*record at offset 4 must be within .* got {beyond} ms"
    with pytest.raises(CorruptRecordError, match=error):
        decoded([(3, data)], 3, 6)
    assert len(decoded([(3, data)], 3, 4)) == 1  # the record is outside of the range


def test_timestamp_that_overflows_is_rejected() -> None:
    data = batch_with_timestamps(2**62, 2**62 + 5)
    broken = bytearray(data)
    header = next(iterate(data))[1]
    assert header.base_timestamp == 2**62
    broken[27:35] = (2**63 - 2).to_bytes(8, "big")  # the base timestamp, the second record is 5 ms later
    with pytest.raises(CorruptRecordError, match="a timestamp exceeds 64 bits"):
        decoded([(3, with_crc(broken))], 3, 5)


def with_crc(batch: bytearray) -> bytes:
    """Return the batch with a valid CRC."""
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return bytes(batch)


def test_record_id_is_the_row_name_or_the_position() -> None:
    builder = new_builder(1 << 20)
    builder.append(0, 1, None, b"a", [("own", b"x"), (BATCH_HEADER, b"q/4"), (ROW_HEADER, b"0-ab-0")])
    builder.append(1, 1, None, b"b", [])
    data = assign(seal(builder, default_compression("none")), 3, 0)
    wanted = OffsetRange(TopicPartition("t", 7), 3, 5)
    for include_headers in (False, True):
        schema = arrow_schema(include_headers=include_headers, include_record_id=True)
        (part,) = decode_range([(3, data)], wanted, schema)
        assert part.column("recordId").to_pylist() == ["t/q/4/0-ab-0", "t-7-4"]
        assert ("headers" in part.schema.names) is include_headers
