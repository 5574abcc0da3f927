"""The log of one partition: segments of record batches, its offsets and its leader epochs.

Rules: "Log truth". Offsets have no gaps. The hot paths (`append_as_leader`, `append_as_follower`, `read`) run on the
event loop and cost one write or read each; nothing looks into records.

Threads: one owner calls everything, but `flush`, `sync_identity` and `remove_deleted`, which any thread may call
meanwhile: see `kipmesh.storage.durability`.

Invariants: log_start_offset <= log_end_offset; every batch below recovery_point is durable; a batch is visible to
`read` only when all of it was written. A failed write is cut off again. When the disk is full the log goes on once
there is room; any other failure, a failed fsync above all (the kernel forgets what it could not write, so a second
try proves nothing), is for good: everything raises `StorageError` until the log is loaded anew.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.messages.fetch import EpochEndOffset
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, assign, check_crc, iterate, peek, whole_batches
from kipmesh.storage.durability import Durability
from kipmesh.storage.epochs import LeaderEpochs
from kipmesh.storage.errors import StorageError, is_no_space
from kipmesh.storage.open_files import OpenFiles
from kipmesh.storage.positions import Positions
from kipmesh.storage.retention import RetiredFiles, expired
from kipmesh.storage.segment import DELETED_SUFFIX, MAX_RELATIVE_OFFSET, Segment
from kipmesh.storage.timestamps import TimestampOffset, first_at_or_after, largest
from kipmesh.storage.validation import validate_produced, validate_replicated

_LOG = logging.getLogger(__name__)

METADATA_TOPIC = "__cluster_metadata"
METADATA_TOPIC_ID = bytes(15) + b"\x01"

OnFailed = Callable[["Log", StorageError], None]
"""Told once that a log failed for good, from whichever thread met the failure: a flush's, or the owner's."""


class AppendInfo(NamedTuple):
    """What was appended."""

    first_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time_ms: int
    """-1 unless the topic's timestamps are the broker's."""
    size_bytes: int


class Log:
    """See the module; made by `kipmesh.storage.log_loader`."""

    def __init__(
        self,
        files: OpenFiles,
        folder: str,
        topic: str,
        partition: int,
        *,
        topic_id: bytes,
        config: TopicConfig,
        segments: list[Segment],
        epochs: LeaderEpochs,
        log_start_offset: int,
        log_end_offset: int,
        recovery_point: int,
        now_ms: int,
        on_recovery_point_lowered: Callable[[], None] | None = None,
        on_failed: OnFailed | None = None,
    ) -> None:
        self.files = files
        self.dir = folder
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.config = config
        self.epochs = epochs
        self.log_start_offset = log_start_offset
        self.log_end_offset = log_end_offset
        self.size_bytes = sum(segment.size_bytes for segment in segments)
        self.failed: StorageError | None = None
        """Set for good by a failure of the disk."""
        self.durability = Durability(
            files.fs, folder, recovery_point, now_ms if recovery_point < log_end_offset else None
        )
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self._positions = Positions()
        self._retired = RetiredFiles()
        self._closed = False
        self._on_recovery_point_lowered = on_recovery_point_lowered
        self._on_failed = on_failed
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
        return tuple(self._bases)

    @property
    def unflushed_messages(self) -> int:
        """Records that an fsync would make durable."""
        return max(0, self.log_end_offset - self.recovery_point)

    def update_config(self, config: TopicConfig) -> None:
        """Take a changed configuration; it counts from the next append on."""
        self.config = config

    # -- appending

    def append_as_leader(self, batch: bytes, leader_epoch: int, now_ms: int) -> AppendInfo:
        """Check one batch, give it offsets and write it; a plain KafkaError says what is wrong with the batch."""
        self._check_usable()
        config = self.config
        if leader_epoch < self.epochs.latest_epoch:
            raise KafkaError(ErrorCode.FENCED_LEADER_EPOCH, f"epoch {leader_epoch} after {self.epochs.latest_epoch}")
        header = validate_produced(batch, config, now_ms, is_internal=self.topic == METADATA_TOPIC)
        first_offset = self.log_end_offset
        append_time, max_timestamp = -1, header.max_timestamp
        if config.message_timestamp_type == "LogAppendTime":
            append_time = max_timestamp = now_ms
            data = assign(batch, first_offset, leader_epoch, now_ms)
        else:
            data = assign(batch, first_offset, leader_epoch)
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
            raise self._fail(error, "append to") from error
        self._positions.remember(first_offset, segment, position)
        self.durability.note_append(now_ms)
        return AppendInfo(first_offset, last_offset, max_timestamp, append_time, len(data))

    def append_as_follower(self, records: bytes, now_ms: int) -> AppendInfo | None:
        """Write batches as the leader has them; None when not one is whole.

        CorruptRecordError when they are damaged, or do not continue the log; then none of them is written.
        """
        self._check_usable()
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
            raise self._fail(error, "append to") from error
        self.durability.note_append(now_ms)
        position, last = batches[-1]
        max_timestamp = max(header.max_timestamp for _, header in batches)
        return AppendInfo(first_offset, last.last_offset, max_timestamp, -1, position + last.size_bytes)

    def _check_continues(self, records: bytes, batches: list[tuple[int, BatchHeader]]) -> None:
        expected = self.log_end_offset
        first = batches[0][1]
        if first.base_offset < expected <= first.last_offset and self.log_start_offset == expected:
            # The leader's log start lies within this batch, and so does ours: begin with the whole batch.
            check_crc(records, batches[0][0], first)
            start = self.log_start_offset
            self.truncate_fully_and_start_at(first.base_offset)
            self.log_start_offset = start
            expected = first.base_offset
        validate_replicated(records, batches, expected, self.epochs.latest_epoch)

    def _append_run(self, view: memoryview, batches: list[tuple[int, BatchHeader]], start: int, now_ms: int) -> int:
        """Write as many batches from `start` on as fit the segment, in one go; gives the first that is left."""
        position, header = batches[start]
        segment = self._segment_for(header.size_bytes, header.last_offset, header.max_timestamp, now_ms)
        room = self.config.segment_bytes - segment.size_bytes
        end, stop = position + header.size_bytes, start + 1
        while stop < len(batches):
            following = batches[stop][1]
            if end + following.size_bytes - position > room:
                break
            if following.last_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
                break
            end += following.size_bytes
            stop += 1
        written_at = segment.write(view[position:end])
        for at, header in batches[start:stop]:
            if header.partition_leader_epoch > self.epochs.latest_epoch:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)
            self.log_end_offset = header.next_offset
            place = written_at + at - position
            segment.note(
                place, header.size_bytes, header.last_offset, header.max_timestamp, self.config.index_interval_bytes
            )
            self._positions.remember(header.base_offset, segment, place)
        self.size_bytes += end - position
        return stop

    def _segment_for(self, size: int, last_offset: int, max_timestamp: int, now_ms: int) -> Segment:
        """The active segment, rolled first when Kafka would."""
        segment = self._segments[-1]
        if segment.size_bytes == 0:
            return segment
        config = self.config
        if (
            segment.size_bytes > config.segment_bytes - size
            or segment.age_ms(now_ms, max_timestamp) > config.segment_ms
            or last_offset - segment.base_offset > MAX_RELATIVE_OFFSET
            or segment.is_index_full(config.segment_index_bytes)
        ):
            self._roll(now_ms)
        return self._segments[-1]

    def maybe_roll(self, now_ms: int) -> None:
        """Roll the active segment by `segment.ms` although nothing is appended."""
        self._check_usable()
        try:
            if self._segments[-1].age_ms(now_ms, now_ms) > self.config.segment_ms:
                self.roll(now_ms)
        except OSError as error:
            raise self._fail(error, "roll") from error

    def roll(self, now_ms: int) -> None:
        """Begin a new segment, unless the active one is empty."""
        self._check_usable()
        try:
            if self._segments[-1].size_bytes:
                self._roll(now_ms)
        except OSError as error:
            raise self._fail(error, "roll") from error

    def _roll(self, now_ms: int) -> None:
        self._segments[-1].seal()
        segment = Segment(self.files, self.dir, self.log_end_offset, now_ms)
        segment.create()
        self.durability.names_dirty = True
        self._segments.append(segment)
        self._bases.append(segment.base_offset)

    def assign_epoch(self, leader_epoch: int) -> None:
        """Become leader: the epoch begins at the log end, records or not."""
        self._check_usable()
        self.epochs.assign(leader_epoch, self.log_end_offset)

    # -- reading

    def read(self, offset: int, max_bytes: int, max_offset: int, min_one_batch: bool) -> bytes:
        """Whole batches from the one that has `offset` on, none that reaches `max_offset`; b"" where there is none.

        At most `max_bytes`, unless `min_one_batch` and the first batch is larger. KafkaError(OFFSET_OUT_OF_RANGE)
        outside of log start and log end.
        """
        self._check_usable()
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is not within {self.log_start_offset}..{self.log_end_offset}",
            )
        limit = min(max_offset, self.log_end_offset)
        if offset >= limit:
            return b""
        try:
            segment, position = self._positions.locate(self._segments, self._bases, offset)
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
            raise self._fail(error, "read") from error
        if not end:
            return b""
        self._positions.remember(next_offset, segment, position + end)
        return data if end == len(data) else data[:end]

    def end_offset_for_epoch(self, epoch: int) -> EpochEndOffset:
        """The largest epoch at or below `epoch` and where it ends; (-1, -1) if unknown."""
        return self.epochs.end_offset_for(epoch, self.log_end_offset)

    def offset_for_timestamp(self, timestamp_ms: int, max_offset: int) -> TimestampOffset | None:
        """The first record below `max_offset` with that timestamp or a later one."""
        self._check_usable()
        limit = min(max_offset, self.log_end_offset)
        try:
            return first_at_or_after(self._segments, timestamp_ms, self.log_start_offset, limit)
        except OSError as error:
            raise self._fail(error, "search") from error

    def max_timestamp_offset(self, max_offset: int) -> TimestampOffset | None:
        """The first record below `max_offset` with the largest timestamp."""
        self._check_usable()
        limit = min(max_offset, self.log_end_offset)
        try:
            return largest(self._segments, self.log_start_offset, limit, self.log_end_offset)
        except OSError as error:
            raise self._fail(error, "search") from error

    # -- cutting

    def truncate_to(self, offset: int) -> None:
        """Remove every batch with a record at or after `offset`; the log ends there, or where such a batch began."""
        self._check_usable()
        if offset >= self.log_end_offset:
            # A leader that was deposed before it wrote has an epoch at its log end that nobody else knows.
            self.epochs.truncate_from_end(self.log_end_offset)
            return
        if offset < self._bases[0]:
            self.truncate_fully_and_start_at(offset)
            return
        keep = bisect_right(self._bases, offset)
        try:
            self._remove_files(self._segments[keep:])
            del self._segments[keep:], self._bases[keep:]
            active = self._segments[-1]
            found = active.find(offset)
            end = found[1].base_offset if found else offset
            if found:
                active.truncate(found[0], end)
        except (OSError, CorruptRecordError) as error:
            raise self._fail(error, "truncate") from error
        self._after_cut(end)
        self.epochs.truncate_from_end(end)
        self.log_start_offset = min(self.log_start_offset, end)
        self._tell_recovery_point()

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Remove everything and begin at `offset`."""
        self._check_usable()
        try:
            self._remove_files(self._segments)
            segment = Segment(self.files, self.dir, offset, self._segments[-1].created_ms)
            segment.create()
        except OSError as error:
            raise self._fail(error, "truncate", for_good=True) from error
        self._segments[:], self._bases[:] = [segment], [offset]
        self._after_cut(offset)
        self.epochs.clear()
        self.log_start_offset = offset
        self._tell_recovery_point()

    def _remove_files(self, segments: Sequence[Segment]) -> None:
        self.durability.note_removal()
        for segment in reversed(segments):
            for path, _ in segment.suffixed(""):
                self.files.fs.remove(path)

    def _after_cut(self, end: int) -> None:
        self._positions.clear()
        self.log_end_offset = end
        self.size_bytes = sum(segment.size_bytes for segment in self._segments)

    def _tell_recovery_point(self) -> None:
        """Lower the recovery point to the log end, on disk too: batches written from here on are not durable."""
        lowered = self.durability.lower(self.log_end_offset)
        if lowered and self._on_recovery_point_lowered:
            self._on_recovery_point_lowered()

    def increment_log_start_offset(self, offset: int) -> None:
        """Records below `offset` are gone for readers; KafkaError(OFFSET_OUT_OF_RANGE) beyond the log end."""
        self._check_usable()
        if offset > self.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"log start {offset} is beyond the end of {self!r}")
        if offset > self.log_start_offset:
            self.log_start_offset = offset
            self.epochs.truncate_from_start(offset)

    def run_retention(self, now_ms: int, high_watermark: int) -> int:
        """Take segments out of use by time, size and log start, below the high watermark; gives how many."""
        self._check_usable()
        count = expired(
            self._segments,
            self.config,
            now_ms,
            log_start_offset=self.log_start_offset,
            log_end_offset=self.log_end_offset,
            high_watermark=high_watermark,
        )
        if not count:
            return 0
        try:
            if count == len(self._segments):
                # The empty successor must be there after a crash: it alone says where the log goes on.
                self._roll(now_ms)
                self.files.fs.sync_dir(self.dir)
            self._retire(self._segments[:count], now_ms)
        except OSError as error:
            raise self._fail(error, "delete segments of") from error
        return count

    def _retire(self, segments: list[Segment], now_ms: int) -> None:
        self.durability.note_removal()
        start = self._bases[len(segments)]
        due_ms = now_ms + self.config.file_delete_delay_ms
        for segment in segments:
            for path, renamed in segment.suffixed(DELETED_SUFFIX):
                self.files.fs.rename(path, renamed)
                self._retired.add(due_ms, renamed)
            self.size_bytes -= segment.size_bytes
        del self._segments[: len(segments)], self._bases[: len(segments)]
        self._positions.clear()
        self.durability.skip_to(start)
        self.increment_log_start_offset(max(start, self.log_start_offset))

    def remove_deleted(self, now_ms: int) -> int:
        """Remove files that have been out of use for `file.delete.delay.ms`; gives how many."""
        return 0 if self._closed else self._retired.remove(self.files.fs, now_ms)

    # -- durability

    def needs_flush(self, now_ms: int) -> bool:
        """Whether `flush.messages`, `flush.ms` or a rolled segment ask for a flush."""
        if self.failed or self._closed:
            return False
        return self.durability.is_due(now_ms, self.config, self.log_end_offset, self._bases[-1])

    def flush(self) -> None:
        """Make everything appended so far durable, then move the recovery point. For any thread.

        StorageError when the disk fails, from then on for good. When the log is cut meanwhile, the recovery point
        stays, and the next flush moves it.
        """
        self._check_usable()
        self._flush(sealed=False)

    def _flush(self, *, sealed: bool) -> None:
        end = self.log_end_offset  # before the segments: a batch below it is in one of them
        try:
            self.durability.flush(list(self._segments), end, self.epochs, sealed=sealed)
        except OSError as error:
            raise self._fail(error, "flush", for_good=True) from error

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable; the caller syncs the folder above. For any thread."""
        try:
            self.durability.sync_identity()
        except OSError as error:
            raise self._fail(error, "sync", for_good=True) from error

    def close(self) -> None:
        """Write indexes, flush, and let the files go. StorageError when that fails; the log is closed anyway."""
        if self._closed:
            return
        try:
            self._check_usable()
            active = self._segments[-1]
            seals = active.exists and not active.is_sealed
            try:
                active.seal()
            except OSError as error:
                raise self._fail(error, "close") from error
            self.durability.names_dirty |= seals
            self._flush(sealed=seals)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the files go without writing anything; the folder may be renamed or removed."""
        self._closed = True
        self.durability.note_removal()
        for segment in self._segments:
            segment.forget_files()

    def _check_usable(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._closed:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{self!r} is closed")

    def _fail(self, error: Exception, what: str, *, for_good: bool = False) -> StorageError:
        raised = StorageError(f"cannot {what} {self.topic}-{self.partition}: {error}")
        if for_good or not (isinstance(error, OSError) and is_no_space(error)):
            with self._failing:
                is_first, self.failed = self.failed is None, self.failed or raised
            if is_first:
                _LOG.error("%s; the log stays unusable", raised.message)
                if self._on_failed:
                    self._on_failed(self, raised)
        return raised
