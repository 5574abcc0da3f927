"""Decodes v2 batches to Arrow columns, the most expensive part of a task.

Topic, partition and timestamp type are constants of a batch. All other fields come from one parse of several batches
(`kipmesh.spark.record_columns`). Keys, values and headers are copied once, from the fetch buffer to Arrow.
Control batches and records outside the range are dropped. Pending data is at most `_ROWS` rows or `_BYTES`, or one
larger batch; the fetches that contain it are at most `_BYTES` and one more fetch.

Invariant: rows of a partition are in offset order, each offset at most once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kipmesh.client.compression import decompressed
from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.spark.offsets import OffsetRange
from kipmesh.spark.record_columns import (
    Numbers,
    RecordColumns,
    RecordHeaders,
    Spans,
    parse_records,
    record_starts,
)
from kipmesh.spark.row_ids import Header, record_id

# Limits of one Arrow batch, large enough to amortise its fixed costs.
_ROWS: Final = 64 * 1024
_BYTES: Final = 4 * 1024 * 1024

_UNREADABLE: Final = (CorruptRecordError, IndexError, pa.ArrowInvalid)
_LOG_APPEND_TIME: Final = 1
_MICROSECONDS: Final = 1000
_MS_MAX: Final = (2**63 - 1) // _MICROSECONDS
"""Largest absolute timestamp in ms that Spark can hold."""
# Larger fetches are decoded in place. Smaller ones, and decompressed batches, are concatenated first.
_BYTES_ALONE: Final = _BYTES // 8


def decode(chunks: Iterable[tuple[OffsetRange, int, bytes]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Decode chunks into Arrow batches with the columns of `schema`.

    A chunk is (range, first wanted offset, bytes of whole batches). Chunks of a range must be in offset order. Drops
    control batches and records outside the range or before the first wanted offset. Raises CorruptRecordError for
    invalid bytes, a wrong CRC, or a timestamp that Spark cannot hold.
    """
    decoder = _Decoder(schema)
    for wanted, first, chunk in chunks:
        yield from decoder.add(wanted, first, chunk)
    yield from decoder.finish()


class _Body(NamedTuple):
    """Decompressed records of one batch, in `data` from position `begin`. Records before offset `first` are dropped."""

    wanted: OffsetRange
    header: record_batch.BatchHeader
    data: bytes | memoryview
    begin: int
    first: int

    @property
    def records(self) -> memoryview:
        return memoryview(self.data)[self.begin : self.begin + self.size_bytes]

    @property
    def size_bytes(self) -> int:
        if self.header.compression:
            return len(self.data) - self.begin
        return self.header.size_bytes - record_batch.HEADER_BYTES


