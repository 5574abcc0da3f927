"""The columnar decoder returns the rows of an oracle that decodes each record, or raises CorruptRecordError."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kipmesh.client.compression import COMPRESSIONS, default_compression
from kipmesh.client.records import decode_columns, new_builder, seal
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import HEADER_BYTES, assign, build, join, parse_header, put_varint
from kipmesh.spark import decode as decoding
from kipmesh.spark.offsets import OffsetRange, TopicPartition
from kipmesh.spark.readers import arrow_schema
from kipmesh.spark.record_columns import record_starts
from kipmesh.spark.row_ids import BATCH_HEADER, ROW_HEADER, record_id

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SCHEMA = arrow_schema(include_headers=True, include_record_id=True)
PLAIN = arrow_schema(include_headers=False)
TIME = 1_700_000_000_000


def decode_range(
    chunks: Iterable[tuple[int, bytes]], wanted: OffsetRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Decode chunks of one range."""
    return decoding.decode(((wanted, first, chunk) for first, chunk in chunks), schema)


class Zeros(NamedTuple):
    """A field of zero bytes. Hypothesis warns about values with a long representation."""

    size_bytes: int


Field = bytes | Zeros | None


class RecordFields(NamedTuple):
    """One record."""

    key: Field
    value: Field
    late_ms: int
    headers: list[tuple[str, bytes | None]]


class Batch(NamedTuple):
    """A batch after a gap of `gap` offsets. `holes` are indexes of records that compaction removed."""

    records: list[RecordFields]
    compression: str
    append_time: int | None
    gap: int
    holes: frozenset[int]
    is_control: bool


FIELDS = st.none() | st.binary(max_size=3) | st.builds(Zeros, st.integers(60, 70) | st.just(9000))
NAMES = st.text(max_size=3) | st.sampled_from([BATCH_HEADER, ROW_HEADER])
RECORDS = st.builds(
    RecordFields,
    FIELDS,
    FIELDS,
    st.integers(-300, 300) | st.integers(-TIME, 1 << 40),
    st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=3)), max_size=3),
)
BATCHES = st.builds(
    Batch,
    st.lists(RECORDS, min_size=1, max_size=12)
    | RECORDS.flatmap(lambda repeated: st.integers(1, 80).map(lambda times: [repeated] * times)),
    st.sampled_from(COMPRESSIONS),
    st.none() | st.integers(0, 1 << 41),
    st.integers(0, 3),
    st.frozensets(st.integers(0, 12), max_size=4),
    st.booleans() | st.just(False),
)


def field_bytes(field: Field) -> bytes | None:
    return bytes(field.size_bytes) if isinstance(field, Zeros) else field


def encode(batches: Sequence[Batch]) -> tuple[bytes, int]:
    """Return the batches as stored in a log, and the next offset."""
    data, offset = b"", 0
    for batch in batches:
        offset += batch.gap
        if batch.is_control:
            data += build([(b"\0\0\0\0", b"")], base_offset=offset, leader_epoch=0, timestamp_ms=1, is_control=True)
            offset += 1
            continue
        builder = new_builder(1 << 30)
        kept = [pair for pair in enumerate(batch.records) if pair[0] not in batch.holes] or [(0, batch.records[0])]
        for index, record in kept:
            builder.append(
                index, TIME + record.late_ms, field_bytes(record.key), field_bytes(record.value), record.headers
            )
        sealed = seal(builder, default_compression(batch.compression))
        last = parse_header(sealed)._replace(last_offset_delta=len(batch.records) - 1, record_count=len(kept))
        data += assign(join(last, sealed[HEADER_BYTES:]), offset, 5, batch.append_time)
        offset += len(batch.records)
    return data, offset


def oracle(chunks: Sequence[tuple[int, bytes]], start: int, end: int) -> list[dict[str, Any]]:
    """Return the rows that `decode_columns` decodes from the same bytes."""
    rows = []
    for first, data in chunks:
        columns = decode_columns(data, start_offset=first, end_offset=end, with_headers=True)
        for offset, at, kind, key, value, headers in zip(*columns, strict=True):
            row = {"key": key, "value": value, "topic": "t", "partition": 7, "offset": offset, "timestamp": at * 1000}
            row["timestampType"] = kind
            row["headers"] = [{"key": name, "value": content} for name, content in headers] or None
            row["recordId"] = record_id("t", 7, offset, list(headers))
            rows.append(row)
    return rows


