"""Format of a snapshot file, and loading of its metadata image.

A file consists of record batches (v2) that start with a SnapshotHeader and end with a SnapshotFooter (630-02).

Reading checks the CRC of each batch, the positions of header and footer, and that each record has a value. Other
control records are skipped. Offsets count the records of the file and are unrelated to the log.

Invariants: invalid bytes raise CorruptRecordError. Only one batch is in memory at a time.
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
"""Codecs for writing snapshots. Reading accepts all codecs of Kafka."""

BATCH_RECORDS_MAX = 1000
"""Maximum records per batch; encoding one takes about 3 ms."""
BATCH_BYTES_MAX = 1 << 20
"""Size after which a batch gets no more records. Apache Kafka reads batches of up to 8 MiB."""
READ_BYTES = 1 << 20

_BUILDER_BYTES = (1 << 31) - 1  # no limit in the builder


class ReadableFile(Protocol):
    """The methods of `File` that are needed for reading."""

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes, fewer only at the end of the file."""

    def size(self) -> int:
        """Return the size in bytes."""


class SnapshotSummary(NamedTuple):
    """Header, number of data records, and size of a valid snapshot."""

    header: SnapshotHeader
    records: int
    size_bytes: int


def control_batch(record: SnapshotHeader | SnapshotFooter, base_offset: int, epoch: int, now_ms: int) -> bytes:
    """Return an encoded batch with one control record, the header or footer of a snapshot."""
    return record_batch.build(
        [encode_control(record)], base_offset=base_offset, leader_epoch=epoch, timestamp_ms=now_ms, is_control=True
    )


def data_batch(values: Sequence[bytes], base_offset: int, epoch: int, now_ms: int, compression: int) -> bytes:
    """Return an encoded batch of records without keys. `compression`: codec number, see COMPRESSIONS."""
    builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, -1, _BUILDER_BYTES)
    append = builder.append
    for index, value in enumerate(values):
        append(index, now_ms, None, value, [])
    return record_batch.assign(builder.build(), base_offset, epoch)


def batches_of(values: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the values in lists of at most `BATCH_RECORDS_MAX`.

    A list ends when it has `BATCH_BYTES_MAX` bytes or more.
    """
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
    """Reads one snapshot file from start to end."""

    def __init__(self, file: ReadableFile, name: str) -> None:
        """`name` is for messages. The caller closes the file."""
        self._file = file
        self._name = name
        self.size_bytes = file.size()
        self.read_bytes = 0
        """Number of bytes read, a multiple of complete batches."""
        self.records = 0
        """Number of data records read."""
        self.header: SnapshotHeader | None = None
        """The header, after the first batch was read."""
        self._is_ended = False

    def values(self) -> Iterator[list[bytes]]:
        """Yield the values of each data batch, as a list. The snapshot is valid only if the iteration completes.

        Raises CorruptRecordError, OSError.
        """
        try:
            for data, position, header in self._batches():
                if self._is_ended:
                    raise CorruptRecordError("a batch follows the footer")
                if header.is_control:
                    self._read_control(data, position, header)
                elif self.header is None:
                    raise CorruptRecordError("it does not start with a header")
                else:
                    values = _values(data, position, header)
                    self.records += len(values)
                    yield values
            if not self._is_ended:
                raise CorruptRecordError("it does not end with a footer")
        except CorruptRecordError as error:
            raise CorruptRecordError(f"snapshot {self._name}: {error.message}") from error

    def check(self) -> SnapshotSummary:
        """Read the whole file and return its summary. Raises CorruptRecordError, OSError."""
        for _ in self.values():
            pass
        return self.summary

    @property
    def summary(self) -> SnapshotSummary:
        """The summary. Raises RuntimeError until the file has been read to its end."""
        if self.header is None or not self._is_ended:
            raise RuntimeError(f"snapshot {self._name} was not read to its end")
        return SnapshotSummary(self.header, self.records, self.size_bytes)

    def read_header(self) -> SnapshotHeader:
        """Read only the first batch and return the header. Raises CorruptRecordError, OSError."""
        for data, position, header in self._batches():
            if header.is_control:
                self._read_control(data, position, header)
            break
        if self.header is None:
            raise CorruptRecordError(f"snapshot {self._name}: it does not start with a header")
        return self.header

    def _read_control(self, data: bytes, position: int, header: BatchHeader) -> None:
        for record in _records(data, position, header):
            if self._is_ended:
                raise CorruptRecordError("a record follows the footer")
            kind = control_type(record.key)
            if self.header is None:
                if kind != ControlType.SNAPSHOT_HEADER:
                    raise CorruptRecordError("it does not start with a header")
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
            else:  # the batch is larger than the bytes read, or incomplete
                needed = record_batch.parse_header(data).size_bytes
                if position + needed > self.size_bytes:
                    raise CorruptRecordError(f"the batch at byte {position} is incomplete")
                wanted = needed
            position += used


def _records(data: bytes, position: int, header: BatchHeader) -> list[DefaultRecordBatch]:
    try:
        return list(DefaultRecordBatch(memoryview(data)[position : position + header.size_bytes]))
    except Exception as error:
        # The decoder and each decompressor raise different exceptions for invalid bytes.
        raise CorruptRecordError(f"cannot decode the batch of {header.size_bytes} bytes: {error}") from error


def _values(data: bytes, position: int, header: BatchHeader) -> list[bytes]:
    values = [record.value for record in _records(data, position, header)]
    if None in values:
        raise CorruptRecordError("a record has no value")
    if len(values) != header.record_count or header.size_bytes < HEADER_BYTES:
        raise CorruptRecordError(f"a batch has {len(values)} records, but its header says {header.record_count}")
    return values


class ImageLoader:
    """Loads the metadata image of a snapshot, some records at a time.

    The caller may run other work between two steps. It should disable the garbage collector meanwhile and call
    `gc.freeze` afterwards, because a large image makes full collections slow.

    Invariant: use the image only after the last step, and never after a failed one.
    """

    def __init__(self, reader: SnapshotReader, snapshot_id: SnapshotId) -> None:
        self.image = MetadataImage(snapshot_id.end_offset - 1, snapshot_id.epoch)
        self.records = 0
        """Number of applied records."""
        self._reader = reader

    def steps(self) -> Iterator[int]:
        """Apply at most 1,000 records per step. Yield the total number of applied records.

        Raises CorruptRecordError, OSError.
        """
        for values in self._reader.values():
            for start in range(0, len(values), BATCH_RECORDS_MAX):
                delta = MetadataDelta()  # not used: the whole image is new
                for value in values[start : start + BATCH_RECORDS_MAX]:
                    self.image.apply(decode_record(value), delta)
                    self.records += 1
                yield self.records
        self.image.timestamp_ms = self._reader.summary.header.last_contained_log_timestamp
