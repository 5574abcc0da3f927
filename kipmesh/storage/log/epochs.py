"""Leader epochs of one log: which epoch's records start where, with the semantics of Kafka's LeaderEpochFileCache.

Rules: "Log truth". The list is a pure function of the batches in the log and of `assign` on becoming leader, so the
checkpoint needs to be on disk only before the recovery point passes what it says: recovery reads the rest from batches.

Invariants: epochs and start offsets both rise strictly. `entries` is an immutable value that is replaced, so that
another thread may write it while the owner changes it.
"""

from __future__ import annotations

from bisect import bisect_right

from kipmesh.messages import EpochEndOffset

UNDEFINED = EpochEndOffset(-1, -1)


class LeaderEpochs:
    """(epoch, start offset) of a log, oldest first."""

    __slots__ = ("entries", "latest_epoch", "written")

    def __init__(self, entries: tuple[tuple[int, int], ...] = ()) -> None:
        self.entries: tuple[tuple[int, int], ...] = ()
        self.latest_epoch = -1
        for epoch, start_offset in entries:
            self.assign(epoch, start_offset)
        self.written: tuple[tuple[int, int], ...] | None = entries if self.entries == entries else None
        """What the checkpoint file holds; None when that is not known."""

    @property
    def is_dirty(self) -> bool:
        """Whether the checkpoint file is behind."""
        return self.written != self.entries

    def assign(self, epoch: int, start_offset: int) -> None:
        """Records from `start_offset` on are of `epoch`; entries that contradict this go.

        An epoch keeps its first start offset: assigning it again changes nothing.
        """
        if epoch < 0 or start_offset < 0:
            raise ValueError(f"leader epoch {epoch} at offset {start_offset}")
        entries = self.entries
        if entries and epoch == entries[-1][0] and start_offset >= entries[-1][1]:
            return
        keep = len(entries)
        while keep and (entries[keep - 1][0] >= epoch or entries[keep - 1][1] >= start_offset):
            keep -= 1
        self._replace((*entries[:keep], (epoch, start_offset)))

    def truncate_from_end(self, end_offset: int) -> None:
        """Forget epochs that start at or after `end_offset`."""
        entries = self.entries
        keep = len(entries)
        while keep and entries[keep - 1][1] >= end_offset:
            keep -= 1
        if keep != len(entries):
            self._replace(entries[:keep])

    def truncate_from_start(self, start_offset: int) -> None:
        """Forget epochs that end at or before `start_offset`; the one that spans it starts there now."""
        entries = self.entries
        gone = bisect_right(entries, start_offset, key=lambda entry: entry[1])
        if gone and entries[gone - 1][1] != start_offset:
            self._replace(((entries[gone - 1][0], start_offset), *entries[gone:]))
        elif gone > 1:
            self._replace(entries[gone - 1 :])

    def clear(self) -> None:
        """Forget all."""
        self._replace(())

    def end_offset_for(self, epoch: int, log_end_offset: int) -> EpochEndOffset:
        """The largest epoch at or below `epoch`, and where it ends.

        (-1, -1) when `epoch` is -1 or above all known ones. Below all known ones: `epoch` itself, ending where the
        first known one starts.
        """
        entries = self.entries
        if epoch < 0 or not entries:
            return UNDEFINED
        if epoch == self.latest_epoch:
            return EpochEndOffset(epoch, log_end_offset)
        above = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if above == len(entries):
            return UNDEFINED
        return EpochEndOffset(entries[above - 1][0] if above else epoch, entries[above][1])

    def epoch_of(self, offset: int) -> int:
        """The epoch of a record, -1 if it is before all known ones."""
        at = bisect_right(self.entries, offset, key=lambda entry: entry[1])
        return self.entries[at - 1][0] if at else -1

    def _replace(self, entries: tuple[tuple[int, int], ...]) -> None:
        self.entries = entries
        self.latest_epoch = entries[-1][0] if entries else -1
