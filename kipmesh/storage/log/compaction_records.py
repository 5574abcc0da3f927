"""What compaction makes of one record batch: which records stay, and the batch of those that do.

Rules (Apache Kafka's). Of the records with a key only the last stays. A tombstone (a record without value) that is its
key's last stays until the batch's delete horizon, which the first compaction that meets it sets: bit 6 of the
attributes, with the horizon in ms as the batch's base timestamp. Control batches stay as they are. What stays keeps its
offset, and its batch its base and last offset, producer and sequence; the codec is the producer's.

Ours: a record without key stays, and so does a batch that cannot be decoded.

Invariants: nothing here changes an offset; bytes of a record change only where its batch gets a delete horizon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, join, put_varint
from kipmesh.storage.compression import compress, decompress

RECORDS_BYTES_MAX = 64 << 20
"""Bytes of a batch's records when they are decompressed."""

DELETE_HORIZON = 0x40
"""The bit of a batch's attributes that says so."""
_OUTPUT_BYTES_MIN = 16 << 10
_OUTPUT_RATIO = 8
_NO_TIMESTAMP = -1


class Place(NamedTuple):
    """One record within the decompressed records of a batch."""

    start: int
    attributes: int
    """Position of its attributes, after its length."""
    rest: int
    """Position of what follows its timestamp."""
    end: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    is_tombstone: bool


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Value and the position after it. IndexError, CorruptRecordError."""
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
    raise CorruptRecordError("a varint is longer than ten bytes")


def records_of(data: bytes, header: BatchHeader) -> bytes:
    """The records of a whole batch, decompressed; CorruptRecordError."""
    body = data[HEADER_BYTES : header.size_bytes]
    limit = max(_OUTPUT_BYTES_MIN, len(body) * _OUTPUT_RATIO)  # all of the output's memory is written to
    while limit < RECORDS_BYTES_MAX:
        try:
            return decompress(body, header.compression, limit)
        except CorruptRecordError:
            limit *= _OUTPUT_RATIO
    return decompress(body, header.compression, RECORDS_BYTES_MAX)


def places(records: bytes, header: BatchHeader) -> list[Place]:
    """Where each record is; CorruptRecordError unless they are whole, and their offsets rise within the batch."""
    found: list[Place] = []
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
                raise CorruptRecordError("a record reaches beyond its end")
            if not before < offset_delta <= header.last_offset_delta:
                raise CorruptRecordError(f"a record with offset delta {offset_delta} after {before}")
            found.append(
                Place(position, attributes, rest, end, timestamp_delta, offset_delta, key, is_tombstone=value_size < 0)
            )
            position, before = end, offset_delta
    except IndexError:
        raise CorruptRecordError("a record reaches beyond its batch") from None
    if position != len(records):
        raise CorruptRecordError("bytes after the last record")
    return found


def validate_keys(batch: bytes, header: BatchHeader) -> None:
    """KafkaError(INVALID_RECORD) unless each record of a batch for a compacted topic can be read and has a key."""
    try:
        found = places(records_of(bytes(batch), header), header)
    except CorruptRecordError as error:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"a batch for a compacted topic: {error.message}") from None
    if any(place.key is None for place in found):
        raise KafkaError(ErrorCode.INVALID_RECORD, "a compacted topic takes no record without key")
    if any(place.offset_delta != number for number, place in enumerate(found)):
        raise KafkaError(ErrorCode.INVALID_RECORD, "offsets within the batch have gaps")


def keys_of(data: bytes, header: BatchHeader) -> Sequence[tuple[bytes, int]]:
    """Key and offset of each record that has a key; none of a batch that cannot be decoded, or has none to see."""
    if header.is_control or not header.record_count:
        return ()
    try:
        found = places(records_of(data, header), header)
    except CorruptRecordError:
        return ()
    return [(place.key, header.base_offset + place.offset_delta) for place in found if place.key is not None]


def empty_batch(header: BatchHeader) -> bytes:
    """The batch without records: it says what its producer last wrote."""
    kept = header._replace(record_count=0, base_timestamp=header.max_timestamp).with_records(0, 0)
    return join(kept._replace(attributes=kept.attributes & ~DELETE_HORIZON), b"")


def filler(base_offset: int, last_offset: int, leader_epoch: int) -> bytes:
    """A batch without records for offsets whose records are gone."""
    header = BatchHeader(
        base_offset, 0, leader_epoch, 2, 0, 0, last_offset - base_offset, _NO_TIMESTAMP, _NO_TIMESTAMP, -1, -1, -1, 0
    )
    return join(header.with_records(0, 0), b"")


def cleaned(
    data: bytes, header: BatchHeader, newest: Mapping[bytes, int], now_ms: int, delete_retention_ms: int
) -> bytes | None:
    """The batch with the records that stay: `data` itself when all do, None when none does.

    `newest` is the last offset of each key that is known. The batch is whole.
    """
    if header.is_control or not header.record_count:
        return data
    try:
        records = records_of(data, header)
        found = places(records, header)
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


def _put_moved(out: bytearray, records: bytes, place: Place, by_ms: int) -> None:
    """The record in a batch whose base timestamp is another."""
    record = bytearray(records[place.attributes : place.attributes + 1])
    put_varint(record, place.timestamp_delta + by_ms)
    record += records[place.rest : place.end]
    put_varint(out, len(record))
    out += record
