"""Checks a recorded history for anomalies of a replicated log. Pure; one pass, then checks of the final state.

Each check reports under its name in `Kind`; docs/chaos.md defines them. The checks rely on topics that are neither
compacted nor transactional and whose retention deletes nothing during a run.

A duplicate record after a lost response is an anomaly for idempotent producers. For other producers it is at-least-once
delivery, which is counted. Progress limits do not apply in a halting window, which lasts from the start of a fault with
`halts` until `settle_s` after its end. A check that lacks its events reports `INCOMPLETE`. Groups: see
`history_groups`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kipmesh_chaos import history as h
from kipmesh_chaos.history import Event, Kind, Ok, Phase, Read, ReaderKind
from kipmesh_chaos.history_groups import GroupChecker

FINDINGS_MAX = 20
"""Maximum number of reported findings per kind. Further ones are only counted."""


class Window(NamedTuple):
    """Time of a fault in seconds since the start of the run. `until` is None while the fault lasts. `settle_s` is None
    unless the fault halts progress.
    """

    since: float
    until: float | None
    settle_s: float | None

    @property
    def end(self) -> float:
        """End of the fault plus `settle_s`; infinity while the fault lasts."""
        return float("inf") if self.until is None else self.until + (self.settle_s or 0.0)


class Acknowledged(NamedTuple):
    """Time, in seconds since the start of the run, and offset of an acknowledged write."""

    t: float
    offset: int


class Delay(NamedTuple):
    """Longest time in seconds from the acknowledgement of a write, at `t`, to its read. `offset_unread` is the offset
    of the write if it was never read, else None.
    """

    delay_s: float
    t: float
    offset_unread: int | None = None


class Progress:
    """Times of acknowledgements and reads, from which write gaps and read delays follow."""

    def __init__(self) -> None:
        self._acknowledged: dict[int, list[Acknowledged]] = {}
        self._read: dict[tuple[str, int], dict[int, float]] = {}

    def acknowledged(self, partition: int, one: Acknowledged) -> None:
        """Record an acknowledged write to a partition."""
        self._acknowledged.setdefault(partition, []).append(one)

    def read(self, reader: str, partition: int, t: float, offsets: Iterable[int]) -> None:
        """Record that a consumer read these offsets at `t`. The first read of an offset counts."""
        times = self._read.setdefault((reader, partition), {})
        for offset in offsets:
            times.setdefault(offset, t)

    def write_gaps(
        self, partitions: Iterable[int], since: float, until: float, windows: Sequence[Window]
    ) -> list[tuple[float, float]]:
        """For each partition, return (longest time in s without an acknowledged write, start of that time) between
        `since` and `until`.

        Time in halting windows does not count: a gap ends there and another one begins after it.
        """
        halts = _merged([(one.since, one.end) for one in windows if one.settle_s is not None])
        found = []
        for partition in partitions:
            times = [one.t for one in self._acknowledged.get(partition, ()) if since <= one.t <= until]
            edges = [since, *times, until]
            gaps = [
                (end - begin, begin) for left, right in pairwise(edges) for begin, end in _without(left, right, halts)
            ]
            found.append(max(gaps, key=lambda gap: gap[0], default=(0.0, since)))
        return found

    def read_delays(
        self,
        consumers: Iterable[str],
        partitions: Sequence[int],
        since: float,
        windows: Sequence[Window],
        end: float,
    ) -> list[tuple[str, int, Delay]]:
        """Return (consumer, partition, longest delay) for each pair, of writes acknowledged after `since`.

        Time in halting windows does not count. An offset that was never read counts as a delay until `end`, also if it
        was acknowledged before `since`.
        """
        halts = _merged([(one.since, one.end) for one in windows if one.settle_s is not None])
        found = []
        for reader in consumers:
            for partition in partitions:
                times = self._read.get((reader, partition), {})
                longest = Delay(0.0, since)
                for one in self._acknowledged.get(partition, ()):
                    seen = times.get(one.offset)
                    if seen is None:
                        longest = Delay(end - one.t, one.t, one.offset)
                        break
                    if one.t < since:
                        continue
                    waited = max((b - a for a, b in _without(one.t, seen, halts)), default=0.0)
                    if waited > longest.delay_s:
                        longest = Delay(waited, one.t)
                found.append((reader, partition, longest))
        return found


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((since, until))
    return merged


def _without(since: float, until: float, halts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of a span outside the halting windows, which are sorted and disjoint."""
    left = []
    for begin, end in halts:
        if end <= since:
            continue
        if begin >= until:
            break
        if begin > since:
            left.append((since, begin))
        since = max(since, end)
    if since < until:
        left.append((since, until))
    return left


