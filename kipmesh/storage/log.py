"""The log of one partition: segments of record batches, its offsets and its leader epochs.

Rules: "Log truth". Offsets have no gaps. The hot paths (`append_as_leader`, `append_as_follower`, `read`) run on the
event loop and cost one write or read each; nothing looks into records.

Threads: one owner calls everything, but `flush`, which any thread may call meanwhile. They share immutable values,
the cache of open files, and `recovery_point` under `_flush_lock`.

Invariants: log_start_offset <= log_end_offset; every batch below recovery_point is durable; a batch is visible to
`read` only when all of it was written. A failed write is cut off again. When the disk is full the log goes on once
there is room; any other failure, a failed fsync above all (the kernel forgets what it could not write, so a second
try proves nothing), is for good: everything raises `StorageError` until the log is loaded anew.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.messages.fetch import EpochEndOffset
from kipmesh.core.record_batch import LOG_OVERHEAD_BYTES, BatchHeader, assign, check_crc, iterate
from kipmesh.storage.checkpoint import write_epochs
from kipmesh.storage.epochs import LeaderEpochs
from kipmesh.storage.errors import StorageError, is_no_space
from kipmesh.storage.open_files import OpenFiles
from kipmesh.storage.segment import DELETED_SUFFIX, MAX_RELATIVE_OFFSET, OFFSET_LENGTH_DELTA, Segment
from kipmesh.storage.timestamps import TimestampOffset, first_at_or_after, largest
from kipmesh.storage.validation import validate_produced

_LOG = logging.getLogger(__name__)

METADATA_TOPIC = "__cluster_metadata"
METADATA_TOPIC_ID = bytes(15) + b"\x01"
PARTITION_METADATA = "partition.metadata"

_POSITIONS_MAX = 32
_HEAD_BYTES = OFFSET_LENGTH_DELTA.size


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
        self.recovery_point = recovery_point
        self.size_bytes = sum(segment.size_bytes for segment in segments)
        self.failed: StorageError | None = None
        """Set for good by a failure of the disk."""
        self.names_dirty = False
        """Whether files were made or removed since the folder was last synced."""
        self.identity_dirty = False
        """Whether `partition.metadata` and the folder's own name are not known to be durable."""
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self._positions: dict[int, tuple[Segment, int]] = {}  # where the batch with this base offset is
        self._deleted: list[tuple[int, str]] = []  # when to remove what
        self._closed = False
        self._unsealed = False  # whether closing has just written the active segment's indexes
        self._generation = 0  # of truncations and removals, which a running flush must notice
        self._flush_lock = threading.Lock()
        self._flushing = threading.Lock()  # one flush at a time; never taken by the owner's other calls
        self._unflushed_since_ms: int | None = now_ms if recovery_point < log_end_offset else None
        self._on_recovery_point_lowered = on_recovery_point_lowered

    def __repr__(self) -> str:
        return f"Log({self.topic}-{self.partition}, {self.log_start_offset}..{self.log_end_offset})"

    @property
    def latest_epoch(self) -> int:
        """The latest leader epoch, -1 if there is none."""
        return self.epochs.latest_epoch

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
        self._remember(first_offset, segment, position)
        if self._unflushed_since_ms is None:
            self._unflushed_since_ms = now_ms
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
        if self._unflushed_since_ms is None:
            self._unflushed_since_ms = now_ms
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
        epoch = self.epochs.latest_epoch
        for position, header in batches:
            check_crc(records, position, header)
            if header.base_offset != expected or header.last_offset_delta < 0:
                raise CorruptRecordError(f"offset {header.base_offset} to {self!r} that ends at {expected}")
            if header.partition_leader_epoch < epoch:
                raise CorruptRecordError(f"leader epoch {header.partition_leader_epoch} to {self!r} after {epoch}")
            epoch = header.partition_leader_epoch
            expected = header.next_offset

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
            self._remember(header.base_offset, segment, place)
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
        segment = self._segments[-1]
        try:
            if segment.size_bytes and segment.age_ms(now_ms, now_ms) > self.config.segment_ms:
                self._roll(now_ms)
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
        self.names_dirty = True
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
            segment, position = self._locate(offset)
            data = segment.read_at(max(max_bytes, _HEAD_BYTES), position)
            end, next_offset = whole_batches(data, max_bytes, limit)
            if end == 0 and min_one_batch:
                base_offset, length, delta = OFFSET_LENGTH_DELTA.unpack_from(data)
                if base_offset + delta >= limit:
                    return b""
                end, next_offset = length + LOG_OVERHEAD_BYTES, base_offset + delta + 1
                data = segment.read_at(end, position)
                if len(data) < end:
                    raise CorruptRecordError(f"the batch at offset {base_offset} of {self!r} is cut")
        except OSError as error:
            raise self._fail(error, "read") from error
        if not end:
            return b""
        self._remember(next_offset, segment, position + end)
        return data if end == len(data) else data[:end]

    def _locate(self, offset: int) -> tuple[Segment, int]:
        """Segment and position of the batch that has `offset`, which is below the log end."""
        known = self._positions.get(offset)
        if known is not None and known[1] < known[0].size_bytes:
            return known
        segment = self._segments[bisect_right(self._bases, offset) - 1]
        found = segment.find(offset)
        if found is None:
            raise CorruptRecordError(f"no batch of {self!r} has offset {offset}")
        return segment, found[0]

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        """Keep a position for the next read, so that whoever reads on needs no index."""
        positions = self._positions
        if offset not in positions and len(positions) >= _POSITIONS_MAX:
            del positions[next(iter(positions))]
        positions[offset] = (segment, position)

    def end_offset_for_epoch(self, epoch: int) -> EpochEndOffset:
        """The largest epoch at or below `epoch` and where it ends; (-1, -1) if unknown."""
        return self.epochs.end_offset_for(epoch, self.log_end_offset)

    def offset_for_timestamp(self, timestamp_ms: int, max_offset: int) -> TimestampOffset | None:
        """The first record below `max_offset` with that timestamp or a later one."""
        self._check_usable()
        try:
            return first_at_or_after(
                self._segments, timestamp_ms, self.log_start_offset, min(max_offset, self.log_end_offset)
            )
        except OSError as error:
            raise self._fail(error, "search") from error

    def max_timestamp_offset(self, max_offset: int) -> TimestampOffset | None:
        """The first record below `max_offset` with the largest timestamp."""
        self._check_usable()
        try:
            limit = min(max_offset, self.log_end_offset)
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
        self._generation += 1
        for segment in reversed(segments):
            for path, _ in segment.suffixed(""):
                self.files.fs.remove(path)
            self.names_dirty = True

    def _after_cut(self, end: int) -> None:
        self._positions.clear()
        self.log_end_offset = end
        self.size_bytes = sum(segment.size_bytes for segment in self._segments)

    def _tell_recovery_point(self) -> None:
        """Lower the recovery point to the log end, on disk too: batches written from here on are not durable."""
        with self._flush_lock:
            self._generation += 1
            lowered = self.recovery_point > self.log_end_offset
            self.recovery_point = min(self.recovery_point, self.log_end_offset)
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
        count = self._expired(now_ms, high_watermark)
        if not count:
            return 0
        try:
            if count == len(self._segments):
                if not self._segments[-1].size_bytes:
                    count -= 1
                else:
                    # The empty successor must be there after a crash: it alone says where the log goes on.
                    self._roll(now_ms)
                    self.files.fs.sync_dir(self.dir)
            self._retire(self._segments[:count], now_ms)
        except OSError as error:
            raise self._fail(error, "delete segments of") from error
        return count

    def _expired(self, now_ms: int, high_watermark: int) -> int:
        config = self.config
        excess = self.size_bytes - config.retention_bytes if config.retention_bytes >= 0 else -1
        count = 0
        for number, segment in enumerate(self._segments):
            is_last = number + 1 == len(self._segments)
            end = self.log_end_offset if is_last else self._bases[number + 1]
            if end > high_watermark:
                break
            excess -= segment.size_bytes
            age_ms = now_ms - segment.largest_timestamp(segment.created_ms)
            is_old = 0 <= config.retention_ms < age_ms and (segment.size_bytes > 0 or not is_last)
            is_below_start = not is_last and end <= self.log_start_offset
            if not (is_old or is_below_start or (excess >= 0 and segment.size_bytes > 0)):
                break
            count += 1
        return count

    def _retire(self, segments: list[Segment], now_ms: int) -> None:
        self._generation += 1
        start = self._bases[len(segments)]
        due_ms = now_ms + self.config.file_delete_delay_ms
        for segment in segments:
            for path, renamed in segment.suffixed(DELETED_SUFFIX):
                self.files.fs.rename(path, renamed)
                self._deleted.append((due_ms, renamed))
            self.size_bytes -= segment.size_bytes
        self.names_dirty = True
        del self._segments[: len(segments)], self._bases[: len(segments)]
        self._positions.clear()
        with self._flush_lock:
            self.recovery_point = max(self.recovery_point, start)
        self.increment_log_start_offset(max(start, self.log_start_offset))

    def remove_deleted(self, now_ms: int) -> int:
        """Remove files that have been out of use for `file.delete.delay.ms`; gives how many."""
        if self._closed:
            return 0
        due = [path for due_ms, path in self._deleted if due_ms <= now_ms]
        if due:
            self._deleted = [entry for entry in self._deleted if entry[0] > now_ms]
        for path in due:
            try:
                self.files.fs.remove(path)
            except OSError as error:  # the next start removes it
                _LOG.warning("cannot remove %s: %s", path, error)
        return len(due)

    # -- durability

    def needs_flush(self, now_ms: int) -> bool:
        """Whether `flush.messages`, `flush.ms` or a rolled segment ask for a flush."""
        if self.failed or self._closed or self.recovery_point >= self.log_end_offset:
            return False
        if self.unflushed_messages >= self.config.flush_messages or self.recovery_point < self._bases[-1]:
            return True
        since = self._unflushed_since_ms
        return since is not None and now_ms - since >= self.config.flush_ms

    def flush(self) -> None:
        """Make everything appended so far durable, then move the recovery point. For any thread.

        StorageError when the disk fails, from then on for good. When the log is cut meanwhile, the recovery point
        stays, and the next flush moves it.
        """
        self._check_usable()
        with self._flushing:
            self._flush(is_last=False)

    def _flush(self, *, is_last: bool) -> None:
        self._unflushed_since_ms = None
        generation, end, segments = self._generation, self.log_end_offset, list(self._segments)
        try:
            for number, segment in enumerate(segments):
                is_active = number + 1 == len(segments)
                segment_end = end if is_active else segments[number + 1].base_offset
                if segment_end > self.recovery_point or (is_last and is_active and self._unsealed):
                    segment.sync(with_indexes=is_last or not is_active)
            if self.epochs.is_dirty:
                self.epochs.written = write_epochs(self.files.fs, self.dir, self.epochs.entries)
                self.names_dirty = True
            self._sync_names(with_parent=True)
        except FileNotFoundError as error:
            if generation == self._generation and not self._closed:
                raise self._fail(error, "flush", for_good=True) from error
            return
        except OSError as error:
            raise self._fail(error, "flush", for_good=True) from error
        with self._flush_lock:
            if generation == self._generation and end > self.recovery_point:
                self.recovery_point = end

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable; the caller syncs the folder above. For any thread."""
        try:
            with self._flushing:
                self._sync_names(with_parent=False)
        except OSError as error:
            if not self._closed:
                raise self._fail(error, "sync", for_good=True) from error

    def _sync_names(self, *, with_parent: bool) -> None:
        fs = self.files.fs
        was_dirty = self.identity_dirty
        if was_dirty:
            file = fs.open(f"{self.dir}/{PARTITION_METADATA}")
            try:
                file.sync()
            finally:
                file.close()
        if self.names_dirty or was_dirty:
            self.names_dirty = False
            fs.sync_dir(self.dir)
        if was_dirty and with_parent:
            fs.sync_dir(os.path.dirname(self.dir))
        if was_dirty:
            self.identity_dirty = False

    def close(self) -> None:
        """Write indexes, flush, and let the files go. StorageError when that fails; the log is closed anyway."""
        if self._closed:
            return
        try:
            self._check_usable()
            active = self._segments[-1]
            self._unsealed = active.exists and not active.is_sealed
            try:
                active.seal()
            except OSError as error:
                raise self._fail(error, "close") from error
            self.names_dirty |= self._unsealed
            with self._flushing:
                self._flush(is_last=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the files go without writing anything; the folder may be renamed or removed."""
        self._closed = True
        self._generation += 1
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
            self.failed = raised
            _LOG.error("%s; the log stays unusable", raised.message)
        return raised


def whole_batches(data: bytes, max_bytes: int, limit: int) -> tuple[int, int]:
    """Bytes of the whole batches at the front of `data` that end below offset `limit`, and the offset after them."""
    position = next_offset = 0
    end = min(len(data), max_bytes)
    unpack = OFFSET_LENGTH_DELTA.unpack_from
    while position + _HEAD_BYTES <= end:
        base_offset, length, delta = unpack(data, position)
        following = position + length + LOG_OVERHEAD_BYTES
        if following > end or base_offset + delta >= limit:
            break
        if length <= 0:
            raise CorruptRecordError(f"batch length {length} at offset {base_offset}")
        position, next_offset = following, base_offset + delta + 1
    return position, next_offset
