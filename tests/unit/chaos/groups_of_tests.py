"""Histories of a consumer group by a tiny coordinator that does everything right, and ways to spoil them."""

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
    """A group over the logs of some partitions. Members die, and read on and commit when they are out already."""

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
        """Who was owner of a partition in a generation that is over."""
        self.committed: dict[int, int] = {}
        self.late: list[tuple[int, int]] = []
        """Commits of this generation whose members gave up, and that are still under way."""
        self.rebalance()

    def add(self, make: Callable[[float], Event]) -> None:
        self.t += 0.001 + self.source.random() * 0.05
        self.events.append(make(self.t))

    def step(self) -> None:
        steps = [self.produce, self.read, self.commit, self.arrive, self.look, self.rebalance, self.zombie]
        self.source.choices(steps, [8, 8, 4, 2, 2, 0.5, 1])[0]()

    def produce(self) -> None:
        where, self.operations = self.source.randrange(len(self.logs)), self.operations + 1
        value, operation = str(self.operations), self.operations
        self.add(lambda t: Invoke(t, operation, "producer-1", where, value))
        self.logs[where].append(value)
        self.add(lambda t: Ok(t, operation, len(self.logs[where]) - 1))

    def read(self, where: int = -1, who: str = "", count: int = 4) -> None:
        where = where if where >= 0 else self.source.randrange(len(self.logs))
        member, log = who or self.owners[where], self.logs[where]
        start = self.positions[member, where]
        stop = min(start + self.source.randint(1, count), len(log))
        if stop > start:
            self.positions[member, where] = stop
            records = list(enumerate(log))[start:stop]
            self.add(lambda t: Read(t, member, ReaderKind.MEMBER, where, records, len(log)))

    def commit(self) -> None:
        where = self.source.randrange(len(self.logs))
        offset = self.positions[self.owners[where], where]
        number = self.begin(self.owners[where], self.generation, where, offset)
        match self.source.choice(["ok"] * 6 + ["lost", "unknown", "late"]):
            case "ok":
                self.committed[where] = offset
                self.add(lambda t: CommitOk(t, number))
            case how:
                if how == "unknown":
                    self.committed[where] = offset
                elif how == "late":
                    self.late.append((where, offset))
                self.add(lambda t: CommitUnknown(t, number, "REQUEST_TIMED_OUT"))

    def begin(self, member: str, generation: int, where: int, offset: int) -> int:
        self.commits += 1
        number = self.commits
        self.add(lambda t: Commit(t, number, GROUP, member, generation, [(where, offset)]))
        return number

    def arrive(self) -> None:
        """What its member had given up comes true, over what was committed since then."""
        if self.late:
            where, offset = self.late.pop(self.source.randrange(len(self.late)))
            self.committed[where] = offset

    def look(self) -> None:
        since = self.t
        offsets = [(where, self.committed.get(where, -1)) for where in range(len(self.logs))]
        self.add(lambda t: OffsetsFetched(t, since, GROUP, "observer", offsets))

    def rebalance(self) -> None:
        self.zombies = [(member, self.generation, where) for where, member in self.owners.items()]
        self.late.clear()
        self.generation += 1
        generation = self.generation
        members = self.source.sample(MEMBERS, self.source.randint(1, len(MEMBERS)))
        self.owners = {where: self.source.choice(members) for where in range(len(self.logs))}
        self.zombies = [one for one in self.zombies if self.owners[one[2]] != one[0]]
        for member in members:
            mine = [where for where, owner in self.owners.items() if owner == member]
            offsets = [(where, self.committed.get(where, -1)) for where in mine]
            self.positions |= {(member, where): max(offset, 0) for where, offset in offsets}
            self.add(lambda t, m=member, p=mine: Assigned(t, GROUP, m, generation, p, p))  # type: ignore[misc]
            since = self.t
            self.add(lambda t, m=member, o=offsets, s=since: OffsetsFetched(t, s, GROUP, m, o))  # type: ignore[misc]

    def zombie(self) -> None:
        """Reads what it has fetched, and its commit is refused."""
        if self.zombies:
            member, generation, where = self.source.choice(self.zombies)
            self.read(where, member)
            number = self.begin(member, generation, where, self.positions[member, where])
            self.add(lambda t: CommitUnknown(t, number, "ILLEGAL_GENERATION"))

    def end(self) -> list[Event]:
        self.add(lambda t: PhaseBegan(t, Phase.RECOVERY))
        self.add(lambda t: PhaseBegan(t, Phase.FINAL))
        for where, log in enumerate(self.logs):
            while self.positions[self.owners[where], where] < len(log):
                self.read(where)
            self.events.append(Read(self.t, "final", ReaderKind.FINAL, where, list(enumerate(log)), len(log)))
            self.events.append(End(self.t, where, len(log), (), ()))
        self.look()
        self.add(lambda t: PhaseBegan(t, Phase.END))
        return self.events


def group_history(seed: int, *, partitions: int = 2, steps: int = 600) -> list[Event]:
    """A history without an anomaly, with lost and late commits, dead members and such that do not know it."""
    group = Coordinator(random.Random(seed), partitions)
    for _ in range(steps):
        group.step()
    return group.end()


# -- what spoils them


