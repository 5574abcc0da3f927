"""Names of written rows, by which readers recognise a row that was written again.

A record of a write has two additional headers:

- `kipmesh.batch`: `<query id>/<batch number>`, or the id of a batch write. A batch that is repeated after a restart
  keeps it.
- `kipmesh.row`: `<task>-<16 hex digits>-<n>`: the digits are a hash of the row, `n` counts equal hashes in the task
  from 0.

A repeated task gives the same rows the same names, in whatever order they come. Equal rows are interchangeable.

Invariant: the names of one run of a task are distinct and depend only on its multiset of rows.
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
"""Topic, key, value, partition, timestamp in ms and headers, as in the columns."""

_LENGTH: Final = struct.Struct("<q")
_ABSENT: Final = -1


def row_hash(row: Row) -> int:
    """Return a 64-bit hash of all fields of a row, the same in every process."""
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
    """Append the content with its length, so that different rows have different bytes."""
    parts.append(_LENGTH.pack(_ABSENT if content is None else len(content)))
    if content is not None:
        parts.append(content)


class RowNames:
    """Names the rows of one attempt of task number `task`. Needs 8 bytes of memory per row."""

    def __init__(self, task: int) -> None:
        self._task = task
        # Sorted arrays of earlier hashes. Each has less than half the length of its predecessor, so there are few.
        self._seen: list[np.ndarray[Any, Any]] = []

    def take(self, rows: Iterable[Row]) -> list[bytes]:
        """Return the value of the header `kipmesh.row` for each of the next rows, in order."""
        hashes = np.fromiter(map(row_hash, rows), dtype=np.uint64)
        if not len(hashes):
            return []
        counts = self._counts(hashes)
        task = self._task
        return [b"%d-%016x-%d" % (task, h, n) for h, n in zip(hashes.tolist(), counts.tolist(), strict=True)]

    def _counts(self, hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Remember these hashes. Return how often each occurred before, in earlier calls or earlier in `hashes`."""
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
    """Return the headers except `kipmesh.batch` and `kipmesh.row`: a record that is written again gets new ones."""
    return [each for each in headers if each[0] not in (BATCH_HEADER, ROW_HEADER)]


def record_id(topic: str, partition: int, offset: int, headers: Sequence[Header]) -> str:
    """Return an id that all copies of a row share: `<topic>/<batch>/<row>`, from headers that `kipmesh.spark` wrote.

    Without these headers, the id is `<topic>-<partition>-<offset>`, unique to the record.
    """
    batch = row = None
    for name, content in headers:
        if name == BATCH_HEADER:
            batch = content
        elif name == ROW_HEADER:
            row = content
    if batch is None or row is None:
        return f"{topic}-{partition}-{offset}"
    return f"{topic}/{batch.decode(errors='replace')}/{row.decode(errors='replace')}"
