"""Consumer groups in a history: who owns what, what is committed, and whether everything was read before it was.

What is checked, each under its name in `Kind`:
- A partition has one owner in a generation: two members are never told the same one in the same generation.
- Committed offsets do not go back. A fetch of them tells the value of a commit that began before the answer came, and
  that no other one has replaced: none that began after its end was acknowledged before the fetch began. A commit ends
  with its acknowledgement. One that failed may come true until its generation is over, that is until a member was told
  its partitions in a later one; so two commits of one generation, the first of which failed, may leave the first one's
  offset. That is what the protocol allows. Nothing else is: not after the coordinator has changed, nor when a member
  has died.
- A member commits no lower offset than it was told when it took the partition up, or has committed since then.
- A commit of a generation is not acknowledged if it began after a member was told its partitions in a later one.
- No record is skipped: whatever is below a committed offset some member has read before that commit began, and a
  member that takes a partition up begins no later than where the group is.

Records may be read again, by the next owner, if they were read and not committed; those are counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from kipmesh_chaos.history import Assigned, Commit, CommitOk, CommitUnknown, Kind, OffsetsFetched, Read

_NEVER = float("inf")


Tell = Callable[[Kind, float, str, int], None]
"""Called with an anomaly, its time, what happened, and the partition."""


class _Write:
    """One partition of a commit."""

    __slots__ = ("acked", "begin", "generation", "offset")

    def __init__(self, offset: int, begin: float, generation: int) -> None:
        self.offset = offset
        self.begin = begin
        self.acked = _NEVER
        self.generation = generation


class _Partition:
    """What is known of one partition of a group."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        """Offsets from `frontier` on that somebody read."""
        self.frontier = 0
        """All below was read by some member."""
        self.writes: dict[int, list[_Write]] = {}
        """Commits by offset."""
        self.acks: list[float] = []
        """When commits were acknowledged, in order ..."""
        self.begins: list[float] = []
        """... and the latest beginning of those up to there."""

    def record(self, offset: int) -> bool:
        """Somebody read this; whether it is the first time."""
        if offset < self.frontier or offset in self.read:
            return False
        self.read.add(offset)
        self.skip_to(self.frontier)
        return True

    def skip_to(self, offset: int) -> None:
        """All below counts as read; of what was read above, what follows on it."""
        if offset > self.frontier:
            self.frontier = offset
            self.read = {one for one in self.read if one >= offset}
        while self.frontier in self.read:
            self.read.remove(self.frontier)
            self.frontier += 1

    def acknowledged(self, write: _Write, t: float) -> None:
        write.acked = t
        self.acks.append(t)
        self.begins.append(max(write.begin, self.begins[-1] if self.begins else write.begin))


class _Tenure:
    """A member with a partition that it took up: where it may go on."""

    def __init__(self) -> None:
        self.fetched: int | None = None
        self.first: int | None = None
        self.floor = 0
        """What it was told or has committed."""


class _Group:
    def __init__(self) -> None:
        self.partitions: dict[int, _Partition] = {}
        self.owners: dict[tuple[int, int], str] = {}
        self.generations: list[int] = []
        """Those that members were told something in and that were later than all before, in order ..."""
        self.since: list[float] = []
        """... and when."""

    def over(self, generation: int) -> float:
        """When a later generation was known."""
        place = bisect_right(self.generations, generation)
        return self.since[place] if place < len(self.since) else _NEVER


class GroupChecker:
    """Takes the events of groups one by one, in the order of the history."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._groups: dict[str, _Group] = {}
        self.members: dict[str, str] = {}
        """The group of each reader that is a member."""
        self._tenures: dict[tuple[str, int], _Tenure] = {}
        self._commits: dict[int, tuple[Commit, list[_Write]]] = {}
        self.commits = 0
        """Commits that were acknowledged."""
        self.read_again = 0
        """Records that members read and some member of the group had read before."""

    @property
    def generations(self) -> int:
        """In how many generations, of all groups, members were told partitions."""
        return sum(len(group.generations) for group in self._groups.values())

    def assigned(self, event: Assigned) -> None:
        """A member was told its partitions."""
        group = self._groups.setdefault(event.group, _Group())
        self.members[event.member] = event.group
        if not group.generations or event.generation > group.generations[-1]:
            group.generations.append(event.generation)
            group.since.append(event.t)
        for partition in event.partitions:
            other = group.owners.setdefault((event.generation, partition), event.member)
            if other != event.member:
                text = f"{other} and {event.member} both have it in generation {event.generation} of {event.group}"
                self._tell(Kind.TWO_OWNERS, event.t, text, partition)
        for partition in event.added:
            self._tenures[event.member, partition] = _Tenure()

    def read(self, event: Read) -> None:
        """A member read records."""
        group = self._groups.get(self.members.get(event.reader, ""))
        if group is None:
            self._tell(Kind.INCOMPLETE, event.t, f"{event.reader} reads without partitions", event.partition)
            return
        known = group.partitions.setdefault(event.partition, _Partition())
        tenure = self._tenures.get((event.reader, event.partition))
        for offset, _value in event.records:
            self.read_again += not known.record(offset)
        if tenure is not None and tenure.first is None and event.records:
            tenure.first = event.records[0][0]
            self._check_first(event.t, event.reader, event.partition, tenure)

    def commit(self, event: Commit) -> None:
        """A member is about to commit."""
        group = self._groups.get(event.group)
        if group is None or event.commit in self._commits:
            self._tell(Kind.INCOMPLETE, event.t, f"commit {event.commit} is twice, or of nobody", -1)
            return
        writes = []
        for partition, offset in event.offsets:
            known = group.partitions.setdefault(partition, _Partition())
            write = _Write(offset, event.t, event.generation)
            writes.append(write)
            known.writes.setdefault(offset, []).append(write)
            if offset > known.frontier:
                text = (
                    f"{event.member} commits offset {offset}, and nobody in {event.group} has read offset "
                    f"{known.frontier}"
                )
                self._tell(Kind.GROUP_SKIPPED, event.t, text, partition)
                known.skip_to(offset)
            tenure = self._tenures.get((event.member, partition))
            if tenure is not None:
                if offset < tenure.floor:
                    text = f"{event.member} commits offset {offset} after it was told or committed {tenure.floor}"
                    self._tell(Kind.COMMIT_WENT_BACK, event.t, text, partition)
                tenure.floor = max(tenure.floor, offset)
        self._commits[event.commit] = (event, writes)

    def outcome(self, event: CommitOk | CommitUnknown) -> None:
        """What became of a commit."""
        begun, writes = self._commits.pop(event.commit, (None, []))
        if begun is None:
            text = f"commit {event.commit} never began, or has two outcomes"
            self._tell(Kind.INCOMPLETE, event.t, text, -1)
            return
        if isinstance(event, CommitUnknown):
            return
        self.commits += 1
        group = self._groups[begun.group]
        for (partition, _), write in zip(begun.offsets, writes, strict=True):
            group.partitions[partition].acknowledged(write, event.t)
        if group.over(begun.generation) < begun.t:
            text = (
                f"{begun.member}'s commit of generation {begun.generation} of {begun.group} was accepted, and began "
                f"when a later one was told already"
            )
            self._tell(Kind.COMMIT_STALE, event.t, text, begun.offsets[0][0] if begun.offsets else -1)

    def fetched(self, event: OffsetsFetched) -> None:
        """The coordinator said what is committed."""
        group = self._groups.setdefault(event.group, _Group())
        for partition, offset in event.offsets:
            known = group.partitions.setdefault(partition, _Partition())
            self._check_fetched(event, group, partition, known, offset)
            tenure = self._tenures.get((event.reader, partition))
            if tenure is not None and tenure.fetched is None:
                tenure.fetched = offset
                tenure.floor = max(tenure.floor, offset)
                self._check_first(event.t, event.reader, partition, tenure)

    def _check_fetched(
        self, event: OffsetsFetched, group: _Group, partition: int, known: _Partition, offset: int
    ) -> None:
        """As a register: see above."""
        before = bisect_left(known.acks, event.since)
        replaced = known.begins[before - 1] if before else -_NEVER
        told = f"{event.reader} was told the committed offset {offset} of {event.group}"
        if offset < 0:
            if before:
                text = f"{told} (none), and a commit was acknowledged before"
                self._tell(Kind.COMMIT_WENT_BACK, event.t, text, partition)
            return
        writes = known.writes.get(offset, [])
        if not writes:
            self._tell(Kind.COMMIT_PHANTOM, event.t, told, partition)
        elif all(self._end(group, write) < replaced for write in writes):
            text = f"{told}, which later commits had replaced, the last of them before {event.since:.2f} s"
            self._tell(Kind.COMMIT_WENT_BACK, event.t, text, partition)

    def _end(self, group: _Group, write: _Write) -> float:
        """When the commit cannot come true any more."""
        return write.acked if write.acked < _NEVER else group.over(write.generation)

    def _check_first(self, t: float, member: str, partition: int, tenure: _Tenure) -> None:
        """A member that takes a partition up begins no later than where the group is; without offsets at 0."""
        if tenure.first is None or tenure.fetched is None or tenure.first <= max(tenure.fetched, 0):
            return
        text = f"{member} begins at offset {tenure.first}, and the group is at {max(tenure.fetched, 0)}"
        self._tell(Kind.GROUP_SKIPPED, t, text, partition)