class _Decoder:
    """Collects record batches and converts several of them into one Arrow batch."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._bodies: list[_Body] = []
        self._rows = self._bytes = 0
        self._held_bytes = 0
        """Size of the fetches that contain pending batches. A fetch may be kept for one small batch."""

    def add(self, wanted: OffsetRange, first: int, chunk: bytes) -> Iterator[pa.RecordBatch]:
        """Add the batches of a chunk; yield the Arrow batches that reach a size limit. Raises CorruptRecordError."""
        for position, header in record_batch.iterate(chunk):
            if header.last_offset < first or header.is_control or not header.record_count:
                continue
            if header.base_offset >= wanted.end:
                break
            record_batch.check_crc(chunk, position, header)
            body = _body(wanted, chunk, position, header, first)
            rows, size = self._rows + header.record_count, self._bytes + body.size_bytes
            if self._bodies and (rows > _ROWS or size > _BYTES):
                yield from self.finish()
            self._bodies.append(body)
            self._rows += header.record_count
            self._bytes += body.size_bytes
        if self._bodies:
            self._held_bytes += len(chunk)
        if self._bytes >= _BYTES_ALONE or self._held_bytes >= _BYTES:
            yield from self.finish()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Convert the pending batches; yield one Arrow batch, or nothing if no record is wanted.

        Raises CorruptRecordError.
        """
        bodies, self._bodies = self._bodies, []
        self._rows = self._bytes = self._held_bytes = 0
        if not bodies:
            return
        try:
            columns = self._columns(bodies)
        except _UNREADABLE:
            for body in bodies:  # find the invalid one
                try:
                    self._columns([body])
                except _UNREADABLE as error:
                    raise _unreadable(body.wanted, body.header, error) from error
            raise
        if columns.num_rows:
            yield columns

    def _columns(self, bodies: list[_Body]) -> pa.RecordBatch:
        data, begins = _one_buffer(bodies)
        octets = np.frombuffer(data, np.uint8)
        last_ends = [begin + body.size_bytes for begin, body in zip(begins, bodies, strict=True)]
        parts = record_starts(data, octets, begins, last_ends)
        for body, starts in zip(bodies, parts, strict=True):
            if len(starts) != body.header.record_count:
                raise CorruptRecordError(f"{len(starts)} records, but the header has {body.header.record_count}")
        counts = np.array([len(part) for part in parts])
        starts = np.concatenate(parts)
        ends = np.append(starts[1:], 0)
        ends[np.cumsum(counts) - 1] = last_ends
        records = parse_records(octets, starts, ends)
        return self._arrow(pa.py_buffer(data), records, _BatchValues(bodies, counts))

    def _arrow(self, data: pa.Buffer, records: RecordColumns, batches: _BatchValues) -> pa.RecordBatch:
        offsets = batches.offsets(records.offset_deltas)
        is_wanted = (offsets >= batches.firsts) & (offsets < batches.ends)
        timestamps = batches.timestamps(records.timestamp_deltas)
        is_beyond = (timestamps > _MS_MAX) | (timestamps < -_MS_MAX)
        if is_beyond.any():
            if (is_beyond & is_wanted).any():
                first = int((is_beyond & is_wanted).argmax())
                raise CorruptRecordError(
                    f"the timestamp of the record at offset {offsets[first]} must be within {_MS_MAX} ms of 1970 for "
                    f"Spark, got {timestamps[first]} ms"
                )
            timestamps = np.where(is_beyond, 0, timestamps)  # these records are dropped below
        keys, values = _two_columns(data, records.keys, records.values)
        count = len(offsets)
        arrays = [
            keys,
            values,
            batches.topics(),
            pa.array(batches.partitions),
            pa.array(offsets),
            pa.array(timestamps * _MICROSECONDS).cast(pa.timestamp("us", tz="UTC")),
            pa.array(batches.types),
        ]
        headers = None
        if len(self._schema) > len(arrays):
            headers = _headers(data, records.headers, count)
            if "headers" in self._schema.names:
                arrays.append(headers)
        if "recordId" in self._schema.names:
            arrays.append(_record_ids(batches, offsets, headers))
        found = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return found if is_wanted.all() else found.filter(pa.array(is_wanted))


def _body(wanted: OffsetRange, chunk: bytes, position: int, header: record_batch.BatchHeader, first: int) -> _Body:
    if not header.compression:
        return _Body(wanted, header, chunk, position + record_batch.HEADER_BYTES, first)
    try:
        data = decompressed(memoryview(chunk)[position : position + header.size_bytes], header)
    except Exception as error:
        # Each codec has its own exception for invalid bytes.
        raise _unreadable(wanted, header, error) from error
    return _Body(wanted, header, data, record_batch.HEADER_BYTES, first)


def _unreadable(wanted: OffsetRange, header: record_batch.BatchHeader, error: Exception) -> CorruptRecordError:
    topic, partition = wanted.topic_partition
    return CorruptRecordError(f"batch at offset {header.base_offset} of {topic}-{partition} cannot be read: {error}")


def _one_buffer(bodies: list[_Body]) -> tuple[bytes, list[int]]:
    """Return one buffer with all bodies, and the position of each. Copies unless all bodies share one buffer."""
    data = bodies[0].data
    if isinstance(data, bytes) and all(body.data is data for body in bodies):
        return data, [body.begin for body in bodies]
    begins, end = [], 0
    for body in bodies:
        begins.append(end)
        end += body.size_bytes
    return b"".join([body.records for body in bodies]), begins


