"""Log compaction (`cleanup.policy=compact`): keeps the last record of each key, at its offset.

Rules: as Apache Kafka's log cleaner. Inactive segments below the high watermark are compacted, unless younger than
`min.compaction.lag.ms`. The dirty part, from `first_dirty_offset`, determines the last offset of each key. All segments
below its end are then rewritten; small ones are merged up to `segment.bytes`. An emptied batch is kept while it is the
last of its producer. Only segments below the recovery point are compacted, so a truncation of clean segments also
rewrites the checkpoints, and a tombstone is never removed while older values of its key remain.

Difference to Kafka: other removed batches are replaced by one batch without records per leader epoch, which Kafka's
readers accept. Offsets therefore never have gaps, and the remaining batches have all leader epochs.

Threads: the log's owner calls `plan_compaction`, the steps of `Swap` and `mark_clean`. All other functions run on a
worker thread: they read inactive segments and write files that are not in use. A truncation meanwhile discards their
result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.record_batch import BatchHeader, check_crc, parse_header
from kipmesh.messages.schema import MAX_INT64
from kipmesh.storage.log.compaction_records import clean_batch, empty_batch, filler_batch, keys_of
from kipmesh.storage.log.log import Log
from kipmesh.storage.log.segment import CLEANED_SUFFIX, MAX_RELATIVE_OFFSET, SWAP_SUFFIX, Segment

_LOG = logging.getLogger(__name__)

KEY_BYTES = 150
"""Estimated memory per key, in addition to its bytes."""
_WRITE_BYTES = 1 << 20

Pace = Callable[[int], None]
"""Called with the number of bytes read or written. May sleep, or raise to stop the compaction."""


@dataclass(slots=True)
class Plan:
    """Segments of one log that can be compacted."""

    log: Log
    segments: Sequence[Segment]
    """Inactive segments from the oldest."""
    end_offset: int
    """End offset of `segments`."""
    first_dirty_offset: int
    producers: frozenset[int]
    """Last offset of each idempotent producer."""
    generation: int
    """Generation of the log's durability when the plan was made, updated after each swap."""
    dirty_ratio: float
    is_overdue: bool
    """Whether `max.compaction.lag.ms` is exceeded."""

    @property
    def is_due(self) -> bool:
        """Whether the dirty ratio exceeds `min.cleanable.dirty.ratio`, or the log is overdue."""
        return self.is_overdue or self.dirty_ratio > self.log.config.min_cleanable_dirty_ratio


def plan_compaction(log: Log, now_ms: int, high_watermark: int) -> Plan | None:
    """Return the segments that can be compacted, or None if no segment is dirty.

    Also returns None for the metadata log, if the topic is not compacted, and if the log has failed or is replacing
    segments. Raises OSError, CorruptRecordError.
    """
    config = log.config
    if not config.is_compacted or log.topic == CLUSTER_METADATA_TOPIC or log.failed or log.swap:
        return None
    first_dirty = max(log.first_dirty_offset, log.log_start_offset)
    bound = min(high_watermark, log.recovery_point)
    segments: list[Segment] = []
    items, end, dirty_bytes, total_bytes, is_overdue = log.segments.items, 0, 0, 0, False
    for segment, following in pairwise(items):
        is_dirty = following.base_offset > first_dirty
        age_ms = now_ms - segment.retention_timestamp
        is_young = config.min_compaction_lag_ms > 0 and age_ms < config.min_compaction_lag_ms
        if following.base_offset > bound or (is_dirty and is_young):
            break
        segments.append(segment)
        end = following.base_offset
        total_bytes += segment.size_bytes
        if is_dirty:
            if not dirty_bytes and config.max_compaction_lag_ms < MAX_INT64:
                is_overdue = segment.age_ms(now_ms, now_ms) > config.max_compaction_lag_ms
            dirty_bytes += segment.size_bytes
    if not dirty_bytes:
        return None
    return Plan(
        log,
        segments,
        end,
        first_dirty,
        frozenset(log.producers.last_offsets()),
        log.durability.generation,
        dirty_bytes / total_bytes,
        is_overdue,
    )


class OffsetMap(NamedTuple):
    """Last offset of each key in the records from the plan's first dirty offset to `end_offset` (exclusive)."""

    offsets: Mapping[bytes, int]
    end_offset: int


