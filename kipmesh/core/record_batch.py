"""Record batches, format v2: headers, checksums, and the two fields that a server may patch.

A batch is opaque bytes from producer to consumer. A server reads its 61-byte header, checks the CRC-32C (over
everything from the attributes on) and patches base offset and leader epoch, which the CRC does not cover. Records are
decoded here for the metadata log only, which is written uncompressed.

Invariants: nothing here raises anything but `CorruptRecordError` on bad bytes; nothing here copies a batch unless it
returns one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

from crc32c import crc32c

from kipmesh.core.errors import CorruptRecordError

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES = 61
"""Bytes of a batch before its first record."""
LOG_OVERHEAD_BYTES = 12
"""Base offset and length, which the length itself does not count."""
MAGIC = 2

_HEADER = Struct(">qiibIhiqqqhii")
_OFFSET_LENGTH_EPOCH = Struct(">qii")
_OFFSET_LENGTH_DELTA = Struct(">qi11xi")
_CRC = Struct(">I")
_CRC_POSITION = 17
_CRC_FROM = 21

_COMPRESSION_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20


class BatchHeader(NamedTuple):
    """The header of a batch, fields in their order on disk."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Offset after the last record."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def largest_timestamp(self) -> int:
        """The largest timestamp of its records; -1 if compaction left none."""
        return self.max_timestamp if self.record_count else -1

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole batch."""
        return self.batch_length + LOG_OVERHEAD_BYTES

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd; more is unknown."""
        return self.attributes & _COMPRESSION_MASK

    def with_records(self, size_bytes: int, compression: int) -> BatchHeader:
        """The header of the same batch with its records in so many bytes of another form; its CRC is not right."""
        attributes = self.attributes & ~_COMPRESSION_MASK | compression
        return self._replace(batch_length=HEADER_BYTES - LOG_OVERHEAD_BYTES + size_bytes, attributes=attributes)

    @property
    def is_control(self) -> bool:
        """Whether its records are markers that clients never see."""
        return self.attributes & _CONTROL != 0

    @property
    def is_transactional(self) -> bool:
        """Whether it belongs to a transaction."""
        return self.attributes & _TRANSACTIONAL != 0

    @property
    def is_log_append_time(self) -> bool:
        """Whether all its records have `max_timestamp`, the broker's clock."""
        return self.attributes & _LOG_APPEND_TIME != 0


class Record(NamedTuple):
    """One decoded record."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


def parse_header(data: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`; CorruptRecordError when it is cut, implausible or of another format."""
    if position < 0 or len(data) - position < HEADER_BYTES:
        raise CorruptRecordError(f"{len(data) - position} bytes are less than a batch header of {HEADER_BYTES}")
    header = BatchHeader(*_HEADER.unpack_from(data, position))
    if header.magic != MAGIC:
        raise CorruptRecordError(f"batch format {header.magic} at position {position}, expected {MAGIC}")
    if header.batch_length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
        raise CorruptRecordError(f"batch length {header.batch_length} at position {position} is less than its header")
    if header.base_offset < 0:
        raise CorruptRecordError(f"negative base offset {header.base_offset} at position {position}")
    return header


