"""File-system interface of storage, its real implementation, errors, and the cache of open files.

Rules: storage reads and writes every byte through this interface, so that tests can inject errors. Data is durable only
after `File.sync`; names (created, renamed, removed) only after `sync_dir` of their directory. `write_atomic` replaces
small files.

Invariants: a `File` closes itself when the last reference is dropped, so it stays usable on other threads when the
cache evicts it. The cache holds at most `limit` files, because 10,000 partitions have 30,000 files. Its lock guards
only the cache; fsyncs on worker threads use it beside the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections import OrderedDict
from typing import NamedTuple, Protocol

from kipmesh.core.errors import ErrorCode, KafkaError

Buffer = bytes | bytearray | memoryview

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = frozenset(
    getattr(errno, name)
    for name in ("EIO", "EROFS", "ENXIO", "ENODEV", "ENOMEDIUM", "ESTALE", "ENOTCONN", "EUCLEAN")
    if hasattr(errno, name)  # some exist only on some systems
)


class StorageError(KafkaError):
    """The disk or data directory has failed, or is full, offline or locked. Clients receive KAFKA_STORAGE_ERROR."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.KAFKA_STORAGE_ERROR, message)


def is_no_space(error: OSError) -> bool:
    """Return whether the disk or quota is full (ENOSPC, EDQUOT), a transient error."""
    return error.errno in _NO_SPACE


def is_broken(error: OSError) -> bool:
    """Return whether the disk itself failed (for example EIO, EROFS), rather than a file or this process.

    The data directory then goes offline.
    """
    return error.errno in _BROKEN


class FileStat(NamedTuple):
    """Size, modification time (ms since 1970) and kind of a directory entry."""

    size_bytes: int
    modified_ms: int
    is_dir: bool


class File(Protocol):
    """An open file. Positions are byte offsets. Methods raise OSError."""

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes, fewer only at the end of the file."""

    def write_at(self, data: Buffer, position: int) -> None:
        """Write all of `data` at `position`, extending the file if needed. A failed write may be partial."""

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes, or extend it with zeros."""

    def size(self) -> int:
        """Return the size in bytes."""

    def sync(self) -> None:
        """Make written data durable (fdatasync), but not the name of the file."""

    def close(self) -> None:
        """Close the file. Idempotent."""


class FileLock(Protocol):
    """An exclusive lock on a file, across and within processes."""

    def release(self) -> None:
        """Release the lock. Idempotent."""


class FileSystem(Protocol):
    """File-system operations that storage needs. Paths are strings. All methods except `exists` raise OSError."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises FileNotFoundError if it is missing, unless `create` is set."""

    def exists(self, path: str, /) -> bool:
        """Return whether the file or directory exists."""

    def list_dir(self, path: str) -> dict[str, FileStat]:
        """Return the entries of a directory as a dict of name to FileStat."""

    def make_dirs(self, path: str) -> None:
        """Create the directory and its parents if missing."""

    def rename(self, old: str, new: str, /) -> None:
        """Rename atomically, replacing an existing file."""

    def remove(self, path: str, /) -> None:
        """Remove a file. Raises FileNotFoundError if it does not exist."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content. Does nothing if it does not exist."""

    def sync_dir(self, path: str) -> None:
        """Make the creation, renaming and removal of a directory's entries durable."""

    def lock(self, path: str) -> FileLock:
        """Lock the file without waiting, creating it if missing. Raises BlockingIOError if it is already locked."""


def read_file(fs: FileSystem, path: str) -> bytes:
    """Return the content of a small file. Raises FileNotFoundError if it is missing, or another OSError."""
    with contextlib.closing(fs.open(path)) as file:
        return file.read_at(file.size(), 0)


def write_file(fs: FileSystem, path: str, data: bytes, *, sync: bool) -> None:
    """Create or overwrite a small file, not atomically. `sync`: make its content durable. Raises OSError."""
    with contextlib.closing(fs.open(path, create=True)) as file:
        file.truncate(0)
        file.write_at(data, 0)
        if sync:
            file.sync()


def write_atomic(fs: FileSystem, path: str, data: bytes, *, sync_dir: bool = True) -> None:
    """Create or replace a small file atomically and durably.

    Without `sync_dir` the caller must sync the directory before it relies on the new content. Raises OSError. The
    file then has its old content, unless only the sync of the directory failed.
    """
    temporary = path + ".tmp"
    try:
        write_file(fs, temporary, data, sync=True)
        fs.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            fs.remove(temporary)
        raise
    if sync_dir:
        fs.sync_dir(os.path.dirname(path))


class RealFileSystem:
    """The operating system's `FileSystem`."""

    access = os.O_RDWR

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises FileNotFoundError if it is missing, unless `create` is set."""
        flags = self.access | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return _RealFile(os.open(path, flags, 0o644))

    exists = staticmethod(os.path.exists)
    rename = staticmethod(os.replace)
    remove = staticmethod(os.unlink)

    def list_dir(self, path: str) -> dict[str, FileStat]:
        """Return a dict of name to FileStat. Skips entries that are removed meanwhile."""
        found = {}
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another thread may have removed it
                    stat = entry.stat()
                    found[entry.name] = FileStat(stat.st_size, stat.st_mtime_ns // 1_000_000, entry.is_dir())
        return found

    def make_dirs(self, path: str) -> None:
        """Create the directory and its parents if missing."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        except FileNotFoundError:
            os.makedirs(path, exist_ok=True)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content. Does nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable (fsync)."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> FileLock:
        """Lock the file with flock, creating it if missing. Raises BlockingIOError if it is already locked."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return _RealFile(descriptor)


class _RealFile:
    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_at(self, size: int, position: int) -> bytes:
        data = os.pread(self._descriptor, size, position)
        part = data
        while part and len(data) < size:  # a signal or the limit of 2 GiB may shorten a read
            part = os.pread(self._descriptor, size - len(data), position + len(data))
            data += part
        return data

    def write_at(self, data: Buffer, position: int) -> None:
        written = os.pwrite(self._descriptor, data, position)
        while written < len(data):
            written += os.pwrite(self._descriptor, memoryview(data)[written:], position + written)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close
    release = close  # of a locked file


class OpenFiles:
    """LRU cache of at most `limit` open files, by path. Thread-safe."""

    def __init__(self, fs: FileSystem, limit: int = 1000) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.fs = fs
        self.limit = limit
        self._files: OrderedDict[str, File] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, path: str, *, create: bool = False) -> File:
        """Return the open file for a path, opening it if it is not cached. Call `get` before each use.

        Raises FileNotFoundError if the file is missing, unless `create` is set, or another OSError.
        """
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
        """Drop the file with this path, if it is cached. Call this after the file was renamed or removed."""
        with self._lock:
            self._files.pop(path, None)

    def close(self) -> None:
        """Drop all files. Each file is closed when its last user drops it."""
        with self._lock:
            self._files.clear()
