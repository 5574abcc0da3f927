"""In-memory file system that fails on demand and forgets unsynced data on a power failure.

It records the durable content and the later writes of each file, and the same for the names in each directory. `crash`
keeps the durable state. With a random generator it also keeps some later operations per file and directory: the first
ones, of which the last may be torn. The calls and the generator determine everything.

Invariants: after `crash` a file has at least its synced content and a directory at least its synced names. Handles and
locks from before are dead.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field
from random import Random

from kipmesh.storage.fs import Buffer, File, FileLock, FileStat


@dataclass(slots=True)
class Fault:
    """A pending failure: skips `skip` operations of its kind on paths that contain `path`, then fails the next `times`
    operations.
    """

    operation: str
    """open, read, write, truncate, sync, sync_dir, rename, remove or list."""
    error: int = errno.EIO
    path: str = ""
    skip: int = 0
    times: int = 1
    torn_bytes: int = 0
    """For a write: number of bytes that reach the file despite the failure."""


@dataclass(slots=True)
class _Inode:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(position, data) of a write or (size, None) of a truncation."""
    modified_ms: int = 0

    def recover(self, rng: Random | None) -> None:
        data = bytearray(self.durable)
        if rng is not None and self.pending:
            kept = rng.randint(0, len(self.pending))
            for number, (position, written) in enumerate(self.pending[:kept]):
                torn = number + 1 == kept and rng.random() < 0.5
                if written is None:
                    del data[position:]
                    data.extend(bytes(position - len(data)))
                else:
                    _put(data, position, written[: rng.randint(0, len(written))] if torn else written)
        self.data, self.durable = data, bytes(data)
        self.pending.clear()


@dataclass(slots=True)
class _Directory:
    entries: dict[str, _Inode | _Directory] = field(default_factory=dict)
    durable: dict[str, _Inode | _Directory] = field(default_factory=dict)
    pending: list[dict[str, _Inode | _Directory]] = field(default_factory=list)
    """The names after each change since the last sync."""

    def changed(self) -> None:
        self.pending.append(dict(self.entries))

    def recover(self, rng: Random | None) -> None:
        if rng is not None and self.pending:
            kept = rng.randint(0, len(self.pending))
            self.durable = self.pending[kept - 1] if kept else self.durable
        self.entries = dict(self.durable)
        self.pending.clear()
        for entry in self.entries.values():
            entry.recover(rng)


def _put(data: bytearray, position: int, written: bytes) -> None:
    if position > len(data):
        data.extend(bytes(position - len(data)))
    data[position : position + len(written)] = written


