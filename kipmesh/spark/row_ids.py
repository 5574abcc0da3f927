"""Names of rows that are written: by them a reader tells a row that was written again from one that is there twice.

A record of a streaming (or batch) write has two headers, beside its own:

- `kipmesh.batch`: ``<query id>/<batch number>``, of a batch write the id of the write. A batch that is run again after
  a restart has the same.
- `kipmesh.row`: ``<task>-<16 hex digits of the row>-<n>``: the digits are a hash of the whole row, `n` counts equal
  hashes within the task from 0.

A task that is run again, on the same rows in whatever order, gives each of them the same name: the hash does not ask
where in the task a row stands, and of rows that are equal it does not matter which is which. Two rows of one run of a
task never have the same name, however they hash.

Invariant: within a run of a task the names are distinct; they are a function of the set of rows (with repetitions).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np

BATCH_HEADER: Final = "kipmesh.batch"
ROW_HEADER: Final = "kipmesh.row"

Header = tuple[str, bytes | None]
Row = tuple[str, bytes | None, bytes | None, int | None, int | None, Sequence[Header]]
"""Topic, key, value, partition, timestamp in ms, headers, as they were in the columns."""

_LENGTH: Final = struct.Struct("<q")
_ABSENT: Final = -1


def row_hash(row: Row) -> int:
    """64 bits of everything in the row."""
    topic, key, value, partition, timestamp_ms, headers = row
    parts: list[bytes] = []
    for each in (topic.encode(), key, value):
        _append(parts, each)
    parts.append(_LENGTH.pack(_ABSENT if partition is None else partition))
    parts.append(_LENGTH.pack(_ABSENT if timestamp_ms is None else timestamp_ms))
    for name, content in headers:
        _append(parts, name.encode())
        _append(parts, content)
    return int.from_bytes(blake2b(b"".join(parts), digest_size=8).digest(), "big")


def _append(parts: list[bytes], content: bytes | None) -> None:
    """With its length before it, so that no two rows give the same bytes."""
    parts.append(_LENGTH.pack(_ABSENT if content is None else len(content)))
    if content is not None:
        parts.append(content)


class RowNames:
    """The names of one run of task number `task`. Keeps 8 bytes a row."""

    def __init__(self, task: int) -> None:
        self._task = task
        # Sorted arrays of the hashes so far, each less than half as long as the one before: so they are few.
        self._seen: list[np.ndarray[Any, Any]] = []

    def take(self, rows: Iterable[Row]) -> list[bytes]:
        """The names of the next rows, in their order."""
        hashes = np.fromiter(map(row_hash, rows), dtype=np.uint64)
        if not len(hashes):
            return []
        counts = self._counts(hashes)
        task = self._task
        return [b"%d-%016x-%d" % (task, h, n) for h, n in zip(hashes.tolist(), counts.tolist(), strict=True)]

    def _counts(self, hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """How often each was there before: in earlier calls, and to its left."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        counts = np.empty(len(hashes), dtype=np.int64)
        counts[order] = np.arange(len(hashes)) - np.searchsorted(ordered, ordered, side="left")
        for seen in self._seen:
            counts += np.searchsorted(seen, hashes, side="right") - np.searchsorted(seen, hashes, side="left")
        while self._seen and len(self._seen[-1]) <= 2 * len(ordered):
            ordered = np.sort(np.concatenate([self._seen.pop(), ordered]))
        self._seen.append(ordered)
        return counts


def without_names(headers: Sequence[Header]) -> list[Header]:
    """The headers that are a record's own: a record that was read and is written again gets a new name."""
    return [each for each in headers if each[0] not in (BATCH_HEADER, ROW_HEADER)]


def record_id(topic: str, partition: int, offset: int, headers: Sequence[Header]) -> str:
    """What is equal for all times that one row was written: by its headers, without them by its place."""
    batch = row = None
    for name, content in headers:
        if name == BATCH_HEADER:
            batch = content
        elif name == ROW_HEADER:
            row = content
    if batch is None or row is None:
        return f"{topic}-{partition}-{offset}"
    return f"{topic}/{batch.decode(errors='replace')}/{row.decode(errors='replace')}"
