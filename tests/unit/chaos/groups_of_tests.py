"""Consumer group histories: a model of a correct coordinator generates them, mutations add anomalies."""

from __future__ import annotations

import random
from collections.abc import Callable

from kipmesh_chaos.history import (
    Assigned,
    Begin,
    Commit,
    CommitOk,
    CommitUnknown,
    End,
    Event,
    Invoke,
    Kind,
    Limits,
    OffsetsFetched,
    Ok,
    Phase,
    PhaseBegan,
    Read,
    ReaderKind,
)

GROUP = "readers"
MEMBERS = ("member-1", "member-2", "member-3")
Spoil = Callable[[list[Event], random.Random], None]


class Coordinator:
    """A group that reads some partitions. Expired members may keep reading and try to commit."""

    def __init__(self, source: random.Random, partitions: int) -> None:
        self.source = source
        self.logs: list[list[str]] = [[] for _ in range(partitions)]
        self.events: list[Event] = [
            Begin(0, "test", 1, partitions, Limits(), (GROUP,), (), True),
            PhaseBegan(0, Phase.FAULTS),
        ]
        self.t = 0.0
        self.operations = self.commits = self.generation = 0
        self.owners: dict[int, str] = {}
        self.positions: dict[tuple[str, int], int] = {}
        self.zombies: list[tuple[str, int, int]] = []
        """Member, generation and partition of each assignment that the last rebalance revoked."""
        self.committed: dict[int, int] = {}
        self.late: list[tuple[int, int]] = []
        """Partition and offset of timed-out commits of this generation that may still be applied."""
        self.rebalance()

    def add(self, make: Callable[[float], Event]) -> None:
        self.t += 0.001 + self.source.random() * 0.05
        self.events.append(make(self.t))

    def step(self) -> None:
        steps = [
            self.produce,
            self.read,
            self.commit,
            self.apply_late_commit,
            self.fetch_offsets,
            self.rebalance,
            self.zombie,
        ]
        self.source.choices(steps, [8, 8, 4, 2, 2, 0.5, 1])[0]()

    def produce(self) -> None:
        partition, self.operations = self.source.randrange(len(self.logs)), self.operations + 1
        value, operation = str(self.operations), self.operations
        self.add(lambda t: Invoke(t, operation, "producer-1", partition, value))
        self.logs[partition].append(value)
        self.add(lambda t: Ok(t, operation, len(self.logs[partition]) - 1))

    def read(self, partition: int = -1, member_name: str = "", count: int = 4) -> None:
        partition = partition if partition >= 0 else self.source.randrange(len(self.logs))
        member, log = member_name or self.owners[partition], self.logs[partition]
        start = self.positions[member, partition]
        stop = min(start + self.source.randint(1, count), len(log))
        if stop > start:
            self.positions[member, partition] = stop
            records = list(enumerate(log))[start:stop]
            self.add(lambda t: Read(t, member, ReaderKind.MEMBER, partition, records, len(log)))

    def commit(self) -> None:
        partition = self.source.randrange(len(self.logs))
        offset = self.positions[self.owners[partition], partition]
        number = self.send_commit(self.owners[partition], self.generation, partition, offset)
        match self.source.choice(["ok"] * 6 + ["lost", "unknown", "late"]):
            case "ok":
                self.committed[partition] = offset
                self.add(lambda t: CommitOk(t, number))
            case outcome:
                if outcome == "unknown":
                    self.committed[partition] = offset
                elif outcome == "late":
                    self.late.append((partition, offset))
                self.add(lambda t: CommitUnknown(t, number, "REQUEST_TIMED_OUT"))

    def send_commit(self, member: str, generation: int, partition: int, offset: int) -> int:
        self.commits += 1
        number = self.commits
        self.add(lambda t: Commit(t, number, GROUP, member, generation, [(partition, offset)]))
        return number

    def apply_late_commit(self) -> None:
        """Apply a commit that timed out. It replaces later commits."""
        if self.late:
            partition, offset = self.late.pop(self.source.randrange(len(self.late)))
            self.committed[partition] = offset

    def fetch_offsets(self) -> None:
        since = self.t
        offsets = [(partition, self.committed.get(partition, -1)) for partition in range(len(self.logs))]
        self.add(lambda t: OffsetsFetched(t, since, GROUP, "observer", offsets))

    def rebalance(self) -> None:
        self.zombies = [(member, self.generation, partition) for partition, member in self.owners.items()]
        self.late.clear()
        self.generation += 1
        generation = self.generation
        members = self.source.sample(MEMBERS, self.source.randint(1, len(MEMBERS)))
        self.owners = {partition: self.source.choice(members) for partition in range(len(self.logs))}
        self.zombies = [zombie for zombie in self.zombies if self.owners[zombie[2]] != zombie[0]]
        for member in members:
            assigned = [partition for partition, owner in self.owners.items() if owner == member]
            offsets = [(partition, self.committed.get(partition, -1)) for partition in assigned]
            self.positions |= {(member, partition): max(offset, 0) for partition, offset in offsets}
            self.add(lambda t, m=member, p=assigned: Assigned(t, GROUP, m, generation, p, p))  # type: ignore[misc]
            since = self.t
            self.add(lambda t, m=member, o=offsets, s=since: OffsetsFetched(t, s, GROUP, m, o))  # type: ignore[misc]

    def zombie(self) -> None:
        """An expired member reads its fetched records. Its commit is rejected."""
        if self.zombies:
            member, generation, partition = self.source.choice(self.zombies)
            self.read(partition, member)
            number = self.send_commit(member, generation, partition, self.positions[member, partition])
            self.add(lambda t: CommitUnknown(t, number, "ILLEGAL_GENERATION"))

    def end(self) -> list[Event]:
        self.add(lambda t: PhaseBegan(t, Phase.RECOVERY))
        self.add(lambda t: PhaseBegan(t, Phase.FINAL))
        for partition, log in enumerate(self.logs):
            while self.positions[self.owners[partition], partition] < len(log):
                self.read(partition)
            self.events.append(Read(self.t, "final", ReaderKind.FINAL, partition, list(enumerate(log)), len(log)))
            self.events.append(End(self.t, partition, len(log), (), ()))
        self.fetch_offsets()
        self.add(lambda t: PhaseBegan(t, Phase.END))
        return self.events


