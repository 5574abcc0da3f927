"""One segment of a log: `<20 digits>.log` and its two indexes.

The rules of indexing are Kafka's: the first batch of a segment gets no entry, every later one does whose distance to
the last entry exceeds `index.interval.bytes`; the time index gets the largest timestamp so far, and that once more
when the segment stops being the active one.

Invariants: the file has exactly `size_bytes` bytes, all of whole batches, while the log is not failed: what a failed
write left behind is cut, or else the failure is for good. The file is made by `create`, which an empty partition does
without.

Threads: the owner writes and cuts; `sync` and searches by timestamp (`segment_list`) are for any thread meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

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
"""Of a segment that compaction writes; worth nothing after a stop."""
SWAP_SUFFIX = ".swap"
"""Of a segment that compaction has written, until it has taken the place of others."""

SUFFIXES = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX)

NO_TIMESTAMP = -1
MAX_RELATIVE_OFFSET = (1 << 31) - 1

_SCAN_BYTES = 16 << 10
_RECOVERY_BYTES = 4 << 20


def _paths(directory: str, base_offset: int, name_suffix: str) -> tuple[str, str, str]:
    """Paths of a segment's log, offset index and time index."""
    log, offset_index, time_index = (f"{directory}/{base_offset:020d}{kind}{name_suffix}" for kind in SUFFIXES)
    return log, offset_index, time_index


