"""What the members of a group did, written down as it happened, and what must hold of it: for `python -m bench.groups`.

A life is one consumer from its start to its end, by a number of its own. Nothing here knows of the network or a clock.

Must hold: a partition has at most one owner a generation; every acknowledged record was read; no record is at two
offsets; a record that was read twice was read by a life that died, lost its membership or could not commit. From the
records of `__consumer_offsets`: generations go up, each assigns a partition once, and no committed offset goes back.
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
    """How a life's possession of a partition ended."""

    COMMITTED = "given up after a commit"
    UNCOMMITTED = "given up, and its commit failed"
    LOST = "its membership was lost"
    DIED = "died"


CAUSES = (End.DIED, End.LOST, End.UNCOMMITTED)
"""What makes that a record is read again, the likeliest first."""


class Pauses(NamedTuple):
    """Times without a new record of a partition, in seconds."""

    longest_s: float
    median_s: float
    """Of the longest of each partition."""
    partition: int
    """That had the longest."""


class Ledger:
    """See the module. Times are seconds of one clock."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.joins = self.leaves = self.deaths = self.losses = self.failed_commits = 0
        self.failed_polls: Counter[str] = Counter()
        """Errors that `poll` raised, by name."""
        self.problems: list[str] = []
        """What must not be."""
        self.generations: set[int] = set()
        """That some member was assigned partitions in."""
        self.reads = 0
        """Records that were read, each as often as it was."""
        self._owners: dict[tuple[int, int], str] = {}
        self._last_reader: dict[tuple[int, int], int] = {}
        self._places: dict[bytes, tuple[int, int]] = {}
        self._again: list[tuple[int, int, int, int]] = []
        self._ends: defaultdict[tuple[int, int], set[End]] = defaultdict(set)
        self._new_at: dict[int, float] = {}
        self._longest: dict[int, tuple[float, float]] = {}

    # --- what happens ------------------------------------------------------------------------------------------------

    def assigned(self, generation: int, member_id: str, partitions: Iterable[int]) -> None:
        """A member has these, all together, in a generation."""
        self.generations.add(generation)
        for partition in partitions:
            owner = self._owners.setdefault((generation, partition), member_id)
            if owner != member_id:
                self.problems.append(f"partition {partition}, generation {generation}: {owner} and {member_id} own it")

    def ended(self, life: int, partitions: Iterable[int], end: End) -> None:
        """A life has these no more."""
        for partition in partitions:
            self._ends[life, partition].add(end)

    def read(self, life: int, partition: int, offset: int, value: bytes, now: float) -> None:
        """A life has processed a record."""
        self.reads += 1
        where = partition, offset
        before = self._last_reader.get(where)
        self._last_reader[where] = life
        if before is not None:
            self._again.append((before, life, partition, offset))
            return
        place = self._places.setdefault(value, where)
        if place != where:
            self.problems.append(f"{value!r} is at {place} and at {where}")
        last = self._new_at.get(partition)
        self._new_at[partition] = now
        if last is not None and now - last > self._longest.get(partition, (0.0, 0.0))[0]:
            self._longest[partition] = now - last, now

    # --- what came of it ---------------------------------------------------------------------------------------------

    @property
    def changes(self) -> int:
        """Changes of the membership: who lost it came back, which is a change, too."""
        return self.joins + self.leaves + self.deaths + 2 * self.losses

    def missing(self, acknowledged: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of these (partition, offset) the ones that nobody has read."""
        return [where for where in acknowledged if where not in self._last_reader]

    def repeats(self) -> dict[End | None, int]:
        """Records that were read again, by the cause; None where there was no reason to."""
        found: Counter[End | None] = Counter()
        for before, life, partition, _ in self._again:
            # Who lost its membership may read on until it hears of that: also after the next owner has read.
            ends = self._ends[before, partition] | (self._ends[life, partition] & {End.LOST})
            found[next((cause for cause in CAUSES if cause in ends), None)] += 1
        return dict(found)

    def pauses(self) -> Pauses:
        """Of all partitions that were read."""
        if not self._longest:
            return Pauses(0.0, 0.0, -1)
        longest = max(self._longest, key=lambda partition: self._longest[partition][0])
        median_s = statistics.median(pause for pause, _ in self._longest.values())
        return Pauses(self._longest[longest][0], median_s, longest)

    def verdicts(self, acknowledged: Iterable[tuple[int, int]]) -> list[str]:
        """All that does not hold, at most a few of a kind."""
        found = self.problems[:EXAMPLES_MAX]
        missing = self.missing(acknowledged)
        if missing:
            found.append(f"{len(missing)} acknowledged records were not read, for example {missing[:EXAMPLES_MAX]}")
        unexplained = self.repeats().get(None, 0)
        if unexplained:
            found.append(f"{unexplained} records were read again though who read them first had committed")
        return found


class LogFacts(NamedTuple):
    """What the records of a group in `__consumer_offsets` say."""

    last_generation: int
    stable_generations: int
    """That have an assignment."""
    commits: int
    problems: Sequence[str]


def facts_of_log(group_id: str, topic: str, records: Iterable[Record]) -> LogFacts:
    """Follow the records of a group in the order of the log."""
    generation, stable, commits = 0, 0, 0
    problems: list[str] = []
    committed: dict[int, int] = {}
    for record in records:
        if record.key.group != group_id or record.value is None:
            continue
        if isinstance(record, GroupRecord):
            value = record.value
            if value.generation <= generation:
                problems.append(f"generation {value.generation} is in the log after {generation}")
            generation = value.generation
            stable += bool(value.members)
            lists = [flat(decode_assignment(one.assignment).assigned_partitions) for one in value.members]
            counts = Counter(where for owned in lists for where in owned)
            twice = [where for where, count in counts.items() if count > 1]
            if twice:
                problems.append(f"generation {generation} assigns twice: {twice}")
        elif record.key.topic == topic:
            commits += 1
            partition, offset = record.key.partition, record.value.offset
            if offset < committed.get(partition, 0):
                problems.append(f"the offset of partition {partition} went back: {committed[partition]} to {offset}")
            committed[partition] = offset
    return LogFacts(generation, stable, commits, problems)
