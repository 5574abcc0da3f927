"""State of a coordinator: live groups, pending writes, timers, and the result of the current event.

Records change the table when they are committed, in log order. Work that needs the outcome of a group's writes
(deletion, expiry, joining a group that is being deleted) is deferred until the group has no pending write.

Invariants: every request gets one response; a write's outcome is reported once, and its records reach the table once,
or never if they were not appended; a timer has at most one deadline, the last one set.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import ClassicGroup
from kipmesh.core.group.records import Record
from kipmesh.core.group.table import GroupTable
from kipmesh.core.group.types import Completion, Decision, Instant, Settings, Write, write_error

Outcome = Callable[[ErrorCode, Instant], None]
"""Called with NONE when the write is committed, else with the error for members."""


TimerName = tuple[str, ...]
"""Timer kind (see `rebalances`), group id, and the member id for a member's timer."""


class _Pending(NamedTuple):
    write: Write
    outcome: Outcome | None


class Timers:
    """Deadlines by timer name, in monotonic ms."""

    def __init__(self) -> None:
        self._deadlines: dict[TimerName, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, TimerName]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, name: TimerName, deadline_ms: int) -> None:
        """Set the deadline of `name`, replacing an earlier one."""
        self._count += 1
        self._deadlines[name] = (deadline_ms, self._count)
        heapq.heappush(self._heap, (deadline_ms, self._count, name))
        if len(self._heap) > 2 * len(self._deadlines) + 64:  # every heartbeat leaves an outdated entry
            self._heap = [(when, count, name) for name, (when, count) in self._deadlines.items()]
            heapq.heapify(self._heap)

    def cancel(self, name: TimerName) -> None:
        """Remove the deadline of `name`, if any."""
        self._deadlines.pop(name, None)

    def next_deadline_ms(self) -> int | None:
        """Return the earliest deadline in monotonic ms, or None without timers."""
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> TimerName | None:
        """Remove and return the name of the timer with the earliest deadline, or None if none is due."""
        when = self.next_deadline_ms()
        if when is None or when > now_ms:
            return None
        name = heapq.heappop(self._heap)[2]
        del self._deadlines[name]
        return name


class CoordinatorState:
    """State shared by the parts of one coordinator."""

    def __init__(self, settings: Settings, table: GroupTable) -> None:
        self.settings = settings
        self.table = table
        self.live: dict[str, ClassicGroup] = {}
        """Groups that were used since the load, and all that have members."""
        self.timers = Timers()
        self.deleting: set[str] = set()
        """Groups whose tombstones are being written."""
        self.is_closed = False
        """Whether this broker is no longer the coordinator; requests then get NOT_COORDINATOR."""
        self._writes: list[Write] = []
        self._completions: list[Completion] = []
        self._pending: dict[int, _Pending] = {}
        self._in_flight: Counter[str] = Counter()
        self._deferred: dict[str, list[Callable[[Instant], None]]] = {}
        self._last_write = 0

    # --- groups ----------------------------------------------------------------------------------------------------

    def group(self, group_id: str) -> ClassicGroup | None:
        """Return the live group, created from the table if necessary, or None if the group does not exist."""
        group = self.live.get(group_id)
        if group is None and group_id in self.table:
            value = self.table.groups.get(group_id)
            group = ClassicGroup(group_id, -1) if value is None else ClassicGroup.from_record(group_id, value)
            self.live[group_id] = group
        return group

    def forget_if_unused(self, group_id: str) -> None:
        """Drop a live group that is empty and not in the table. Ignores other groups."""
        group = self.live.get(group_id)
        if group is not None and group.is_empty and group_id not in self.table:
            del self.live[group_id]

    # --- result of the event ---------------------------------------------------------------------------------------

    def respond(self, request_id: int, response: Any) -> None:
        """Add the response to this request to the event's result."""
        self._completions.append(Completion(request_id, response))

    def write(self, group_id: str, records: Sequence[Record], outcome: Outcome | None = None) -> None:
        """Add a write to the event's result, which the driver appends as one batch. Calls `outcome` when the driver
        reports the result of the write."""
        self._last_write += 1
        write = Write(self._last_write, group_id, tuple(records))
        self._pending[write.id] = _Pending(write, outcome)
        self._in_flight[group_id] += 1
        self._writes.append(write)

    def take(self) -> Decision:
        """Return the writes and responses of the current event, and start the next event without any."""
        decision = Decision(self._writes, self._completions)
        self._writes, self._completions = [], []
        return decision

    # --- outcomes --------------------------------------------------------------------------------------------------

    def is_busy(self, group_id: str) -> bool:
        """Return whether the group has writes that are neither committed nor failed."""
        return self._in_flight[group_id] > 0

    def when_idle(self, group_id: str, work: Callable[[Instant], None], now: Instant) -> None:
        """Call `work` once the group has no pending write: immediately or in a later event."""
        if self.is_busy(group_id):
            self._deferred.setdefault(group_id, []).append(work)
        else:
            work(now)

    def committed(self, write_id: int, now: Instant) -> None:
        """Handle a write that is below the high watermark: apply its records to the table and call its outcome. Writes
        are reported in order. Raises KeyError for a write that is not pending."""
        pending = self._pending.pop(write_id)
        for record in pending.write.records:
            self.table.replay(record)
        if pending.outcome is not None:
            pending.outcome(ErrorCode.NONE, now)
        self._write_finished(pending.write.group_id, now)

    def failed(self, write_id: int, code: ErrorCode, now: Instant, *, may_commit: bool = False) -> None:
        """Handle a failed write: call its outcome with `write_error(code)`. Raises KeyError for a write that is not
        pending.

        With `may_commit` the write timed out after its append; `committed` or `failed` must report it again.
        """
        pending = self._pending.pop(write_id)
        if may_commit:
            self._pending[write_id] = pending._replace(outcome=None)
        if pending.outcome is not None:
            pending.outcome(write_error(code), now)
        if not may_commit:
            self._write_finished(pending.write.group_id, now)

    def _write_finished(self, group_id: str, now: Instant) -> None:
        self._in_flight[group_id] -= 1
        if self._in_flight[group_id]:
            return
        del self._in_flight[group_id]
        work = self._deferred.pop(group_id, [])
        for place, one in enumerate(work):
            if self.is_busy(group_id):  # earlier work wrote records: defer the rest
                self._deferred.setdefault(group_id, []).extend(work[place:])
                return
            one(now)

    def abandon(self, code: ErrorCode, now: Instant) -> None:
        """Close the coordinator: call the outcomes of all pending writes with `code`, then run deferred work, which
        observes `is_closed`."""
        self.is_closed = True
        for write_id in list(self._pending):
            pending = self._pending.pop(write_id)
            if pending.outcome is not None:
                pending.outcome(code, now)
        self._in_flight.clear()
        work, self._deferred = self._deferred, {}
        for one in chain.from_iterable(work.values()):
            one(now)
