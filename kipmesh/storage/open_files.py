"""A bounded cache of open files: 10,000 partitions are 30,000 files, and a process may open fewer.

Invariants: the cache holds at most `limit` files. The lock guards the cache alone, because fsyncs on worker threads
use it beside the event loop; a file that is dropped while somebody uses it stays open until they let go of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from kipmesh.storage.fs import File, FileSystem


class OpenFiles:
    """Open files by path, the least recently used dropped first."""

    def __init__(self, fs: FileSystem, limit: int = 1000) -> None:
        if limit < 1:
            raise ValueError("at least one file must be open")
        self.fs = fs
        self.limit = limit
        self._files: OrderedDict[str, File] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, path: str, *, create: bool = False) -> File:
        """The open file of that path; FileNotFoundError unless `create`. Do not keep it."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
            file = self.fs.open(path, create=create)
            self._files[path] = file
            if len(self._files) > self.limit:
                self._files.popitem(last=False)
            return file

    def forget(self, path: str) -> None:
        """Drop a file that gets another name or is removed."""
        with self._lock:
            self._files.pop(path, None)

    def close(self) -> None:
        """Drop all."""
        with self._lock:
            self._files.clear()
