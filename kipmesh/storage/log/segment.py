"""One segment of a log: `<20 digits>.log`, `.index` and `.timeindex`.

Indexing follows Kafka: the first batch of a segment gets no entry. A later batch gets one when it is more than
`index.interval.bytes` after the previous entry. The time index then gets the largest timestamp so far, and once more
when the segment becomes inactive.

Invariants: unless the log has failed, the file consists of exactly `size_bytes` bytes of complete batches; a partial
write is truncated or fails the log permanently. `create` makes the file; an empty partition has none.

Threads: the owner writes and truncates. Any thread may call `sync` and search by timestamp (`segment_list`) meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, check_crc, parse_header
from kipmesh.storage.fs import File, OpenFiles
from kipmesh.storage.log.index import OFFSET_ENTRY, TIME_ENTRY, SparseIndex

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
DELETED_SUFFIX = ".deleted"
CLEANED_SUFFIX = ".cleaned"
"""Of a segment that compaction is writing; a restart removes it."""
SWAP_SUFFIX = ".swap"
"""Of a compacted segment that is replacing others."""

SUFFIXES = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX)
OFFSET_DIGITS = 20

NO_TIMESTAMP = -1
MAX_RELATIVE_OFFSET = (1 << 31) - 1

_SCAN_BYTES = 16 << 10
_RECOVERY_BYTES = 4 << 20


def _paths(directory: str, base_offset: int, name_suffix: str) -> tuple[str, str, str]:
    """Return the paths of a segment's log, offset index and time index."""
    log, offset_index, time_index = (f"{directory}/{base_offset:020d}{kind}{name_suffix}" for kind in SUFFIXES)
    return log, offset_index, time_index


def offset_of(name: str, suffix: str) -> int | None:
    """Return the offset in the name of a file `<20 digits><suffix>`, or None for other names."""
    digits = name.removesuffix(suffix)
    return int(digits) if name != digits and len(digits) == OFFSET_DIGITS and digits.isdigit() else None


