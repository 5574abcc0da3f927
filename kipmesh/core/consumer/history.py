"""Which leader epochs a consumer has read, and from where on: what it compares with the leader's (392-08).

Kafka's consumer knows the epoch of its last record only, so it finds that its log was cut, but not always where. With
the starts of the epochs it can go back epoch by epoch as a follower does ("Log truth").

Invariants: epochs and start offsets rise; what was read before the first entry is not known.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from kipmesh.messages import EpochEndOffset

ENTRIES_MAX: Final = 64
"""Older epochs are forgotten: a truncation that reaches back so far is found at the oldest that is known."""


class OwnEpoch(NamedTuple):
    """An epoch that was read, and the offset after its last record."""

    epoch: int
    end_offset: int


class Parted(NamedTuple):
    """Our log and the leader's have the same records below `end_offset` (None: not known), and then differ."""

    end_offset: int | None
    epoch: int
    """Of the leader's record before."""


class EpochHistory:
    """(epoch, first offset) of what was read since the last seek, oldest first."""

    __slots__ = ("_base", "_entries")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []
        self._base = -1  # where it began, if the epoch of the record before that is known

    @property
    def last_epoch(self) -> int:
        """The epoch of the record before the fetch offset; -1 if that is not known."""
        return self._entries[-1][0] if self._entries else -1

    @property
    def first_offset(self) -> int:
        """Where it begins; -1 if it is empty."""
        return self._entries[0][1] if self._entries else -1

    def begin(self, offset: int, epoch: int) -> None:
        """Nothing was read yet; the record before `offset` is of `epoch`, -1 if that is not known."""
        self._entries = [(epoch, offset)] if epoch >= 0 else []
        self._base = offset if epoch >= 0 else -1

    def read(self, first_offset: int, epoch: int) -> None:
        """Records from `first_offset` on are of `epoch`; not below the last one."""
        if epoch > self.last_epoch:
            self._entries.append((epoch, first_offset))
            del self._entries[:-ENTRIES_MAX]

    def floor(self, epoch: int, fetch_offset: int) -> OwnEpoch | None:
        """The largest epoch read that is not above `epoch`; None if none is known."""
        entries = self._entries
        above = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if not above:
            return None
        end = entries[above][1] if above < len(entries) else fetch_offset
        return OwnEpoch(entries[above - 1][0], end)

    def cut(self, offset: int) -> None:
        """What was read from `offset` on does not count; the epoch that spans it stays the last one."""
        entries = self._entries
        while len(entries) > 1 and entries[-1][1] >= offset:
            entries.pop()
        if entries and entries[0][1] >= offset and not entries[0][1] == offset == self._base:
            entries.clear()


def judge(history: EpochHistory, asked: OwnEpoch, found: EpochEndOffset, fetch_offset: int) -> OwnEpoch | Parted | None:
    """The leader says `found` about the end of `asked.epoch`: what of that which we have read is in its log?

    None: all up to the fetch offset. An epoch of ours: that is to be asked about next. `found` is the leader's largest
    epoch that is not above the one asked about; (-1, -1) if there is none.
    """
    if found.epoch < 0 or found.end_offset < 0:
        return Parted(None, -1)
    if found.epoch >= asked.epoch:
        end_offset = min(found.end_offset, asked.end_offset)
        return None if end_offset == fetch_offset else Parted(end_offset, found.epoch)
    own = history.floor(found.epoch, fetch_offset)
    if own is None:
        return Parted(min(found.end_offset, history.first_offset), found.epoch)
    if own.epoch < found.epoch:
        return own  # the leader's epoch is none of ours: back to the end of our own earlier one
    return Parted(min(found.end_offset, own.end_offset), found.epoch)
