"""Checks of consumer groups in a history: ownership, committed offsets, skipped records.

- A partition has at most one owner per generation.
- A fetched committed offset belongs to a commit that began before the fetch ended and that was not replaced. A commit
  is replaced when one that began after its end was acknowledged before the fetch began. A commit ends with its
  acknowledgement, a failed one when a member receives an assignment of a later generation.
- A member commits no offset below the one it fetched on assignment or committed since.
- A commit is not acknowledged if it began after the assignment of a later generation.
- All records below a committed offset were read by a member before the commit began. A newly assigned member starts no
  later than the committed offset. Records that the next owner reads again are counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from kipmesh_chaos.history import Assigned, Commit, CommitOk, CommitUnknown, Kind, OffsetsFetched, Read

_NEVER = float("inf")


Report = Callable[[Kind, float, str, int], None]
"""Called with each anomaly: kind, time, text, partition."""


@dataclass(slots=True)
class _Write:
    """Commit of one partition: when it began and was acknowledged, in seconds since the start of the run."""

    begin: float
    generation: int
    acked: float = _NEVER


@dataclass(slots=True)
class _Partition:
    """State of one partition of a group."""

    read: set[int] = field(default_factory=set)
    """Offsets at or above `frontier` that a member read."""
    frontier: int = 0
    """A member has read every offset below this one."""
    writes: dict[int, list[_Write]] = field(default_factory=dict)
    """Commits by offset."""
    acks: list[float] = field(default_factory=list)
    """Times of acknowledged commits, ascending ..."""
    begins: list[float] = field(default_factory=list)
    """... and the latest begin among the commits acknowledged so far."""

    def record(self, offset: int) -> bool:
        """Record a read offset; return whether no member has read it before."""
        if offset < self.frontier or offset in self.read:
            return False
        self.read.add(offset)
        self.skip_to(self.frontier)
        return True

    def skip_to(self, offset: int) -> None:
        """Treat all offsets below `offset` as read."""
        if offset > self.frontier:
            self.frontier = offset
            self.read = {one for one in self.read if one >= offset}
        while self.frontier in self.read:
            self.read.remove(self.frontier)
            self.frontier += 1

    def acknowledged(self, write: _Write, t: float) -> None:
        """Record that a commit of the partition was acknowledged at `t`."""
        write.acked = t
        self.acks.append(t)
        self.begins.append(max(write.begin, self.begins[-1] if self.begins else write.begin))


@dataclass(slots=True)
class _Tenure:
    """A member's ownership of a partition: the committed offset that it fetched first, and the first offset that it
    read. Each is None until then.
    """

    fetched: int | None = None
    first: int | None = None
    floor: int = 0
    """Highest offset that the member fetched or committed."""


@dataclass(slots=True)
class _Group:
    partitions: defaultdict[int, _Partition] = field(default_factory=lambda: defaultdict(_Partition))
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    generations: list[int] = field(default_factory=list)
    """Assigned generations, ascending ..."""
    since: list[float] = field(default_factory=list)
    """... and the time of the first assignment of each."""

    def over(self, generation: int) -> float:
        """Return the time of the first assignment of a later generation; infinity if there is none."""
        place = bisect_right(self.generations, generation)
        return self.since[place] if place < len(self.since) else _NEVER


class GroupChecker:
    """Checks the events of consumer groups, in the order of the history. No method raises for an anomaly.

    `report` is called with each anomaly.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._groups: dict[str, _Group] = {}
        self.members: dict[str, str] = {}
        """Group of each reader that is a group member."""
        self._tenures: dict[tuple[str, int], _Tenure] = {}
        self._commits: dict[int, tuple[Commit, list[_Write]]] = {}
        self.commits = 0
        """Number of acknowledged commits."""
        self.read_again = 0
        """Records read by a member after another read in the group."""

    @property
    def generations(self) -> int:
        """Number of assigned generations, summed over all groups."""
        return sum(len(group.generations) for group in self._groups.values())

    def assigned(self, event: Assigned) -> None:
        """Process an assignment. Reports a partition that another member owns in the same generation."""
        group = self._groups.setdefault(event.group, _Group())
        self.members[event.member] = event.group
        if not group.generations or event.generation > group.generations[-1]:
            group.generations.append(event.generation)
            group.since.append(event.t)
        for partition in event.partitions:
            other = group.owners.setdefault((event.generation, partition), event.member)
            if other != event.member:
                text = f"{other} and {event.member} both own it in generation {event.generation} of {event.group}"
                self._report(Kind.TWO_OWNERS, event.t, text, partition)
        for partition in event.added:
            self._tenures[event.member, partition] = _Tenure()

    def read(self, event: Read) -> None:
        """Process records that a member read. Reports a first read above the committed offset, and a reader without an
        assignment.
        """
        group = self._groups.get(self.members.get(event.reader, ""))
        if group is None:
            self._report(Kind.INCOMPLETE, event.t, f"{event.reader} reads without an assignment", event.partition)
            return
        known = group.partitions[event.partition]
        tenure = self._tenures.get((event.reader, event.partition))
        for offset, _value in event.records:
            self.read_again += not known.record(offset)
        if tenure is not None and tenure.first is None and event.records:
            tenure.first = event.records[0][0]
            self._check_first(event.t, event.reader, event.partition, tenure)

    def commit(self, event: Commit) -> None:
        """Process the beginning of a commit. Reports an offset above one that no member has read, or below one that the
        member fetched or committed.
        """
        group = self._groups.get(event.group)
        if group is None or event.commit in self._commits:
            self._report(Kind.INCOMPLETE, event.t, f"commit {event.commit} occurs twice or has no group", -1)
            return
        writes = []
        for partition, offset in event.offsets:
            known = group.partitions[partition]
            write = _Write(event.t, event.generation)
            writes.append(write)
            known.writes.setdefault(offset, []).append(write)
            if offset > known.frontier:
                text = (
                    f"{event.member} commits offset {offset}, but no member of {event.group} has read offset "
                    f"{known.frontier}"
                )
                self._report(Kind.GROUP_SKIPPED, event.t, text, partition)
                known.skip_to(offset)
            tenure = self._tenures.get((event.member, partition))
            if tenure is not None:
                if offset < tenure.floor:
                    text = f"{event.member} commits offset {offset} after it fetched or committed {tenure.floor}"
                    self._report(Kind.COMMIT_WENT_BACK, event.t, text, partition)
                tenure.floor = max(tenure.floor, offset)
        self._commits[event.commit] = (event, writes)

    def outcome(self, event: CommitOk | CommitUnknown) -> None:
        """Process the outcome of a commit. Reports a commit that was acknowledged although it began after a later
        generation was assigned.
        """
        begun, writes = self._commits.pop(event.commit, (None, []))
        if begun is None:
            text = f"commit {event.commit} has an outcome but no `commit`, or two outcomes"
            self._report(Kind.INCOMPLETE, event.t, text, -1)
            return
        if isinstance(event, CommitUnknown):
            return
        self.commits += 1
        group = self._groups[begun.group]
        for (partition, _), write in zip(begun.offsets, writes, strict=True):
            group.partitions[partition].acknowledged(write, event.t)
        if group.over(begun.generation) < begun.t:
            text = (
                f"the commit of {begun.member} in generation {begun.generation} of {begun.group} was accepted, but "
                f"began after a later generation was assigned"
            )
            self._report(Kind.COMMIT_STALE, event.t, text, begun.offsets[0][0] if begun.offsets else -1)

    def fetched(self, event: OffsetsFetched) -> None:
        """Process fetched committed offsets. Reports an offset that was not committed or had been replaced, and a first
        read above it.
        """
        group = self._groups.setdefault(event.group, _Group())
        for partition, offset in event.offsets:
            self._check_fetched(event, group, partition, offset)
            tenure = self._tenures.get((event.reader, partition))
            if tenure is not None and tenure.fetched is None:
                tenure.fetched = offset
                tenure.floor = max(tenure.floor, offset)
                self._check_first(event.t, event.reader, partition, tenure)

    def _check_fetched(self, event: OffsetsFetched, group: _Group, partition: int, offset: int) -> None:
        """Report an offset that no commit wrote, or that later acknowledged commits had replaced before the fetch
        began.
        """
        known = group.partitions[partition]
        before = bisect_left(known.acks, event.since)
        replaced = known.begins[before - 1] if before else -_NEVER
        prefix = f"{event.reader} fetched the committed offset {offset} of {event.group}"
        if offset < 0:
            if before:
                text = f"{prefix} (none), but a commit was acknowledged before"
                self._report(Kind.COMMIT_WENT_BACK, event.t, text, partition)
            return
        writes = known.writes.get(offset, [])
        if not writes:
            self._report(Kind.COMMIT_PHANTOM, event.t, prefix, partition)
        elif all(self._end(group, write) < replaced for write in writes):
            text = f"{prefix}, which later commits had replaced before {event.since:.2f} s"
            self._report(Kind.COMMIT_WENT_BACK, event.t, text, partition)

    def _end(self, group: _Group, write: _Write) -> float:
        """Return the latest time at which the commit may be applied."""
        return write.acked if write.acked < _NEVER else group.over(write.generation)

    def _check_first(self, t: float, member: str, partition: int, tenure: _Tenure) -> None:
        """Report a newly assigned member whose first read is above the committed offset that it fetched (0 if there is
        none).
        """
        if tenure.first is None or tenure.fetched is None or tenure.first <= max(tenure.fetched, 0):
            return
        text = f"{member} starts at offset {tenure.first}, but the group committed {max(tenure.fetched, 0)}"
        self._report(Kind.GROUP_SKIPPED, t, text, partition)
