"""The checker's copies of logs: one (epoch, batch CRC, index in the batch) per offset.

Each batch is read once. `Shadow` is the copy of a replica's log, `CommittedLog` that of the committed records.
"""

from __future__ import annotations

from typing import NamedTuple

from kipmesh.core import record_batch
from kipmesh.storage.log.log import Log

Entry = tuple[int, int, int]
NOTHING_SURVIVES = -1
"""Survivable end offset of an unclean election."""
_READ_BYTES = 1 << 20


class Loss(NamedTuple):
    """Committed records from `offset` on were lost, as the rules permit, when `leader_epoch` started."""

    offset: int
    leader_epoch: int


class Shadow:
    """The checker's copy of one replica's log. See the module docstring."""

    def __init__(self) -> None:
        self.base = 0
        self.entries: list[Entry] = []
        self.generation = 0
        self.verified = 0
        """Offset below which the entries match the committed log."""
        self.may_differ_from: int | None = None
        """After a permitted loss, offset from which the replica may still have lost records, even after a truncation,
        because a later unclean leader may restore them. None once the replica has later records."""

    @property
    def end(self) -> int:
        """Offset after the last copied entry."""
        return self.base + len(self.entries)

    def follow(self, log: Log) -> list[tuple[int, Entry]]:
        """Update the copy to the log's current start, end and content. Return (offset, entry) of new records."""
        generation = log.durability.generation
        if generation != self.generation:
            self.generation = generation
            start = log.log_start_offset
            if not self.base <= start <= self.end:
                self.base, self.entries = start, []
            del self.entries[start - self.base :]
            self.verified = min(self.verified, start)
        new: list[tuple[int, Entry]] = []
        while self.end < log.log_end_offset:
            data = log.read(self.end, _READ_BYTES, log.log_end_offset, True)
            for _, header in record_batch.iterate(data):
                for offset in range(max(header.base_offset, self.end), header.next_offset):
                    entry = (header.partition_leader_epoch, header.crc, offset - header.base_offset)
                    new.append((offset, entry))
                    self.entries.append(entry)
        return new

    def matching_end(self, committed: CommittedLog, end: int) -> int:
        """Return the first offset below `end` at which the entries differ from the committed log, or `end`."""
        entries, base, expected = self.entries, self.base, committed.entries
        offset = max(self.verified, base)
        while offset < end and entries[offset - base] == expected[offset]:
            offset += 1
        return offset


class CommittedLog:
    """The checker's copy of the committed records of one partition, with permitted losses."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.leaders: dict[int, int] = {}
        """Leader epoch to leader id."""
        self.survivable: dict[int, int] = {}
        """Leader epoch to the committed end offset that its leader must have, or NOTHING_SURVIVES."""
        self.allowed: dict[int, int] = {}
        """The same for elections that may lose records, until their leader or a later one starts."""
        self.losses: list[Loss] = []
        self.acknowledged: dict[int, tuple[Entry, int]] = {}
        """Offset to the entry acknowledged there with acks=all, and the number of earlier losses."""
        self.first_lost = 1 << 62
        """Lowest offset of any permitted loss; very large if there was none."""
        self.log_start = 0
        """Highest offset of a DeleteRecords request."""

    @property
    def end(self) -> int:
        """Offset after the last committed entry, 0 if there is none."""
        return len(self.entries)

    @property
    def loss_epoch(self) -> int:
        """Leader epoch that started with the last permitted loss, or -1."""
        return self.losses[-1].leader_epoch if self.losses else -1


def content(log: Log, offset: int) -> bytes:
    """Return the bytes of all batches from the one that contains `offset` to the log end."""
    parts = []
    while offset < log.log_end_offset:
        data = log.read(offset, _READ_BYTES, log.log_end_offset, True)
        parts.append(data)
        offset = max(header.next_offset for _, header in record_batch.iterate(data))
    return b"".join(parts)
