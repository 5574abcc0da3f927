"""An event loop in virtual time. Each simulated process has one; the engine runs all of them on one thread.

Production coroutines run on it unchanged. A paused process (SIGSTOP) runs nothing; its events are queued. A dead
process never runs again: its tasks are cancelled, and their cleanup has no effect outside of the process.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.engine import Engine

Work = Callable[[], object]
_CLEANUP_STEPS_MAX = 2000


class SimLoop(asyncio.AbstractEventLoop):
    """An asyncio event loop for one process in virtual time, without sockets, threads or signals.

    Args:
        after_run: called whenever the process has run.
        rate: speed of the process's clock.
    """

    def __init__(self, engine: Engine, after_run: Work, rate: float = 1.0) -> None:
        self.engine = engine
        self.rate = rate
        self.is_dead = False
        self.is_paused = False
        self.problem: BaseException | None = None
        """Exception of a callback, a defect of the simulator or of production code."""
        self._after_run = after_run
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._prune_at = 64
        self._is_running = False
        self._is_due = False

    # -- called by asyncio

    def time(self) -> float:
        """Return the process's monotonic clock in seconds."""
        return self.engine.now_ms * self.rate / 1000

    def now_ms(self) -> int:
        """Return the process's monotonic clock in whole milliseconds."""
        return int(self.time() * 1000)

    def get_debug(self) -> bool:
        """Return False: there is no debug mode."""
        return False

    def is_running(self) -> bool:
        """Return whether a callback is running."""
        return self._is_running

    def is_closed(self) -> bool:
        """Return whether the process is dead."""
        return self.is_dead

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback to run after those already scheduled. Return its handle."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._is_running and not self._is_due:
            self._is_due = True
            self.engine.after(0, self._run_due)
        return handle

    # The only other threads close logs, and the loop waits for them.
    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback to run in `delay` seconds, measured by the process's clock. Return its handle."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback to run when `time` reaches `when`. Return its handle.

        If the process is dead, the callback never runs.
        """
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.is_dead:
            delay_ms = (when - self.time()) * 1000 / self.rate
            self.engine.after(delay_ms, lambda: self._fire(handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future attached to this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Create a task on this loop."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        if len(self._tasks) > self._prune_at:
            self._tasks = {other: None for other in self._tasks if not other.done()}
            self._prune_at = 2 * len(self._tasks) + 64
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record the exception of a callback in `problem`. Exceptions of tasks are left to their owners."""
        if "handle" in context and self.problem is None and not self.is_dead:
            self.problem = context.get("exception") or RuntimeError(context["message"])

    # -- called by the simulator

    def deliver(self, work: Work) -> None:
        """Run `work` in the process now, or when it resumes; drop it if the process is dead.

        Raises the exception of a failed callback.
        """
        if not self.is_dead:
            self._ready.append(asyncio.Handle(work, (), self))
            self._run()

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled() and not self.is_dead:
            self._ready.append(handle)
            self._run()

    def _run_due(self) -> None:
        self._is_due = False
        self._run()

    def _run(self) -> None:
        if self.is_paused or self.is_dead or self._is_running:
            return
        self._drain(None)
        if self.problem is not None:
            raise self.problem
        self._after_run()

    def _drain(self, steps: int | None) -> None:
        ready = self._ready
        self._is_running = True
        events._set_running_loop(self)
        try:
            while ready and steps != 0:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if steps is not None:
                    steps -= 1
        finally:
            events._set_running_loop(None)
            self._is_running = False

    def resume(self) -> None:
        """Resume a paused process and call `after_run` after each step. Raises the exception of a failed callback."""
        self.is_paused = False
        while self._ready and not (self.is_paused or self.is_dead or self._is_running):
            self._drain(1)
            if self.problem is not None:
                raise self.problem
            self._after_run()

    def kill(self) -> None:
        """End the process as SIGKILL does. Its tasks are cancelled with no effect outside the process. Idempotent.

        Raises RuntimeError if the process itself is running.
        """
        if self.is_dead:
            return
        self.is_dead = True
        self._ready.clear()
        if self._is_running:
            raise RuntimeError("a process cannot end itself while it runs")
        for task in self._tasks:
            if not task.done():
                task.cancel()
        self._drain(_CLEANUP_STEPS_MAX)
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if task.done() and not task.cancelled():
                task.exception()  # marks it as retrieved
        self._tasks.clear()
        self._ready.clear()
