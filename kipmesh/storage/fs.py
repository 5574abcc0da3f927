"""The file-system interface of storage, so that tests can make it fail, the real one, its errors, and open files.

Rules: every byte that storage reads or writes goes through here. Nothing is durable before `File.sync`, and no name
(created, renamed, removed) before `sync_dir` of its directory. `write_atomic` is how small files are replaced.

Invariants: a `File` closes itself when the last reference goes, so that whoever holds one can use it, even from
another thread, while the cache of open files drops it. The cache holds at most `limit` files: 10,000 partitions are
30,000 files, and a process may open fewer. Its lock guards the cache alone, because fsyncs on worker threads use it
beside the event loop.
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
    if hasattr(errno, name)  # not every system has all of them
)


class StorageError(KafkaError):
    """The disk failed or is full: `KAFKA_STORAGE_ERROR` to whoever asked."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.KAFKA_STORAGE_ERROR, message)


def is_no_space(error: OSError) -> bool:
    """Whether the disk (or quota) is full, which passes, as opposed to broken, which does not."""
    return error.errno in _NO_SPACE


def is_broken(error: OSError) -> bool:
    """Whether the error is the disk's own, and not of one file or of this process: the data directory goes offline."""
    return error.errno in _BROKEN


class FileStat(NamedTuple):
    """What a directory says about one of its entries."""

    size_bytes: int
    modified_ms: int
    is_dir: bool


class File(Protocol):
    """An open file; positions are bytes from its start. Errors are OSError."""

    def read_at(self, size: int, position: int) -> bytes:
        """At most `size` bytes; fewer at the file's end only."""

    def write_at(self, data: Buffer, position: int) -> None:
        """All of `data`, or OSError after some of it."""

    def truncate(self, size: int) -> None:
        """Cut to `size` bytes."""

    def size(self) -> int:
        """Bytes in the file."""

    def sync(self) -> None:
        """Make what was written durable (fdatasync)."""

    def close(self) -> None:
        """Idempotent."""


class FileLock(Protocol):
    """A lock on a file that no other process, nor another holder in this one, can take."""

    def release(self) -> None:
        """Idempotent."""


class FileSystem(Protocol):
    """What storage needs of a file system. Paths are strings; errors are OSError."""

    def open(self, path: str, *, create: bool = False) -> File:
        """For reading and writing; FileNotFoundError unless `create`."""

    def exists(self, path: str, /) -> bool:
        """Whether there is a file or directory of that name."""

    def list_dir(self, path: str) -> dict[str, FileStat]:
        """Entries by name."""

    def make_dirs(self, path: str) -> None:
        """The directory and those above it, where missing."""

    def rename(self, old: str, new: str, /) -> None:
        """Atomic; replaces a file of the new name."""

    def remove(self, path: str, /) -> None:
        """Remove a file."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all in it; no error when it is not there."""

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def lock(self, path: str) -> FileLock:
        """Take the lock; BlockingIOError when somebody has it."""


def read_file(fs: FileSystem, path: str) -> bytes:
    """A whole small file; FileNotFoundError when it is not there."""
    with contextlib.closing(fs.open(path)) as file:
        return file.read_at(file.size(), 0)


def write_file(fs: FileSystem, path: str, data: bytes, *, sync: bool) -> None:
    """A whole small file; a crash may leave any part of it."""
    with contextlib.closing(fs.open(path, create=True)) as file:
        file.truncate(0)
        file.write_at(data, 0)
        if sync:
            file.sync()


def write_atomic(fs: FileSystem, path: str, data: bytes, *, sync_dir: bool = True) -> None:
    """Replace a small file: a crash leaves the old content or the new.

    Without `sync_dir` the caller syncs the directory itself, before it relies on the new content.
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
    """The operating system's."""

    def open(self, path: str, *, create: bool = False) -> File:
        """See FileSystem."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return _RealFile(os.open(path, flags, 0o644))

    exists = staticmethod(os.path.exists)
    rename = staticmethod(os.replace)
    remove = staticmethod(os.unlink)

    def list_dir(self, path: str) -> dict[str, FileStat]:
        """See FileSystem."""
        found = {}
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # gone by now: another thread writes here, too
                    stat = entry.stat()
                    found[entry.name] = FileStat(stat.st_size, stat.st_mtime_ns // 1_000_000, entry.is_dir())
        return found

    def make_dirs(self, path: str) -> None:
        """See FileSystem."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        except FileNotFoundError:
            os.makedirs(path, exist_ok=True)

    def remove_tree(self, path: str) -> None:
        """See FileSystem."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def sync_dir(self, path: str) -> None:
        """See FileSystem."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> FileLock:
        """See FileSystem."""
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
        if len(data) == size or not data:
            return data
        parts = [data]  # a signal, or a read beyond 2 GiB, may cut it short of the end
        got = len(data)
        while got < size:
            data = os.pread(self._descriptor, size - got, position + got)
            if not data:
                break
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def write_at(self, data: Buffer, position: int) -> None:
        written = os.pwrite(self._descriptor, data, position)
        if written == len(data):
            return
        view = memoryview(data)
        while written < len(view):
            written += os.pwrite(self._descriptor, view[written:], position + written)

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