class FaultyFileSystem:
    """An in-memory `FileSystem` with injected faults (see the module docstring). Thread-safe."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        """Total size of files above which writes fail with ENOSPC; None for no limit."""
        self.now_ms = 0
        """Modification time of later writes."""
        self.faults: list[Fault] = []
        self.syncs = 0
        self.open_files = 0
        self._root = _Directory()
        self._locks: set[str] = set()
        self.crashes = 0
        """Number of power failures."""
        self.mutex = threading.RLock()

    # -- faults

    def fail(
        self,
        operation: str,
        error: int = errno.EIO,
        *,
        path: str = "",
        skip: int = 0,
        times: int = 1,
        torn_bytes: int = 0,
    ) -> None:
        """Add a fault. The arguments are the fields of `Fault`."""
        self.faults.append(Fault(operation, error, path, skip, times, torn_bytes))

    def crash(self, rng: Random | None = None) -> None:
        """Simulate a power failure. Without `rng`, all unsynced data is lost, otherwise a random part of it.

        Pending faults are removed. Open files and locks become unusable.
        """
        with self.mutex:
            self.crashes += 1
            self._locks.clear()
            self.faults.clear()
            self._root.recover(rng)

    @property
    def used_bytes(self) -> int:
        """Total size of all named files."""

        def size(directory: _Directory) -> int:
            return sum(len(e.data) if isinstance(e, _Inode) else size(e) for e in directory.entries.values())

        return size(self._root)

    def check(self, operation: str, path: str) -> Fault | None:
        """Raise the OSError of the first matching fault, or return that fault if it is a torn write.

        Returns None if no fault matches.
        """
        for fault in self.faults:
            if fault.operation == operation and fault.path in path:
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                if fault.torn_bytes:
                    return fault
                raise OSError(fault.error, os.strerror(fault.error), path)
        return None

    # -- FileSystem

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file. Raises FileNotFoundError if it is missing, unless `create` is set.

        Creating a file on a full disk raises OSError(ENOSPC).
        """
        with self.mutex:
            self.check("open", path)
            directory, name = self._parent(path)
            inode = directory.entries.get(name)
            if inode is None:
                if not create:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                if self.capacity_bytes is not None and self.used_bytes >= self.capacity_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
                inode = directory.entries[name] = _Inode(modified_ms=self.now_ms)
                directory.changed()
            if isinstance(inode, _Directory):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            return _FaultyFile(self, path, inode)

    def exists(self, path: str) -> bool:
        """Return whether the file or directory exists."""
        with self.mutex:
            try:
                directory, name = self._parent(path)
            except OSError:
                return False
            return not name or name in directory.entries

    def list_dir(self, path: str) -> dict[str, FileStat]:
        """Return a dict of name to FileStat. Raises FileNotFoundError if there is no such directory."""
        with self.mutex:
            self.check("list", path)
            return {
                name: FileStat(0, 0, True)
                if isinstance(entry, _Directory)
                else FileStat(len(entry.data), entry.modified_ms, False)
                for name, entry in self._directory(path).entries.items()
            }

    def make_dirs(self, path: str) -> None:
        """Create the directory and its parents if missing. Raises FileExistsError if one of them is a file."""
        with self.mutex:
            directory = self._root
            for name in _parts(path):
                entry = directory.entries.get(name)
                if entry is None:
                    entry = directory.entries[name] = _Directory()
                    directory.changed()
                if isinstance(entry, _Inode):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                directory = entry

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory, replacing any existing one. Only a rename within one directory is atomic in a
        power failure.
        """
        with self.mutex:
            self.check("rename", old)
            (old_directory, old_name), (new_directory, new_name) = self._parent(old), self._parent(new)
            if old_name not in old_directory.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
            new_directory.entries[new_name] = old_directory.entries.pop(old_name)
            old_directory.changed()
            if new_directory is not old_directory:
                new_directory.changed()

    def remove(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError if there is none."""
        with self.mutex:
            self.check("remove", path)
            directory, name = self._parent(path)
            if not isinstance(directory.entries.get(name), _Inode):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            del directory.entries[name]
            directory.changed()

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content, if it exists. Raises OSError for a fault or a missing parent."""
        with self.mutex:
            self.check("remove", path)
            directory, name = self._parent(path)
            if directory.entries.pop(name, None) is not None:
                directory.changed()

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        with self.mutex:
            self.syncs += 1
            self.check("sync_dir", path)
            directory = self._directory(path)
            directory.durable = dict(directory.entries)
            directory.pending.clear()

    def lock(self, path: str) -> FileLock:
        """Lock the path. Raises BlockingIOError if it is already locked."""
        with self.mutex:
            if path in self._locks:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
            self._locks.add(path)
            return _FaultyLock(self, path)

    def release(self, path: str, crashes: int) -> None:
        """Release a lock, unless a power failure has already released it. `crashes` is the number of power failures
        when the lock was taken.
        """
        with self.mutex:
            if crashes == self.crashes:
                self._locks.discard(path)

    def flip_bit(self, path: str, position: int, bit: int) -> None:
        """Flip bit `bit` (0 to 7) of the byte at `position` durably, as a damaged disk would.

        Removes all pending faults.
        """
        self.faults.clear()
        file = self.open(path)
        file.write_at(bytes([file.read_at(1, position)[0] ^ 1 << bit]), position)
        file.sync()
        file.close()

    def _directory(self, path: str) -> _Directory:
        directory = self._root
        for name in _parts(path):
            entry = directory.entries.get(name)
            if not isinstance(entry, _Directory):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            directory = entry
        return directory

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parts = _parts(path)
        if not parts:
            return self._root, ""
        return self._directory("/".join(parts[:-1])), parts[-1]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


class _FaultyFile:
    def __init__(self, fs: FaultyFileSystem, path: str, inode: _Inode) -> None:
        self._fs = fs
        self._path = path
        self._inode = inode
        self._crashes = fs.crashes
        self._is_open = True
        fs.open_files += 1

    def _check(self, operation: str) -> Fault | None:
        if not self._is_open or self._crashes != self._fs.crashes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        return self._fs.check(operation, self._path)

    def read_at(self, size: int, position: int) -> bytes:
        with self._fs.mutex:
            self._check("read")
            return bytes(self._inode.data[position : position + size])

    def write_at(self, data: Buffer, position: int) -> None:
        with self._fs.mutex:
            fault = self._check("write")
            written = bytes(data)
            code = fault.error if fault else 0
            if fault:
                written = written[: fault.torn_bytes]
            if self._fs.capacity_bytes is not None:
                grows = max(0, position + len(written) - len(self._inode.data))
                room = max(0, self._fs.capacity_bytes - self._fs.used_bytes)
                if grows > room:
                    written = written[: len(written) - (grows - room)]
                    code = errno.ENOSPC
            _put(self._inode.data, position, written)
            self._inode.pending.append((position, written))
            self._inode.modified_ms = self._fs.now_ms
            if code:
                raise OSError(code, os.strerror(code), self._path)

    def truncate(self, size: int) -> None:
        with self._fs.mutex:
            self._check("truncate")
            data = self._inode.data
            del data[size:]
            data.extend(bytes(size - len(data)))
            self._inode.pending.append((size, None))
            self._inode.modified_ms = self._fs.now_ms

    def size(self) -> int:
        with self._fs.mutex:
            self._check("read")
            return len(self._inode.data)

    def sync(self) -> None:
        with self._fs.mutex:
            self._fs.syncs += 1
            self._check("sync")
            self._inode.durable = bytes(self._inode.data)
            self._inode.pending.clear()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._fs.open_files -= 1

    def __del__(self) -> None:
        self.close()


class _FaultyLock:
    def __init__(self, fs: FaultyFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._crashes = fs.crashes

    def release(self) -> None:
        self._fs.release(self._path, self._crashes)
