"""Leader epochs of one log and their start offsets, with the semantics of Kafka's LeaderEpochFileCache.

Rule REP-01. The entries follow from the batches in the log and the calls of `assign` by a new leader. The
checkpoint is therefore needed only below the recovery point: recovery rebuilds later entries from the batches.

Invariants: epochs and start offsets rise strictly. `entries` is immutable and replaced as a whole, so that another
thread may write it to disk while the owner changes it.
"""

from __future__ import annotations

from bisect import bisect_right

from kipmesh.messages import EpochEndOffset

UNDEFINED = EpochEndOffset(-1, -1)


class LeaderEpochs:
    """Leader epochs of one log: (epoch, start offset) pairs, oldest first."""

    __slots__ = ("entries", "latest_epoch", "written")

    def __init__(self, entries: tuple[tuple[int, int], ...] = ()) -> None:
        self.entries: tuple[tuple[int, int], ...] = ()
        self.latest_epoch = -1
        for epoch, start_offset in entries:
            self.assign(epoch, start_offset)
        self.written: tuple[tuple[int, int], ...] | None = entries if self.entries == entries else None
        """Entries in the checkpoint file, or None if unknown."""

    @property
    def is_dirty(self) -> bool:
        """Whether the checkpoint file is outdated."""
        return self.written != self.entries

    def assign(self, epoch: int, start_offset: int) -> None:
        """Start `epoch` at `start_offset`. Remove entries whose epoch or start offset is not lower.

        Assigning the latest epoch again keeps its first start offset. Raises ValueError for negative arguments.
        """
        if epoch < 0 or start_offset < 0:
            raise ValueError(f"leader epoch and start offset must be at least 0, got {epoch} and {start_offset}")
        entries = self.entries
        if entries and epoch == entries[-1][0] and start_offset >= entries[-1][1]:
            return
        keep = len(entries)
        while keep and (entries[keep - 1][0] >= epoch or entries[keep - 1][1] >= start_offset):
            keep -= 1
        self._replace((*entries[:keep], (epoch, start_offset)))

    def truncate_from_end(self, end_offset: int) -> None:
        """Remove epochs that start at or after `end_offset`."""
        entries = self.entries
        keep = len(entries)
        while keep and entries[keep - 1][1] >= end_offset:
            keep -= 1
        if keep != len(entries):
            self._replace(entries[:keep])

    def truncate_from_start(self, start_offset: int) -> None:
        """Remove epochs that end at or before `start_offset`. The epoch that contains this offset then starts there."""
        entries = self.entries
        count = bisect_right(entries, start_offset, key=lambda entry: entry[1])
        if count and entries[count - 1][1] != start_offset:
            self._replace(((entries[count - 1][0], start_offset), *entries[count:]))
        elif count > 1:
            self._replace(entries[count - 1 :])

    def clear(self) -> None:
        """Remove all entries."""
        self._replace(())

    def end_offset_for(self, epoch: int, log_end_offset: int) -> EpochEndOffset:
        """Return the largest epoch at or below `epoch`, and its end offset; for the latest epoch that is the log end.

        Returns (-1, -1) if `epoch` is negative or above all entries, or if there are none. If it is below all, returns
        `epoch` itself with the start offset of the first entry.
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
        """Return the leader epoch of the record at `offset`, or -1 if it is before all entries."""
        at = bisect_right(self.entries, offset, key=lambda entry: entry[1])
        return self.entries[at - 1][0] if at else -1

    def _replace(self, entries: tuple[tuple[int, int], ...]) -> None:
        self.entries = entries
        self.latest_epoch = entries[-1][0] if entries else -1
