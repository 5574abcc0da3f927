"""Files for reading only, as storage's readers want them: volumes may be mounted read-only, and nothing is changed."""

from __future__ import annotations

import errno
import os

from kipmesh.storage.fs import Buffer, File, RealFileSystem


class ReadOnlyFile:
    """An open file that refuses to be changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, size: int, position: int) -> bytes:
        """At most `size` bytes; fewer at the file's end only."""
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, position)):
            parts.append(part)
            size, position = size - len(part), position + len(part)
        return b"".join(parts)

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write_at(self, data: Buffer, position: int) -> None:
        """Refused."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path)

    def truncate(self, size: int) -> None:
        """Refused."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path)

    def sync(self) -> None:
        """Nothing was written."""


class ReadOnlyFileSystem(RealFileSystem):
    """The real one, whose files are opened for reading."""

    def open(self, path: str, *, create: bool = False) -> File:
        """FileNotFoundError also with `create`."""
        return ReadOnlyFile(path)
