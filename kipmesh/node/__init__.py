"""Parts that brokers and controllers share: the process (`runtime`), probes, the quorum replica, clocks and tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


def wall_ms() -> int:
    """Return the wall clock in ms since 1970, for record timestamps."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return the monotonic clock in ms, for durations and deadlines."""
    return time.monotonic_ns() // 1_000_000


@dataclass(eq=False)
class BackgroundTasks:
    """A set of tasks that nothing awaits. `on_failure` receives the exception of each task that fails."""

    on_failure: Callable[[BaseException], None]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Run `work` in a new task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_failure(error)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
