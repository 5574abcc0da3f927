"""Topics that are created all the time, by several clients: which were acknowledged, when, and under which id.

A request whose answer is lost is sent again by the client, and may then find its own topic. That one counts as
acknowledged too: the cluster said that it is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

from kipmesh.client import AdminClient
from kipmesh.client.sync import Portal
from kipmesh.client.types import NewTopic
from kipmesh.core.errors import ErrorCode, KafkaError

CREATORS = 3
PAUSE_S = 0.01
WAIT_S = 30.0


class Creations:
    """`with Creations(...)`: creates from then on, until the end of the block, on the loop of `portal`."""

    def __init__(
        self, portal: Portal, brokers: Sequence[str], prefix: str, *, creators: int = CREATORS, replicas: int = 1
    ) -> None:
        """`brokers` are their addresses; the creators begin at them in turn."""
        self._portal = portal
        self.acknowledged: dict[str, bytes] = {}
        """Name -> topic id; empty for a topic of which only was said that it exists already."""
        self.unknown: dict[str, KafkaError] = {}
        """What failed: the topic may exist or not."""
        self.times: list[float] = []
        """When each was acknowledged, by `time.monotonic`, in order."""
        self._brokers = list(brokers)
        self._prefix = prefix
        self._creators = creators
        self._replicas = replicas
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

    def more(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Return when so many more are acknowledged than now; TimeoutError."""
        self._portal.call(self._more(count, timeout_s))

    async def _begin(self) -> None:
        self._tasks = [asyncio.create_task(self._create(number)) for number in range(self._creators)]

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

    def gap_s(self, since: float) -> float:
        """The longest time without an acknowledgement that ended after `since` (as `time.monotonic` counts)."""
        return max([after - before for before, after in pairwise(self.times) if after >= since], default=0.0)

    async def _create(self, number: int) -> None:
        turn = number % len(self._brokers)
        bootstrap = ",".join([*self._brokers[turn:], *self._brokers[:turn]])
        async with AdminClient(bootstrap, **{"default.api.timeout.ms": int(WAIT_S * 1000)}) as admin:
            count = 0
            while not self._ends:
                name = f"{self._prefix}-{number}-{count:05}"
                count += 1
                await self._create_one(admin, name)
                await asyncio.sleep(PAUSE_S)

    async def _create_one(self, admin: AdminClient, name: str) -> None:
        try:
            (created,) = await admin.create_topics([NewTopic(name, 1, self._replicas)], wait=False)
            self.acknowledged[name] = created.topic_id
        except KafkaError as error:
            if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                self.unknown[name] = error
                return
            self.acknowledged[name] = b""
        self.times.append(time.monotonic())
        self._arrived.set()
