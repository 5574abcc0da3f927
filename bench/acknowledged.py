"""Load that goes on all the time: when the cluster acknowledged each thing, and the longest time without any."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from types import TracebackType
from typing import Self

from kipmesh.client.sync import Portal


class Acknowledged:
    """`with` a subclass of this: it works until the end of the block, by several tasks on the loop of `portal`."""

    def __init__(self, portal: Portal, tasks: int, wait_s: float) -> None:
        """`wait_s` is how long `more` waits if it is not told."""
        self.times: list[float] = []
        """When each was acknowledged, by `time.monotonic`, in order."""
        self._portal = portal
        self._count = tasks
        self._wait_s = wait_s
        self._ends = False
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived = asyncio.Event()

    def __enter__(self) -> Self:
        self._portal.call(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._end(at_once=error is not None))

    def more(self, count: int, timeout_s: float | None = None) -> None:
        """Return when so many more are acknowledged than now; TimeoutError."""
        self._portal.call(self._more(count, self._wait_s if timeout_s is None else timeout_s))

    def gap_s(self, since: float) -> float:
        """The longest time without an acknowledgement that ended after `since` (as `time.monotonic` counts)."""
        return max([after - before for before, after in pairwise(self.times) if after >= since], default=0.0)

    async def _work(self, number: int) -> None:
        """One of the tasks, by its number from 0: does things until `_ends`, and tells of each by `_acknowledge`."""
        raise NotImplementedError

    def _acknowledge(self) -> None:
        self.times.append(time.monotonic())
        self._arrived.set()

    async def _begin(self) -> None:
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(self._count)]

    async def _end(self, *, at_once: bool) -> None:
        self._ends = True
        if at_once:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures and not at_once:
            raise failures[0]

    async def _more(self, count: int, timeout_s: float) -> None:
        wanted = len(self.times) + count
        async with asyncio.timeout(timeout_s):
            while len(self.times) < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                self._arrived.clear()
                await self._arrived.wait()