class Finding(NamedTuple):
    """One anomaly. `t` is the time in seconds since the start of the run at which it was detected, `partition` is -1
    for none.
    """

    kind: Kind
    t: float
    text: str
    partition: int = -1


class Figures(NamedTuple):
    """Counts of a history, and durations in seconds.

    `invoked`, `acknowledged`, `failed` and `unknown` count writes; `faults` counts injected faults.
    """

    invoked: int = 0
    acknowledged: int = 0
    failed: int = 0
    unknown: int = 0
    repeated: int = 0
    """Duplicate records in the log."""
    read: int = 0
    """Records read by all consumers together."""
    commits: int = 0
    """Acknowledged commits of group members."""
    generations: int = 0
    """Generations of consumer groups."""
    read_again: int = 0
    """Records that another group member had already read."""
    faults: int = 0
    longest_write_gap_s: float = 0.0
    longest_read_delay_s: float = 0.0


class Verdict(NamedTuple):
    """Result of a check: at most FINDINGS_MAX findings of each kind, the number of all findings by kind,
    and figures.
    """

    findings: tuple[Finding, ...]
    counts: dict[str, int]
    figures: Figures

    @property
    def is_clean(self) -> bool:
        """Whether there are no findings."""
        return not self.findings


class _Operation(NamedTuple):
    t: float
    producer: str
    partition: int
    value: str
    floor: int
    """Highest acknowledged offset of the partition when the operation began; -1 for none."""


@dataclass(slots=True)
class _Replica:
    """Contents of one replica of one partition, from its dumps."""

    log_start: int
    log_end: int
    values: dict[int, str] = field(default_factory=dict)
    batches: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def batches_within(self, start: int, end: int) -> dict[int, tuple[int, int, int]]:
        """Return the batches that end at or above `start` and begin below `end`: (last offset, CRC, epoch) by base
        offset.
        """
        return {base: batch for base, batch in self.batches.items() if batch[0] >= start and base < end}