class _BatchValues:
    """Values from batch headers as arrays with one element per record."""

    def __init__(self, bodies: list[_Body], counts: Numbers) -> None:
        headers = [body.header for body in bodies]
        self._counts = counts
        self._topics = [body.wanted.topic_partition.topic for body in bodies]
        self.partitions = self._each([body.wanted.topic_partition.partition for body in bodies]).astype(np.int32)
        self._base_offsets = self._each([header.base_offset for header in headers])
        self._last_deltas = self._each([header.last_offset_delta for header in headers])
        self.firsts = self._each([body.first for body in bodies])
        self.ends = self._each([body.wanted.end for body in bodies])
        self.types = self._each([int(header.is_log_append_time) for header in headers]).astype(np.int32)
        self._base_timestamps = self._each([header.base_timestamp for header in headers])
        self._append_times = self._each([header.max_timestamp for header in headers])
        # Offsets ascend only within a run of batches of one partition.
        places = [body.wanted.topic_partition for body in bodies]
        changes = [0, *(int(a != b) for a, b in itertools.pairwise(places))]
        self._runs = self._each(np.cumsum(changes).tolist())

    def _each(self, values: list[int]) -> Numbers:
        return np.repeat(np.array(values, np.int64), self._counts)

    def topics(self) -> pa.Array:
        """Return an Arrow array with the topic of each record."""
        names = list(dict.fromkeys(self._topics))
        if len(names) == 1:
            return pa.repeat(names[0], int(self._counts.sum()))
        return pa.array(names).take(pa.array(self._each([names.index(each) for each in self._topics])))

    def offsets(self, deltas: Numbers) -> Numbers:
        """Return the offset of each record: its delta plus the base offset of its batch.

        Raises CorruptRecordError if offsets are not ascending or outside their batch.
        """
        offsets = self._base_offsets + deltas
        falls = (offsets[1:] <= offsets[:-1]) & (self._runs[1:] == self._runs[:-1])
        if (deltas < 0).any() or (deltas > self._last_deltas).any() or falls.any():
            raise CorruptRecordError("record offsets must be ascending and within their batch")
        return offsets

    def timestamps(self, deltas: Numbers) -> Numbers:
        """Return the timestamp of each record in ms; in a batch with log append time, the append time.

        Raises CorruptRecordError if a timestamp exceeds 64 bits.
        """
        times = self._base_timestamps + deltas
        if (((self._base_timestamps ^ times) & (deltas ^ times)) < 0).any():
            raise CorruptRecordError("a timestamp exceeds 64 bits")
        return np.where(self.types == _LOG_APPEND_TIME, self._append_times, times) if self.types.any() else times


def _two_columns(data: pa.Buffer, one: Spans, other: Spans) -> tuple[pa.Array, pa.Array]:
    """Return two binary columns whose fields alternate in `data`. Copies each field once."""
    count = len(one.starts)
    bounds = np.empty(4 * count + 1, np.int32)
    bounds[0:-1:4], bounds[1:-1:4] = one.starts, one.ends
    bounds[2:-1:4], bounds[3:-1:4] = other.starts, other.ends
    bounds[-1] = bounds[-2]
    # Every second piece is a field. The pieces between are lengths and other fields.
    pieces = pa.BinaryArray.from_buffers(pa.binary(), 4 * count, [None, pa.py_buffer(bounds), data])
    return _taken(pieces, 0, one.is_null), _taken(pieces, 2, other.is_null)


def _taken(pieces: pa.Array, first: int, is_null: np.ndarray[Any, Any]) -> pa.Array:
    count = len(is_null)
    if not is_null.any():
        return pieces.take(pa.array(np.arange(first, 4 * count, 4, dtype=np.int32)))
    if is_null.all():
        return pa.nulls(count, pa.binary())
    return pieces.take(pa.array(np.arange(first, 4 * count, 4, dtype=np.int32), mask=is_null))


def _headers(data: pa.Buffer, headers: RecordHeaders | None, count: int) -> pa.Array:
    """Return the `headers` column as in Spark's Kafka connector: null for a record without headers."""
    kind = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    if headers is None:
        return pa.nulls(count, pa.list_(kind))
    keys, values = _two_columns(data, headers.keys, headers.values)
    structs = pa.StructArray.from_arrays([keys.cast(pa.string()), values], fields=list(kind))
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(headers.counts, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), structs, mask=pa.array(headers.counts == 0))


def _record_ids(batches: _BatchValues, offsets: Numbers, headers: pa.Array) -> pa.Array:
    ids = []
    places = zip(batches.topics().to_pylist(), batches.partitions.tolist(), offsets.tolist(), strict=True)
    for (topic, partition, offset), row in zip(places, headers.to_pylist(), strict=True):
        own: list[Header] = [(each["key"], each["value"]) for each in row or ()]
        ids.append(record_id(topic, partition, offset, own))
    return pa.array(ids, pa.string())
