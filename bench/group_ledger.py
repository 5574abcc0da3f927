"""Records what the members of a group did, and checks the rules of groups: for `python -m bench.groups`.

A life is one consumer from its start to its end, with a number. Sans-IO: callers supply times.

Rules: a partition has at most one owner per generation; every acknowledged record was read; a record has one offset; a
record was read twice only if its first reader died, lost its membership or could not commit. From the records of
`__consumer_offsets`: generations increase, each assigns a partition once, and committed offsets do not decrease.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from kipmesh.core.group.records import GroupRecord, Record, decode_assignment, flat

EXAMPLES_MAX = 5


class End(StrEnum):
    """How a life's ownership of a partition ended."""

    COMMITTED = "revoked after a commit"
    UNCOMMITTED = "revoked, and the commit failed"
    LOST = "membership lost"
    DIED = "died"


CAUSES = (End.DIED, End.LOST, End.UNCOMMITTED)
"""Ends after which records are read again, the most likely first."""


class Pauses(NamedTuple):
    """Longest times in seconds between two new records of a partition."""

    longest_s: float
    median_s: float
    """Median of the longest pauses of all partitions."""
    partition: int
    """Partition with the longest pause, or -1."""


class Ledger:
    """Records the events of all lives and checks the rules. Times are seconds of one clock.

    `joins`, `leaves`, `deaths`, `losses` and `failed_commits` are counts that the members update.
    """

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.joins = self.leaves = self.deaths = self.losses = self.failed_commits = 0
        self.failed_polls: Counter[str] = Counter()
        """Number of errors raised by `poll`, by name."""
        self.problems: list[str] = []
        """Violations of rules."""
        self.generations: set[int] = set()
        """Generations in which a member was assigned partitions."""
        self.reads = 0
        """Number of records read, including repeated ones."""
        self._owners: dict[tuple[int, int], str] = {}
        self._last_reader: dict[tuple[int, int], int] = {}
        self._positions: dict[bytes, tuple[int, int]] = {}
        self._again: list[tuple[int, int, int, int]] = []
        self._ends: defaultdict[tuple[int, int], set[End]] = defaultdict(set)
        self._new_at: dict[int, float] = {}
        self._longest: dict[int, tuple[float, float]] = {}

    # --- events ------------------------------------------------------------------------------------------------------

    def assigned(self, generation: int, member_id: str, partitions: Iterable[int]) -> None:
        """Record the whole assignment of a member in a generation. A partition with two owners is added to
        `problems`.
        """
        self.generations.add(generation)
        for partition in partitions:
            owner = self._owners.setdefault((generation, partition), member_id)
            if owner != member_id:
                self.problems.append(
                    f"partition {partition}, generation {generation}: owned by {owner} and {member_id}"
                )

    def ended(self, life: int, partitions: Iterable[int], end: End) -> None:
        """Record that a life no longer owns the partitions, and how that ended."""
        for partition in partitions:
            self._ends[life, partition].add(end)

    def read(self, life: int, partition: int, offset: int, value: bytes, now: float) -> None:
        """Record that a life has processed a record at time `now`. A value at two offsets is added to `problems`."""
        self.reads += 1
        position = partition, offset
        before = self._last_reader.get(position)
        self._last_reader[position] = life
        if before is not None:
            self._again.append((before, life, partition, offset))
            return
        first = self._positions.setdefault(value, position)
        if first != position:
            self.problems.append(f"{value!r} is at {first} and at {position}")
        last = self._new_at.get(partition)
        self._new_at[partition] = now
        if last is not None and now - last > self._longest.get(partition, (0.0, 0.0))[0]:
            self._longest[partition] = now - last, now

    # --- results ----------------------------------------------------------------------------------------------------

    @property
    def changes(self) -> int:
        """Number of membership changes. A lost membership counts twice, because the member rejoins."""
        return self.joins + self.leaves + self.deaths + 2 * self.losses

    def missing(self, acknowledged: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the acknowledged (partition, offset) pairs that no life has read."""
        return [position for position in acknowledged if position not in self._last_reader]

    def repeats(self) -> dict[End | None, int]:
        """Return the number of repeated reads by cause. The key None counts those without a cause."""
        found: Counter[End | None] = Counter()
        for before, life, partition, _ in self._again:
            # A life may read on after it has lost its membership, even after the next owner has read.
            ends = self._ends[before, partition] | (self._ends[life, partition] & {End.LOST})
            found[next((cause for cause in CAUSES if cause in ends), None)] += 1
        return dict(found)

    def pauses(self) -> Pauses:
        """Return the pauses of all partitions that were read at least twice; zeros if there are none."""
        if not self._longest:
            return Pauses(0.0, 0.0, -1)
        longest = max(self._longest, key=lambda partition: self._longest[partition][0])
        median_s = statistics.median(pause for pause, _ in self._longest.values())
        return Pauses(self._longest[longest][0], median_s, longest)

    def verdicts(self, acknowledged: Iterable[tuple[int, int]]) -> list[str]:
        """Return messages that describe the violations, at most `EXAMPLES_MAX` of each kind; empty if there are none.

        `acknowledged` has the (partition, offset) of each acknowledged record.
        """
        found = self.problems[:EXAMPLES_MAX]
        missing = self.missing(acknowledged)
        if missing:
            found.append(f"{len(missing)} acknowledged records were not read, e.g. {missing[:EXAMPLES_MAX]}")
        unexplained = self.repeats().get(None, 0)
        if unexplained:
            found.append(f"{unexplained} records were read again although their first reader had committed")
        return found


class LogFacts(NamedTuple):
    """Facts from the records of a group in `__consumer_offsets`. `problems` are violations of rules."""

    last_generation: int
    stable_generations: int
    """Number of generations that have an assignment."""
    commits: int
    problems: Sequence[str]


def facts_of_log(group_id: str, topic: str, records: Iterable[Record]) -> LogFacts:
    """Check the records of a group, in the order of the log, and return the facts. Only commits of `topic` count.
    Violations do not raise an exception.
    """
    generation, stable, commits = 0, 0, 0
    problems: list[str] = []
    committed: dict[int, int] = {}
    for record in records:
        if record.key.group != group_id or record.value is None:
            continue
        if isinstance(record, GroupRecord):
            value = record.value
            if value.generation <= generation:
                problems.append(f"generation {value.generation} follows {generation} in the log")
            generation = value.generation
            stable += bool(value.members)
            lists = [flat(decode_assignment(one.assignment).assigned_partitions) for one in value.members]
            counts = Counter(each for owned in lists for each in owned)
            twice = [each for each, count in counts.items() if count > 1]
            if twice:
                problems.append(f"generation {generation} assigns partitions twice: {twice}")
        elif record.key.topic == topic:
            commits += 1
            partition, offset = record.key.partition, record.value.offset
            if offset < committed.get(partition, 0):
                problems.append(
                    f"the committed offset of partition {partition} decreased from {committed[partition]} to {offset}"
                )
            committed[partition] = offset
    return LogFacts(generation, stable, commits, problems)
