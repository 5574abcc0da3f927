"""The log of one partition: segments of record batches, offsets and leader epochs.

Rules REP-01 and REP-09. Offsets have no gaps: compaction (`kipmesh.storage.log.compaction`) replaces removed batches
by batches without records. The hot paths (`append_as_leader`, `append_as_follower`, `read`) run on the event loop and
cost one write or read each. Records are decoded only to check the keys of compacted topics.

Threads: one owner calls every method. `flush`, `sync_identity`, `remove_deleted`, `offset_for_timestamp` and
`max_timestamp_offset` may also run on other threads, see `kipmesh.storage.log.durability`.

Invariants: log_start_offset <= log_end_offset; every batch below recovery_point is durable; `read` returns only
completely written batches. A partial write is truncated. A full disk is a transient error. Any other disk error is
permanent: until the log is reloaded, methods that read or change it raise that `StorageError` (`check_usable`). That
includes a failed fsync, because a second fsync may succeed although the kernel dropped the data.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, assign, iterate, peek, whole_batches
from kipmesh.messages import EpochEndOffset
from kipmesh.storage.fs import OpenFiles, StorageError, is_no_space
from kipmesh.storage.log.durability import Durability, EpochsNotWrittenError, Snapshot
from kipmesh.storage.log.epochs import LeaderEpochs
from kipmesh.storage.log.producer_snapshots import Producers
from kipmesh.storage.log.segment import Segment
from kipmesh.storage.log.segment_list import SegmentList, TimestampOffset, first_at_or_after, largest
from kipmesh.storage.log.validation import AppendInfo, continuing, validate_produced, validate_replicated

_LOG = logging.getLogger(__name__)

_SEARCHES_MAX = 5
_Found = TypeVar("_Found")

OnFailed = Callable[["Log", StorageError], None]
"""Called once per log, on a permanent failure, on the thread that met it (a flush's or the owner's)."""


class Replacement(Protocol):
    """A running replacement of segments with a compacted copy (`kipmesh.storage.log.compaction.Swap`)."""

    def cancel(self) -> None:
        """Cancel the replacement durably before a truncation, unless readers use the copy. Raises OSError."""


@dataclass(eq=False, repr=False)
class Log:
    """The log of one partition: appends, reads, truncates and flushes batches. See the module docstring.

    Created by `kipmesh.storage.log.log_loader.open_log`.
    """

    files: OpenFiles
    dir: str
    topic: str
    partition: int
    topic_id: bytes
    config: TopicConfig
    segments: SegmentList
    epochs: LeaderEpochs
    producers: Producers
    durability: Durability
    log_start_offset: int
    log_end_offset: int
    checkpoint_recovery_point: Callable[[], None] | None = None
    """Makes the recovery point durable. Called before the first append after a truncation below the recovery point."""
    on_failed: OnFailed | None = None
    failed: StorageError | None = None
    """The permanent failure, if there was one."""
    first_dirty_offset: int = 0
    """Offset below which the log is compacted; at most the recovery point."""
    swap: Replacement | None = None
    """The running replacement, at most one."""
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = self.segments.size_bytes
        self._closed = False
        self._failure_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Log({self.topic}-{self.partition}, {self.log_start_offset}..{self.log_end_offset})"

    @property
    def latest_epoch(self) -> int:
        """The latest leader epoch, or -1 if there is none."""
        return self.epochs.latest_epoch

    @property
    def recovery_point(self) -> int:
        """Offset below which every batch is durable."""
        return self.durability.recovery_point

    @property
    def segment_base_offsets(self) -> tuple[int, ...]:
        """Base offsets of the segments, oldest first."""
        return self.segments.base_offsets

    @property
    def unflushed_messages(self) -> int:
        """Number of offsets at the log end that are not known to be durable."""
        return max(0, self.log_end_offset - self.recovery_point)

    def update_config(self, config: TopicConfig) -> None:
        """Replace the topic configuration, effective from the next append."""
        self.config = config

    # -- appending

    def append_as_leader(self, batch: bytes, leader_epoch: int, now_ms: int) -> AppendInfo:
        """Validate a produced batch, assign offsets and `leader_epoch`, and write it. `now_ms` is wall-clock time.

        A duplicate from an idempotent producer is not written again: the result has the offsets of the first write and
        `size_bytes` 0.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION if the log is closed; FENCED_LEADER_EPOCH if `leader_epoch` is
        below the log's latest; the codes of `validate_produced` and of `Producers.check`. Raises StorageError if the
        log has failed before, or if the disk fails or is full.
        """
        self._check_appendable()
        config = self.config
        if leader_epoch < self.epochs.latest_epoch:
            raise KafkaError(
                ErrorCode.FENCED_LEADER_EPOCH,
                f"leader epoch {leader_epoch} is older than the log's latest epoch {self.epochs.latest_epoch}",
            )
        header = validate_produced(batch, config, now_ms, is_internal=self.topic == CLUSTER_METADATA_TOPIC)
        first_offset = self.log_end_offset
        append_time, max_timestamp = -1, header.max_timestamp
        if config.message_timestamp_type == "LogAppendTime":
            append_time = max_timestamp = now_ms
            header = header._replace(max_timestamp=now_ms)
        repeated = self.producers.check(header)
        if repeated is not None:
            append_time = -1 if append_time < 0 else repeated.timestamp
            return AppendInfo(repeated.first_offset, repeated.last_offset, repeated.timestamp, append_time, 0)
        data = assign(batch, first_offset, leader_epoch, None if append_time < 0 else append_time)
        last_offset = first_offset + header.last_offset_delta
        try:
            segment = self._segment_for(len(data), last_offset, max_timestamp, now_ms)
            if leader_epoch > self.epochs.latest_epoch:
                self.epochs.assign(leader_epoch, first_offset)
            position = segment.write(data)
            self.log_end_offset = last_offset + 1
            self.size_bytes += len(data)
            segment.index_batch(position, len(data), last_offset, max_timestamp, config.index_interval_bytes)
        except OSError as error:
            raise self.fail(error, "append to") from error
        self.producers.append(header, first_offset, now_ms)
        self.segments.cache_position(first_offset, segment, position)
        self.durability.note_append(now_ms)
        return AppendInfo(first_offset, last_offset, max_timestamp, append_time, len(data))

    def _check_appendable(self) -> None:
        """Call `check_usable`, then checkpoint a lowered recovery point before new batches are written.

        Otherwise the checkpoint on disk would vouch for offsets that were truncated. `truncate_to` leaves
        this to the next append, so that one checkpoint covers all logs that are truncated together. Raises
        StorageError if the checkpoint cannot be written.
        """
        self.check_usable()
        if self.durability.is_checkpoint_stale:
            _, mark = self.durability.to_checkpoint()
            if self.checkpoint_recovery_point:
                self.checkpoint_recovery_point()
            self.durability.note_checkpoint(mark)

    def append_as_follower(self, records: bytes, now_ms: int) -> AppendInfo | None:
        """Write the complete batches fetched from the leader, with their offsets and epochs.

        Returns None if there are none.

        A batch without records that starts before the log end is shortened. Raises CorruptRecordError, before anything
        is written, if a batch is corrupt or does not continue the log; KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the
        log is closed; StorageError if the log has failed before, or if the disk fails or is full. After a StorageError,
        the batches below `log_end_offset` are written.
        """
        self._check_appendable()
        if self.topic != CLUSTER_METADATA_TOPIC:
            records = continuing(records, self.log_end_offset)
        batches = list(iterate(records, allow_partial=True))
        if not batches:
            return None
        self._check_continues(records, batches)
        first_offset = self.log_end_offset
        view = memoryview(records)
        done = 0
        try:
            while done < len(batches):
                done = self._append_run(view, batches, done, now_ms)
        except OSError as error:
            raise self.fail(error, "append to") from error
        finally:
            if self.log_end_offset > first_offset:
                self.durability.note_append(now_ms)
        position, last = batches[-1]
        max_timestamp = max(header.max_timestamp for _, header in batches)
        return AppendInfo(first_offset, last.last_offset, max_timestamp, -1, position + last.size_bytes)

    def _check_continues(self, records: bytes, batches: list[tuple[int, BatchHeader]]) -> None:
        """Raise CorruptRecordError unless the batches continue the log.

        An empty log may start within the first batch. The log end is then moved back to the start of that batch.
        """
        start = self.log_end_offset
        first = batches[0][1]
        if not (first.base_offset < start <= first.last_offset and self.log_start_offset == start):
            validate_replicated(records, batches, start, self.epochs.latest_epoch)
            return
        # The log start of leader and follower is within this batch: store the whole batch.
        validate_replicated(records, batches, first.base_offset, -1)
        self.truncate_fully_and_start_at(first.base_offset)
        self.log_start_offset = start
        self._check_appendable()

    def _append_run(self, view: memoryview, batches: list[tuple[int, BatchHeader]], start: int, now_ms: int) -> int:
        """Write the batches from index `start` that fit the active segment in one call. Return the next index."""
        position, header = batches[start]
        segment = self._segment_for(header.size_bytes, header.last_offset, header.max_timestamp, now_ms)
        end, stop = segment.fitting_run(batches, start, self.config.segment_bytes)
        written_at = segment.write(view[position:end])
        for at, header in batches[start:stop]:
            if header.partition_leader_epoch > self.epochs.latest_epoch:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)
            self.log_end_offset = header.next_offset
            self.producers.append(header, header.base_offset, now_ms)
            place = written_at + at - position
            interval = self.config.index_interval_bytes
            segment.index_batch(place, header.size_bytes, header.last_offset, header.largest_timestamp, interval)
            self.segments.cache_position(header.base_offset, segment, place)
        self.size_bytes += end - position
        return stop

    def _segment_for(self, size: int, last_offset: int, max_timestamp: int, now_ms: int) -> Segment:
        """Return the active segment for a batch, creating its file or rolling it where Kafka would roll."""
        segment = self.segments.active
        if not segment.exists:
            segment.create()
            self.durability.names_dirty = True
        if segment.size_bytes and segment.should_roll(self.config, size, last_offset, max_timestamp, now_ms):
            self._roll(now_ms)
        return self.segments.active

    def maybe_roll(self, now_ms: int) -> None:
        """Start a new active segment if the current one is not empty and older than `segment.ms`.

        Raises StorageError if the log has failed or the disk fails, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log
        is closed.
        """
        self.check_usable()
        with self.storage_errors("roll"):
            if self.segments.active.age_ms(now_ms, now_ms) > self.config.roll_ms:
                self.roll(now_ms)

    def roll(self, now_ms: int) -> None:
        """Start a new active segment, unless the current one is empty.

        Raises StorageError if the log has failed or the disk fails, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log
        is closed.
        """
        self.check_usable()
        with self.storage_errors("roll"):
            if self.segments.active.size_bytes:
                self._roll(now_ms)

    def _roll(self, now_ms: int) -> None:
        self.segments.active.become_inactive()
        self.producers.write_snapshot(self.log_end_offset)
        self.segments.add(self.log_end_offset, now_ms)
        self.durability.names_dirty = True

    def assign_epoch(self, leader_epoch: int) -> None:
        """Start `leader_epoch` at the log end, when this replica becomes leader.

        Raises StorageError if the log has failed, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if it is closed, ValueError
        for a negative epoch.
        """
        self.check_usable()
        self.epochs.assign(leader_epoch, self.log_end_offset)

    # -- reading

    def read(self, offset: int, max_bytes: int, max_offset: int, min_one_batch: bool) -> bytes:
        """Return complete batches from the one that contains `offset`, all of whose offsets are below `max_offset`.

        Returns b"" if there are none. The first batch may start before `offset`. Returns at most `max_bytes` bytes. If
        the first batch is larger, returns only that batch if `min_one_batch` is set, otherwise b"".

        Raises KafkaError: OFFSET_OUT_OF_RANGE if `offset` is below the log start or above the log end,
        UNKNOWN_TOPIC_OR_PARTITION if the log is closed. Raises CorruptRecordError for an invalid or incomplete batch,
        StorageError if the log has failed or the disk fails.
        """
        self.check_usable()
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is outside of the log's range {self.log_start_offset}..{self.log_end_offset}",
            )
        limit = min(max_offset, self.log_end_offset)
        if offset >= limit:
            return b""
        try:
            segment, position = self.segments.locate(offset)
            data = segment.read_at(max(max_bytes, HEADER_BYTES), position)
            end, next_offset = whole_batches(data, max_bytes, limit)
            if end == 0 and min_one_batch:
                end, next_offset = peek(data)
                if next_offset > limit:
                    return b""
                data = segment.read_at(end, position)
                if len(data) < end:
                    raise CorruptRecordError(f"the batch before offset {next_offset} of {self!r} is incomplete")
        except OSError as error:
            raise self.fail(error, "read") from error
        if not end:
            return b""
        self.segments.cache_position(next_offset, segment, position + end)
        return data if end == len(data) else data[:end]

    def bytes_from(self, offset: int) -> int:
        """Return the size in bytes of all batches from the one that contains `offset`; 0 at or after the log end.

        Raises OSError; CorruptRecordError if the batch cannot be found.
        """
        return self.segments.bytes_from(offset) if offset < self.log_end_offset else 0

    def end_offset_for_epoch(self, epoch: int) -> EpochEndOffset:
        """Return the largest leader epoch at or below `epoch`, and its end offset.

        Returns (-1, -1) if `epoch` is -1 or above the latest epoch. Below all epochs, returns `epoch` itself with the
        start offset of the first one.
        """
        return self.epochs.end_offset_for(epoch, self.log_end_offset)

    def offset_for_timestamp(self, timestamp_ms: int, max_offset: int) -> TimestampOffset | None:
        """Return the first record below `max_offset` whose timestamp (ms) is at least `timestamp_ms`, or None.

        Thread-safe. May decompress a batch. Raises KafkaError: OFFSET_NOT_AVAILABLE if truncations keep interrupting
        the search, UNKNOWN_TOPIC_OR_PARTITION if the log is closed. Raises CorruptRecordError for an invalid batch,
        StorageError if the log has failed or the disk fails.
        """
        return self._search(partial(first_at_or_after, timestamp_ms), max_offset)

    def max_timestamp_offset(self, max_offset: int) -> TimestampOffset | None:
        """Return the first record with the largest timestamp of those below `max_offset`, or None if there is none.

        Thread-safe. May decompress a batch. Raises KafkaError: OFFSET_NOT_AVAILABLE if truncations keep interrupting
        the search, UNKNOWN_TOPIC_OR_PARTITION if the log is closed. Raises CorruptRecordError for an invalid batch,
        StorageError if the log has failed or the disk fails.
        """
        return self._search(largest, max_offset)

    def _search(self, find: Callable[[Sequence[Segment], int, int], _Found], max_offset: int) -> _Found:
        """Return `find(segments, log start offset, max offset)`, computed on one consistent state of the log.

        Repeats a search that a truncation interrupted. Raises KafkaError(OFFSET_NOT_AVAILABLE) after `_SEARCHES_MAX`
        attempts.
        """
        for _ in range(_SEARCHES_MAX):
            self.check_usable()
            generation = self.durability.generation
            try:
                limit = min(max_offset, self.log_end_offset)
                found = find(list(self.segments.items), self.log_start_offset, limit)
            except (OSError, CorruptRecordError) as error:
                if self.durability.is_unchanged(generation):
                    raise (self.fail(error, "search") if isinstance(error, OSError) else error) from error
            else:
                if self.durability.is_unchanged(generation):
                    return found
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, f"{self!r} is being truncated, retry the search")

    # -- truncating

    def truncate_to(self, offset: int) -> None:
        """Remove every batch that contains `offset` or a later one.

        The log then ends at `offset`, or before it if `offset` was within a batch. If `offset` is at or above the log
        end, no batch is removed. If it is below the first segment, the log is emptied and starts at `offset`.
        Raises StorageError if the log has failed, or if the disk fails or a batch is corrupt, which is then permanent;
        KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log is closed.
        """
        self.check_usable()
        if offset >= self.log_end_offset:
            # A leader that resigned before its first append assigned an epoch that no other replica knows.
            self.epochs.truncate_from_end(self.log_end_offset)
            return
        if offset < self.segments.items[0].base_offset:
            self.truncate_fully_and_start_at(offset)
            return
        try:
            if self.swap:
                self.swap.cancel()
            with self.durability.changing_files():
                end = self.segments.truncate(offset)
                self._end_at(end)
                self.producers.truncate(self.segments.items, end)
                self.epochs.truncate_from_end(end)
                self.log_start_offset = min(self.log_start_offset, end)
        except (OSError, CorruptRecordError) as error:
            raise self.fail(error, "truncate", permanent=True) from error

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Remove all batches. The empty log starts and ends at `offset`.

        Raises StorageError if the log has failed or the disk fails, which is then permanent;
        KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log is closed.
        """
        self.check_usable()
        with self.storage_errors("truncate", permanent=True):
            if self.swap:
                self.swap.cancel()
            with self.durability.changing_files():
                self.segments.reset(offset)
                self._end_at(offset)
                self.producers.clear()
                self.epochs.clear()
                self.log_start_offset = offset

    def _end_at(self, offset: int) -> None:
        """Set the log end after a truncation, and lower the recovery point and first dirty offset to it."""
        self.log_end_offset = offset
        self.first_dirty_offset = min(self.first_dirty_offset, offset)
        self.size_bytes = self.segments.size_bytes
        self.durability.lower(offset)

    def increment_log_start_offset(self, offset: int) -> None:
        """Raise the log start to `offset`, which hides earlier records from readers. Never lowers it.

        Raises KafkaError: OFFSET_OUT_OF_RANGE if `offset` exceeds the log end, UNKNOWN_TOPIC_OR_PARTITION if the log is
        closed. Raises StorageError if the log has failed.
        """
        self.check_usable()
        if offset > self.log_end_offset:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"log start offset {offset} is beyond the log end of {self!r}"
            )
        if offset > self.log_start_offset:
            self.log_start_offset = offset
            self.epochs.truncate_from_start(offset)

    def run_retention(self, now_ms: int, high_watermark: int) -> int:
        """Remove expired segments below the high watermark from the log. Return their number.

        A segment expires by time, size or log start offset. The log start becomes the start of the first remaining
        segment. `remove_deleted` removes the files after `file.delete.delay.ms`. Does nothing while compaction replaces
        segments.

        Raises StorageError if the log has failed or the disk fails, which is then permanent;
        KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log is closed.
        """
        self.check_usable()
        if self.swap:  # a restart that completes the swap needs the old segments
            return 0
        segments = self.segments.items
        count = self._expired(now_ms, high_watermark)
        if not count:
            return 0
        if count == len(segments):
            self.roll(now_ms)
        with self.storage_errors("delete segments of", permanent=True):
            if count + 1 == len(segments) and not self.segments.active.size_bytes:
                # Only the empty active segment will hold the log end offset: its name must survive a crash.
                self.files.fs.sync_dir(self.dir)
            with self.durability.changing_files():
                start = self.segments.retire(count, now_ms + self.config.file_delete_delay_ms)
                self.size_bytes = self.segments.size_bytes
                self.durability.skip_to(start)
                self.producers.delete_snapshots_before(start)
                self.increment_log_start_offset(max(start, self.log_start_offset))
        return count

    def held_back(self, now_ms: int, high_watermark: int) -> int:
        """Return the number of expired segments that are kept only because they are not below the high watermark."""
        return self._expired(now_ms, self.log_end_offset) - self._expired(now_ms, high_watermark)

    def _expired(self, now_ms: int, high_watermark: int) -> int:
        return self.segments.expired(
            self.config,
            now_ms,
            log_start_offset=self.log_start_offset,
            log_end_offset=self.log_end_offset,
            high_watermark=high_watermark,
        )

    def remove_deleted(self, now_ms: int) -> int:
        """Remove the files of segments that were retired at least `file.delete.delay.ms` ago. Return their number.

        Returns 0 if the log is closed. Errors are logged. Thread-safe.
        """
        return 0 if self._closed else self.segments.remove_retired(now_ms)

    # -- durability

    def needs_flush(self, now_ms: int) -> bool:
        """Return whether `flush.messages`, `flush.ms` or a rolled segment requires a flush.

        False if the log is closed or has failed.
        """
        if self.failed or self._closed:
            return False
        return self.durability.is_due(now_ms, self.config, self.log_end_offset, self.segments.active.base_offset)

    def flush(self, *, sealed: bool = False) -> None:
        """Make all batches appended so far durable and advance the recovery point. Thread-safe.

        `sealed`: also sync the indexes of the active segment. If the log is truncated meanwhile, the recovery point
        does not change; the next flush advances it.

        Raises StorageError if the log has failed or the disk fails; the failure is permanent, except if the
        disk is too full for the leader epochs. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the log is closed.
        """
        self.check_usable()
        try:
            self.durability.flush(self._snapshot, self.epochs, sealed=sealed)
        except OSError as error:
            raise self.fail(error, "flush", permanent=not isinstance(error, EpochsNotWrittenError)) from error

    def _snapshot(self) -> Snapshot:
        end = self.log_end_offset  # read before the segments, so that they contain every batch below it
        return list(self.segments.items), end

    def make_truncations_durable(self) -> bool:
        """Flush if a truncation may not be durable. Return whether all truncations are durable now. Thread-safe.

        Returns False, without raising, if the flush failed or the log was truncated meanwhile. Call this before a high
        watermark is checkpointed (392-10). A power failure may restore batches truncated since the last sync, in place
        of batches appended there. A checkpointed high watermark above them would mark records as committed that never
        were.
        """
        try:
            if self._has_unsynced_truncation:
                self.flush()
            return not self._has_unsynced_truncation
        except KafkaError as error:
            _LOG.warning("high watermark not raised log=%r error=%s", self, error.message)
            return False

    @property
    def _has_unsynced_truncation(self) -> bool:
        return self.durability.has_unsynced_change or self.segments.active.has_unsynced_truncation

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable, unless the log is closed. The caller syncs the data directory.

        Thread-safe. Raises StorageError; the failure is then permanent.
        """
        with self.storage_errors("sync", permanent=True):
            self.durability.sync_identity()

    def close(self) -> None:
        """Write indexes, flush and close all files. Does nothing if the log is already closed.

        Raises StorageError if the log has failed or the disk fails; the log is closed anyway.
        """
        if self._closed:
            return
        try:
            self.check_usable()
            active = self.segments.active
            seals = active.exists and not active.is_sealed
            with self.storage_errors("close"):
                active.seal()
                self.durability.names_dirty |= self.producers.write_final_snapshot(self.log_end_offset) or seals
            self.flush(sealed=seals)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the log and its files without writing. The directory may then be renamed or removed."""
        self._closed = True
        self.durability.stop()
        self.segments.forget_files()

    def move_to(self, directory: str) -> None:
        """Close without writing, wait for a running flush, and rename the log's directory to `directory`.

        Raises OSError.
        """
        self.abandon()
        self.durability.wait_for_flush()  # it writes the epochs to a path that another log may use soon
        self.files.fs.rename(self.dir, directory)
        self.segments.forget_files()  # again: another thread may have opened files before the rename

    def check_usable(self) -> None:
        """Raise StorageError if the log has failed, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if it is closed."""
        if self.failed is not None:
            raise self.failed
        if self._closed:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{self!r} is closed")

    @contextmanager
    def storage_errors(self, action: str, *, permanent: bool = False) -> Iterator[None]:
        """Context manager that converts an OSError with `fail` and raises the result."""
        try:
            yield
        except OSError as error:
            raise self.fail(error, action, permanent=permanent) from error

    def fail(self, error: Exception, action: str, *, permanent: bool = False) -> StorageError:
        """Return the StorageError to raise for `error`. Record it as permanent unless the disk is only full.

        Thread-safe.

        `action` completes "cannot <action> topic-partition". `permanent` makes even a full disk a permanent failure.
        The first permanent failure calls `on_failed`.
        """
        raised = StorageError(f"cannot {action} {self.topic}-{self.partition}: {error}")
        is_transient = not permanent and isinstance(error, OSError) and is_no_space(error)
        if not is_transient and self.mark_failed(raised):
            _LOG.error("log failed permanently log=%r error=%s", self, raised.message)
            if self.on_failed:
                self.on_failed(self, raised)
        return raised

    def mark_failed(self, error: StorageError) -> bool:
        """Make `check_usable` raise `error` from now on. Return False if the log had already failed.

        Thread-safe.
        """
        with self._failure_lock:
            is_first, self.failed = self.failed is None, self.failed or error
        return is_first