def group_history(seed: int, *, partitions: int = 2, steps: int = 600) -> list[Event]:
    """Return a history without anomalies that has lost and late commits and expired members."""
    group = Coordinator(random.Random(seed), partitions)
    for _ in range(steps):
        group.step()
    return group.end()


# -- mutations


def _indexes(events: list[Event], kind: type, condition: Callable[..., bool] = lambda _: True) -> list[int]:
    return [index for index, event in enumerate(events) if isinstance(event, kind) and condition(event)]


def assign_partition_twice(events: list[Event], source: random.Random) -> None:
    index = source.choice(_indexes(events, Assigned, lambda event: bool(event.partitions)))
    event = events[index]
    assert isinstance(event, Assigned)
    events.insert(index + 1, event._replace(member="member-9"))


def _acknowledged(events: list[Event], since: float) -> list[tuple[float, float, int, int]]:
    """Return (begin, end, partition, offset) of each commit that was acknowledged before `since`."""
    invoked = {event.commit: event for event in events if isinstance(event, Commit)}
    return [
        (invoked[event.commit].t, event.t, *invoked[event.commit].offsets[0])
        for event in events
        if isinstance(event, CommitOk) and event.t < since
    ]


def fetch_replaced_offset(events: list[Event], source: random.Random) -> None:
    """Fetch an offset that a later acknowledged commit had replaced."""
    for index in reversed(_indexes(events, OffsetsFetched, lambda event: event.reader == "observer")):
        event = events[index]
        assert isinstance(event, OffsetsFetched)
        before = _acknowledged(events, event.since)
        failed = {other.commit for other in events if isinstance(other, CommitUnknown)}
        # Failed commits may still be applied.
        ambiguous = {other.offsets[0] for other in events if isinstance(other, Commit) and other.commit in failed}
        for _, end, partition, offset in before:
            newer = [commit for commit in before if commit[2] == partition and commit[0] > end and commit[3] > offset]
            same = [commit for commit in before if commit[2:] == (partition, offset) and commit[1] > end]
            if newer and not same and (partition, offset) not in ambiguous:
                events[index] = event._replace(
                    offsets=[
                        (number, offset if number == partition else committed) for number, committed in event.offsets
                    ]
                )
                return
    raise AssertionError("no such fetch")


