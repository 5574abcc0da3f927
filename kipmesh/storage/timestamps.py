"""Offsets by timestamp, for ListOffsets: by the time index, then by batch headers, then within one batch.

This is the one place of storage that decodes records, of a single batch, because an answer names a record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch

from kipmesh.core.record_batch import BatchHeader
from kipmesh.storage.segment import NO_TIMESTAMP, Segment

_LOG = logging.getLogger(__name__)


class TimestampOffset(NamedTuple):
    """A record found by its timestamp."""

    timestamp: int
    offset: int
    leader_epoch: int


def first_at_or_after(
    segments: Sequence[Segment], timestamp_ms: int, start_offset: int, max_offset: int
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
            if header.max_timestamp < timestamp_ms or header.last_offset < start_offset:
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


def largest(
    segments: Sequence[Segment], start_offset: int, max_offset: int, log_end_offset: int
) -> TimestampOffset | None:
    """The first record with the largest timestamp within [start_offset, max_offset)."""
    best: tuple[int, Segment, int] | None = None  # timestamp, segment, last offset of its batch
    for number, segment in enumerate(segments):
        if segment.base_offset >= max_offset:
            break
        end = segments[number + 1].base_offset if number + 1 < len(segments) else log_end_offset
        if end <= max_offset and segment.base_offset >= start_offset:
            timestamp, offset = segment.max_timestamp, segment.max_timestamp_offset
        else:
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
    files, timestamp, offset, position = segment.files, NO_TIMESTAMP, segment.base_offset, 0
    if start_offset <= segment.base_offset:  # up to a time entry that lies below max_offset, it gives the answer
        at = segment.time_index.floor(files, max_offset - 1 - segment.base_offset, field=1)
        if at >= 0:
            timestamp, relative = segment.time_index.at(files, at)
            offset = segment.base_offset + relative
            at = segment.offset_index.floor(files, relative)
            position = segment.offset_index.at(files, at)[1] if at >= 0 else 0
    for _, header in segment.batches(position):
        if header.base_offset >= max_offset:
            break
        if header.last_offset >= start_offset and header.max_timestamp > timestamp:
            timestamp, offset = header.max_timestamp, header.last_offset
    return timestamp, offset


def _records(segment: Segment, position: int, header: BatchHeader) -> Iterator[tuple[int, int]]:
    """(offset, timestamp) of each record; of the batch as a whole when it cannot be decoded."""
    records: list[tuple[int, int]] = []
    try:
        records.extend((r.offset, r.timestamp) for r in DefaultRecordBatch(segment.batch(position, header)))
    except Exception as error:  # whatever a codec raises on what a producer wrote
        _LOG.warning("cannot decode the batch at offset %d of %s: %s", header.base_offset, segment.path, error)
        return iter([(header.base_offset, header.max_timestamp)])
    return iter(records)
