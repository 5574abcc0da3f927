"""Where the batches of a log are: by what was read and written last, else by the segments' indexes.

Who reads on from where the last read ended, or follows the log's end, needs no index. Bounded: the oldest go first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage.segment import Segment

_POSITIONS_MAX = 32


class Positions:
    """Offset at which a batch begins -> its segment and position."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[Segment, int]] = {}

    def remember(self, offset: int, segment: Segment, position: int) -> None:
        """The batch that begins at `offset`, there or still to come, is at that position."""
        known = self._known
        if offset not in known and len(known) >= _POSITIONS_MAX:
            del known[next(iter(known))]
        known[offset] = (segment, position)

    def clear(self) -> None:
        """Segments were cut or removed."""
        self._known.clear()

    def locate(self, segments: Sequence[Segment], base_offsets: Sequence[int], offset: int) -> tuple[Segment, int]:
        """Segment and position of the batch that has `offset`, which is within the log. OSError."""
        known = self._known.get(offset)
        if known is not None and known[1] < known[0].size_bytes:
            return known
        segment = segments[bisect_right(base_offsets, offset) - 1]
        if offset == segment.base_offset:
            return segment, 0
        found = segment.find(offset)
        if found is None:
            raise CorruptRecordError(f"no batch in {segment.path} has offset {offset}")
        return segment, found[0]
