"""The content of a snapshot's file, and the image that it states.

Record batches v2 are between a SnapshotHeader and a SnapshotFooter (630-02).

Reading checks everything: each batch's CRC, that the header comes first and the footer last, that each record has a
value. Other control records in between are skipped. Offsets inside count records from 0 and say nothing about the log.

Invariant: bad bytes raise CorruptRecordError and nothing else; a batch is in memory at a time, not the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from kipmesh.core import record_batch
from kipmesh.core.control_records import (
    ControlType,
    SnapshotFooter,
    SnapshotHeader,
    control_type,
    decode_control,
    encode_control,
)
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.records import decode_record
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader
from kipmesh.messages import SnapshotId

COMPRESSIONS = {"none": 0, "gzip": 1, "snappy": 2, "zstd": 4}
"""What a snapshot may be written with; what Kafka compresses otherwise is read as well."""

BATCH_RECORDS_MAX = 1000
"""Records of a batch: what is written at a time while others wait, some 3 ms."""
BATCH_BYTES_MAX = 1 << 20
"""Bytes of a batch beyond which no record is added; Apache Kafka reads up to 8 MiB."""
READ_BYTES = 1 << 20

_BUILDER_BYTES = (1 << 31) - 1  # the builder itself need not say when to stop


class ReadableFile(Protocol):
    """What reading needs of a `File`."""

    def read_at(self, size: int, position: int) -> bytes:
        """At most `size` bytes; fewer at the file's end only."""

    def size(self) -> int:
        """Bytes in the file."""


class SnapshotSummary(NamedTuple):
    """What a whole, valid snapshot has."""

    header: SnapshotHeader
    records: int
    size_bytes: int


def control_batch(record: SnapshotHeader | SnapshotFooter, base_offset: int, epoch: int, now_ms: int) -> bytes:
    """A batch of one control record, the first or the last of a snapshot."""
    return record_batch.build(
        [encode_control(record)], base_offset=base_offset, leader_epoch=epoch, timestamp_ms=now_ms, is_control=True
    )


def data_batch(values: Sequence[bytes], base_offset: int, epoch: int, now_ms: int, compression: int) -> bytes:
    """A batch of records without keys."""
    builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, -1, _BUILDER_BYTES)
    append = builder.append
    for index, value in enumerate(values):
        append(index, now_ms, None, value, [])
    return record_batch.assign(builder.build(), base_offset, epoch)