def checked_batches(file: File, size_bytes: int) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each batch in the first `size_bytes` of a file; CorruptRecordError if one is damaged."""
    position, chunk, start = 0, b"", 0
    while position < size_bytes:
        if position + HEADER_BYTES > start + len(chunk):
            chunk, start = file.read_at(min(_RECOVERY_BYTES, size_bytes - position), position), position
        header = parse_header(chunk, position - start)
        if header.size_bytes > size_bytes - position:
            raise CorruptRecordError(f"the batch at position {position} is cut")
        if position + header.size_bytes > start + len(chunk):
            wanted = min(max(_RECOVERY_BYTES, header.size_bytes), size_bytes - position)
            chunk, start = file.read_at(wanted, position), position
        check_crc(chunk, position - start, header)
        yield position, header
        position += header.size_bytes


class Segment:
    """A segment; offsets are absolute."""

    __slots__ = (
        "base_offset",
        "bytes_since_index",
        "created_ms",
        "directory",
        "exists",
        "files",
        "first_timestamp",
        "is_sealed",
        "largest",
        "offset_index",
        "path",
        "size_bytes",
        "time_index",
        "truncations",
        "truncations_synced",
    )

    def __init__(
        self, files: OpenFiles, directory: str, base_offset: int, created_ms: int, name_suffix: str = ""
    ) -> None:
        self.files = files
        self.directory = directory
        self.base_offset = base_offset
        self.created_ms = created_ms
        """When it was made; for one found on disk, when it was last written."""
        self.path, offset_path, time_path = _paths(directory, base_offset, name_suffix)
        self.exists = False
        self.size_bytes = 0
        self.offset_index = SparseIndex(files, offset_path, OFFSET_ENTRY)
        self.time_index = SparseIndex(files, time_path, TIME_ENTRY)
        self.is_sealed = False
        """Whether the index files have everything that they should."""
        self.truncations = self.truncations_synced = 0
        """How often it was cut, or may have been, and how many of these are durable."""
        self.bytes_since_index = 0
        self.largest = (NO_TIMESTAMP, base_offset)
        """The largest timestamp and the last offset of the batch that has it; one value, replaced at once."""
        self.first_timestamp: int | None = None
        """Largest timestamp of the first batch, by which the segment's age is counted; None when not yet read."""

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp, -1 if there is none."""
        return self.largest[0]

    # -- writing

    def create(self) -> None:
        """Make the file."""
        self.files.get(self.path, create=True)
        self.exists = True

    def write(self, data: bytes | memoryview) -> int:
        """Append whole batches with one write and give their position. OSError leaves the file as it was.

        When not even that works, the error is EIO, whatever it was that began it: the file is not to be trusted.
        """
        position = self.size_bytes
        file = self.files.get(self.path)
        try:
            file.write_at(data, position)
        except OSError as error:
            try:
                file.truncate(position)
            except OSError as second:
                raise OSError(errno.EIO, f"could not cut {self.path} after a failed write: {second}") from error
            self.truncations += 1  # part of the batch may have been written
            raise
        self.size_bytes = position + len(data)
        return position

    def note(self, position: int, size: int, last_offset: int, max_timestamp: int, interval_bytes: int) -> None:
        """Index a batch that was written."""
        self.is_sealed = False
        if position == 0:
            self.first_timestamp = max_timestamp
        if max_timestamp > self.largest[0]:
            self.largest = (max_timestamp, last_offset)
        if self.bytes_since_index > interval_bytes:
            self.offset_index.append(last_offset - self.base_offset, position)
            self.note_max_timestamp()
            self.bytes_since_index = 0
        self.bytes_since_index += size

    def note_max_timestamp(self) -> None:
        """Put the largest timestamp so far into the time index, unless it is there."""
        last = self.time_index.last
        timestamp, offset = self.largest
        if timestamp > (last[0] if last else NO_TIMESTAMP):
            self.time_index.append(timestamp, offset - self.base_offset)

    def seal(self) -> None:
        """Bring the index files up to date, both made even if empty: a missing one is a lost one."""
        if self.is_sealed or not self.exists:
            return
        self.note_max_timestamp()
        self.offset_index.write()
        self.time_index.write()
        self.is_sealed = True

    def sync(self, *, with_indexes: bool) -> None:
        """Make the log, and for a sealed segment its indexes, durable. Called from any thread."""
        if not self.exists:
            return
        cuts = self.truncations  # first: a cut meanwhile is not in it
        self.files.get(self.path).sync()
        self.truncations_synced = max(self.truncations_synced, cuts)
        if with_indexes:
            self.files.get(self.offset_index.path).sync()
            self.files.get(self.time_index.path).sync()

    @property
    def has_unsynced_truncation(self) -> bool:
        """Whether it was cut since what is durable of it: a crash may bring back what was cut."""
        return self.truncations != self.truncations_synced

    def finish(self) -> None:
        """Seal, before a segment follows; a cut is made durable first, the one sync that an append waits for. OSError.

        Otherwise a power failure may bring back what was cut, and where that ends just as the next segment begins
        nobody can tell that its records are of another history.
        """
        self.seal()
        if self.has_unsynced_truncation:
            try:
                self.sync(with_indexes=False)
            except OSError as error:
                raise OSError(errno.EIO, f"could not sync {self.path} after a cut: {error}") from error

    def _is_index_full(self, index_bytes_max: int) -> bool:
        return (
            self.offset_index.count >= index_bytes_max // OFFSET_ENTRY.size
            or self.time_index.count >= index_bytes_max // TIME_ENTRY.size - 1
        )

    def is_to_end(self, config: TopicConfig, size: int, last_offset: int, max_timestamp: int, now_ms: int) -> bool:
        """Whether Kafka would roll before it appends a batch of that size, last offset and timestamp."""
        return (
            self.size_bytes > config.segment_bytes - size
            or self.age_ms(now_ms, max_timestamp) > config.roll_ms
            or last_offset - self.base_offset > MAX_RELATIVE_OFFSET
            or self._is_index_full(config.segment_index_bytes)
        )

    def fitting(self, batches: Sequence[tuple[int, BatchHeader]], start: int, bytes_max: int) -> tuple[int, int]:
        """Of batches that follow each other, by position: end of those from `start` on that fit here, and the next.

        The one at `start` always fits.
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
        """At most `size` bytes at a position within the segment."""
        return self.files.get(self.path).read_at(min(size, self.size_bytes - position), position)

    def find(self, offset: int) -> tuple[int, BatchHeader] | None:
        """The first batch whose last offset is `offset` or more; None when there is none."""
        for found, header in self.batches(self.indexed_position(offset - self.base_offset)):
            if header.last_offset >= offset:
                return found, header
        return None

    def indexed_position(self, key: int, *, field: int = 0) -> int:
        """Position of the last batch in the index whose relative last offset (or position: field=1) is at most `key`.

        0 if there is none.
        """
        at = self.offset_index.floor(key, field=field)
        return self.offset_index.at(at)[1] if at >= 0 else 0

    def batches(self, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch from a batch's position on; CorruptRecordError on garbage."""
        chunk, start = b"", position
        while position < self.size_bytes:
            if position + HEADER_BYTES > start + len(chunk):
                start = position
                chunk = self.read_at(_SCAN_BYTES, position)
            header = parse_header(chunk, position - start)
            yield position, header
            position += header.size_bytes

    def largest_timestamp(self, modified_ms: int) -> int:
        """What retention goes by: the largest timestamp, or when the file was last written if no record has one."""
        return self.max_timestamp if self.max_timestamp >= 0 else modified_ms

    def age_ms(self, now_ms: int, timestamp: int) -> int:
        """How long the segment has been the active one for a batch of that timestamp, as Kafka counts."""
        if self.first_timestamp is None and self.size_bytes:
            self.first_timestamp = next(self.batches())[1].max_timestamp
        if self.first_timestamp is not None and self.first_timestamp >= 0:
            return timestamp - self.first_timestamp
        return now_ms - self.created_ms

    # -- cutting

    def truncate(self, position: int, offset: int) -> None:
        """Cut at the position of the batch that begins at `offset`."""
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
        """Find the largest timestamp by the last time entry and the batches after it."""
        entry = self.time_index.last
        self.largest = (entry[0], self.base_offset + entry[1]) if entry else (NO_TIMESTAMP, self.base_offset)
        for _, header in self.batches(self.indexed_position(entry[1]) if entry else 0):
            if header.largest_timestamp > self.largest[0]:
                self.largest = (header.largest_timestamp, header.last_offset)

    # The open files are let go after the names went: until then another thread may open them again, and a file that
    # is later made under such a name must not be taken for the one that is gone.

    def remove(self) -> None:
        """Remove the files there are. OSError."""
        for path in self._paths:
            if self.files.fs.exists(path):
                self.files.fs.remove(path)
        self.forget_files()

    def rename(self, suffix: str) -> list[str]:
        """Give the files there are a suffix; gives the new names. OSError."""
        found = [path for path in self._paths if self.files.fs.exists(path)]
        for path in found:
            self.files.fs.rename(path, path + suffix)
        self.forget_files()
        return [path + suffix for path in found]

    def move(self, name_suffix: str) -> None:
        """Give the files there are their plain names, followed by a suffix, and go on with those. OSError."""
        paths = _paths(self.directory, self.base_offset, name_suffix)
        for old, new in zip(self._paths, paths, strict=True):
            if self.files.fs.exists(old):
                self.files.fs.rename(old, new)
        self.forget_files()
        self.path, self.offset_index.path, self.time_index.path = paths
        self.forget_files()

    def forget_files(self) -> None:
        """Let the open files go."""
        for path in self._paths:
            self.files.forget(path)

    @property
    def _paths(self) -> tuple[str, str, str]:
        return self.path, self.offset_index.path, self.time_index.path

    # -- loading

    def load(self, sizes: dict[str, int]) -> None:
        """Take over files by their sizes; CorruptRecordError when an index cannot be right."""
        self.exists = True
        self.size_bytes = sizes[os.path.basename(self.path)]
        for index in (self.offset_index, self.time_index):
            name = os.path.basename(index.path)
            if name not in sizes:
                raise CorruptRecordError(f"{name} is missing")
            index.load(sizes[name])
        last, last_time = self.offset_index.last, self.time_index.last
        if last and not (last[0] >= 0 and 0 < last[1] < self.size_bytes):
            raise CorruptRecordError(f"{os.path.basename(self.offset_index.path)} ends with {last}")
        if last_time and (last_time[1] < 0 or last_time[0] < self.time_index.at(0)[0]):
            raise CorruptRecordError(f"{os.path.basename(self.time_index.path)} ends with {last_time}")
        if last_time:
            self.largest = (last_time[0], self.base_offset + last_time[1])
        self.is_sealed = True

    def end_offset(self) -> int:
        """Offset after the last batch, by the indexes and the batches after what they say last.

        CorruptRecordError when one of them cannot be right: a cut that a crash took back in the log, but not in the
        time index, leaves one that lacks its end, and whoever searched by it would skip records.
        """
        last, (largest, largest_at) = self.offset_index.last, self.largest
        end = self.base_offset
        for position, header in self.batches(self.indexed_position(largest_at - self.base_offset)):
            if position + header.size_bytes > self.size_bytes:
                raise CorruptRecordError(f"{os.path.basename(self.path)} ends within a batch")
            if last and position == last[1] and header.last_offset != self.base_offset + last[0]:
                raise CorruptRecordError(f"{os.path.basename(self.offset_index.path)} does not fit its log")
            if header.largest_timestamp > largest:
                raise CorruptRecordError(f"{os.path.basename(self.time_index.path)} lacks its end")
            end = header.next_offset
        self.bytes_since_index = self.size_bytes - (last[1] if last else 0)
        return end

    def recover(self, interval_bytes: int, epochs: list[tuple[int, int]]) -> tuple[int, int, str]:
        """Check every batch and rebuild the indexes; nothing is truncated yet.

        Return the end offset and the bytes of the valid part, and why it ends there; "" if it ends where the file does.

        `epochs` gets (leader epoch, base offset) of each batch where the epoch rises. Beyond wrong CRCs, what ends a
        segment is a gap in the offsets or a leader epoch that falls: remains of a truncation that was not durable.
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
                self.note(at, header.size_bytes, header.last_offset, header.largest_timestamp, interval_bytes)
                position = at + header.size_bytes
                offset = header.next_offset
        except CorruptRecordError as error:
            problem = error.message
        return offset, position, problem

    def _check_order(self, header: BatchHeader, offset: int, epochs: list[tuple[int, int]]) -> None:
        if header.base_offset != offset or header.last_offset_delta < 0:
            raise CorruptRecordError(f"offset {header.base_offset} follows {offset - 1}")
        if header.last_offset - self.base_offset > MAX_RELATIVE_OFFSET:
            raise CorruptRecordError(f"offset {header.last_offset} is too far from the segment's base offset")
        if epochs and 0 <= header.partition_leader_epoch < epochs[-1][0]:
            raise CorruptRecordError(f"leader epoch {header.partition_leader_epoch} follows {epochs[-1][0]}")
