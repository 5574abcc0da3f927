"""Virtual time: a heap of what happens when. Equal times happen in the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Scheduler:
    """Milliseconds as floats, from 0."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.steps = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, delay_ms: float, action: Action) -> None:
        """Let it happen that much later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_ms + max(0.0, delay_ms), self._count, action))

    def run_until(self, end_ms: float) -> None:
        """Let everything happen that is due by then."""
        while self._heap and self._heap[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._heap)
            self.steps += 1
            action()
        self.now_ms = end_ms
