"""Encoding and decoding of record batches v2, based on aiokafka's Cython code.

Encoding: `new_builder` collects records, `seal` returns the bytes to send. Decoding: `consumer_records` returns
records, `decode_columns` columns. Invariant: invalid bytes raise only CorruptRecordError, or
UNSUPPORTED_COMPRESSION_TYPE for an unknown compression type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from kipmesh.client.compression import Compression, compress, decompressed, default_compression
from kipmesh.client.types import ConsumerRecord, Headers
from kipmesh.core.errors import CorruptRecordError, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, Buffer, assign, check_crc, iterate, join, parse_header


def new_builder(size_bytes_max: int) -> Any:
    """Return a builder of one batch of at most `size_bytes_max` bytes before compression.

    Its `append(index, timestamp_ms, key, value, headers)`, with headers as a list, returns metadata with the record's
    `size` in bytes, or None if the batch is full. The first record always fits.
    """
    return DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, size_bytes_max)


def record_bytes_max(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Return an upper bound on the size of a batch that contains only this record."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, list(headers)))


def check_fields(topic: object, key: object, value: object, partition: object, headers: object) -> None:
    """Raise an error that names the first invalid argument of `send`; return if all are valid.

    Raises TypeError for a wrong type and ValueError for a header name that cannot be encoded as UTF-8.
    """
    if not isinstance(topic, str):
        raise TypeError(f"topic must be str, got {topic!r}")
    for name, field in (("key", key), ("value", value)):
        if field is not None and not isinstance(field, bytes):
            raise TypeError(f"{name} must be bytes or None, got {type(field).__name__}; encode it first")
    if partition is not None and not isinstance(partition, int):
        raise TypeError(f"partition must be int or None, got {partition!r}")
    if not isinstance(headers, Iterable) or isinstance(headers, str | bytes):
        raise TypeError(f"headers must be (str, bytes or None) pairs, got {type(headers).__name__}")
    for header in headers:
        match header:
            case (str() as name, bytes() | None):
                try:
                    name.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"header name {name!r} cannot be encoded as UTF-8") from None
            case _:
                raise TypeError(f"headers must be (str, bytes or None) pairs, got {header!r}")


def seal(builder: Any, compression: Compression) -> bytes:
    """Return the bytes of the builder's batch, compressed if that makes it smaller. May run on a thread."""
    plain = builder.build()
    if compression.number == 0:
        return bytes(plain)
    body = compress(memoryview(plain)[HEADER_BYTES:], compression)
    if len(body) + HEADER_BYTES >= len(plain):
        return bytes(plain)
    return join(parse_header(plain).with_records(len(body), compression.number), body)


def restamped(payload: bytes, stamp: tuple[int, int, int]) -> bytes:
    """Return the batch with another (producer id, producer epoch, base sequence) and a new CRC."""
    producer_id, epoch, sequence = stamp
    header = parse_header(payload)
    return join(
        header._replace(producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence),
        memoryview(payload)[HEADER_BYTES:],
    )


def encode_batch(
    records: Sequence[tuple[bytes | None, bytes | None]],
    *,
    timestamp_ms: int,
    compression: str = "none",
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """Encode one or more (key, value) pairs as a batch for tests and tools. All records get the same timestamp.

    Raises ValueError for an unknown compression name.
    """
    builder = new_builder(1 << 31)
    for index, (key, value) in enumerate(records):
        builder.append(index, timestamp_ms, key, value, [])
    return assign(seal(builder, default_compression(compression)), base_offset, leader_epoch)


def read_batch(data: Buffer, position: int, header: BatchHeader) -> list[Any]:
    """Decode the batch at byte `position`. Return objects with offset, timestamp (ms), key, value and headers.

    Raises CorruptRecordError, or KafkaError(UNSUPPORTED_COMPRESSION_TYPE).
    """
    try:
        return list(DefaultRecordBatch(decompressed(memoryview(data)[position : position + header.size_bytes], header)))
    except KafkaError:
        raise
    except Exception as error:
        # The decoder raises many exception types for invalid bytes.
        raise CorruptRecordError(f"batch at offset {header.base_offset} cannot be decoded: {error}") from error


def consumer_records(
    topic: str, partition: int, data: Buffer, position: int, header: BatchHeader, from_offset: int
) -> list[ConsumerRecord]:
    """Decode the records at or above `from_offset` of the batch at byte `position`.

    Returns an empty list for a control batch, whose records are not for applications.

    Raises CorruptRecordError, or KafkaError(UNSUPPORTED_COMPRESSION_TYPE).
    """
    if header.is_control or header.record_count == 0:
        return []
    kind = 1 if header.is_log_append_time else 0
    epoch = header.partition_leader_epoch
    records = [
        ConsumerRecord(topic, partition, each.offset, each.timestamp, kind, each.key, each.value, each.headers, epoch)
        for each in read_batch(data, position, header)
    ]
    if header.base_offset < from_offset:
        return [record for record in records if record.offset >= from_offset]
    return records


class Columns(NamedTuple):
    """Records as columns of equal length. Timestamps are in ms. `headers` is empty unless requested."""

    offsets: list[int]
    timestamps: list[int]
    timestamp_types: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]


def decode_columns(
    data: Buffer,
    *,
    start_offset: int = 0,
    end_offset: int | None = None,
    check_crcs: bool = True,
    with_headers: bool = False,
) -> Columns:
    """Decode whole batches into columns: records with start_offset <= offset < end_offset, without control batches.

    Raises CorruptRecordError for an invalid batch or, with `check_crcs`, a wrong CRC, and
    KafkaError(UNSUPPORTED_COMPRESSION_TYPE).
    """
    columns = Columns([], [], [], [], [], [])
    for position, header in iterate(data):
        if header.next_offset <= start_offset:
            continue
        if end_offset is not None and header.base_offset >= end_offset:
            break
        if check_crcs:
            check_crc(data, position, header)
        if header.is_control or header.record_count == 0:
            continue
        records = read_batch(data, position, header)
        if header.base_offset < start_offset or (end_offset is not None and header.last_offset >= end_offset):
            stop = header.next_offset if end_offset is None else end_offset
            records = [each for each in records if start_offset <= each.offset < stop]
        columns.offsets.extend([each.offset for each in records])
        columns.timestamps.extend([each.timestamp for each in records])
        columns.timestamp_types.extend([1 if header.is_log_append_time else 0] * len(records))
        columns.keys.extend([each.key for each in records])
        columns.values.extend([each.value for each in records])
        if with_headers:
            columns.headers.extend([each.headers for each in records])
    return columns