def forget_committed_offsets(events: list[Event], source: random.Random) -> None:
    """Fetch no offsets, like a coordinator that lost its state."""
    event = events[-2]
    assert isinstance(event, OffsetsFetched)
    events[-2] = event._replace(offsets=[(number, -1) for number, _ in event.offsets])


def commit_lower_offset(events: list[Event], source: random.Random) -> None:
    last: dict[tuple[str, int, int], int] = {}
    for index in _indexes(events, Commit):
        event = events[index]
        assert isinstance(event, Commit)
        partition, offset = event.offsets[0]
        if last.get((event.member, event.generation, partition), 0) > 0:
            events[index] = event._replace(offsets=[(partition, 0)])
            return
        last[event.member, event.generation, partition] = offset
    raise AssertionError("no such commit")


def fetch_uncommitted_offset(events: list[Event], source: random.Random) -> None:
    event = events[-2]
    assert isinstance(event, OffsetsFetched)
    events[-2] = event._replace(offsets=[(number, 10_000) for number, _ in event.offsets])


def accept_commit_of_zombie(events: list[Event], source: random.Random) -> None:
    index = source.choice(_indexes(events, CommitUnknown, lambda event: event.error == "ILLEGAL_GENERATION"))
    event = events[index]
    assert isinstance(event, CommitUnknown)
    events[index] = CommitOk(event.t, event.commit)


def _last_read(events: list[Event], partition: int) -> int:
    return max(_indexes(events, Read, lambda event: event.partition == partition), default=-1)


def _is_first_of_tenure(events: list[Event], member: str, partition: int) -> bool:
    last_assignment = _indexes(events, Assigned, lambda event: event.member == member)[-1]
    return not _indexes(
        events[last_assignment:], Read, lambda event: event.reader == member and event.partition == partition
    )


def commit_before_read(events: list[Event], source: random.Random) -> None:
    for index in _indexes(events, Commit):
        event = events[index]
        assert isinstance(event, Commit)
        partition, offset = event.offsets[0]
        read = _last_read(events[:index], partition)
        if read >= 0 and events[read].records[-1][0] == offset - 1:  # type: ignore[union-attr]
            events.insert(index, events.pop(read))
            return
    raise AssertionError("no such commit")


def start_after_committed_offset(events: list[Event], source: random.Random) -> None:
    """Let a member start after the committed offset. An expired member has read the skipped records."""
    for index in _indexes(events, Read, lambda event: event.kind is ReaderKind.MEMBER and len(event.records) > 1):
        event = events[index]
        assert isinstance(event, Read)
        if _is_first_of_tenure(events[:index], event.reader, event.partition):
            events[index] = event._replace(records=event.records[1:])
            return
    raise AssertionError("no such read")


def acknowledge_unknown_commit(events: list[Event], source: random.Random) -> None:
    events.insert(-1, CommitOk(1, 10_000))


GROUP_SPOILS: list[tuple[Spoil, Kind]] = [
    (assign_partition_twice, Kind.TWO_OWNERS),
    (fetch_replaced_offset, Kind.COMMIT_WENT_BACK),
    (forget_committed_offsets, Kind.COMMIT_WENT_BACK),
    (commit_lower_offset, Kind.COMMIT_WENT_BACK),
    (fetch_uncommitted_offset, Kind.COMMIT_PHANTOM),
    (accept_commit_of_zombie, Kind.COMMIT_STALE),
    (commit_before_read, Kind.GROUP_SKIPPED),
    (start_after_committed_offset, Kind.GROUP_SKIPPED),
    (acknowledge_unknown_commit, Kind.INCOMPLETE),
]
