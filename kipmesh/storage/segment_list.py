"""The segments of one log, oldest first: which has an offset, a new one, and taking them out of use.

Invariants: there is always one, and the last is the active one; base offsets rise strictly. The owner changes the
list; another thread takes a copy, and asks `Durability` whether segments were cut or removed meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kipmesh.storage.open_files import OpenFiles
from kipmesh.storage.positions import Positions
from kipmesh.storage.retention import RetiredFiles
from kipmesh.storage.segment import DELETED_SUFFIX, Segment


class SegmentList:
    """See the module."""

    __slots__ = ("_bases", "_files", "_folder", "_positions", "active", "items", "retired")

    def __init__(self, files: OpenFiles, folder: str, segments: list[Segment]) -> None:
        self._files = files
        self._folder = folder
        self.items = segments
        self.active = segments[-1]
        self.retired = RetiredFiles()
        self._bases = [segment.base_offset for segment in segments]
        self._positions = Positions()

    @property
    def base_offsets(self) -> tuple[int, ...]:
        """Oldest first."""
        return tuple(self._bases)

    @property
    def size_bytes(self) -> int:
        """Of all."""
        return sum(segment.size_bytes for segment in self.items)

    # -- where batches are

    def remember(self, offset: int, segment: Segment, position: int) -> None:
        """The batch that begins at `offset`, there or still to come, is at that position."""
        self._positions.remember(offset, segment, position)

    def locate(self, offset: int) -> tuple[Segment, int]:
        """Segment and position of the batch that has `offset`, which is within the log. OSError."""
        return self._positions.locate(self.items, self._bases, offset)

    def bytes_from(self, offset: int) -> int:
        """Bytes of the batches from the one that has `offset` on, which is within the log. OSError."""
        first = max(0, bisect_right(self._bases, offset) - 1)
        position = self.locate(max(offset, self._bases[0]))[1]
        return sum(segment.size_bytes for segment in self.items[first:]) - position

    # -- changes

    def add(self, base_offset: int, now_ms: int) -> None:
        """Begin a new active segment; its file is made. OSError: then nothing changed."""
        segment = Segment(self._files, self._folder, base_offset, now_ms)
        segment.create()
        self._append(segment)

    def _append(self, segment: Segment) -> None:
        self.items.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    def cut(self, offset: int) -> int:
        """Remove every batch with a record at or after `offset`, which is in one of them; gives the end. OSError."""
        keep = bisect_right(self._bases, offset)
        for segment in reversed(self.items[keep:]):
            segment.remove()
        del self.items[keep:], self._bases[keep:]
        self.active = self.items[-1]
        self._positions.clear()
        found = self.active.find(offset)
        if found is None:
            return offset
        position, header = found
        self.active.truncate(position, header.base_offset)
        return header.base_offset

    def start_over(self, offset: int) -> None:
        """Remove all and begin at `offset`. OSError."""
        created_ms = self.active.created_ms
        for segment in reversed(self.items):
            segment.remove()
        segment = Segment(self._files, self._folder, offset, created_ms)
        segment.create()
        del self.items[:], self._bases[:]
        self._append(segment)
        self._positions.clear()

    def retire(self, count: int, due_ms: int) -> int:
        """Take the oldest out of use: files get another name and go when due; gives where the rest begins. OSError."""
        for segment in self.items[:count]:
            for renamed in segment.rename(DELETED_SUFFIX):
                self.retired.add(due_ms, renamed)
        del self.items[:count], self._bases[:count]
        self._positions.clear()
        return self._bases[0]

    def replace(self, old: Sequence[Segment], new: Segment, due_ms: int) -> None:
        """Let `new` be in the place of segments that follow each other; they are retired. OSError."""
        for segment in old:
            for renamed in segment.rename(DELETED_SUFFIX):
                self.retired.add(due_ms, renamed)
        first = self.items.index(old[0])
        self.items[first : first + len(old)] = [new]
        self._bases[first : first + len(old)] = [new.base_offset]
        self._positions.clear()

    def moved(self) -> None:
        """A segment's files have other names."""
        self._positions.clear()

    def forget_files(self) -> None:
        """Let the open files go."""
        for segment in self.items:
            segment.forget_files()