def _places(events: list[Event], kind: type, condition: Callable[..., bool] = lambda _: True) -> list[int]:
    return [place for place, event in enumerate(events) if isinstance(event, kind) and condition(event)]


def two_owners(events: list[Event], source: random.Random) -> None:
    place = source.choice(_places(events, Assigned, lambda one: bool(one.partitions)))
    event = events[place]
    assert isinstance(event, Assigned)
    events.insert(place + 1, event._replace(member="member-9"))


def _acknowledged(events: list[Event], since: float) -> list[tuple[float, float, int, int]]:
    """(begin, end, partition, offset) of commits that were acknowledged before `since`."""
    begun = {event.commit: event for event in events if isinstance(event, Commit)}
    return [
        (begun[event.commit].t, event.t, *begun[event.commit].offsets[0])
        for event in events
        if isinstance(event, CommitOk) and event.t < since
    ]


def fetch_goes_back(events: list[Event], source: random.Random) -> None:
    """An offset that a later, acknowledged commit has replaced."""
    for place in reversed(_places(events, OffsetsFetched, lambda one: one.reader == "observer")):
        event = events[place]
        assert isinstance(event, OffsetsFetched)
        before = _acknowledged(events, event.since)
        failed = {number for one in events if isinstance(one, CommitUnknown) for number in [one.commit]}
        unsure = {
            one.offsets[0] for one in events if isinstance(one, Commit) and one.commit in failed
        }  # may come true again
        for _, end, where, offset in before:
            newer = [one for one in before if one[2] == where and one[0] > end and one[3] > offset]
            same = [one for one in before if one[2:] == (where, offset) and one[1] > end]
            if newer and not same and (where, offset) not in unsure:
                events[place] = event._replace(
                    offsets=[(number, offset if number == where else one) for number, one in event.offsets]
                )
                return
    raise AssertionError("no such fetch")


def fetch_of_nothing(events: list[Event], source: random.Random) -> None:
    """The new coordinator does not know what was committed."""
    event = events[-2]
    assert isinstance(event, OffsetsFetched)
    events[-2] = event._replace(offsets=[(number, -1) for number, _ in event.offsets])


def commit_goes_back(events: list[Event], source: random.Random) -> None:
    last: dict[tuple[str, int, int], int] = {}
    for place in _places(events, Commit):
        event = events[place]
        assert isinstance(event, Commit)
        where, offset = event.offsets[0]
        if last.get((event.member, event.generation, where), 0) > 0:
            events[place] = event._replace(offsets=[(where, 0)])
            return
        last[event.member, event.generation, where] = offset
    raise AssertionError("no such commit")


def fetch_of_a_phantom(events: list[Event], source: random.Random) -> None:
    event = events[-2]
    assert isinstance(event, OffsetsFetched)
    events[-2] = event._replace(offsets=[(number, 10_000) for number, _ in event.offsets])


def a_zombie_commits(events: list[Event], source: random.Random) -> None:
    place = source.choice(_places(events, CommitUnknown, lambda one: one.error == "ILLEGAL_GENERATION"))
    event = events[place]
    assert isinstance(event, CommitUnknown)
    events[place] = CommitOk(event.t, event.commit)


def _last_read(events: list[Event], where: int) -> int:
    return max(_places(events, Read, lambda one: one.partition == where), default=-1)


def _is_first_of_tenure(events: list[Event], member: str, where: int) -> bool:
    told = _places(events, Assigned, lambda one: one.member == member)[-1]
    return not _places(events[told:], Read, lambda one: one.reader == member and one.partition == where)


def commit_before_reading(events: list[Event], source: random.Random) -> None:
    for place in _places(events, Commit):
        event = events[place]
        assert isinstance(event, Commit)
        where, offset = event.offsets[0]
        read = _last_read(events[:place], where)
        if read >= 0 and events[read].records[-1][0] == offset - 1:  # type: ignore[union-attr]
            events.insert(place, events.pop(read))
            return
    raise AssertionError("no such commit")


def begin_too_late(events: list[Event], source: random.Random) -> None:
    """A member begins after the committed offset; a dead one had read what is between, so nobody never read it."""
    for place in _places(events, Read, lambda one: one.kind is ReaderKind.MEMBER and len(one.records) > 1):
        event = events[place]
        assert isinstance(event, Read)
        if _is_first_of_tenure(events[:place], event.reader, event.partition):
            events[place] = event._replace(records=event.records[1:])
            return
    raise AssertionError("no such read")


def outcome_of_nothing(events: list[Event], source: random.Random) -> None:
    events.insert(-1, CommitOk(1, 10_000))


GROUP_SPOILS: list[tuple[Spoil, Kind]] = [
    (two_owners, Kind.TWO_OWNERS),
    (fetch_goes_back, Kind.COMMIT_WENT_BACK),
    (fetch_of_nothing, Kind.COMMIT_WENT_BACK),
    (commit_goes_back, Kind.COMMIT_WENT_BACK),
    (fetch_of_a_phantom, Kind.COMMIT_PHANTOM),
    (a_zombie_commits, Kind.COMMIT_STALE),
    (commit_before_reading, Kind.GROUP_SKIPPED),
    (begin_too_late, Kind.GROUP_SKIPPED),
    (outcome_of_nothing, Kind.INCOMPLETE),
]
