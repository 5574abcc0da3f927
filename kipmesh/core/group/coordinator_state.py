"""The state of a coordinator: the groups that live, what is written, and what the present step asks for.

Records change the table when they are committed, in the order of the log, and nothing else does. What must see the
outcome of a group's writes before it decides (deleting, expiring, joining a group that is being deleted) is put off
until none is under way.

Invariants: every request is answered once; a write's outcome is told to who asked for it once, and its records reach
the table once, or never if they were not appended; a timer has one deadline at most, the last that was set.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import ClassicGroup
from kipmesh.core.group.records import Record
from kipmesh.core.group.table import GroupTable
from kipmesh.core.group.types import Answer, Decision, Instant, Settings, Write, write_error

Outcome = Callable[[ErrorCode, Instant], None]
"""Told NONE when the write is committed, else what went wrong as members are told it."""


TimerName = tuple[str, ...]
"""Kind (`rebalances`), group, and the member if it is about one."""


class _Pending(NamedTuple):
    write: Write
    outcome: Outcome | None


class Timers:
    """Deadlines by name, in ms of a clock that never goes back; the driver says what time it is."""

    def __init__(self) -> None:
        self._deadlines: dict[TimerName, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, TimerName]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, name: TimerName, deadline_ms: int) -> None:
        """Let `name` be due at `deadline_ms`, and no more when it was before."""
        self._count += 1
        self._deadlines[name] = (deadline_ms, self._count)
        heapq.heappush(self._heap, (deadline_ms, self._count, name))
        if len(self._heap) > 2 * len(self._deadlines) + 64:  # heartbeats leave their old deadlines behind
            self._heap = [(when, count, name) for name, (when, count) in self._deadlines.items()]
            heapq.heapify(self._heap)

    def cancel(self, name: TimerName) -> None:
        """`name` is not due any more."""
        self._deadlines.pop(name, None)

    def next_deadline_ms(self) -> int | None:
        """When the next name is due."""
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> TimerName | None:
        """A name that is due, which is then forgotten; the earliest first."""
        when = self.next_deadline_ms()
        if when is None or when > now_ms:
            return None
        name = heapq.heappop(self._heap)[2]
        del self._deadlines[name]
        return name


class CoordinatorState:
    """Shared by the parts of one coordinator."""

    def __init__(self, settings: Settings, table: GroupTable) -> None:
        self.settings = settings
        self.table = table
        self.live: dict[str, ClassicGroup] = {}
        """Groups that were asked about since the load, and all that have members."""
        self.timers = Timers()
        self.deleting: set[str] = set()
        """Groups whose tombstones are on their way."""
        self.is_closed = False
        """This broker is not the coordinator any more: requests are answered NOT_COORDINATOR."""
        self._writes: list[Write] = []
        self._answers: list[Answer] = []
        self._pending: dict[int, _Pending] = {}
        self._in_flight: Counter[str] = Counter()
        self._put_off: dict[str, list[Callable[[Instant], None]]] = {}
        self._last_write = 0

    # --- groups ----------------------------------------------------------------------------------------------------

    def group(self, group_id: str) -> ClassicGroup | None:
        """The group, alive; None when there is none of that name."""
        group = self.live.get(group_id)
        if group is None and group_id in self.table:
            value = self.table.groups.get(group_id)
            group = ClassicGroup(group_id, -1) if value is None else ClassicGroup.from_record(group_id, value)
            self.live[group_id] = group
        return group

    def forget_if_unused(self, group_id: str) -> None:
        """Let go of a group that is empty and that no record speaks of."""
        group = self.live.get(group_id)
        if group is not None and group.is_empty and group_id not in self.table:
            del self.live[group_id]

    # --- what the step asks for ------------------------------------------------------------------------------------

    def answer(self, request_id: int, response: Any) -> None:
        """The request is over."""
        self._answers.append(Answer(request_id, response))

    def write(self, group_id: str, records: Sequence[Record], outcome: Outcome | None = None) -> None:
        """Append these; `outcome` is told how that went."""
        self._last_write += 1
        write = Write(self._last_write, group_id, tuple(records))
        self._pending[write.id] = _Pending(write, outcome)
        self._in_flight[group_id] += 1
        self._writes.append(write)

    def take(self) -> Decision:
        """What the step that ends here asks for."""
        decision = Decision(self._writes, self._answers)
        self._writes, self._answers = [], []
        return decision

    # --- outcomes --------------------------------------------------------------------------------------------------

    def is_busy(self, group_id: str) -> bool:
        """Whether records of the group are under way."""
        return self._in_flight[group_id] > 0

    def when_quiet(self, group_id: str, work: Callable[[Instant], None], now: Instant) -> None:
        """Do `work` once no record of the group is under way: now, or in a later step."""
        if self.is_busy(group_id):
            self._put_off.setdefault(group_id, []).append(work)
        else:
            work(now)

    def committed(self, write_id: int, now: Instant) -> None:
        """The write is below the high watermark; writes are reported in their order."""
        pending = self._pending.pop(write_id)
        for record in pending.write.records:
            self.table.replay(record)
        if pending.outcome is not None:
            pending.outcome(ErrorCode.NONE, now)
        self._landed(pending.write.group_id, now)

    def failed(self, write_id: int, code: ErrorCode, now: Instant, *, may_commit: bool = False) -> None:
        """The write was refused; or, with `may_commit`, it was appended and takes too long, and is reported again."""
        pending = self._pending.pop(write_id)
        if may_commit:
            self._pending[write_id] = pending._replace(outcome=None)
        if pending.outcome is not None:
            pending.outcome(write_error(code), now)
        if not may_commit:
            self._landed(pending.write.group_id, now)

    def _landed(self, group_id: str, now: Instant) -> None:
        self._in_flight[group_id] -= 1
        if self._in_flight[group_id]:
            return
        del self._in_flight[group_id]
        work = self._put_off.pop(group_id, [])
        for place, one in enumerate(work):
            if self.is_busy(group_id):  # the one before wrote: the rest waits for that
                self._put_off.setdefault(group_id, []).extend(work[place:])
                return
            one(now)

    def abandon(self, code: ErrorCode, now: Instant) -> None:
        """The coordinator ends: whoever waits for a write is told; what was put off is done and finds the end."""
        self.is_closed = True
        for write_id in list(self._pending):
            pending = self._pending.pop(write_id)
            if pending.outcome is not None:
                pending.outcome(code, now)
        self._in_flight.clear()
        work, self._put_off = self._put_off, {}
        for put_off in work.values():
            for one in put_off:
                one(now)