def _batches(log: Log, segment: Segment, pace: Pace) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield the header and bytes of each batch, and call `pace`. Raises OSError; CorruptRecordError for a wrong CRC."""
    for position, header in segment.batches():
        data = segment.read_at(header.size_bytes, position)
        check_crc(data, 0, header)
        pace(header.size_bytes)
        yield header, data


def build_offset_map(plan: Plan, memory_bytes: int, pace: Pace) -> OffsetMap:
    """Read dirty records into an offset map until its keys need an estimated `memory_bytes`.

    Raises OSError, CorruptRecordError.
    """
    offsets: dict[bytes, int] = {}
    used, end = 0, plan.first_dirty_offset
    for number, segment in enumerate(plan.segments):
        if number + 1 < len(plan.segments) and plan.segments[number + 1].base_offset <= plan.first_dirty_offset:
            continue
        for header, data in _batches(plan.log, segment, pace):
            if header.last_offset < plan.first_dirty_offset:
                continue
            for key, offset in keys_of(data, header):
                if key not in offsets:
                    used += len(key) + KEY_BYTES
                offsets[key] = offset
            end = header.next_offset
            if used >= memory_bytes:
                return OffsetMap(offsets, end)
    return OffsetMap(offsets, end)


def group_segments(plan: Plan, end_offset: int) -> list[list[Segment]]:
    """Group adjacent segments that start below `end_offset`, up to `segment.bytes` per group.

    Each group is rewritten as one segment.
    """
    config, groups = plan.log.config, list[list[Segment]]()
    size = 0
    for number, segment in enumerate(plan.segments):
        if segment.base_offset >= end_offset:
            break
        end = plan.segments[number + 1].base_offset if number + 1 < len(plan.segments) else plan.end_offset
        if (
            not groups
            or size + segment.size_bytes > config.segment_bytes
            or end - 1 - groups[-1][0].base_offset > MAX_RELATIVE_OFFSET
        ):
            groups.append([])
            size = 0
        groups[-1].append(segment)
        size += segment.size_bytes
    return groups


@dataclass(slots=True)
class _Writer:
    """Writes a compacted segment."""

    _segment: Segment
    _interval_bytes: int
    _pace: Pace
    _parts: list[bytes] = field(default_factory=list)
    _bytes: int = 0
    _hole: tuple[int, int, int] | None = None  # base offset, last offset, leader epoch

    def add(self, batch: bytes) -> None:
        """Write a batch."""
        self._fill()
        self._put(batch)

    def omit(self, header: BatchHeader) -> None:
        """Omit a batch. Adjacent omitted batches of one leader epoch become one batch without records."""
        epoch = header.partition_leader_epoch
        if self._hole is not None and self._hole[2] == epoch:
            self._hole = (self._hole[0], header.last_offset, epoch)
        else:
            self._fill()
            self._hole = (header.base_offset, header.last_offset, epoch)

    def _fill(self) -> None:
        if self._hole is not None:
            self._put(filler_batch(*self._hole))
            self._hole = None

    def _put(self, batch: bytes) -> None:
        self._parts.append(batch)
        self._bytes += len(batch)
        if self._bytes >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        position = self._segment.write(b"".join(self._parts))
        for batch in self._parts:
            header = parse_header(batch)
            self._segment.index_batch(
                position, len(batch), header.last_offset, header.largest_timestamp, self._interval_bytes
            )
            position += len(batch)
        self._pace(self._bytes)
        self._parts.clear()
        self._bytes = 0

    def finish(self) -> None:
        """Write all buffered data and indexes, and sync the files. Raises OSError."""
        self._fill()
        if self._parts:
            self._write()
        self._segment.seal()
        self._segment.sync(with_indexes=True)


class Swap:
    """Crash-safe replacement of adjacent segments (`old`) with their compacted copy (`new`), using Kafka's file names.

    1. `.cleaned`: the copy is written and fsynced. A restart removes it.
    2. `begin`: the copy is renamed to `.swap` and the directory is synced. A restart now completes the replacement.
    3. `take_over`: the old segments are renamed to `.deleted`, readers use the copy, and the directory is synced.
    4. `finish`: the copy gets its plain name.

    A truncation between 2 and 3 cancels the replacement durably; otherwise a restart would restore truncated records.
    Retention is suspended meanwhile. The syncs run on a worker thread, all other steps on the log's owner.

    Invariants: a log has at most one `.swap` file. While it exists, the copy or the segments that it replaces are
    complete.
    """

    def __init__(self, log: Log, old: Sequence[Segment], new: Segment, generation: int) -> None:
        """`generation`: the generation of the log's durability when `old` was read."""
        self.log = log
        self.old = list(old)
        self.new = new
        self.generation = generation
        """The last generation in which only this swap changed the log; odd if something else changed it."""
        self._is_in_use = False

    def begin(self) -> bool:
        """Rename the copy to `.swap` (step 2). Call `sync` next.

        Returns False, without any effect, if the log was truncated since `old` was read or another swap is running.
        Raises StorageError if the log has failed or the disk fails, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log
        is closed.
        """
        log = self.log
        log.check_usable()
        if log.swap is not None or not log.durability.is_unchanged(self.generation):
            return False
        with log.storage_errors("compact", permanent=True):
            self.new.move(SWAP_SUFFIX)
        log.swap = self
        return True

    def sync(self) -> None:
        """Sync the log's directory after `begin` or `take_over`. Thread-safe.

        Raises StorageError, unless the log was truncated or closed meanwhile; the failure is then permanent.
        """
        log = self.log
        generation = log.durability.generation
        try:
            log.files.fs.sync_dir(log.dir)
        except OSError as error:
            if log.durability.is_unchanged(generation):
                raise log.fail(error, "sync the directory of", permanent=True) from error

    def cancel(self) -> None:
        """Cancel the swap durably before a truncation, unless `take_over` has run. Raises OSError.

        The copy lacks records that were superseded by newer ones, which the truncation may remove.
        """
        if not self._is_in_use:
            self.new.move(CLEANED_SUFFIX)
            self.log.files.fs.sync_dir(self.log.dir)
            self.log.swap = None

    def take_over(self, now_ms: int) -> bool:
        """Replace the old segments with the copy (step 3). Call `sync` next. Return False if the swap was cancelled.

        Raises StorageError if the log has failed or the disk fails, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log
        is closed.
        """
        log = self.log
        log.check_usable()
        if log.swap is not self:
            return False
        with self._changing_files():
            log.segments.replace(self.old, self.new, now_ms + log.config.file_delete_delay_ms)
            self._is_in_use = True
            log.size_bytes = log.segments.size_bytes
            log.producers.delete_snapshots([segment.base_offset for segment in self.old[1:]])
        return True

    def finish(self) -> None:
        """Rename the copy to its plain name (step 4), unless it was truncated away.

        Raises StorageError if the log has failed or the disk fails, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log
        is closed.
        """
        log = self.log
        log.check_usable()
        log.swap = None
        if self.new in log.segments.items:  # not truncated meanwhile
            with self._changing_files():
                self.new.move("")
                log.segments.positions.clear()

    @contextmanager
    def _changing_files(self) -> Iterator[None]:
        durability = self.log.durability
        is_alone = durability.is_unchanged(self.generation)
        with self.log.storage_errors("compact", permanent=True), durability.changing_files():
            yield
        self.generation = durability.generation if is_alone else 1

    def discard(self) -> None:
        """Remove the copy's files, unless the log uses them or the swap is running. Thread-safe. Raises OSError."""
        if not self._is_in_use and self.log.swap is not self:
            self.new.remove()


