"""What storage raises: a `KafkaError` for the request at hand, a `StorageError` when the disk is at fault."""

from __future__ import annotations

import errno

from kipmesh.core.errors import ErrorCode, KafkaError

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
    """Whether the error is the disk's own, and not of one file or of this process: the data folder goes offline."""
    return error.errno in _BROKEN
