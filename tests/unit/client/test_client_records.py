"""Encoding and decoding of record batches by clients."""

from __future__ import annotations

import contextlib
import gzip
import random

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.client.compression import COMPRESSIONS, Compression, decompressed, default_compression
from kipmesh.client.records import consumer_records, decode_columns, encode_batch, new_builder, seal
from kipmesh.core.errors import CorruptRecordError, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, check_crc, iterate, join, parse_header

maybe_bytes = st.none() | st.binary(max_size=60)
headers = st.lists(st.tuples(st.text(max_size=8), maybe_bytes), max_size=3)


@given(
    st.lists(st.tuples(st.integers(0, 2**41), maybe_bytes, maybe_bytes, headers), min_size=1, max_size=40),
    st.sampled_from(COMPRESSIONS),
)
@settings(max_examples=60, deadline=None)
def test_encoded_records_decode_to_same_records(
    records: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]], compression: str
) -> None:
    builder = new_builder(1 << 20)
    for index, (timestamp, key, value, fields) in enumerate(records):
        builder.append(index, timestamp, key, value, fields)
    batch = seal(builder, default_compression(compression))
    header = parse_header(batch)
    check_crc(batch, 0, header)
    assert header.record_count == len(records)
    read = consumer_records("t", 3, batch, 0, header, 0)
    assert [(r.timestamp, r.key, r.value, list(r.headers)) for r in read] == records
    assert [r.offset for r in read] == list(range(len(records)))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compression_shrinks_repetitive_records(name: str) -> None:
    batch = encode_batch([(None, b"again and again " * 20)] * 50, timestamp_ms=1, compression=name)
    assert parse_header(batch).compression == COMPRESSIONS.index(name)
    assert (len(batch) < 8000) == (name != "none")
    assert decode_columns(batch).values == [b"again and again " * 20] * 50


def test_compression_levels_are_applied() -> None:
    source = random.Random(1)
    words = [source.randbytes(source.randint(3, 9)) for _ in range(500)]
    text = b" ".join(source.choice(words) for _ in range(20_000))

    def size(compression: Compression) -> int:
        builder = new_builder(1 << 20)
        builder.append(0, 1, None, text, [])
        return len(seal(builder, compression))

    assert size(Compression(1, 9)) < size(Compression(1, 1))
    assert size(Compression(4, 19)) < size(Compression(4, 1))
    # As in Apache Kafka, the default of lz4 is the fast compressor, not level 9 of the slow one.
    assert size(Compression(3, 9)) == size(default_compression("lz4")) == size(Compression(3, 1))
    assert size(Compression(3, 10)) < size(Compression(3, 9))


def test_incompressible_batch_stays_uncompressed() -> None:
    batch = encode_batch([(None, bytes(range(256)))], timestamp_ms=1, compression="zstd")
    assert parse_header(batch).compression == 0


def test_columns_hold_the_offsets_of_a_range() -> None:
    data = b"".join(
        encode_batch([(b"k%d" % i, b"%d" % i) for i in range(base, base + 10)], timestamp_ms=base, base_offset=base)
        for base in (0, 10, 20)
    )
    columns = decode_columns(data, start_offset=7, end_offset=23, with_headers=True)
    assert columns.offsets == list(range(7, 23))
    assert columns.values == [b"%d" % i for i in range(7, 23)]
    assert columns.keys == [b"k%d" % i for i in range(7, 23)]
    assert columns.timestamps == [0] * 3 + [10] * 10 + [20] * 3
    assert columns.timestamp_types == [0] * 16
    assert len(columns.headers) == 16
    assert decode_columns(data, start_offset=30).offsets == []


def test_wrong_crc_raises_if_checks_are_enabled() -> None:
    batch = bytearray(encode_batch([(None, b"value")], timestamp_ms=1))
    batch[-2] ^= 1
    with pytest.raises(CorruptRecordError):
        decode_columns(bytes(batch))
    assert decode_columns(bytes(batch), check_crcs=False).values != [b"value"]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_batches_raise_only_kafka_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(COMPRESSIONS))
    batch = bytearray(encode_batch([(b"key", b"value " * 20)] * 20, timestamp_ms=1, compression=name))
    for _ in range(data.draw(st.integers(1, 4))):
        batch[data.draw(st.integers(0, len(batch) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(batch)))
    with contextlib.suppress(KafkaError):
        decode_columns(bytes(batch[:cut]), check_crcs=False)


@pytest.mark.parametrize("name", COMPRESSIONS[1:])
def test_decompression_is_limited(name: str) -> None:
    batch = memoryview(encode_batch([(None, b"again and again " * 64)] * 1024, timestamp_ms=1, compression=name))
    header = parse_header(batch)
    size = 2 << 20
    plain = decompressed(batch, header, size)
    plain_header = parse_header(plain)
    assert (plain_header.compression, plain_header.size_bytes) == (0, len(plain))
    exact = len(plain) - HEADER_BYTES
    assert bytes(decompressed(batch, header, exact)) == bytes(plain)
    for limit in (exact - 1, exact // 3, 1):
        with pytest.raises(CorruptRecordError, match="exceed the limit"):
            decompressed(batch, header, limit)
    cut = batch[: len(batch) - 20]
    with pytest.raises(CorruptRecordError):
        decompressed(cut, header._replace(batch_length=len(cut) - 12), size)


@pytest.mark.parametrize("name", COMPRESSIONS[1:])
def test_decompression_bomb_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = encode_batch([(None, bytes(3 << 20))], timestamp_ms=1, compression=name)
    assert len(batch) < 300_000
    assert len(decode_columns(batch).values[0] or b"") == 3 << 20
    monkeypatch.setattr(decompressed, "__defaults__", (2 << 20,))
    with pytest.raises(CorruptRecordError, match="limit of 2097152 bytes"):
        decode_columns(batch)


def test_java_compression_formats_are_decoded() -> None:
    """Snappy in one raw block and gzip in two members. `seal` writes neither."""
    plain = encode_batch([(b"k", b"value " * 30)] * 30, timestamp_ms=1)
    body = plain[HEADER_BYTES:]
    raw = bytes(cramjam.snappy.compress_raw(body))
    members = gzip.compress(body[:100]) + gzip.compress(body[100:])
    for number, packed in ((2, raw), (1, members)):
        batch = join(parse_header(plain).with_records(len(packed), number), packed)
        assert decode_columns(batch) == decode_columns(plain)


def test_records_carry_leader_epoch_and_offset() -> None:
    batch = encode_batch([(None, b"x")], timestamp_ms=1, base_offset=77, leader_epoch=5)
    ((_, header),) = iterate(batch)
    assert (header.base_offset, header.partition_leader_epoch) == (77, 5)
    (record,) = consumer_records("t", 0, batch, 0, header, 0)
    assert (record.offset, record.leader_epoch, record.timestamp_type) == (77, 5, 0)