class Checker:
    """Checks a history event by event: call `add` for each event in order, then `verdict` once."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self._figures: Counter[str] = Counter()
        self._begin: h.Begin | None = None
        self._phases: dict[Phase, float] = {}
        self._operations: dict[int, _Operation] = {}
        self._outcomes: set[int] = set()
        self._values: dict[str, int] = {}
        self._failed: dict[str, str] = {}
        self._acknowledged: list[tuple[int, Ok]] = []
        self._highest_acknowledged: dict[int, int] = {}
        self._first_seen: dict[tuple[int, int], tuple[str, str]] = {}
        self._final: dict[int, dict[int, str]] = {}
        self._ends: dict[int, h.End] = {}
        self._replicas: dict[tuple[int, int], _Replica] = {}
        self._positions: dict[tuple[str, int, int], int] = {}
        self._watermarks: dict[tuple[str, int, int, int], int] = {}

        self._windows: dict[int, Window] = {}
        self._progress = Progress()
        self._groups = GroupChecker(self._found)
        self._last_t = 0.0

    def add(self, event: Event) -> None:
        """Process the next event and check what it determines. Findings are kept for `verdict`."""
        self._last_t = max(self._last_t, event.t)
        match event:
            case h.Invoke():
                self._invoked(event)
            case Ok():
                self._ok(event)
            case h.Failed() | h.Unknown():
                self._not_ok(event)
            case h.Assigned():
                self._assigned(event)
            case h.Commit():
                self._groups.commit(event)
            case h.CommitOk() | h.CommitUnknown():
                self._groups.outcome(event)
            case h.OffsetsFetched():
                self._groups.fetched(event)
            case Read():
                self._read(event)
            case h.Begin():
                self._begin = event
            case h.PhaseBegan():
                self._phases.setdefault(event.phase, event.t)
            case h.End():
                self._ends[event.partition] = event
            case h.Dump():
                self._dumped(event)
            case h.FaultBegan():
                self._figures["faults"] += 1

                self._windows[event.fault] = Window(event.t, None, event.settle_s if event.halts else None)
            case h.FaultEnded():
                window = self._windows.get(event.fault)
                if window is not None:
                    self._windows[event.fault] = window._replace(until=event.t)
            case h.NotRecovered():
                self._found(Kind.NOT_RECOVERED, event.t, event.text)

    def verdict(self) -> Verdict:
        """Check the final state and return the result of the whole check. Call once, after the last event."""
        if self._begin is None:
            self._found(Kind.INCOMPLETE, self._last_t, "the history has no event `begin`")
        if Phase.END not in self._phases:
            self._found(Kind.INCOMPLETE, self._last_t, "the run did not complete: the history has no phase `end`")
        for partition in range(self._begin.partitions if self._begin is not None else 0):
            self._check_partition(partition)
        self._check_lost()
        if self._begin is not None and self._begin.exactly_once:
            for partition, values in self._final.items():
                self._check_once_in_order(partition, values)
        gaps = self._check_progress()
        figures = Figures(
            **{
                name: self._figures[name] for name in ("invoked", "acknowledged", "failed", "unknown", "read", "faults")
            },
            commits=self._groups.commits,
            generations=self._groups.generations,
            read_again=self._groups.read_again,
            repeated=sum(len(values) - len(set(values.values())) for values in self._final.values()),
            longest_write_gap_s=round(gaps[0], 3),
            longest_read_delay_s=round(gaps[1], 3),
        )
        self.findings.sort(key=lambda one: one.t)
        return Verdict(tuple(self.findings), dict(self.counts), figures)

    # -- producers

    def _invoked(self, event: h.Invoke) -> None:
        self._figures["invoked"] += 1
        if event.operation in self._operations or event.value in self._values:
            self._found(Kind.INCOMPLETE, event.t, f"operation {event.operation} or its value occurs twice")
            return
        floor = self._highest_acknowledged.get(event.partition, -1)
        self._operations[event.operation] = _Operation(event.t, event.producer, event.partition, event.value, floor)
        self._values[event.value] = event.operation

    def _outcome(self, event: Ok | h.Failed | h.Unknown) -> _Operation | None:
        operation = self._operations.get(event.operation)
        if operation is None or event.operation in self._outcomes:
            text = "has an outcome but no `invoke`" if operation is None else "has two outcomes"
            self._found(Kind.INCOMPLETE, event.t, f"operation {event.operation} {text}")
            return None
        self._outcomes.add(event.operation)
        return operation

    def _ok(self, event: Ok) -> None:
        operation = self._outcome(event)
        if operation is None:
            return
        self._figures["acknowledged"] += 1
        where = operation.partition
        if event.offset <= operation.floor:
            text = (
                f"write {operation.value!r} of {operation.producer} was acknowledged at offset {event.offset}, but "
                f"offset {operation.floor} had been acknowledged before the write began"
            )
            self._found(Kind.REORDERED, event.t, text, where)
        self._highest_acknowledged[where] = max(self._highest_acknowledged.get(where, -1), event.offset)
        self._acknowledged.append((where, event))
        self._progress.acknowledged(where, Acknowledged(event.t, event.offset))
        self._check_value(where, event.offset, operation.value, f"acknowledged to {operation.producer}", event.t)

    def _not_ok(self, event: h.Failed | h.Unknown) -> None:
        operation = self._outcome(event)
        if operation is None:
            return
        self._figures["failed" if isinstance(event, h.Failed) else "unknown"] += 1
        if isinstance(event, h.Failed):
            self._failed[operation.value] = event.error

    # -- readers

    def _read(self, event: Read) -> None:
        source = f"read by {event.reader}" + (f" from replica {event.replica}" if event.replica >= 0 else "")
        for offset, value in event.records:
            self._check_written(event.partition, offset, value, source, event.t)
            self._check_value(event.partition, offset, value, source, event.t)
        if event.kind is ReaderKind.FINAL:
            final = self._final.setdefault(event.partition, {})
            final.update((offset, value) for offset, value in event.records)
        if event.kind is not ReaderKind.REPLICA:
            self._check_order(event)
        if event.kind is ReaderKind.MEMBER:
            self._groups.read(event)
        if event.kind in (ReaderKind.CONSUMER, ReaderKind.MEMBER):
            self._figures["read"] += len(event.records)
            reader = self._groups.members.get(event.reader) or event.reader
            self._progress.read(reader, event.partition, event.t, [offset for offset, _ in event.records])
        self._check_watermark(event)

    def _assigned(self, event: h.Assigned) -> None:
        self._groups.assigned(event)
        for partition in event.added:  # the member restarts from the committed offset
            self._positions.pop((event.member, partition, 0), None)
            self._watermarks.pop((event.member, partition, -1, 0), None)

    def _check_order(self, event: Read) -> None:
        key = (event.reader, event.partition, event.session)
        for offset, _value in event.records:
            expected = self._positions.get(key)
            if expected is not None and offset < expected:
                text = f"{event.reader} read offset {offset} after offset {expected - 1}"
                self._found(Kind.WENT_BACK, event.t, text, event.partition)
            elif expected is not None and offset > expected:
                text = f"{event.reader} read offset {offset}, but not offsets {expected} to {offset - 1}"
                self._found(Kind.SKIPPED, event.t, text, event.partition)
            self._positions[key] = offset + 1

    def _check_watermark(self, event: Read) -> None:
        if event.high_watermark < 0:
            return
        key = (event.reader, event.partition, event.leader_epoch, event.session)
        last = self._watermarks.get(key, -1)
        if event.high_watermark < last:
            within = f" within leader epoch {event.leader_epoch}" if event.leader_epoch >= 0 else ""
            text = f"{event.reader} received high watermark {last}, then {event.high_watermark}{within}"
            self._found(Kind.WATERMARK, event.t, text, event.partition)
        self._watermarks[key] = max(last, event.high_watermark)
        above = [offset for offset, _ in event.records if offset >= event.high_watermark]
        if above:
            text = f"{event.reader} read offset {above[0]} while the high watermark was {event.high_watermark}"
            self._found(Kind.ABOVE_WATERMARK, event.t, text, event.partition)

    def _check_written(self, partition: int, offset: int, value: str, source: str, t: float) -> None:
        operation = self._operations.get(self._values.get(value, -1))
        if operation is None:
            text = f"offset {offset} has {value!r} ({source}), which no producer wrote"
            self._found(Kind.PHANTOM, t, text, partition)
        elif operation.partition != partition:
            text = f"offset {offset} has {value!r} ({source}), which was written to partition {operation.partition}"
            self._found(Kind.PHANTOM, t, text, partition)
        elif value in self._failed:
            text = f"offset {offset} has {value!r} ({source}), whose write had failed: {self._failed[value]}"
            self._found(Kind.PHANTOM, t, text, partition)

    def _check_value(self, partition: int, offset: int, value: str, source: str, t: float) -> None:
        known = self._first_seen.setdefault((partition, offset), (value, source))
        if known[0] != value:
            text = f"offset {offset} has {known[0]!r} ({known[1]}) and {value!r} ({source})"
            self._found(Kind.TWO_VALUES, t, text, partition)

    # -- at the end

    def _dumped(self, event: h.Dump) -> None:
        key = (event.partition, event.replica)
        replica = self._replicas.setdefault(key, _Replica(event.log_start, event.log_end))
        replica.values.update((offset, value) for offset, value in event.records)
        replica.batches.update((base, (last, crc, epoch)) for base, last, crc, epoch in event.batches)

    def _check_partition(self, partition: int) -> None:
        end = self._ends.get(partition)
        if end is None or (partition not in self._final and end.high_watermark > 0):
            text = f"partition {partition} has no final read: lost writes cannot be detected"
            self._found(Kind.INCOMPLETE, self._last_t, text, partition)
            return
        missing = set(range(end.high_watermark)) - self._final.get(partition, {}).keys()
        if missing:
            text = f"the final read has no offset {min(missing)} ({len(missing)} of {end.high_watermark} missing)"
            self._found(Kind.SKIPPED, end.t, text, partition)
        dumped = {replica: one for (where, replica), one in self._replicas.items() if where == partition}
        for replica in end.isr:
            if replica not in dumped:
                text = f"no log of replica {replica} of partition {partition}"
                self._found(Kind.INCOMPLETE, self._last_t, text, partition)
        for replica, one in dumped.items():
            if replica in end.isr:
                self._check_replica(end, replica, one)
        self._check_batches(end, {replica: one for replica, one in dumped.items() if replica in end.isr})

    def _check_once_in_order(self, partition: int, values: dict[int, str]) -> None:
        """Check a partition's records (`values` by offset) for duplicates and for records of one producer that are out
        of order.
        """
        first: dict[str, int] = {}
        last: dict[str, tuple[int, int]] = {}
        for offset in sorted(values):
            value = values[offset]
            operation = self._values.get(value)
            if operation is None:
                continue  # reported as a phantom record
            if value in first:
                text = f"{value!r} is at offset {first[value]} and again at {offset}"
                self._found(Kind.DUPLICATE, self._last_t, text, partition)
                continue
            first[value] = offset
            producer = self._operations[operation].producer
            before = last.get(producer)
            if before is not None and operation < before[0]:
                text = (
                    f"{producer}'s operation {operation} is at offset {offset}, its later operation {before[0]} at "
                    f"{before[1]}"
                )
                self._found(Kind.REORDERED, self._last_t, text, partition)
            else:
                last[producer] = (operation, offset)

    def _check_replica(self, end: h.End, replica: int, one: _Replica) -> None:
        source = f"in the log of replica {replica}"
        missing = [offset for offset in range(one.log_start, end.high_watermark) if offset not in one.values]
        if missing:
            text = (
                f"in-sync replica {replica} lacks offset {missing[0]} ({len(missing)} missing below the high "
                f"watermark {end.high_watermark}; its log ends at {one.log_end})"
            )
            self._found(Kind.REPLICAS, self._last_t, text, end.partition)
        for offset, value in one.values.items():
            if offset < end.high_watermark:
                self._check_written(end.partition, offset, value, source, self._last_t)
                known = self._first_seen.get((end.partition, offset))
                if known is not None and known[0] != value:
                    text = f"replica {replica} has {value!r} at offset {offset}, {known[0]!r} was {known[1]}"
                    self._found(Kind.REPLICAS, self._last_t, text, end.partition)

    def _check_batches(self, end: h.End, replicas: dict[int, _Replica]) -> None:
        """Check that the batches of all in-sync replicas below the high watermark have equal offsets, CRCs and leader
        epochs.
        """
        if len(replicas) < 2:
            return
        first, *others = sorted(replicas)
        start = max(one.log_start for one in replicas.values())
        wanted = replicas[first].batches_within(start, end.high_watermark)
        for other in others:
            found = replicas[other].batches_within(start, end.high_watermark)
            if found == wanted:
                continue
            base = min(base for base in wanted.keys() | found.keys() if wanted.get(base) != found.get(base))
            text = (
                f"replicas {first} and {other} have different batches at offset {base} (last offset, CRC, leader "
                f"epoch): {wanted.get(base)} and {found.get(base)}"
            )
            self._found(Kind.REPLICAS, self._last_t, text, end.partition)

    def _check_lost(self) -> None:
        for partition, ok in self._acknowledged:
            final = self._final.get(partition)
            if final is None:
                continue  # reported as incomplete
            value = self._operations[ok.operation].value
            found = final.get(ok.offset)
            if found != value:
                has = "has no record" if found is None else f"has {found!r}"
                text = f"{value!r} was acknowledged at offset {ok.offset}, where the final read {has}"
                self._found(Kind.LOST, ok.t, text, partition)

    def _check_progress(self) -> tuple[float, float]:
        """Check the progress limits; return the longest write gap and read delay in seconds, both 0 if the history
        lacks the begin event or a phase.
        """
        begin, since, until = self._begin, self._phases.get(Phase.FAULTS), self._phases.get(Phase.RECOVERY)
        if begin is None or since is None or until is None:
            return 0.0, 0.0
        limits: h.Limits = begin.limits
        windows = list(self._windows.values())
        gaps = self._progress.write_gaps(range(begin.partitions), since, until, windows)
        for partition, (gap_s, at) in enumerate(gaps):
            if limits.write_gap_s is not None and gap_s > limits.write_gap_s:
                text = f"no acknowledged write for {gap_s:.2f} s (limit {limits.write_gap_s:g} s) from {at:.2f} s on"
                self._found(Kind.NO_PROGRESS, at, text, partition)
        delays = self._progress.read_delays(begin.consumers, range(begin.partitions), since, windows, self._last_t)
        for reader, partition, delay in delays:
            if delay.offset_unread is not None:
                text = f"{reader} never read offset {delay.offset_unread}, which was acknowledged at {delay.t:.2f} s"
                self._found(Kind.NO_PROGRESS, delay.t, text, partition)
            elif limits.read_delay_s is not None and delay.delay_s > limits.read_delay_s:
                text = (
                    f"{reader} read a record acknowledged at {delay.t:.2f} s with a delay of {delay.delay_s:.2f} s "
                    f"(limit {limits.read_delay_s:g} s)"
                )
                self._found(Kind.NO_PROGRESS, delay.t, text, partition)
        return max((gap for gap, _ in gaps), default=0.0), max((one.delay_s for _, _, one in delays), default=0.0)

    def _found(self, kind: Kind, t: float, text: str, partition: int = -1) -> None:
        self.counts[kind.value] += 1
        if self.counts[kind.value] <= FINDINGS_MAX:
            self.findings.append(Finding(kind, t, text, partition))


def check(events: Iterable[Event]) -> Verdict:
    """Check a whole history, in the order of its events. A history without the begin event or the end phase gets the
    finding INCOMPLETE.
    """
    checker = Checker()
    for event in events:
        checker.add(event)
    return checker.verdict()