def compact(plan: Plan, group: Sequence[Segment], offset_map: OffsetMap, now_ms: int, pace: Pace) -> Swap | None:
    """Write the compacted copy of a group, and return the swap that replaces the group with it.

    Returns None if the group is one segment that would not change. Raises OSError, CorruptRecordError.
    """
    log = plan.log
    new = Segment(log.files, log.dir, group[0].base_offset, max(each.created_ms for each in group), CLEANED_SUFFIX)
    new.remove()  # of an earlier attempt
    try:
        new.create()
        is_changed = _write(plan, group, offset_map, now_ms, _Writer(new, log.config.index_interval_bytes, pace), pace)
    except BaseException:
        new.remove()
        raise
    if not is_changed and len(group) == 1:
        new.remove()
        return None
    return Swap(log, group, new, plan.generation)


def _write(
    plan: Plan, group: Sequence[Segment], offset_map: OffsetMap, now_ms: int, writer: _Writer, pace: Pace
) -> bool:
    """Write the compacted batches of a group with `writer`. Return whether any batch changed."""
    is_changed = False
    retention_ms = plan.log.config.delete_retention_ms
    for segment in group:
        for header, data in _batches(plan.log, segment, pace):
            if header.base_offset >= offset_map.end_offset:
                writer.add(data)
                continue
            is_last_of_producer = header.producer_id >= 0 and header.last_offset in plan.producers
            kept = clean_batch(data, header, offset_map.offsets, now_ms, retention_ms)
            if kept is not None and (header.record_count or header.is_control or is_last_of_producer):
                writer.add(kept)
            elif is_last_of_producer:
                writer.add(empty_batch(header))
            else:
                writer.omit(header)
            is_changed |= kept is not data
    writer.finish()
    return is_changed


def mark_clean(plan: Plan, offset_map: OffsetMap) -> bool:
    """Raise the log's first dirty offset to the end of `offset_map`. Call this after the last swap.

    Returns False, without any effect, if anything other than these swaps truncated or removed segments meanwhile.
    """
    if not plan.log.durability.is_unchanged(plan.generation):
        return False
    plan.log.first_dirty_offset = max(plan.log.first_dirty_offset, offset_map.end_offset)
    return True


def compact_now(log: Log, now_ms: int, high_watermark: int, *, memory_bytes: int = 128 << 20) -> bool:
    """Run a complete compaction, for tests and tools. Return whether the compacted records were marked clean.

    Returns False if there was nothing to do, or if the log was truncated meanwhile. Raises OSError, KafkaError.
    """
    plan = plan_compaction(log, now_ms, high_watermark)
    if plan is None:
        return False
    offset_map = build_offset_map(plan, memory_bytes, _no_pace)
    for group in group_segments(plan, offset_map.end_offset):
        swap = compact(plan, group, offset_map, now_ms, _no_pace)
        if swap is None:
            continue
        if swap.begin():
            swap.sync()
            if swap.take_over(now_ms):
                swap.sync()
                swap.finish()
        swap.discard()
        plan.generation = swap.generation
    return mark_clean(plan, offset_map)


def _no_pace(size_bytes: int) -> None:
    """A `Pace` that does not limit the rate."""
