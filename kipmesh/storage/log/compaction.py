"""Compaction of a log: of each key the last record stays; offsets stay as they are (`cleanup.policy=compact`).

Rules (Apache Kafka's cleaner): closed segments are compacted, below the high watermark and not younger than
`min.compaction.lag.ms`. The dirty part, from `first_dirty_offset` on, says the last offset of each key; then all
segments up to its end are written anew, several small ones as one of at most `segment.bytes`. A batch that loses all
its records stays as an empty one while it is the last of its producer. Also below the recovery point: so a cut that
takes something clean away is one that the checkpoints are rewritten for, and no tombstone is ever taken for one whose
older values are gone when they are not.

Ours: where other batches lose all their records, one batch without records has their place, of one leader epoch each.
Kafka's readers know such batches. So offsets have no gaps in any log, and a gap is always damage; and leader epochs
can be read from the batches that are left.

Threads: `plan_of`, the steps of `Swap` and `done` are the log owner's. The rest is for another thread: it reads closed
segments, and writes files that nobody else knows. When the log is cut meanwhile, what was written is thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.record_batch import BatchHeader, check_crc, parse_header
from kipmesh.messages.schema import MAX_INT64
from kipmesh.storage.log.compaction_records import cleaned, empty_batch, filler, keys_of
from kipmesh.storage.log.log import Log, Swap
from kipmesh.storage.log.segment import CLEANED_SUFFIX, MAX_RELATIVE_OFFSET, Segment

_LOG = logging.getLogger(__name__)

KEY_BYTES = 150
"""Memory that a key takes beyond its own bytes, about."""
_WRITE_BYTES = 1 << 20

Pace = Callable[[int], None]
"""Told how many bytes were read or written; it may sleep, and raise to stop the work."""


@dataclass(slots=True)
class Plan:
    """What of a log is to be compacted."""

    log: Log
    segments: Sequence[Segment]
    """Closed ones, from the oldest on."""
    end_offset: int
    """Where they end."""
    first_dirty_offset: int
    producers: frozenset[int]
    """The last offset of each producer."""
    generation: int
    """Of the log's durability when the plan was made, and after each swap."""
    dirty_ratio: float
    is_overdue: bool
    """Whether `max.compaction.lag.ms` asks for it."""

    @property
    def is_due(self) -> bool:
        """Whether it is worth it."""
        return self.is_overdue or self.dirty_ratio > self.log.config.min_cleanable_dirty_ratio


def plan_of(log: Log, now_ms: int, high_watermark: int) -> Plan | None:
    """What could be compacted; None when there is nothing new, or the log is not compacted at all. OSError."""
    config = log.config
    if not config.is_compacted or log.topic == CLUSTER_METADATA_TOPIC or log.failed or log.swap:
        return None
    first_dirty = max(log.first_dirty_offset, log.log_start_offset)
    bound = min(high_watermark, log.recovery_point)
    segments: list[Segment] = []
    items, end, dirty_bytes, total_bytes, is_overdue = log.segments.items, 0, 0, 0, False
    for segment, following in pairwise(items):
        is_dirty = following.base_offset > first_dirty
        age_ms = now_ms - segment.largest_timestamp(segment.created_ms)
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


class Newest(NamedTuple):
    """The last offset of each key, of the records from the first dirty offset to `end_offset`."""

    offsets: Mapping[bytes, int]
    end_offset: int


def _batches(log: Log, segment: Segment, pace: Pace) -> Iterator[tuple[BatchHeader, bytes]]:
    """Every batch; CorruptRecordError when one is damaged."""
    for position, header in segment.batches():
        data = segment.read_at(header.size_bytes, position)
        check_crc(data, 0, header)
        pace(header.size_bytes)
        yield header, data


def newest_offsets(plan: Plan, memory_bytes: int, pace: Pace) -> Newest:
    """Look at the dirty part, or as much of it as the memory has room for. OSError, CorruptRecordError."""
    newest: dict[bytes, int] = {}
    used, end = 0, plan.first_dirty_offset
    for number, segment in enumerate(plan.segments):
        if number + 1 < len(plan.segments) and plan.segments[number + 1].base_offset <= plan.first_dirty_offset:
            continue
        for header, data in _batches(plan.log, segment, pace):
            if header.last_offset < plan.first_dirty_offset:
                continue
            for key, offset in keys_of(data, header):
                if key not in newest:
                    used += len(key) + KEY_BYTES
                newest[key] = offset
            end = header.next_offset
            if used >= memory_bytes:
                return Newest(newest, end)
    return Newest(newest, end)


