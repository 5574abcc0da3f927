"""Batches v2 to Arrow, column by column: the part of a Spark task that takes the time.

The topic, partition and timestamp type of a batch are constants, offsets of a batch without holes are a range; only
keys, values and timestamps are taken from the records. Control batches are skipped, records outside of the range asked
for are dropped, and one Arrow batch holds at most `_ROWS` rows or `_BYTES` of wire data, whichever comes first.

Invariant: rows leave in offset order, each offset at most once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
from aiokafka.record.default_records import DefaultRecordBatch

from kipmesh.client.compression import decompressed
from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.spark.offsets import OffsetRange
from kipmesh.spark.row_ids import record_id

# Spark's own default of rows in an Arrow batch, and the bytes after which a batch of large records is sent.
_ROWS: Final = 10_000
_BYTES: Final = 4 * 1024 * 1024

_CREATE_TIME: Final = 0
_LOG_APPEND_TIME: Final = 1


def arrow_schema(*, include_headers: bool, include_record_id: bool = False) -> pa.Schema:
    """The columns of Spark's Kafka connector as Arrow types, exactly as Spark 4.2 expects them."""
    fields = [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
    if include_headers:
        header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
        fields.append(pa.field("headers", pa.list_(header)))
    if include_record_id:
        fields.append(pa.field("recordId", pa.string()))
    return pa.schema(fields)


def decode(chunks: Iterable[tuple[int, bytes]], wanted: OffsetRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Arrow batches of the records of `wanted` in `chunks`: first offsets, and whole batches in offset order.

    Raises `CorruptRecordError` for bytes that are no batch or whose CRC is wrong.
    """
    columns = _Columns(wanted, schema)
    for first, chunk in chunks:
        view = memoryview(chunk)
        for position, header in record_batch.iterate(chunk):
            if header.last_offset < first or header.is_control:
                continue
            if header.base_offset >= wanted.end:
                break
            record_batch.check_crc(chunk, position, header)
            columns.add(view[position : position + header.size_bytes], header, first)
            if columns.is_full:
                yield columns.take()
    if columns.rows:
        yield columns.take()


class _Columns:
    """The Arrow batch that is being built."""

    def __init__(self, wanted: OffsetRange, schema: pa.Schema) -> None:
        self._wanted = wanted
        self._schema = schema
        self._with_ids = "recordId" in schema.names
        self._with_headers = "headers" in schema.names
        self._keeps_headers = self._with_headers or self._with_ids
        self._clear()

    def _clear(self) -> None:
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._offsets: list[np.ndarray[Any, Any]] = []
        self._timestamps: list[int] = []
        self._types: list[np.ndarray[Any, Any]] = []
        self._headers: list[Any] = []
        self._bytes = 0

    @property
    def rows(self) -> int:
        return len(self._values)

    @property
    def is_full(self) -> bool:
        return self.rows >= _ROWS or self._bytes >= _BYTES

    def add(self, batch: memoryview, header: record_batch.BatchHeader, first: int) -> None:
        """Take the records of one batch over, those from offset `first` on. Raises `CorruptRecordError`."""
        before = self.rows
        whole = header.base_offset >= first and header.last_offset < self._wanted.end
        try:
            records = DefaultRecordBatch(decompressed(batch, header))
            if whole and header.record_count == header.last_offset_delta + 1:
                self._take_all(records)
                self._offsets.append(np.arange(header.base_offset, header.next_offset, dtype=np.int64))
            else:
                self._take_wanted(records, first)
        except Exception as error:
            # The decoder and five decompressors have an exception each for bytes that they cannot read.
            topic, partition = self._wanted.topic_partition
            text = f"batch at offset {header.base_offset} of {topic}-{partition} cannot be read: {error}"
            raise CorruptRecordError(text) from error
        taken = self.rows - before
        kind = _LOG_APPEND_TIME if header.is_log_append_time else _CREATE_TIME
        self._types.append(np.full(taken, kind, dtype=np.int32))
        self._bytes += header.size_bytes

    def _take_all(self, records: DefaultRecordBatch) -> None:
        keys, values, timestamps = self._keys.append, self._values.append, self._timestamps.append
        if self._keeps_headers:
            headers = self._headers.append
            for record in records:
                keys(record.key)
                values(record.value)
                timestamps(record.timestamp)
                headers(record.headers)
            return
        for record in records:
            keys(record.key)
            values(record.value)
            timestamps(record.timestamp)

    def _take_wanted(self, records: DefaultRecordBatch, first: int) -> None:
        """For the batches at the edges of a range, and those that compaction left holes in."""
        offsets: list[int] = []
        for record in records:
            if not first <= record.offset < self._wanted.end:
                continue
            offsets.append(record.offset)
            self._keys.append(record.key)
            self._values.append(record.value)
            self._timestamps.append(record.timestamp)
            if self._keeps_headers:
                self._headers.append(record.headers)
        self._offsets.append(np.array(offsets, dtype=np.int64))

    def take(self) -> pa.RecordBatch:
        """The batch as built so far; the next one starts empty."""
        topic, partition = self._wanted.topic_partition
        count = self.rows
        timestamps = np.array(self._timestamps, dtype=np.int64) * 1000
        offsets = np.concatenate(self._offsets)
        arrays = [
            pa.array(self._keys, pa.binary()),
            pa.array(self._values, pa.binary()),
            pa.repeat(topic, count),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            pa.array(offsets),
            pa.array(timestamps).cast(pa.timestamp("us", tz="UTC")),
            pa.array(np.concatenate(self._types)),
        ]
        if self._with_headers:
            arrays.append(_headers_array(self._headers, self._schema.field("headers").type))
        if self._with_ids:
            ids = map(record_id, repeat(topic), repeat(partition), offsets.tolist(), self._headers)
            arrays.append(pa.array(ids, pa.string(), size=count))
        self._clear()
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _headers_array(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Headers as the connector gives them: null, and not an empty list, for a record without headers."""
    return pa.array([[dict(zip(("key", "value"), h, strict=True)) for h in row] or None for row in rows], kind)
