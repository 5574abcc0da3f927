"""Record batches, format v2: headers, checksums, and the two fields that a server may change.

A batch is opaque from producer to consumer. A server reads its 61-byte header, checks the CRC-32C (over everything from
the attributes on) and sets base offset and leader epoch, which the CRC does not cover. Only uncompressed records are
decoded here: those of the metadata log and of internal topics.

Invariants: invalid bytes raise CorruptRecordError and nothing else. A batch is copied only where it is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

from crc32c import crc32c

from kipmesh.core.errors import CorruptRecordError
from kipmesh.messages.kafka import put_varint as put_unsigned_varint

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES = 61
"""Size of a batch header, from the base offset to the record count."""
LOG_OVERHEAD_BYTES = 12
"""Size of base offset and batch length, which the batch length does not include."""
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
    """Header of a batch, with its fields in the order of the format."""

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
        """Largest timestamp of the records in ms; -1 if compaction has removed all records."""
        return self.max_timestamp if self.record_count else -1

    @property
    def size_bytes(self) -> int:
        """Size of the whole batch in bytes, including its header."""
        return self.batch_length + LOG_OVERHEAD_BYTES

    @property
    def compression(self) -> int:
        """Compression type: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd. Other values are invalid."""
        return self.attributes & _COMPRESSION_MASK

    def with_records(self, size_bytes: int, compression: int) -> BatchHeader:
        """Return the header for the same records with another compression and size. The CRC must be recomputed."""
        attributes = self.attributes & ~_COMPRESSION_MASK | compression
        return self._replace(batch_length=HEADER_BYTES - LOG_OVERHEAD_BYTES + size_bytes, attributes=attributes)

    @property
    def is_control(self) -> bool:
        """Whether the batch has control records, which clients do not see."""
        return self.attributes & _CONTROL != 0

    @property
    def is_transactional(self) -> bool:
        """Whether the batch is part of a transaction."""
        return self.attributes & _TRANSACTIONAL != 0

    @property
    def is_log_append_time(self) -> bool:
        """Whether `max_timestamp`, set by the broker, is the timestamp of all records."""
        return self.attributes & _LOG_APPEND_TIME != 0


class Record(NamedTuple):
    """A decoded record. The timestamp is in ms; headers are (name, value) pairs."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


def parse_header(data: Buffer, position: int = 0) -> BatchHeader:
    """Return the batch header at `position`.

    Raises CorruptRecordError if it is incomplete, has another format, or has an impossible length or offset.
    """
    if position < 0 or len(data) - position < HEADER_BYTES:
        size = len(data) - position
        raise CorruptRecordError(f"batch header at position {position} must have {HEADER_BYTES} bytes, got {size}")
    header = BatchHeader(*_HEADER.unpack_from(data, position))
    if header.magic != MAGIC:
        raise CorruptRecordError(f"batch format at position {position} must be {MAGIC}, got {header.magic}")
    if header.batch_length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
        raise CorruptRecordError(f"batch length {header.batch_length} at position {position} is too small for a header")
    if header.base_offset < 0:
        raise CorruptRecordError(f"base offset at position {position} must be at least 0, got {header.base_offset}")
    return header


def iterate(data: Buffer, *, allow_partial: bool = False) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch. Raises CorruptRecordError for invalid headers; does not check CRCs.

    With `allow_partial`, an incomplete last batch ends the iteration, as in a read with a byte limit. Otherwise it
    raises CorruptRecordError.
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
            raise _incomplete(data, position, header)
        yield position, header
        position = following


def peek(data: Buffer, position: int = 0) -> tuple[int, int]:
    """Return (size in bytes, offset after the last record) of the batch at `position`, without checks.

    Only for bytes that were validated when they were written.
    """
    base_offset, length, last_offset_delta = _OFFSET_LENGTH_DELTA.unpack_from(data, position)
    return length + LOG_OVERHEAD_BYTES, base_offset + last_offset_delta + 1