def groups(plan: Plan, end_offset: int) -> list[list[Segment]]:
    """The segments that begin below `end_offset`, those that become one together."""
    config, found = plan.log.config, list[list[Segment]]()
    size = 0
    for number, segment in enumerate(plan.segments):
        if segment.base_offset >= end_offset:
            break
        end = _end_of(plan, number)
        if (
            not found
            or size + segment.size_bytes > config.segment_bytes
            or end - 1 - found[-1][0].base_offset > MAX_RELATIVE_OFFSET
        ):
            found.append([])
            size = 0
        found[-1].append(segment)
        size += segment.size_bytes
    return found


def _end_of(plan: Plan, number: int) -> int:
    return plan.segments[number + 1].base_offset if number + 1 < len(plan.segments) else plan.end_offset


class _Writer:
    """Writes a compacted segment."""

    def __init__(self, segment: Segment, interval_bytes: int, pace: Pace) -> None:
        self._segment = segment
        self._interval_bytes = interval_bytes
        self._pace = pace
        self._parts: list[bytes] = []
        self._bytes = 0
        self._hole: tuple[int, int, int] | None = None  # base offset, last offset, leader epoch

    def add(self, batch: bytes) -> None:
        """A batch that stays."""
        self._fill()
        self._put(batch)

    def leave_out(self, header: BatchHeader) -> None:
        """A batch that goes."""
        epoch = header.partition_leader_epoch
        if self._hole is not None and self._hole[2] == epoch:
            self._hole = (self._hole[0], header.last_offset, epoch)
        else:
            self._fill()
            self._hole = (header.base_offset, header.last_offset, epoch)

    def _fill(self) -> None:
        if self._hole is not None:
            self._put(filler(*self._hole))
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
            self._segment.note(position, len(batch), header.last_offset, header.largest_timestamp, self._interval_bytes)
            position += len(batch)
        self._pace(self._bytes)
        self._parts.clear()
        self._bytes = 0

    def finish(self) -> None:
        """Everything is durable then, but the names."""
        self._fill()
        if self._parts:
            self._write()
        self._segment.seal()
        self._segment.sync(with_indexes=True)


def compact(plan: Plan, group: Sequence[Segment], newest: Newest, now_ms: int, pace: Pace) -> Swap | None:
    """Write what is left of a group; None when nothing of it changes. OSError, CorruptRecordError."""
    log = plan.log
    new = Segment(log.files, log.dir, group[0].base_offset, max(each.created_ms for each in group), CLEANED_SUFFIX)
    new.remove()  # what an earlier attempt left
    try:
        new.create()
        is_changed = _write(plan, group, newest, now_ms, _Writer(new, log.config.index_interval_bytes, pace), pace)
    except BaseException:
        new.remove()
        raise
    if not is_changed and len(group) == 1:
        new.remove()
        return None
    return Swap(log, group, new, plan.generation)


def _write(plan: Plan, group: Sequence[Segment], newest: Newest, now_ms: int, writer: _Writer, pace: Pace) -> bool:
    """Whether anything is not as it was."""
    is_changed = False
    retention_ms = plan.log.config.delete_retention_ms
    for segment in group:
        for header, data in _batches(plan.log, segment, pace):
            if header.base_offset >= newest.end_offset:
                writer.add(data)
                continue
            is_last_of_producer = header.producer_id >= 0 and header.last_offset in plan.producers
            kept = cleaned(data, header, newest.offsets, now_ms, retention_ms)
            if kept is not None and (header.record_count or header.is_control or is_last_of_producer):
                writer.add(kept)
            elif is_last_of_producer:
                writer.add(empty_batch(header))
            else:
                writer.leave_out(header)
            is_changed |= kept is not data
    writer.finish()
    return is_changed


def done(plan: Plan, newest: Newest) -> bool:
    """After the last swap: what was looked at is clean now. False when the log was changed by somebody else."""
    if not plan.log.durability.is_unchanged(plan.generation):
        return False
    plan.log.first_dirty_offset = max(plan.log.first_dirty_offset, newest.end_offset)
    return True


def compact_now(log: Log, now_ms: int, high_watermark: int, *, memory_bytes: int = 128 << 20) -> bool:
    """All of it at once, for tests and tools; whether there was anything to compact. OSError, KafkaError."""
    plan = plan_of(log, now_ms, high_watermark)
    if plan is None:
        return False
    newest = newest_offsets(plan, memory_bytes, _no_pace)
    for group in groups(plan, newest.end_offset):
        swap = compact(plan, group, newest, now_ms, _no_pace)
        if swap is None:
            continue
        if swap.begin():
            swap.sync()
            if swap.take_over(now_ms):
                swap.sync()
                swap.finish()
        swap.discard()
        plan.generation = swap.generation
    return done(plan, newest)


def _no_pace(size_bytes: int) -> None:
    """As fast as it goes."""
