"""The log of one partition: segments of record batches, its offsets and its leader epochs.

Rules: "Log truth". Offsets have no gaps: where compaction (`kipmesh.storage.log.compaction`) removes whole batches, a
batch without records is in their place. The hot paths (`append_as_leader`, `append_as_follower`, `read`) run on the
event loop and cost one write or read each; nothing looks into records but the check that those of compacted topics have
keys.

Threads: one owner calls everything, but `flush`, `sync_identity`, `remove_deleted`, `offset_for_timestamp` and
`max_timestamp_offset`, which any thread may call meanwhile: see `kipmesh.storage.log.durability`.

Invariants: log_start_offset <= log_end_offset; every batch below recovery_point is durable; a batch is visible to
`read` only when all of it was written. A failed write is cut off again. When the disk is full the log goes on once
there is room; any other failure, a failed fsync above all (the kernel forgets what it could not write, so a second
try proves nothing), is for good: everything raises `StorageError` until the log is loaded anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, assign, iterate, peek, whole_batches
from kipmesh.messages import EpochEndOffset
from kipmesh.storage.fs import OpenFiles, StorageError, is_no_space
from kipmesh.storage.log.durability import Durability, EpochsNotWrittenError, Snapshot
from kipmesh.storage.log.epochs import LeaderEpochs
from kipmesh.storage.log.producer_snapshots import Producers
from kipmesh.storage.log.segment import CLEANED_SUFFIX, SWAP_SUFFIX, Segment
from kipmesh.storage.log.segment_list import SegmentList, TimestampOffset, first_at_or_after, largest
from kipmesh.storage.log.validation import AppendInfo, continuing, validate_produced, validate_replicated

_LOG = logging.getLogger(__name__)

_SEARCHES_MAX = 5
_Found = TypeVar("_Found")

OnFailed = Callable[["Log", StorageError], None]
"""Told once that a log failed for good, from whichever thread met the failure: a flush's, or the owner's."""


@dataclass(eq=False, repr=False)
class Log:
    """See the module; made by `kipmesh.storage.log.log_loader`."""

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
    """Makes the recovery point durable; called before the first append after a truncation below it."""
    on_failed: OnFailed | None = None
    failed: StorageError | None = None
    """Set for good by a failure of the disk."""
    first_dirty_offset: int = 0
    """Compaction has seen every record below it; at most the recovery point."""
    swap: Swap | None = None
    """The compacted segment that is about to take the place of others."""
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = self.segments.size_bytes
        self._closed = False
        self._failing = threading.Lock()

    def __repr__(self) -> str:
        return f"Log({self.topic}-{self.partition}, {self.log_start_offset}..{self.log_end_offset})"

    @property
    def latest_epoch(self) -> int:
        """The latest leader epoch, -1 if there is none."""
        return self.epochs.latest_epoch

    @property
    def recovery_point(self) -> int:
        """Everything below is durable."""
        return self.durability.recovery_point

    @property
    def segment_base_offsets(self) -> tuple[int, ...]:
        """Base offsets of the segments, oldest first."""
        return self.segments.base_offsets

    @property
    def unflushed_messages(self) -> int:
        """Records that an fsync would make durable."""
        return max(0, self.log_end_offset - self.recovery_point)

    def update_config(self, config: TopicConfig) -> None:
        """Take a changed configuration; it counts from the next append on."""
        self.config = config

    # -- appending

    def append_as_leader(self, batch: bytes, leader_epoch: int, now_ms: int) -> AppendInfo:
        """Check one batch, give it offsets and write it; a plain KafkaError says what is wrong with the batch.

        What a producer sends again is not written: the answer has its first place, and a size of 0.
        """
        self._check_appendable()
        config = self.config
        if leader_epoch < self.epochs.latest_epoch:
            raise KafkaError(ErrorCode.FENCED_LEADER_EPOCH, f"epoch {leader_epoch} after {self.epochs.latest_epoch}")
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
            segment.note(position, len(data), last_offset, max_timestamp, config.index_interval_bytes)
        except OSError as error:
            raise self.fail(error, "append to") from error
        self.producers.appended(header, first_offset, now_ms)
        self.segments.remember(first_offset, segment, position)
        self.durability.note_append(now_ms)
        return AppendInfo(first_offset, last_offset, max_timestamp, append_time, len(data))

    def _check_appendable(self) -> None:
        """Nothing is written while a checkpoint on disk vouches for offsets that a cut gave away.

        Here and not at the cut: logs that are cut together need one checkpoint, which the manager's next one may be.
        """
        self.check_usable()
        if self.durability.is_checkpoint_stale:
            _, mark = self.durability.to_checkpoint()
            if self.checkpoint_recovery_point:
                self.checkpoint_recovery_point()
            self.durability.note_checkpoint(mark)

    def append_as_follower(self, records: bytes, now_ms: int) -> AppendInfo | None:
        """Write batches as the leader has them; None when not one is whole.

        CorruptRecordError when they are damaged, or do not continue the log; then none of them is written. After a
        StorageError those before the log end are.
        """
        self._check_appendable()
        if self.topic != CLUSTER_METADATA_TOPIC:
            records = continuing(records, self.log_end_offset)
        batches = list(iterate(records, allow_partial=True))
        if not batches:
            return None
        self._begin_where(records, batches)
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

    def _begin_where(self, records: bytes, batches: list[tuple[int, BatchHeader]]) -> None:
        """CorruptRecordError unless the batches continue the log; an empty log may begin within the first of them."""
        start = self.log_end_offset
        first = batches[0][1]
        if not (first.base_offset < start <= first.last_offset and self.log_start_offset == start):
            validate_replicated(records, batches, start, self.epochs.latest_epoch)
            return
        # The leader's log start lies within this batch, and so does ours: begin with the whole batch.
        validate_replicated(records, batches, first.base_offset, -1)
        self.truncate_fully_and_start_at(first.base_offset)
        self.log_start_offset = start
        self._check_appendable()

    def _append_run(self, view: memoryview, batches: list[tuple[int, BatchHeader]], start: int, now_ms: int) -> int:
        """Write as many batches from `start` on as fit the segment, in one go; gives the first that is left."""
        position, header = batches[start]
        segment = self._segment_for(header.size_bytes, header.last_offset, header.max_timestamp, now_ms)
        end, stop = segment.fitting(batches, start, self.config.segment_bytes)
        written_at = segment.write(view[position:end])
        for at, header in batches[start:stop]:
            if header.partition_leader_epoch > self.epochs.latest_epoch:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)
            self.log_end_offset = header.next_offset
            self.producers.appended(header, header.base_offset, now_ms)
            place = written_at + at - position
            interval = self.config.index_interval_bytes
            segment.note(place, header.size_bytes, header.last_offset, header.largest_timestamp, interval)
            self.segments.remember(header.base_offset, segment, place)
        self.size_bytes += end - position
        return stop

    def _segment_for(self, size: int, last_offset: int, max_timestamp: int, now_ms: int) -> Segment:
        """The active segment, rolled first when Kafka would."""
        segment = self.segments.active
        if not segment.exists:
            segment.create()
            self.durability.names_dirty = True
        if segment.size_bytes and segment.is_to_end(self.config, size, last_offset, max_timestamp, now_ms):
            self._roll(now_ms)
        return self.segments.active

    def maybe_roll(self, now_ms: int) -> None:
        """Roll the active segment by `segment.ms` although nothing is appended."""
        self.check_usable()
        with self.failing("roll"):
            if self.segments.active.age_ms(now_ms, now_ms) > self.config.roll_ms:
                self.roll(now_ms)

    def roll(self, now_ms: int) -> None:
        """Begin a new segment, unless the active one is empty."""
        self.check_usable()
        with self.failing("roll"):
            if self.segments.active.size_bytes:
                self._roll(now_ms)

    def _roll(self, now_ms: int) -> None:
        self.segments.active.finish()
        self.producers.rolled(self.log_end_offset)
        self.segments.add(self.log_end_offset, now_ms)
        self.durability.names_dirty = True

    def assign_epoch(self, leader_epoch: int) -> None:
        """Become leader: the epoch begins at the log end, records or not."""
        self.check_usable()
        self.epochs.assign(leader_epoch, self.log_end_offset)

    # -- reading

    def read(self, offset: int, max_bytes: int, max_offset: int, min_one_batch: bool) -> bytes:
        """Whole batches from the one that has `offset` on, none that reaches `max_offset`; b"" where there is none.

        At most `max_bytes`, unless `min_one_batch` and the first batch is larger. KafkaError(OFFSET_OUT_OF_RANGE)
        outside of log start and log end.
        """
        self.check_usable()
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is not within {self.log_start_offset}..{self.log_end_offset}",
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
                    raise CorruptRecordError(f"the batch before offset {next_offset} of {self!r} is cut")
        except OSError as error:
            raise self.fail(error, "read") from error
        if not end:
            return b""
        self.segments.remember(next_offset, segment, position + end)
        return data if end == len(data) else data[:end]

    def bytes_from(self, offset: int) -> int:
        """Bytes of the batches from the one that has `offset` on. OSError, CorruptRecordError."""
        return self.segments.bytes_from(offset) if offset < self.log_end_offset else 0

    def end_offset_for_epoch(self, epoch: int) -> EpochEndOffset:
        """The largest epoch at or below `epoch` and where it ends; (-1, -1) if unknown."""
        return self.epochs.end_offset_for(epoch, self.log_end_offset)

    def offset_for_timestamp(self, timestamp_ms: int, max_offset: int) -> TimestampOffset | None:
        """The first record below `max_offset` with that timestamp or a later one. For any thread; may decompress."""
        return self._search(partial(first_at_or_after, timestamp_ms), max_offset)

    def max_timestamp_offset(self, max_offset: int) -> TimestampOffset | None:
        """The first record below `max_offset` with the largest timestamp. For any thread; may decompress."""
        return self._search(largest, max_offset)

    def _search(self, find: Callable[[Sequence[Segment], int, int], _Found], max_offset: int) -> _Found:
        """Return `find(segments, log start offset, max offset)` for one state of the log.

        A search during which the log was truncated is repeated. KafkaError.
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
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, f"{self!r} is being cut")

    # -- truncating

    def truncate_to(self, offset: int) -> None:
        """Remove every batch with a record at or after `offset`; the log ends there, or where such a batch began."""
        self.check_usable()
        if offset >= self.log_end_offset:
            # A leader that was deposed before it wrote has an epoch at its log end that nobody else knows.
            self.epochs.truncate_from_end(self.log_end_offset)
            return
        if offset < self.segments.items[0].base_offset:
            self.truncate_fully_and_start_at(offset)
            return
        try:
            if self.swap:
                self.swap.give_up()
            with self.durability.changing_files():
                end = self.segments.truncate(offset)
                self._end_at(end)
                self.producers.truncated(self.segments.items, end)
                self.epochs.truncate_from_end(end)
                self.log_start_offset = min(self.log_start_offset, end)
        except (OSError, CorruptRecordError) as error:
            raise self.fail(error, "truncate", for_good=True) from error

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Remove everything and begin at `offset`."""
        self.check_usable()
        with self.failing("truncate", for_good=True):
            if self.swap:
                self.swap.give_up()
            with self.durability.changing_files():
                self.segments.start_over(offset)
                self._end_at(offset)
                self.producers.started_over()
                self.epochs.clear()
                self.log_start_offset = offset

    def _end_at(self, offset: int) -> None:
        """Batches written from here on are not durable."""
        self.log_end_offset = offset
        self.first_dirty_offset = min(self.first_dirty_offset, offset)
        self.size_bytes = self.segments.size_bytes
        self.durability.lower(offset)

    def increment_log_start_offset(self, offset: int) -> None:
        """Records below `offset` are gone for readers; KafkaError(OFFSET_OUT_OF_RANGE) beyond the log end."""
        self.check_usable()
        if offset > self.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"log start {offset} is beyond the end of {self!r}")
        if offset > self.log_start_offset:
            self.log_start_offset = offset
            self.epochs.truncate_from_start(offset)

    def run_retention(self, now_ms: int, high_watermark: int) -> int:
        """Take segments out of use by time, size and log start, below the high watermark; gives how many."""
        self.check_usable()
        if self.swap:  # a start that completes it must find what it takes the place of
            return 0
        segments = self.segments.items
        count = self._expired(now_ms, high_watermark)
        if not count:
            return 0
        if count == len(segments):
            self.roll(now_ms)
        with self.failing("delete segments of", for_good=True):
            if count + 1 == len(segments) and not self.segments.active.size_bytes:
                # The empty successor must be there after a crash: it alone says where the log goes on.
                self.files.fs.sync_dir(self.dir)
            with self.durability.changing_files():
                start = self.segments.retire(count, now_ms + self.config.file_delete_delay_ms)
                self.size_bytes = self.segments.size_bytes
                self.durability.skip_to(start)
                self.producers.retired(start)
                self.increment_log_start_offset(max(start, self.log_start_offset))
        return count

    def held_back(self, now_ms: int, high_watermark: int) -> int:
        """How many segments retention would take out of use if all were below the high watermark, and does not."""
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
        """Remove files that have been out of use for `file.delete.delay.ms`; gives how many."""
        return 0 if self._closed else self.segments.remove_retired(now_ms)

    # -- durability

    def needs_flush(self, now_ms: int) -> bool:
        """Whether `flush.messages`, `flush.ms` or a rolled segment ask for a flush."""
        if self.failed or self._closed:
            return False
        return self.durability.is_due(now_ms, self.config, self.log_end_offset, self.segments.active.base_offset)

    def flush(self) -> None:
        """Make everything appended so far durable, then move the recovery point. For any thread.

        StorageError when the disk fails, from then on for good; but for want of room for the leader epochs, which
        passes. When the log is cut meanwhile, the recovery point stays, and the next flush moves it.
        """
        self.check_usable()
        self._flush(sealed=False)

    def _flush(self, *, sealed: bool) -> None:
        try:
            self.durability.flush(self._take, self.epochs, sealed=sealed)
        except OSError as error:
            raise self.fail(error, "flush", for_good=not isinstance(error, EpochsNotWrittenError)) from error

    def _take(self) -> Snapshot:
        end = self.log_end_offset  # before the segments: a batch below it is in one of them
        return list(self.segments.items), end

    def make_truncations_durable(self) -> bool:
        """Flush if a truncation may not be durable. For any thread ("Log truth", 392-10).

        Return False if the flush failed or the log was truncated meanwhile. Call it before a high watermark is made
        durable: a power failure may restore what was truncated since the last sync, in place of what was appended
        there, and a high watermark above would vouch for records that were never committed.
        """
        try:
            if self._has_unsynced_truncation:
                self.flush()
            return not self._has_unsynced_truncation
        except KafkaError as error:
            _LOG.warning("the high watermark of %r is not raised: %s", self, error.message)
            return False

    @property
    def _has_unsynced_truncation(self) -> bool:
        return self.durability.has_unsynced_change or self.segments.active.has_unsynced_truncation

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable; the caller syncs the directory above. For any thread."""
        with self.failing("sync", for_good=True):
            self.durability.sync_identity()

    def close(self) -> None:
        """Write indexes, flush, and let the files go. StorageError when that fails; the log is closed anyway."""
        if self._closed:
            return
        try:
            self.check_usable()
            active = self.segments.active
            seals = active.exists and not active.is_sealed
            with self.failing("close"):
                active.seal()
                self.durability.names_dirty |= self.producers.closing(self.log_end_offset) or seals
            self._flush(sealed=seals)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the files go without writing anything; the directory may be renamed or removed."""
        self._closed = True
        self.durability.end()
        self.segments.forget_files()

    def move_to(self, directory: str) -> None:
        """Close without writing anything and give the directory another name; waits for a flush that runs. OSError."""
        self.abandon()
        self.durability.wait_for_flush()  # it may write the epochs, by a name that is soon another log's
        self.files.fs.rename(self.dir, directory)
        self.segments.forget_files()  # again: a read on another thread may have opened some before the rename

    def check_usable(self) -> None:
        """StorageError when the log failed, KafkaError when it is closed."""
        if self.failed is not None:
            raise self.failed
        if self._closed:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{self!r} is closed")

    @contextmanager
    def failing(self, what: str, *, for_good: bool = False) -> Iterator[None]:
        """Around work that may meet an OSError: `fail` says what is raised then."""
        try:
            yield
        except OSError as error:
            raise self.fail(error, what, for_good=for_good) from error

    def fail(self, error: Exception, what: str, *, for_good: bool = False) -> StorageError:
        """What to raise; from now on everything raises it, unless the failure passes. For any thread."""
        raised = StorageError(f"cannot {what} {self.topic}-{self.partition}: {error}")
        passes = not for_good and isinstance(error, OSError) and is_no_space(error)
        if not passes and self.give_up(raised):
            _LOG.error("%s; the log stays unusable", raised.message)
            if self.on_failed:
                self.on_failed(self, raised)
        return raised

    def give_up(self, error: StorageError) -> bool:
        """From now on everything raises `error`; False when it raised another already. For any thread."""
        with self._failing:
            is_first, self.failed = self.failed is None, self.failed or error
        return is_first


class Swap:
    """How a compacted segment takes the place of others, so that a stop at any point loses nothing; as Kafka names it.

    1. `.cleaned`: the copy is being written. A start removes it. When it is whole it is fsynced.
    2. `begin`: it becomes `.swap`, and the directory is synced. From now on a start completes the exchange.
    3. `take_over`: the others become `.deleted`, readers go on with the copy, and the directory is synced.
    4. `finish`: the copy gets its plain name.

    A log that is truncated between 2 and 3 gives the exchange up first, durably: else a start would restore what was
    truncated. Retention waits meanwhile. The syncs are for a thread, everything else for the log's owner.

    `new` has been written and fsynced, and holds what is left of `old`.

    Invariants: on disk there is at most one `.swap` of a log; while there is, it or what it replaces is complete.
    """

    def __init__(self, log: Log, old: Sequence[Segment], new: Segment, generation: int) -> None:
        """`old` are as they were at that generation of the log's durability."""
        self.log = log
        self.old = list(old)
        self.new = new
        self.generation = generation
        """Until when the log was changed by nobody else; odd when it was."""
        self._has_taken_over = False

    def begin(self) -> bool:
        """Step 2, to be synced; False when the log was changed since the copy was begun. KafkaError."""
        log = self.log
        log.check_usable()
        if log.swap is not None or not log.durability.is_unchanged(self.generation):
            return False
        with log.failing("compact", for_good=True):
            self.new.move(SWAP_SUFFIX)
        log.swap = self
        return True

    def sync(self) -> None:
        """Make the names durable; for any thread. KafkaError."""
        log = self.log
        generation = log.durability.generation
        try:
            log.files.fs.sync_dir(log.dir)
        except OSError as error:
            if log.durability.is_unchanged(generation):
                raise log.fail(error, "sync the folder of", for_good=True) from error

    def give_up(self) -> None:
        """The log is about to be cut: perhaps of what made records go from the copy. OSError."""
        if not self._has_taken_over:
            self.new.move(CLEANED_SUFFIX)
            self.log.files.fs.sync_dir(self.log.dir)
            self.log.swap = None

    def take_over(self, now_ms: int) -> bool:
        """Step 3, to be synced; False when the exchange was given up. KafkaError."""
        log = self.log
        log.check_usable()
        if log.swap is not self:
            return False
        with log.failing("compact", for_good=True):
            is_alone = log.durability.is_unchanged(self.generation)
            with log.durability.changing_files():
                log.segments.replace(self.old, self.new, now_ms + log.config.file_delete_delay_ms)
                self._has_taken_over = True
                log.size_bytes = log.segments.size_bytes
                log.producers.merged([segment.base_offset for segment in self.old[1:]])
            self.generation = log.durability.generation if is_alone else 1
        return True

    def finish(self) -> None:
        """Step 4. KafkaError."""
        log = self.log
        log.check_usable()
        log.swap = None
        if self.new not in log.segments.items:  # cut meanwhile
            return
        with log.failing("compact", for_good=True):
            is_alone = log.durability.is_unchanged(self.generation)
            with log.durability.changing_files():
                self.new.move("")
                log.segments.positions.clear()
            self.generation = log.durability.generation if is_alone else 1

    def discard(self) -> None:
        """Remove a copy that did not come into use; for any thread. OSError."""
        if not self._has_taken_over and self.log.swap is not self:
            self.new.remove()
