"""What the checker knows of logs: one (epoch, CRC of the batch, place in the batch) an offset, so that it reads each
batch once, and what of that is committed."""

from __future__ import annotations

from typing import NamedTuple

from kipmesh.core import record_batch
from kipmesh.storage.log.log import Log

Entry = tuple[int, int, int]
NOTHING_SURVIVES = -1
"""Of an unclean election."""
_READ_BYTES = 1 << 20


class Cut(NamedTuple):
    """Committed records from `offset` on were lost as the rules allow, when `leader_epoch` began."""

    offset: int
    leader_epoch: int


class Shadow:
    """Of one replica's log."""

    def __init__(self) -> None:
        self.base = 0
        self.entries: list[Entry] = []
        self.generation = 0
        self.verified = 0
        """Below, it was found to be what is committed."""
        self.may_differ_from: int | None = None
        """After a loss that the rules allow, the replica may have what is lost from here on, even when its log was cut
        (a later unclean leader may bring it back), until it has something of what came after."""

    @property
    def end(self) -> int:
        """The offset that the next entry gets."""
        return self.base + len(self.entries)

    def take(self, log: Log) -> list[tuple[int, Entry]]:
        """Follow the log; what is new."""
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

    def agrees(self, truth: Truth, end: int) -> int:
        """Up to where, below `end`, the entries are what is committed."""
        entries, base, committed = self.entries, self.base, truth.entries
        at = max(self.verified, base)
        while at < end and entries[at - base] == committed[at]:
            at += 1
        return at


class Truth:
    """What is committed in one partition."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.leaders: dict[int, int] = {}
        """Leader epoch -> who led."""
        self.survivable: dict[int, int] = {}
        """Leader epoch -> how much of what was committed its leader must have, or NOTHING_SURVIVES."""
        self.allowed: dict[int, int] = {}
        """The same of elections that may lose something and whose leaders have not begun, nor later ones."""
        self.cuts: list[Cut] = []
        self.acknowledged: dict[int, tuple[Entry, int]] = {}
        """Offset -> what was acknowledged there with acks=all, and how many cuts there were before."""
        self.floor = 1 << 62
        """The lowest offset that was lost as the rules allow; far away when none was."""
        self.log_start = 0
        """The highest that somebody asked for."""

    @property
    def end(self) -> int:
        """After the last committed entry."""
        return len(self.entries)

    @property
    def cut_epoch(self) -> int:
        """The leader epoch that began with the last such loss."""
        return self.cuts[-1].leader_epoch if self.cuts else -1


def content(log: Log, offset: int) -> bytes:
    """The bytes of all batches from `offset` on."""
    parts = []
    while offset < log.log_end_offset:
        data = log.read(offset, _READ_BYTES, log.log_end_offset, True)
        parts.append(data)
        offset = max(header.next_offset for _, header in record_batch.iterate(data))
    return b"".join(parts)