def checked_batches(file: File, size_bytes: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the position and header of each batch in the first `size_bytes` of a file.

    Raises OSError; CorruptRecordError for an invalid header, a wrong CRC or an incomplete batch.
    """
    position, chunk, start = 0, b"", 0
    while position < size_bytes:
        if position + HEADER_BYTES > start + len(chunk):
            chunk, start = file.read_at(min(_RECOVERY_BYTES, size_bytes - position), position), position
        header = parse_header(chunk, position - start)
        if header.size_bytes > size_bytes - position:
            raise CorruptRecordError(f"the batch at position {position} is incomplete")
        if position + header.size_bytes > start + len(chunk):
            wanted = min(max(_RECOVERY_BYTES, header.size_bytes), size_bytes - position)
            chunk, start = file.read_at(wanted, position), position
        check_crc(chunk, position - start, header)
        yield position, header
        position += header.size_bytes


@dataclass(eq=False, repr=False, slots=True)
class Segment:
    """One segment of a log: its log file and indexes. Offsets are absolute."""

    files: OpenFiles
    directory: str
    base_offset: int
    created_ms: int
    """Creation time, or modification time of a segment loaded from disk."""
    name_suffix: InitVar[str] = ""
    path: str = field(init=False)
    offset_index: SparseIndex = field(init=False)
    time_index: SparseIndex = field(init=False)
    exists: bool = field(init=False, default=False)
    size_bytes: int = field(init=False, default=0)
    is_sealed: bool = field(init=False, default=False)
    """Whether the index files are complete."""
    truncations: int = field(init=False, default=0)
    """Number of truncations, counting possible ones."""
    truncations_synced: int = field(init=False, default=0)
    """How many of them are durable."""
    bytes_since_index: int = field(init=False, default=0)
    largest: tuple[int, int] = field(init=False)
    """The largest timestamp, and the last offset of its batch. Replaced atomically."""
    first_timestamp: int | None = field(init=False, default=None)
    """Largest timestamp of the first batch, the start of the segment's age. None until it is read."""

    def __post_init__(self, name_suffix: str) -> None:
        self.path, offset_path, time_path = _paths(self.directory, self.base_offset, name_suffix)
        self.offset_index = SparseIndex(self.files, offset_path, OFFSET_ENTRY)
        self.time_index = SparseIndex(self.files, time_path, TIME_ENTRY)
        self.largest = (NO_TIMESTAMP, self.base_offset)

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp (ms), or -1 if there is none."""
        return self.largest[0]

    # -- writing

    def create(self) -> None:
        """Create the log file. Raises OSError."""
        self.files.get(self.path, create=True)
        self.exists = True

    def write(self, data: bytes | memoryview) -> int:
        """Append complete batches with one write. Return their position. An OSError leaves the file unchanged.

        If the partial write cannot be truncated, the error is always EIO, because the file is no longer usable.
        """
        position = self.size_bytes
        file = self.files.get(self.path)
        try:
            file.write_at(data, position)
        except OSError as error:
            try:
                file.truncate(position)
            except OSError as second:
                raise OSError(errno.EIO, f"cannot truncate {self.path} after a failed write: {second}") from error
            self.truncations += 1  # part of the batch may have been written
            raise
        self.size_bytes = position + len(data)
        return position

    def index_batch(self, position: int, size: int, last_offset: int, max_timestamp: int, interval_bytes: int) -> None:
        """Add a written batch to the indexes. `interval_bytes`: `index.interval.bytes`. Raises OSError."""
        self.is_sealed = False
        if position == 0:
            self.first_timestamp = max_timestamp
        if max_timestamp > self.largest[0]:
            self.largest = (max_timestamp, last_offset)
        if self.bytes_since_index > interval_bytes:
            self.offset_index.append(last_offset - self.base_offset, position)
            self.index_max_timestamp()
            self.bytes_since_index = 0
        self.bytes_since_index += size

    def index_max_timestamp(self) -> None:
        """Add the largest timestamp so far to the time index, unless it is already there. Raises OSError."""
        last = self.time_index.last
        timestamp, offset = self.largest
        if timestamp > (last[0] if last else NO_TIMESTAMP):
            self.time_index.append(timestamp, offset - self.base_offset)

    def seal(self) -> None:
        """Write both index files, even if empty, because a missing index counts as lost. Raises OSError."""
        if self.is_sealed or not self.exists:
            return
        self.index_max_timestamp()
        self.offset_index.write()
        self.time_index.write()
        self.is_sealed = True

    def sync(self, *, with_indexes: bool) -> None:
        """Make the log file, and optionally the indexes, durable. Does nothing before `create`.

        Thread-safe. Raises OSError.
        """
        if not self.exists:
            return
        truncations = self.truncations  # read first, because the sync may not cover concurrent truncations
        self.files.get(self.path).sync()
        self.truncations_synced = max(self.truncations_synced, truncations)
        if with_indexes:
            self.files.get(self.offset_index.path).sync()
            self.files.get(self.time_index.path).sync()

    @property
    def has_unsynced_truncation(self) -> bool:
        """Whether a crash may restore truncated batches."""
        return self.truncations != self.truncations_synced

    def become_inactive(self) -> None:
        """Seal the segment before the next one starts, and make truncations durable. Raises OSError.

        This is the only sync that an append waits for. Without it, a power failure may restore truncated batches up to
        exactly the start of the next segment, and recovery could not detect the divergence.
        """
        self.seal()
        if self.has_unsynced_truncation:
            try:
                self.sync(with_indexes=False)
            except OSError as error:
                raise OSError(errno.EIO, f"cannot sync {self.path} after a truncation: {error}") from error

    def _is_index_full(self, index_bytes_max: int) -> bool:
        return (
            self.offset_index.count >= index_bytes_max // OFFSET_ENTRY.size
            or self.time_index.count >= index_bytes_max // TIME_ENTRY.size - 1
        )

    def should_roll(self, config: TopicConfig, size: int, last_offset: int, max_timestamp: int, now_ms: int) -> bool:
        """Return whether Kafka would roll before appending a batch with this size, last offset and timestamp.

        The reasons are `segment.bytes`, `segment.ms`, `segment.index.bytes` and the range of relative offsets.
        """
        return (
            self.size_bytes > config.segment_bytes - size
            or self.age_ms(now_ms, max_timestamp) > config.roll_ms
            or last_offset - self.base_offset > MAX_RELATIVE_OFFSET
            or self._is_index_full(config.segment_index_bytes)
        )

    def fitting_run(self, batches: Sequence[tuple[int, BatchHeader]], start: int, bytes_max: int) -> tuple[int, int]:
        """Return (end position, next index) of the batches from index `start` that fit this segment.

        `batches`: position and header of adjacent batches. The one at `start` always counts as fitting.
        """
        position, header = batches[start]
        end, stop = position + header.size_bytes, start + 1
        while stop < len(batches):
            following = batches[stop][1]
            if end + following.size_bytes - position > bytes_max - self.size_bytes:
                break
            if following.last_offset - self.base_offset > MAX_RELATIVE_OFFSET:
                break
            end += following.size_bytes
            stop += 1
        return end, stop

    # -- reading

    def read_at(self, size: int, position: int) -> bytes:
        """Return at most `size` bytes at `position`, fewer at the end of the segment. Raises OSError."""
        return self.files.get(self.path).read_at(min(size, self.size_bytes - position), position)

    def find(self, offset: int) -> tuple[int, BatchHeader] | None:
        """Return the position and header of the first batch whose last offset is at least `offset`.

        Returns None if all batches end before `offset`. Raises OSError, CorruptRecordError.
        """
        for found, header in self.batches(self.indexed_position(offset - self.base_offset)):
            if header.last_offset >= offset:
                return found, header
        return None

    def indexed_position(self, key: int, *, field: int = 0) -> int:
        """Return the position of the last indexed batch whose relative offset is at most `key`, or 0 if there is none.

        With field=1, `key` is compared with the position instead. Raises OSError, CorruptRecordError.
        """
        at = self.offset_index.floor(key, field=field)
        return self.offset_index.at(at)[1] if at >= 0 else 0

    def batches(self, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
        """Yield the position and header of each batch from the one at `position`. CRCs are not checked.

        Raises CorruptRecordError, OSError.
        """
        chunk, start = b"", position
        while position < self.size_bytes:
            if position + HEADER_BYTES > start + len(chunk):
                start = position
                chunk = self.read_at(_SCAN_BYTES, position)
            header = parse_header(chunk, position - start)
            yield position, header
            position += header.size_bytes

    @property
    def retention_timestamp(self) -> int:
        """Timestamp (ms) for retention: the largest record timestamp, or `created_ms` if no record has a timestamp."""
        return self.max_timestamp if self.max_timestamp >= 0 else self.created_ms

    def age_ms(self, now_ms: int, timestamp: int) -> int:
        """Return the age that Kafka compares with `segment.ms`: `timestamp` minus the timestamp of the first batch.

        If that batch has no timestamp or does not exist, returns `now_ms` minus the creation time. Raises OSError,
        CorruptRecordError.
        """
        if self.first_timestamp is None and self.size_bytes:
            self.first_timestamp = next(self.batches())[1].max_timestamp
        if self.first_timestamp is not None and self.first_timestamp >= 0:
            return timestamp - self.first_timestamp
        return now_ms - self.created_ms

    # -- truncating and renaming

    def truncate(self, position: int, offset: int) -> None:
        """Truncate at `position`, where the batch with base offset `offset` starts.

        Raises OSError, CorruptRecordError.
        """
        if self.exists:
            self.files.get(self.path).truncate(position)
            self.truncations += 1
        self.size_bytes = position
        self.is_sealed = False
        relative = offset - self.base_offset
        self.offset_index.truncate(self.offset_index.floor(relative - 1) + 1)
        self.time_index.truncate(self.time_index.floor(relative - 1, field=1) + 1)
        self.bytes_since_index = 0
        if position == 0:
            self.first_timestamp = None
        self.read_max_timestamp()

    def read_max_timestamp(self) -> None:
        """Find the largest timestamp from the last time index entry and the batches after it.

        Raises OSError, CorruptRecordError.
        """
        entry = self.time_index.last
        self.largest = (entry[0], self.base_offset + entry[1]) if entry else (NO_TIMESTAMP, self.base_offset)
        for _, header in self.batches(self.indexed_position(entry[1]) if entry else 0):
            if header.largest_timestamp > self.largest[0]:
                self.largest = (header.largest_timestamp, header.last_offset)

    # Files are closed after the rename, because another thread may reopen them until then. A stale handle must not be
    # used for a new file of the same name.

    def remove(self) -> None:
        """Remove the existing files. Raises OSError."""
        for path in self._paths:
            if self.files.fs.exists(path):
                self.files.fs.remove(path)
        self.forget_files()

    def rename(self, suffix: str) -> list[str]:
        """Append a suffix to the names of the existing files. Return the new paths. Raises OSError."""
        found = [path for path in self._paths if self.files.fs.exists(path)]
        for path in found:
            self.files.fs.rename(path, path + suffix)
        self.forget_files()
        return [path + suffix for path in found]

    def move(self, name_suffix: str) -> None:
        """Rename the existing files to their plain names plus `name_suffix`, and use the new names from now on.

        Raises OSError.
        """
        paths = _paths(self.directory, self.base_offset, name_suffix)
        for old, new in zip(self._paths, paths, strict=True):
            if self.files.fs.exists(old):
                self.files.fs.rename(old, new)
        self.forget_files()
        self.path, self.offset_index.path, self.time_index.path = paths
        self.forget_files()

    def forget_files(self) -> None:
        """Close the files. A later use opens them again."""
        for path in self._paths:
            self.files.forget(path)

    @property
    def _paths(self) -> tuple[str, str, str]:
        return self.path, self.offset_index.path, self.time_index.path

    # -- loading

    def load(self, sizes: dict[str, int]) -> None:
        """Load an existing segment. `sizes`: file sizes in bytes by file name.

        Raises OSError; CorruptRecordError if an index is missing or implausible.
        """
        self.exists = True
        self.size_bytes = sizes[os.path.basename(self.path)]
        for index in (self.offset_index, self.time_index):
            name = os.path.basename(index.path)
            if name not in sizes:
                raise CorruptRecordError(f"{name} is missing")
            index.load(sizes[name])
        last, last_time = self.offset_index.last, self.time_index.last
        if last and not (last[0] >= 0 and 0 < last[1] < self.size_bytes):
            raise CorruptRecordError(f"{os.path.basename(self.offset_index.path)} ends with invalid entry {last}")
        if last_time and (last_time[1] < 0 or last_time[0] < self.time_index.at(0)[0]):
            raise CorruptRecordError(f"{os.path.basename(self.time_index.path)} ends with invalid entry {last_time}")
        if last_time:
            self.largest = (last_time[0], self.base_offset + last_time[1])
        self.is_sealed = True

    def end_offset(self) -> int:
        """Return the offset after the last batch, found from the last index entries and the batches after them.

        Raises OSError; CorruptRecordError if log and indexes do not match. A crash may undo a truncation in the log but
        not in the time index, and a search with such an index would skip records.
        """
        last, (largest, largest_at) = self.offset_index.last, self.largest
        end = self.base_offset
        for position, header in self.batches(self.indexed_position(largest_at - self.base_offset)):
            if position + header.size_bytes > self.size_bytes:
                raise CorruptRecordError(f"the last batch of {os.path.basename(self.path)} is incomplete")
            if last and position == last[1] and header.last_offset != self.base_offset + last[0]:
                raise CorruptRecordError(f"{os.path.basename(self.offset_index.path)} does not match its log")
            if header.largest_timestamp > largest:
                raise CorruptRecordError(f"{os.path.basename(self.time_index.path)} lacks its last entries")
            end = header.next_offset
        self.bytes_since_index = self.size_bytes - (last[1] if last else 0)
        return end

    def recover(self, interval_bytes: int, epochs: list[tuple[int, int]]) -> tuple[int, int, str]:
        """Check every batch and rebuild the indexes, without truncating the log.

        Returns (end offset, size in bytes of the valid part, why it stopped). The reason is "" if the end of the file
        was reached. Stops at an invalid batch, a wrong CRC, a gap in the offsets or a lower leader epoch; the latter
        two remain from a truncation that was not durable. Appends (leader epoch, base offset) to `epochs` where the
        epoch rises. Raises OSError.
        """
        self.offset_index.reset()
        self.time_index.reset()
        self.bytes_since_index = 0
        self.is_sealed = False
        self.largest, self.first_timestamp = (NO_TIMESTAMP, self.base_offset), None
        position, offset, problem = 0, self.base_offset, ""
        try:
            for at, header in checked_batches(self.files.get(self.path), self.size_bytes):
                self._check_order(header, offset, epochs)
                if header.partition_leader_epoch >= 0 and (not epochs or header.partition_leader_epoch > epochs[-1][0]):
                    epochs.append((header.partition_leader_epoch, header.base_offset))
                self.index_batch(at, header.size_bytes, header.last_offset, header.largest_timestamp, interval_bytes)
                position = at + header.size_bytes
                offset = header.next_offset
        except CorruptRecordError as error:
            problem = error.message
        return offset, position, problem

    def _check_order(self, header: BatchHeader, offset: int, epochs: list[tuple[int, int]]) -> None:
        if header.base_offset != offset or header.last_offset_delta < 0:
            raise CorruptRecordError(f"offset {header.base_offset} follows {offset - 1}")
        if header.last_offset - self.base_offset > MAX_RELATIVE_OFFSET:
            raise CorruptRecordError(
                f"offset {header.last_offset} is more than {MAX_RELATIVE_OFFSET} after the base offset"
            )
        if epochs and 0 <= header.partition_leader_epoch < epochs[-1][0]:
            raise CorruptRecordError(f"leader epoch {header.partition_leader_epoch} follows {epochs[-1][0]}")
