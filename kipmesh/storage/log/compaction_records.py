"""Compaction of one record batch.

Rules: as Apache Kafka. Only the last record of each key is kept. A tombstone (a record without value) that is the last
of its key is kept until the batch's delete horizon. The first compaction of the batch sets the horizon: bit 6 of the
attributes, and the horizon (ms) as base timestamp. Control batches are not changed. Kept records keep their offset;
their batch keeps its base and last offset, producer, sequence and codec.

Difference to Kafka: records without key, and batches that cannot be decoded, are kept.

Invariants: offsets never change. The bytes of a record change only when its batch gets a delete horizon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, join, put_varint
from kipmesh.storage.compression import compress, decompress

RECORDS_BYTES_MAX = 64 << 20
"""Maximum decompressed size of a batch's records."""

DELETE_HORIZON = 0x40
"""Attribute bit of a batch whose base timestamp is its delete horizon."""
_OUTPUT_BYTES_MIN = 16 << 10
_OUTPUT_RATIO = 8
_NO_TIMESTAMP = -1


class RecordLocation(NamedTuple):
    """Location and key of one record within the decompressed records of a batch."""

    start: int
    attributes: int
    """Position of the attributes, after the length."""
    rest: int
    """Position after the timestamp delta."""
    end: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    is_tombstone: bool


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the value of the varint at `position`, and the position after it.

    Raises IndexError if it is incomplete, CorruptRecordError if it has more than ten bytes.
    """
    byte = data[position]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position + 1
    value, shift = byte & 0x7F, 7
    while shift < 70:
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position + 1
        shift += 7
    raise CorruptRecordError("a varint must have at most ten bytes")


def records_of(data: bytes, header: BatchHeader) -> bytes:
    """Return the decompressed records of a batch.

    Raises CorruptRecordError if they are invalid or larger than `RECORDS_BYTES_MAX`.
    """
    body = data[HEADER_BYTES : header.size_bytes]
    limit = max(_OUTPUT_BYTES_MIN, len(body) * _OUTPUT_RATIO)  # start small: `decompress` allocates the limit
    while limit < RECORDS_BYTES_MAX:
        try:
            return decompress(body, header.compression, limit)
        except CorruptRecordError:
            limit *= _OUTPUT_RATIO
    return decompress(body, header.compression, RECORDS_BYTES_MAX)


def locate_records(records: bytes, header: BatchHeader) -> list[RecordLocation]:
    """Return the location of each record in the decompressed `records` of a batch.

    Raises CorruptRecordError if records are incomplete, their offsets do not increase, or bytes follow the last record.
    """
    found: list[RecordLocation] = []
    position, before = 0, -1
    try:
        for _ in range(header.record_count):
            size, attributes = _varint(records, position)
            end = attributes + size
            timestamp_delta, rest = _varint(records, attributes + 1)
            offset_delta, at = _varint(records, rest)
            key_size, at = _varint(records, at)
            key = records[at : at + key_size] if key_size >= 0 else None
            value_size, at = _varint(records, at + max(key_size, 0))
            if size < 0 or at + max(value_size, 0) > end or end > len(records):
                raise CorruptRecordError("the fields of a record exceed its length")
            if not before < offset_delta <= header.last_offset_delta:
                raise CorruptRecordError(
                    f"offset delta must be {before + 1} to {header.last_offset_delta}, got {offset_delta}"
                )
            found.append(
                RecordLocation(
                    position, attributes, rest, end, timestamp_delta, offset_delta, key, is_tombstone=value_size < 0
                )
            )
            position, before = end, offset_delta
    except IndexError:
        raise CorruptRecordError("a record exceeds its batch") from None
    if position != len(records):
        raise CorruptRecordError(f"{len(records) - position} bytes follow the last record")
    return found


def validate_keys(batch: bytes, header: BatchHeader) -> None:
    """Raise KafkaError(INVALID_RECORD) unless all records of a batch are valid, with keys and without offset gaps."""
    try:
        found = locate_records(records_of(bytes(batch), header), header)
    except CorruptRecordError as error:
        raise KafkaError(
            ErrorCode.INVALID_RECORD, f"cannot decode a batch for a compacted topic: {error.message}"
        ) from None
    if any(place.key is None for place in found):
        raise KafkaError(ErrorCode.INVALID_RECORD, "records of a compacted topic must have a key")
    if any(place.offset_delta != number for number, place in enumerate(found)):
        raise KafkaError(ErrorCode.INVALID_RECORD, "offset deltas of the batch must not have gaps")


def keys_of(data: bytes, header: BatchHeader) -> Sequence[tuple[bytes, int]]:
    """Return (key, offset) of each record that has a key. Empty for a control batch or an undecodable batch."""
    if header.is_control or not header.record_count:
        return ()
    try:
        found = locate_records(records_of(data, header), header)
    except CorruptRecordError:
        return ()
    return [(place.key, header.base_offset + place.offset_delta) for place in found if place.key is not None]


def empty_batch(header: BatchHeader) -> bytes:
    """Return the batch without its records. It keeps its offsets and the producer's last sequence."""
    kept = header._replace(record_count=0, base_timestamp=header.max_timestamp).with_records(0, 0)
    return join(kept._replace(attributes=kept.attributes & ~DELETE_HORIZON), b"")


