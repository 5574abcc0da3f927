"""Offsets by timestamp, for ListOffsets: by the time index, then by batch headers, then within one batch.

This is the one place of storage that decodes records, of a single batch, because an answer names a record. What they
decompress to is limited; a batch beyond that, or one that cannot be decoded, is one record to a search.

Threads: any, while the log's owner appends. When the log is cut meanwhile, the answer or the error means nothing:
`Log` sees that and asks again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch

from kipmesh.core.record_batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, BatchHeader
from kipmesh.storage.decompress import decompress
from kipmesh.storage.segment import NO_TIMESTAMP, Segment

_LOG = logging.getLogger(__name__)

_RECORDS_BYTES_MAX = 16 << 20
_LENGTH = Struct(">i")
_LENGTH_POSITION = 8
_ATTRIBUTES_LOW_POSITION = 22
_COMPRESSION_MASK = 0x07


class TimestampOffset(NamedTuple):
    """A record found by its timestamp."""

    timestamp: int
    offset: int
    leader_epoch: int


def first_at_or_after(
    timestamp_ms: int, segments: Sequence[Segment], start_offset: int, max_offset: int
) -> TimestampOffset | None:
    """The first record within [start_offset, max_offset) whose timestamp is `timestamp_ms` or more."""
    for segment in segments:
        if segment.base_offset >= max_offset:
            return None
        if segment.max_timestamp < timestamp_ms:
            continue
        for position, header in segment.batches(_start(segment, timestamp_ms)):
            if header.base_offset >= max_offset:
                return None
            if header.largest_timestamp < timestamp_ms or header.last_offset < start_offset:
                continue
            for offset, timestamp in _records(segment, position, header):
                if timestamp >= timestamp_ms and offset >= start_offset:
                    found = TimestampOffset(timestamp, offset, header.partition_leader_epoch)
                    return found if offset < max_offset else None
    return None


def _start(segment: Segment, timestamp_ms: int) -> int:
    """Position of a batch before which every timestamp is less."""
    files = segment.files
    at = segment.time_index.floor(files, timestamp_ms - 1)
    if at < 0:
        return 0
    relative_offset = segment.time_index.at(files, at)[1]
    at = segment.offset_index.floor(files, relative_offset)
    return segment.offset_index.at(files, at)[1] if at >= 0 else 0


def largest(segments: Sequence[Segment], start_offset: int, max_offset: int) -> TimestampOffset | None:
    """The first record with the largest timestamp within [start_offset, max_offset)."""
    best: tuple[int, Segment, int] | None = None  # timestamp, segment, last offset of its batch
    for segment in segments:
        if segment.base_offset >= max_offset:
            break
        timestamp, offset = segment.largest
        if not start_offset <= offset < max_offset:
            timestamp, offset = _largest_within(segment, start_offset, max_offset)
        if timestamp > (best[0] if best else NO_TIMESTAMP):
            best = (timestamp, segment, offset)
    if best is None:
        return None
    found = best[1].find(best[2])
    if found is None:
        return None
    header = found[1]
    candidates = [(t, -o) for o, t in _records(best[1], *found) if start_offset <= o < max_offset]
    if not candidates:
        return None
    timestamp, negative = max(candidates)
    return TimestampOffset(timestamp, -negative, header.partition_leader_epoch)


def _largest_within(segment: Segment, start_offset: int, max_offset: int) -> tuple[int, int]:
    """Largest timestamp of the batches that overlap [start_offset, max_offset), and the last offset of its batch."""
    files, timestamp, offset = segment.files, NO_TIMESTAMP, segment.base_offset
    first = max(0, start_offset - segment.base_offset)  # where to begin to look at batches, relative
    at = segment.time_index.floor(files, max_offset - 1 - segment.base_offset, field=1)
    if at >= 0:
        entry = segment.time_index.at(files, at)
        if entry[1] >= first:  # up to there, it gives the answer
            timestamp, first = entry
            offset = segment.base_offset + first
    at = segment.offset_index.floor(files, first)
    position = segment.offset_index.at(files, at)[1] if at >= 0 else 0
    for _, header in segment.batches(position):
        if header.base_offset >= max_offset:
            break
        if header.last_offset >= start_offset and header.largest_timestamp > timestamp:
            timestamp, offset = header.largest_timestamp, header.last_offset
    return timestamp, offset


def _records(segment: Segment, position: int, header: BatchHeader) -> Iterator[tuple[int, int]]:
    """(offset, timestamp) of each record; of the batch as a whole where it cannot be decoded."""
    data = segment.batch(position, header)
    try:
        for record in DefaultRecordBatch(_uncompressed(data, header)):
            yield record.offset, record.timestamp
    except Exception as error:  # whatever a codec raises on what a producer wrote
        _LOG.warning("cannot decode the batch at offset %d of %s: %s", header.base_offset, segment.path, error)
        yield header.base_offset, header.max_timestamp


def _uncompressed(data: bytes, header: BatchHeader) -> bytes:
    """The batch without compression; its CRC is not made right. CorruptRecordError, or what a codec raises."""
    if not header.compression:
        return data
    records = decompress(data[HEADER_BYTES:], header.compression, _RECORDS_BYTES_MAX)
    batch = bytearray(data[:HEADER_BYTES])
    _LENGTH.pack_into(batch, _LENGTH_POSITION, HEADER_BYTES - LOG_OVERHEAD_BYTES + len(records))
    batch[_ATTRIBUTES_LOW_POSITION] &= ~_COMPRESSION_MASK & 0xFF
    return bytes(batch) + records