def batches_of(values: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The values, as many at a time as a batch should have."""
    batch: list[bytes] = []
    size = 0
    for value in values:
        batch.append(value)
        size += len(value)
        if len(batch) == BATCH_RECORDS_MAX or size >= BATCH_BYTES_MAX:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class SnapshotReader:
    """Reads one file from its beginning to its end."""

    def __init__(self, file: ReadableFile, name: str) -> None:
        """`name` is for messages; the caller closes the file."""
        self._file = file
        self._name = name
        self.size_bytes = file.size()
        self.read_bytes = 0
        """How far reading is, a batch at a time."""
        self.records = 0
        """Data records so far."""
        self.header: SnapshotHeader | None = None
        """Known after the first batch."""
        self._is_ended = False

    def values(self) -> Iterator[list[bytes]]:
        """The values of each data batch; whole and valid only if it comes to its end. CorruptRecordError, OSError."""
        try:
            for data, position, header in self._batches():
                if self._is_ended:
                    raise CorruptRecordError("a batch follows the footer")
                if header.is_control:
                    self._read_control(data, position, header)
                elif self.header is None:
                    raise CorruptRecordError("it does not begin with a header")
                else:
                    values = _values(data, position, header)
                    self.records += len(values)
                    yield values
            if not self._is_ended:
                raise CorruptRecordError("it does not end with a footer")
        except CorruptRecordError as error:
            raise CorruptRecordError(f"snapshot {self._name}: {error.message}") from error

    def check(self) -> SnapshotSummary:
        """Read to the end. CorruptRecordError, OSError."""
        for _ in self.values():
            pass
        return self.summary

    @property
    def summary(self) -> SnapshotSummary:
        """After the end."""
        if self.header is None or not self._is_ended:
            raise RuntimeError("the snapshot is not read to its end")
        return SnapshotSummary(self.header, self.records, self.size_bytes)

    def read_header(self) -> SnapshotHeader:
        """Of the first batch alone. CorruptRecordError, OSError."""
        for data, position, header in self._batches():
            if header.is_control:
                self._read_control(data, position, header)
            break
        if self.header is None:
            raise CorruptRecordError(f"snapshot {self._name}: it does not begin with a header")
        return self.header

    def _read_control(self, data: bytes, position: int, header: BatchHeader) -> None:
        for record in _records(data, position, header):
            if self._is_ended:
                raise CorruptRecordError("a record follows the footer")
            kind = control_type(record.key)
            if self.header is None:
                if kind != ControlType.SNAPSHOT_HEADER:
                    raise CorruptRecordError("it does not begin with a header")
                self.header = decode_control(SnapshotHeader, record.value)
            elif kind == ControlType.SNAPSHOT_FOOTER:
                decode_control(SnapshotFooter, record.value)
                self._is_ended = True

    def _batches(self) -> Iterator[tuple[bytes, int, BatchHeader]]:
        position = 0
        wanted = READ_BYTES
        while position < self.size_bytes:
            wanted = min(wanted, self.size_bytes - position)
            data = self._file.read_at(wanted, position)
            if len(data) < wanted:
                raise CorruptRecordError(f"it ends at byte {position + len(data)} of {self.size_bytes}")
            used = 0
            for at, header in record_batch.iterate(data, allow_partial=True):
                record_batch.check_crc(data, at, header)
                used = at + header.size_bytes
                self.read_bytes = position + used
                yield data, at, header
            if used:
                wanted = READ_BYTES
            else:  # one batch is larger than what was read, or the file is cut
                needed = record_batch.parse_header(data).size_bytes
                if position + needed > self.size_bytes:
                    raise CorruptRecordError(f"the batch at byte {position} is cut")
                wanted = needed
            position += used


def _records(data: bytes, position: int, header: BatchHeader) -> list[DefaultRecordBatch]:
    try:
        return list(DefaultRecordBatch(memoryview(data)[position : position + header.size_bytes]))
    except Exception as error:
        # The decoder and five decompressors have an exception each for bytes that they cannot read.
        raise CorruptRecordError(f"the batch of {header.size_bytes} bytes cannot be read: {error}") from error


def _values(data: bytes, position: int, header: BatchHeader) -> list[bytes]:
    values = [record.value for record in _records(data, position, header)]
    if None in values:
        raise CorruptRecordError("a record has no value")
    if len(values) != header.record_count or header.size_bytes < HEADER_BYTES:
        raise CorruptRecordError(f"a batch has {len(values)} records and says {header.record_count}")
    return values


class ImageLoader:
    """Loads the image of one snapshot, some records at a time.

    The caller may run other work between two steps. Python's garbage collector should be off meanwhile, and the image
    frozen for it afterwards (`gc.freeze`): a large image makes full collections long.

    Invariant: the image is for use after the last step, and not at all when a step fails.
    """

    def __init__(self, reader: SnapshotReader, snapshot_id: SnapshotId) -> None:
        self.image = MetadataImage(snapshot_id.end_offset - 1, snapshot_id.epoch)
        self.records = 0
        """How many are applied so far."""
        self._reader = reader

    def steps(self) -> Iterator[int]:
        """Apply at most 1,000 records at a time; gives how many are applied so far. CorruptRecordError, OSError."""
        for values in self._reader.values():
            for start in range(0, len(values), BATCH_RECORDS_MAX):
                delta = MetadataDelta()  # everything is new
                for value in values[start : start + BATCH_RECORDS_MAX]:
                    self.image.apply(decode_record(value), delta)
                    self.records += 1
                yield self.records
        self.image.timestamp_ms = self._reader.summary.header.last_contained_log_timestamp