def decoded(
    chunks: Sequence[tuple[int, bytes]], start: int, end: int, schema: pa.Schema = SCHEMA
) -> list[dict[str, Any]]:
    found = []
    for part in decode_range(iter(chunks), OffsetRange(TopicPartition("t", 7), start, end), schema):
        assert part.schema.equals(schema)
        part.validate(full=True)
        at = part.schema.get_field_index("timestamp")
        found += part.set_column(at, "timestamp", part.column(at).cast(pa.int64())).to_pylist()
    return found


@UNHURRIED
@given(st.lists(BATCHES, max_size=5), st.lists(BATCHES, max_size=2), st.integers(0, 30), st.integers(0, 200))
def test_decoder_matches_the_oracle(
    first_batches: list[Batch], more_batches: list[Batch], start: int, length: int
) -> None:
    data, middle = encode(first_batches)
    more, _ = encode([*first_batches, *more_batches])
    chunks = [(start, data), (max(start, middle), more[len(data) :])]
    expected = oracle(chunks, start, start + length)
    assert decoded(chunks, start, start + length) == expected
    plain = [{name: row[name] for name in PLAIN.names} for row in expected]
    assert decoded(chunks, start, start + length, PLAIN) == plain


@UNHURRIED
@given(st.lists(st.tuples(st.sampled_from("tu"), st.integers(0, 2), BATCHES), max_size=6))
def test_decoder_keeps_order_of_interleaved_partitions(chunks_of_partitions: list[tuple[str, int, Batch]]) -> None:
    """One Arrow batch may have rows of several partitions. The rows of each partition stay in order."""
    ends: dict[TopicPartition, int] = {}
    chunks, expected = [], []
    for topic, number, batch in chunks_of_partitions:
        topic_partition = TopicPartition(topic, number)
        first = ends.get(topic_partition, 0)
        data, length = encode([batch._replace(gap=first)])
        ends[topic_partition] = length
        chunks.append((OffsetRange(topic_partition, 0, 1 << 40), first, data))
        rows = [{**row, "topic": topic, "partition": number} for row in oracle([(first, data)], 0, 1 << 40)]
        expected += [(row["topic"], row["partition"], row["offset"], row["value"]) for row in rows]
    found = [row for part in decoding.decode(chunks, PLAIN) for row in part.to_pylist()]
    assert [(row["topic"], row["partition"], row["offset"], row["value"]) for row in found] == expected


@UNHURRIED
@given(BATCHES, st.integers(0, 200), st.integers(0, 255))
@example(Batch([RecordFields(None, b"", 0, [])], "none", None, 0, frozenset(), False), 0, 1)
def test_malformed_records_raise_corrupt_record_error(batch: Batch, position: int, octet: int) -> None:
    """The CRC is valid, so the decoder reads the damaged records."""
    data, _ = encode([batch._replace(compression="none", is_control=False)])
    body = bytearray(data[HEADER_BYTES:])
    body[position % len(body)] = octet
    bad = join(parse_header(data), bytes(body))
    try:
        expected = oracle([(0, bad)], 0, 1 << 40)
    except (CorruptRecordError, MemoryError):
        expected = None
    try:
        found = decoded([(0, bad)], 0, 1 << 40)
    except CorruptRecordError:
        return
    assert expected is None or found == expected


def record(*parts: bytes | int) -> bytes:
    body = bytearray()
    for part in parts:
        if isinstance(part, int):
            put_varint(body, part)
        else:
            body += part
    whole = bytearray()
    put_varint(whole, len(body))
    return bytes(whole + body)


def of_records(*records: bytes, count: int | None = None) -> bytes:
    plain = build(
        [(None, b"x")] * (len(records) if count is None else count), base_offset=0, leader_epoch=0, timestamp_ms=1
    )
    body = b"".join(records)
    return join(parse_header(plain).with_records(len(body), 0), body)


GOOD = (b"\0", 0, 0, -1, 1, b"x", 0)


