"""The segments of one log, oldest first: lookup by offset and timestamp, expiry and removal.

Recently read and written positions are cached, so a consumer that continues where its last read ended needs no index.

Searches by timestamp (ListOffsets) use the time index, then batch headers, then the records of one batch. Outside of
compaction, only they decode records. The decompressed size is limited: a larger batch, or one that cannot be decoded,
counts as one record.

Threads: the owner changes the list. Searches run on any thread on a copy of the list; `Log` repeats a search if
segments were truncated or removed meanwhile.

Invariants: there is at least one segment and the last one is active. Base offsets rise strictly. At most
`_POSITIONS_MAX` positions are cached; the oldest are evicted first.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, BatchHeader
from kipmesh.storage.compression import decompress
from kipmesh.storage.fs import OpenFiles
from kipmesh.storage.log.segment import DELETED_SUFFIX, NO_TIMESTAMP, Segment

_LOG = logging.getLogger(__name__)

_POSITIONS_MAX = 32
_RECORDS_BYTES_MAX = 16 << 20
_LENGTH = Struct(">i")
_LENGTH_POSITION = 8
_ATTRIBUTES_LOW_POSITION = 22
_COMPRESSION_MASK = 0x07


class TimestampOffset(NamedTuple):
    """Timestamp (ms), offset and leader epoch of a record found by its timestamp."""

    timestamp: int
    offset: int
    leader_epoch: int


class SegmentList:
    """The segments of one log, oldest first. The last one is active."""

    __slots__ = ("_bases", "_directory", "_files", "_retired", "_retiring", "active", "items", "positions")

    def __init__(self, files: OpenFiles, directory: str, segments: list[Segment]) -> None:
        self._files = files
        self._directory = directory
        self.items = segments
        self.active = segments[-1]
        self._retired: list[tuple[int, str]] = []
        """(removal time, path) of retired files. A restart removes those left by the previous process."""
        self._retiring = threading.Lock()
        self._bases = [segment.base_offset for segment in segments]
        self.positions: dict[int, tuple[Segment, int]] = {}
        """Segment and position of batches by base offset. Must be cleared when files are renamed."""

    @property
    def base_offsets(self) -> tuple[int, ...]:
        """Base offsets, oldest first."""
        return tuple(self._bases)

    @property
    def size_bytes(self) -> int:
        """Total size of the log files of all segments, without indexes."""
        return sum(segment.size_bytes for segment in self.items)

    # -- where batches are

    def cache_position(self, offset: int, segment: Segment, position: int) -> None:
        """Cache the position of the batch with base offset `offset`, which may be the next one to append."""
        known = self.positions
        if offset not in known and len(known) >= _POSITIONS_MAX:
            del known[next(iter(known))]
        known[offset] = (segment, position)

    def locate(self, offset: int) -> tuple[Segment, int]:
        """Return segment and position of the batch that contains `offset`.

        Raises OSError; CorruptRecordError if no batch contains it.
        """
        known = self.positions.get(offset)
        if known is not None and known[1] < known[0].size_bytes:
            return known
        segment = self.items[bisect_right(self._bases, offset) - 1]
        if offset == segment.base_offset:
            return segment, 0
        found = segment.find(offset)
        if found is None:
            raise CorruptRecordError(f"{segment.path} has no batch with offset {offset}")
        return segment, found[0]

    def bytes_from(self, offset: int) -> int:
        """Return the size in bytes of all batches from the one that contains `offset`.

        Raises OSError; CorruptRecordError if no batch contains it.
        """
        first = max(0, bisect_right(self._bases, offset) - 1)
        position = self.locate(max(offset, self._bases[0]))[1]
        return sum(segment.size_bytes for segment in self.items[first:]) - position

    def expired(
        self, config: TopicConfig, now_ms: int, *, log_start_offset: int, log_end_offset: int, high_watermark: int
    ) -> int:
        """Return the number of oldest segments that retention may remove. Includes the active one only if all expire.

        A segment below the high watermark expires if its largest timestamp is older than `retention.ms`, or if the
        later segments alone have at least `retention.bytes`. Below the log start offset it expires under any
        `cleanup.policy`.
        """
        segments = self.items
        excess = self.size_bytes - config.retention_bytes if config.is_deleted and config.retention_bytes >= 0 else -1
        for number, segment in enumerate(segments):
            is_active = number + 1 == len(segments)
            end = log_end_offset if is_active else segments[number + 1].base_offset
            if end > high_watermark or (is_active and not segment.size_bytes):
                return number
            excess -= segment.size_bytes
            age_ms = now_ms - segment.retention_timestamp
            is_old = config.is_deleted and 0 <= config.retention_ms < age_ms
            is_below_start = not is_active and end <= log_start_offset
            if not (is_old or is_below_start or excess >= 0):
                return number
        return len(segments)

    # -- changes

    def add(self, base_offset: int, now_ms: int) -> None:
        """Start a new active segment and create its file. An OSError leaves the list unchanged."""
        segment = Segment(self._files, self._directory, base_offset, now_ms)
        segment.create()
        self._append(segment)

    def _append(self, segment: Segment) -> None:
        self.items.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    def truncate(self, offset: int) -> int:
        """Remove every batch that contains `offset` or a later one. Return the new end offset.

        The new end is the base offset of the batch that contained `offset`, or `offset` if no batch contained it.
        Raises OSError, CorruptRecordError.
        """
        keep = bisect_right(self._bases, offset)
        for segment in reversed(self.items[keep:]):
            segment.remove()
        del self.items[keep:], self._bases[keep:]
        self.active = self.items[-1]
        self.positions.clear()
        found = self.active.find(offset)
        if found is None:
            return offset
        position, header = found
        self.active.truncate(position, header.base_offset)
        return header.base_offset

    def reset(self, offset: int) -> None:
        """Replace all segments with an empty one at `offset`. Raises OSError."""
        created_ms = self.active.created_ms
        for segment in reversed(self.items):
            segment.remove()
        segment = Segment(self._files, self._directory, offset, created_ms)
        segment.create()
        del self.items[:], self._bases[:]
        self._append(segment)
        self.positions.clear()

    def retire(self, count: int, due_ms: int) -> int:
        """Rename the oldest `count` segments to `.deleted`, to be removed at `due_ms`. Return the next base offset.

        Raises OSError.
        """
        self._retire_files(self.items[:count], due_ms)
        del self.items[:count], self._bases[:count]
        self.positions.clear()
        return self._bases[0]

    def replace(self, old: Sequence[Segment], new: Segment, due_ms: int) -> None:
        """Replace adjacent segments `old` with `new`, and rename the files of `old` for removal at `due_ms`.

        Raises OSError.
        """
        self._retire_files(old, due_ms)
        first = self.items.index(old[0])
        self.items[first : first + len(old)] = [new]
        self._bases[first : first + len(old)] = [new.base_offset]
        self.positions.clear()

    def _retire_files(self, segments: Sequence[Segment], due_ms: int) -> None:
        for segment in segments:
            for renamed in segment.rename(DELETED_SUFFIX):
                with self._retiring:
                    self._retired.append((due_ms, renamed))

    def remove_retired(self, now_ms: int) -> int:
        """Remove the retired files that are due. Return the number of due files. Errors are logged. Thread-safe."""
        if not self._retired:
            return 0
        with self._retiring:
            due = [path for due_ms, path in self._retired if due_ms <= now_ms]
            self._retired = [entry for entry in self._retired if entry[0] > now_ms]
        for path in due:
            try:
                self._files.fs.remove(path)
            except FileNotFoundError:
                pass  # two compactions retired a segment of the same name
            except OSError as error:
                _LOG.warning("cannot remove retired file path=%s error=%s", path, error)
        return len(due)

    def forget_files(self) -> None:
        """Close the files of all segments."""
        for segment in self.items:
            segment.forget_files()


# -- searches by timestamp


def first_at_or_after(
    timestamp_ms: int, segments: Sequence[Segment], start_offset: int, max_offset: int
) -> TimestampOffset | None:
    """Return the first record within [start_offset, max_offset) whose timestamp is at least `timestamp_ms`, or None.

    Raises OSError, CorruptRecordError.
    """
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
    """Return the position in `segment` of a batch before which every timestamp is below `timestamp_ms`."""
    at = segment.time_index.floor(timestamp_ms - 1)
    if at < 0:
        return 0
    return segment.indexed_position(segment.time_index.at(at)[1])


def largest(segments: Sequence[Segment], start_offset: int, max_offset: int) -> TimestampOffset | None:
    """Return the first record with the largest timestamp of those within [start_offset, max_offset).

    Returns None if no record there has a timestamp. Raises OSError, CorruptRecordError.
    """
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
    """Return (largest timestamp, last offset) of the batch with the largest timestamp.

    Only batches that overlap [start_offset, max_offset) count. The timestamp is -1 if no such batch has one.
    """
    timestamp, offset = NO_TIMESTAMP, segment.base_offset
    first = max(0, start_offset - segment.base_offset)  # relative offset at which the scan starts
    at = segment.time_index.floor(max_offset - 1 - segment.base_offset, field=1)
    if at >= 0:
        entry = segment.time_index.at(at)
        if entry[1] >= first:  # the entry covers all batches up to its offset
            timestamp, first = entry
            offset = segment.base_offset + first
    for _, header in segment.batches(segment.indexed_position(first)):
        if header.base_offset >= max_offset:
            break
        if header.last_offset >= start_offset and header.largest_timestamp > timestamp:
            timestamp, offset = header.largest_timestamp, header.last_offset
    return timestamp, offset


def _records(segment: Segment, position: int, header: BatchHeader) -> Iterator[tuple[int, int]]:
    """Yield (offset, timestamp) of each record. A batch that cannot be decoded counts as one record."""
    data = segment.read_at(header.size_bytes, position)
    try:
        for record in DefaultRecordBatch(_uncompressed(data, header)):
            yield record.offset, record.timestamp
    except Exception as error:  # codecs raise various errors for invalid data of a producer
        _LOG.warning("cannot decode batch path=%s offset=%d error=%s", segment.path, header.base_offset, error)
        yield header.base_offset, header.max_timestamp


def _uncompressed(data: bytes, header: BatchHeader) -> bytes:
    """Return the batch without compression. Its CRC is not updated.

    Raises CorruptRecordError or errors of the codec.
    """
    if not header.compression:
        return data
    records = decompress(data[HEADER_BYTES:], header.compression, _RECORDS_BYTES_MAX)
    batch = bytearray(data[:HEADER_BYTES])
    _LENGTH.pack_into(batch, _LENGTH_POSITION, HEADER_BYTES - LOG_OVERHEAD_BYTES + len(records))
    batch[_ATTRIBUTES_LOW_POSITION] &= ~_COMPRESSION_MASK & 0xFF
    return bytes(batch) + records