def filler_batch(base_offset: int, last_offset: int, leader_epoch: int) -> bytes:
    """Return a batch with these offsets, without records or a producer, to replace omitted batches."""
    header = BatchHeader(
        base_offset, 0, leader_epoch, 2, 0, 0, last_offset - base_offset, _NO_TIMESTAMP, _NO_TIMESTAMP, -1, -1, -1, 0
    )
    return join(header.with_records(0, 0), b"")


def clean_batch(
    data: bytes, header: BatchHeader, newest: Mapping[bytes, int], now_ms: int, delete_retention_ms: int
) -> bytes | None:
    """Return the batch with only the records that compaction keeps, or None if it keeps none.

    Returns `data` itself if nothing changes, and for control batches and batches that cannot be decoded. `newest`: last
    offset of each known key. `now_ms`: wall-clock time. `data` must be a complete batch.
    """
    if header.is_control or not header.record_count:
        return data
    try:
        records = records_of(data, header)
        found = locate_records(records, header)
    except CorruptRecordError:
        return data
    horizon = header.base_timestamp if header.attributes & DELETE_HORIZON else None
    is_over = horizon is not None and now_ms >= horizon
    kept = []
    for place in found:
        if place.key is not None:
            last = newest.get(place.key, -1)
            if last > header.base_offset + place.offset_delta or (place.is_tombstone and is_over):
                continue
        kept.append(place)
    if not kept:
        return None
    needs_horizon = horizon is None and any(place.is_tombstone for place in kept)
    if len(kept) == len(found) and not needs_horizon:
        return data
    body = bytearray()
    changed = header._replace(record_count=len(kept))
    if needs_horizon:
        changed = changed._replace(
            attributes=header.attributes | DELETE_HORIZON, base_timestamp=now_ms + delete_retention_ms
        )
        for place in kept:
            _put_moved(body, records, place, header.base_timestamp - changed.base_timestamp)
    else:
        for place in kept:
            body += records[place.start : place.end]
    if not header.is_log_append_time:
        largest = max(header.base_timestamp + place.timestamp_delta for place in kept)
        changed = changed._replace(max_timestamp=largest)
    packed = compress(bytes(body), header.compression)
    return join(changed.with_records(len(packed), header.compression), packed)


def _put_moved(out: bytearray, records: bytes, place: RecordLocation, by_ms: int) -> None:
    """Append the record to `out`, with its timestamp delta increased by `by_ms`."""
    record = bytearray(records[place.attributes : place.attributes + 1])
    put_varint(record, place.timestamp_delta + by_ms)
    record += records[place.rest : place.end]
    put_varint(out, len(record))
    out += record
