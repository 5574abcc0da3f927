"""The sparse indexes of a segment: offset to position, and timestamp to offset.

The file formats are Kafka's: big-endian entries of 8 bytes (relative offset, position) or 12 bytes (timestamp, relative
offset), not preallocated. An offset entry has the last offset of the batch at its position. A time entry has the
largest timestamp so far and the last offset of its batch.

Entries are buffered and written some hundreds at a time. Recovery rebuilds lost entries from the log. A lookup bisects
blocks of the file; only unwritten entries are kept in memory.

Threads: the owner changes an index. Any thread may look up entries; a lock protects them.

Invariants: keys rise strictly. At most `_PENDING_BYTES_MAX` bytes are buffered unless the disk is full.
"""

from __future__ import annotations

import os
import threading
from struct import Struct

from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage.fs import OpenFiles, is_no_space

OFFSET_ENTRY = Struct(">ii")
TIME_ENTRY = Struct(">qi")
Entry = tuple[int, int]

_PENDING_BYTES_MAX = 4096
_BLOCK_ENTRIES = 512


class SparseIndex:
    """One index file of a segment: an append-only file of number pairs. Both numbers increase."""

    __slots__ = ("_entry", "_files", "_lock", "_pending", "_written", "last", "path")

    def __init__(self, files: OpenFiles, path: str, entry: Struct) -> None:
        self._files = files
        self.path = path
        self._entry = entry
        self._lock = threading.RLock()
        self._written = 0  # entries in the file
        self._pending = bytearray()
        self.last: Entry | None = None

    @property
    def count(self) -> int:
        """Number of entries, written or buffered."""
        return self._written + len(self._pending) // self._entry.size

    def load(self, file_bytes: int) -> None:
        """Use the existing file, which has `file_bytes` bytes.

        Raises OSError; CorruptRecordError unless the file consists of complete entries.
        """
        if file_bytes % self._entry.size:
            raise CorruptRecordError(
                f"size of {os.path.basename(self.path)} must be a multiple of {self._entry.size}, got {file_bytes}"
            )
        self._written = file_bytes // self._entry.size
        self._pending.clear()
        self.last = self.at(self._written - 1) if self._written else None

    def append(self, first: int, second: int) -> None:
        """Add an entry; entries are written in blocks. Raises OSError. A full disk only delays the write."""
        with self._lock:
            self._pending += self._entry.pack(first, second)
            self.last = (first, second)
        if len(self._pending) >= _PENDING_BYTES_MAX:
            try:
                self.write()
            except OSError as error:
                if not is_no_space(error):
                    raise

    def write(self) -> None:
        """Write buffered entries, creating the file if missing. Idempotent. Raises OSError."""
        file = self._files.get(self.path, create=True)
        if self._pending:
            file.write_at(self._pending, self._written * self._entry.size)
            with self._lock:
                self._written += len(self._pending) // self._entry.size
                self._pending.clear()

    def at(self, number: int) -> Entry:
        """Return the entry at this index, from 0. Raises OSError; CorruptRecordError if the file is too short."""
        first, second = self._entry.unpack(self._bytes(number, number + 1))
        return first, second

    def floor(self, key: int, *, field: int = 0) -> int:
        """Return the index of the last entry whose number `field` (0 or 1) is at most `key`, or -1 if there is none.

        Raises OSError; CorruptRecordError if the file is too short.
        """
        unpack, size = self._entry.unpack_from, self._entry.size
        with self._lock:
            low, high = 0, self.count  # the result + 1 is within [low, high]
        block, block_start, block_end = b"", 0, 0
        while low < high:
            middle = (low + high) // 2
            if not block_start <= middle < block_end:
                block_start = max(low, min(middle - _BLOCK_ENTRIES // 2, high - _BLOCK_ENTRIES))
                block_end = min(block_start + _BLOCK_ENTRIES, high)
                block = self._bytes(block_start, block_end)
            if unpack(block, (middle - block_start) * size)[field] <= key:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def truncate(self, count: int) -> None:
        """Keep the first `count` entries. Does nothing if there are no more. Raises OSError."""
        if count >= self.count:
            return
        with self._lock:
            if count >= self._written:
                del self._pending[(count - self._written) * self._entry.size :]
            else:
                self._pending.clear()
                self._files.get(self.path).truncate(count * self._entry.size)
                self._written = count
        self.last = self.at(count - 1) if count else None

    def reset(self) -> None:
        """Remove all entries, including those in the file. Raises OSError."""
        self._pending.clear()
        self._written = 0
        self.last = None
        if self._files.fs.exists(self.path):
            self._files.get(self.path).truncate(0)

    def _bytes(self, start: int, end: int) -> bytes:
        """Return the bytes of entries [start, end). Raises OSError; CorruptRecordError if the file is too short."""
        size = self._entry.size
        data = b""
        with self._lock:
            if start < self._written:
                data = self._files.get(self.path).read_at((min(end, self._written) - start) * size, start * size)
            if end > self._written:
                data += self._pending[max(0, start - self._written) * size : (end - self._written) * size]
        if len(data) != (end - start) * size:
            raise CorruptRecordError(f"{os.path.basename(self.path)} is shorter than {self._written} entries")
        return data