def iterate(data: Buffer, *, allow_partial: bool = False) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each batch; CorruptRecordError on garbage.

    With `allow_partial` a last batch that is cut ends the iteration, as happens to a read limited in bytes.
    """
    position, end = 0, len(data)
    while position < end:
        if allow_partial and end - position < HEADER_BYTES:
            return
        header = parse_header(data, position)
        following = position + header.batch_length + LOG_OVERHEAD_BYTES
        if following > end:
            if allow_partial:
                return
            raise CorruptRecordError(
                f"batch at position {position} is cut: {end - position} of {header.size_bytes} bytes"
            )
        yield position, header
        position = following


def peek(data: Buffer, position: int = 0) -> tuple[int, int]:
    """Size of the batch at `position` and the offset after it, unchecked: for bytes that were checked when written."""
    base_offset, length, last_offset_delta = _OFFSET_LENGTH_DELTA.unpack_from(data, position)
    return length + LOG_OVERHEAD_BYTES, base_offset + last_offset_delta + 1


def whole_batches(data: Buffer, max_bytes: int, max_offset: int) -> tuple[int, int]:
    """Bytes of the whole batches at the front of `data` that end at or below `max_offset`, and the offset after them.

    (0, 0) when there is none within `max_bytes`. CorruptRecordError on an impossible length; nothing else is checked.
    """
    position = next_offset = 0
    end = min(len(data), max_bytes)
    unpack = _OFFSET_LENGTH_DELTA.unpack_from
    while position + HEADER_BYTES <= end:
        base_offset, length, last_offset_delta = unpack(data, position)
        following = position + length + LOG_OVERHEAD_BYTES
        if length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
            raise CorruptRecordError(f"batch length {length} at offset {base_offset}")
        if following > end or base_offset + last_offset_delta >= max_offset:
            break
        position, next_offset = following, base_offset + last_offset_delta + 1
    return position, next_offset


def check_crc(data: Buffer, position: int, header: BatchHeader) -> None:
    """Raise CorruptRecordError unless the whole batch is there and its CRC-32C is right."""
    end = position + header.size_bytes
    if end > len(data):
        raise CorruptRecordError(f"batch at position {position} is cut")
    actual = crc32c(memoryview(data)[position + _CRC_FROM : end])
    if actual != header.crc:
        raise CorruptRecordError(
            f"wrong CRC of the batch at offset {header.base_offset}: {header.crc:#010x} stored, {actual:#010x} computed"
        )


def assign(batch: Buffer, base_offset: int, leader_epoch: int, log_append_time_ms: int | None = None) -> bytes:
    """The batch with its place in the log; with a log append time also with that timestamp and a new CRC."""
    length = int.from_bytes(memoryview(batch)[8:12], "big", signed=True)
    prefix = _OFFSET_LENGTH_EPOCH.pack(base_offset, length, leader_epoch)
    if log_append_time_ms is None:
        return b"".join((prefix, memoryview(batch)[_OFFSET_LENGTH_EPOCH.size :]))
    header = parse_header(batch)
    assigned = header._replace(
        base_offset=base_offset,
        partition_leader_epoch=leader_epoch,
        attributes=header.attributes | _LOG_APPEND_TIME,
        max_timestamp=log_append_time_ms,
    )
    return join(assigned, memoryview(batch)[HEADER_BYTES:])


def pack_header(header: BatchHeader) -> bytes:
    """The header as its bytes, as it is."""
    return _HEADER.pack(*header)


def join(header: BatchHeader, records: Buffer) -> bytes:
    """The batch of a header, whose CRC is computed here, and its records as they are on the wire."""
    head = bytearray(pack_header(header))
    _CRC.pack_into(head, _CRC_POSITION, crc32c(records, crc32c(memoryview(head)[_CRC_FROM:])))
    return b"".join((head, records))


def build(
    records: Sequence[tuple[bytes | None, bytes | None]],
    *,
    base_offset: int,
    leader_epoch: int,
    timestamp_ms: int,
    is_control: bool = False,
) -> bytes:
    """An uncompressed batch of at least one (key, value), all with the same timestamp."""
    if not records:
        raise ValueError("a batch has at least one record")
    body = bytearray()
    for delta, (key, value) in enumerate(records):
        record = bytearray(b"\0\0")  # attributes, timestamp delta
        put_varint(record, delta)
        _put_bytes(record, key)
        _put_bytes(record, value)
        put_varint(record, 0)  # headers
        put_varint(body, len(record))
        body += record
    header = BatchHeader(
        base_offset,
        HEADER_BYTES - LOG_OVERHEAD_BYTES + len(body),
        leader_epoch,
        MAGIC,
        crc=0,  # computed by `join`
        attributes=_CONTROL if is_control else 0,
        last_offset_delta=len(records) - 1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=len(records),
    )
    return join(header, body)


def read_records(data: Buffer, position: int, header: BatchHeader) -> Iterator[Record]:
    """The records of an uncompressed batch; CorruptRecordError on anything else."""
    if header.compression:
        raise CorruptRecordError(f"the batch at offset {header.base_offset} is compressed")
    reader = _Reader(memoryview(data)[position + HEADER_BYTES : position + header.size_bytes])
    for _ in range(header.record_count):
        size = reader.varint()
        end = reader.position + size
        reader.take(1)  # attributes
        timestamp = header.base_timestamp + reader.varint()
        if header.is_log_append_time:
            timestamp = header.max_timestamp
        offset = header.base_offset + reader.varint()
        key, value = reader.nullable_bytes(), reader.nullable_bytes()
        headers = [reader.header() for _ in range(reader.varint())]
        if reader.position != end:
            raise CorruptRecordError(f"the record at offset {offset} is not as long as it says")
        yield Record(offset, timestamp, key, value, headers)
    if reader.position != len(reader.data):
        raise CorruptRecordError(f"bytes after the last record of the batch at offset {header.base_offset}")


class _Reader:
    """A cursor over the records of one batch."""

    __slots__ = ("data", "position")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if size < 0 or end > len(self.data):
            raise CorruptRecordError("a record reaches beyond its batch")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
            shift += 7
        raise CorruptRecordError("a varint is longer than ten bytes")

    def nullable_bytes(self) -> bytes | None:
        size = self.varint()
        return None if size < 0 else bytes(self.take(size))

    def header(self) -> tuple[str, bytes | None]:
        name = self.nullable_bytes()
        try:
            return (name or b"").decode(), self.nullable_bytes()
        except UnicodeDecodeError:
            raise CorruptRecordError("a record header's key is not UTF-8") from None


def put_varint(out: bytearray, value: int) -> None:
    """Append a zigzag varint, as records have them."""
    encoded = (value << 1) ^ (value >> 63)
    while encoded > 0x7F:
        out.append(0x80 | (encoded & 0x7F))
        encoded >>= 7
    out.append(encoded)


def _put_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)
    else:
        put_varint(out, len(value))
        out += value