@pytest.mark.parametrize(
    ("records", "count"),
    [
        ([record(*GOOD)[:-1]], 1),
        ([record(*GOOD)], 2),
        ([record(*GOOD), record(*GOOD)], 1),
        ([b"\x01"], 1),
        ([b"\xff" * 7], 1),
        ([record(*GOOD) + b"\0"], 1),
        ([record(b"\0", 0, 0, -2, 1, b"x", 0)], 1),
        ([record(b"\0", 0, 0, -1, 100, b"x", 0)], 1),
        ([record(b"\0", 0, 0, -1, 1, b"x", -1)], 1),
        ([record(b"\0", 0, 0, -1, 1, b"x", 1 << 30)], 1),
        ([record(b"\0", 0, 0, -1, 1, b"x", 1, -1, -1)], 1),
        ([record(b"\0", 0, 0, -1, 1, b"x", 1, 1, b"\xff", -1)], 1),
        ([record(b"\0", 0, 0, -1, 1, b"x", 1, 1, b"k", 5, b"v")], 1),
        ([record(b"\0", 0, 0, -1, 1, b"x", 0, b"more")], 1),
        ([record(b"\0", b"\xff" * 10, 0, -1, 1, b"x", 0)], 1),
        ([record(b"\0", 0, -1, -1, 1, b"x", 0)], 1),
        ([record(b"\0", 0, 1, -1, 1, b"x", 0)], 1),
        ([record(*GOOD), record(*GOOD)], 2),
    ],
)
def test_inconsistent_record_fields_are_rejected(records: list[bytes], count: int) -> None:
    with pytest.raises(CorruptRecordError, match="batch at offset 0 of t-7 cannot be read"):
        decoded([(0, of_records(*records, count=count))], 0, 10)
    assert len(decoded([(0, of_records(record(*GOOD)))], 0, 10)) == 1


@UNHURRIED
@given(st.lists(st.integers(0, 300) | st.integers(16_000, 16_400), min_size=1, max_size=60), st.integers(1, 30))
def test_record_starts_match_a_sequential_scan(sizes: list[int], repeats: int) -> None:
    records = [record(bytes(size)) for size in sizes for _ in range(repeats if size < 300 else 1)]
    body, length = b"".join(records), sum(map(len, records))
    expected = np.cumsum([0, *map(len, records)])[:-1]
    for batches in (1, 3, 40):
        data = body * batches
        begins = [length * number for number in range(batches)]
        starts = record_starts(data, np.frombuffer(data, np.uint8), begins, [begin + length for begin in begins])
        assert [record_start.tolist() for record_start in starts] == [(expected + begin).tolist() for begin in begins]


@pytest.mark.parametrize("batches", [1, 40])
def test_batch_that_ends_within_a_record_is_rejected(batches: int) -> None:
    data = (record(bytes(5)) + record(bytes(6)) + record(bytes(7))) * batches
    array, length = np.frombuffer(data, np.uint8), len(data) // batches
    begins = [length * number for number in range(batches)]
    with pytest.raises(CorruptRecordError):
        record_starts(data, array, begins, [begin + length - 1 for begin in begins])


def test_buffer_is_limited_by_uncompressed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_BYTES", 50_000)
    batch = Batch([RecordFields(None, Zeros(9000), 0, [])] * 5, "zstd", None, 0, frozenset(), False)
    data, end = encode([batch] * 6)
    parts = list(decode_range([(0, data)], OffsetRange(TopicPartition("t", 7), 0, end), PLAIN))
    assert [part.num_rows for part in parts] == [5] * 6
    assert pickle.loads(pickle.dumps(parts[0])).nbytes < 60_000


def test_buffer_holds_few_fetched_chunks() -> None:
    """Each chunk contributes one small batch, as when a micro-batch reads little of many partitions."""
    small = Batch([RecordFields(None, b"x", 0, [])], "none", None, 0, frozenset(), False)
    large = Batch([RecordFields(None, Zeros(1 << 20), 0, [])], "none", None, 0, frozenset(), False)
    data, _ = encode([small, large])
    given = 0

    def chunks() -> Iterator[tuple[OffsetRange, int, bytes]]:
        nonlocal given
        for number in range(20):
            given += 1
            yield OffsetRange(TopicPartition("t", number), 0, 1), 0, data

    parts = decoding.decode(chunks(), PLAIN)
    assert next(parts).num_rows == given == 4
    assert sum(part.num_rows for part in parts) == 16