def whole_batches(data: Buffer, max_bytes: int, max_offset: int) -> tuple[int, int]:
    """Return (size in bytes, next offset) of the whole batches at the start of `data` that are within both limits.

    A batch is included if it ends within `max_bytes` and all its offsets are below `max_offset`. Returns (0, 0) if
    there is none. Raises CorruptRecordError for an impossible length; nothing else is checked.
    """
    position = next_offset = 0
    end = min(len(data), max_bytes)
    unpack = _OFFSET_LENGTH_DELTA.unpack_from
    while position + HEADER_BYTES <= end:
        base_offset, length, last_offset_delta = unpack(data, position)
        following = position + length + LOG_OVERHEAD_BYTES
        if length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
            raise CorruptRecordError(f"batch length {length} at offset {base_offset} is too small for a header")
        if following > end or base_offset + last_offset_delta >= max_offset:
            break
        position, next_offset = following, base_offset + last_offset_delta + 1
    return position, next_offset


def check_crc(data: Buffer, position: int, header: BatchHeader) -> None:
    """Raise CorruptRecordError unless the batch is complete and its CRC-32C is correct."""
    end = position + header.size_bytes
    if end > len(data):
        raise _incomplete(data, position, header)
    actual = crc32c(memoryview(data)[position + _CRC_FROM : end])
    if actual != header.crc:
        raise CorruptRecordError(
            f"wrong CRC of the batch at offset {header.base_offset}: {header.crc:#010x} stored, {actual:#010x} computed"
        )


def _incomplete(data: Buffer, position: int, header: BatchHeader) -> CorruptRecordError:
    size = len(data) - position
    return CorruptRecordError(f"batch at position {position} must have {header.size_bytes} bytes, got {size}")


def assign(batch: Buffer, base_offset: int, leader_epoch: int, log_append_time_ms: int | None = None) -> bytes:
    """Return the batch with this base offset and leader epoch.

    With `log_append_time_ms`, also sets that timestamp for all records, updates the CRC, and raises CorruptRecordError
    for an invalid header. Otherwise nothing is checked.
    """
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
    """Encode the header unchanged."""
    return _HEADER.pack(*header)


def join(header: BatchHeader, records: Buffer) -> bytes:
    """Return a batch from a header, whose CRC is recomputed, and encoded records."""
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
    """Return an uncompressed batch of (key, value) records with one timestamp. Raises ValueError without records."""
    if not records:
        raise ValueError("a batch must have at least one record")
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
    """Yield the records of the batch at `position`. Raises CorruptRecordError if it is compressed or invalid."""
    if header.compression:
        raise CorruptRecordError(f"batch at offset {header.base_offset} must be uncompressed to decode its records")
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
            raise CorruptRecordError(f"length of the record at offset {offset} does not match its content")
        yield Record(offset, timestamp, key, value, headers)
    if reader.position != len(reader.data):
        raise CorruptRecordError(f"unexpected bytes after the last record of the batch at offset {header.base_offset}")


class _Reader:
    """A cursor over the records of one batch. Reading beyond its end raises CorruptRecordError."""

    __slots__ = ("data", "position")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if size < 0 or end > len(self.data):
            raise CorruptRecordError(f"record field of {size} bytes exceeds its batch")
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
        raise CorruptRecordError("varint must have at most 10 bytes")

    def nullable_bytes(self) -> bytes | None:
        size = self.varint()
        return None if size < 0 else bytes(self.take(size))

    def header(self) -> tuple[str, bytes | None]:
        name = self.nullable_bytes()
        try:
            return (name or b"").decode(), self.nullable_bytes()
        except UnicodeDecodeError:
            raise CorruptRecordError("key of a record header is not UTF-8") from None


def put_varint(out: bytearray, value: int) -> None:
    """Append `value`, an int64, as a zigzag-encoded varint."""
    put_unsigned_varint(out, (value << 1) ^ (value >> 63))


def _put_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)
    else:
        put_varint(out, len(value))
        out += value
