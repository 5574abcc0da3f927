"""Deadlines by name; the driver says what time it is.

Invariant: a name has one deadline at most, the last that was set.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Timers(Generic[Name]):
    """Names that are due at a time in ms of a clock that never goes back."""

    def __init__(self) -> None:
        self._deadlines: dict[Name, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, Name]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, name: Name, deadline_ms: int) -> None:
        """Let `name` be due at `deadline_ms`, and no more when it was before."""
        self._count += 1
        self._deadlines[name] = (deadline_ms, self._count)
        heapq.heappush(self._heap, (deadline_ms, self._count, name))
        if len(self._heap) > 2 * len(self._deadlines) + 64:  # heartbeats leave their old deadlines behind
            self._heap = [(when, count, name) for name, (when, count) in self._deadlines.items()]
            heapq.heapify(self._heap)

    def cancel(self, name: Name) -> None:
        """`name` is not due any more."""
        self._deadlines.pop(name, None)

    def next_deadline_ms(self) -> int | None:
        """When the next name is due."""
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> Name | None:
        """A name that is due, which is then forgotten; the earliest first."""
        when = self.next_deadline_ms()
        if when is None or when > now_ms:
            return None
        name = heapq.heappop(self._heap)[2]
        del self._deadlines[name]
        return name
