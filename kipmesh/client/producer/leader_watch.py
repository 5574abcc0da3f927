"""Checks for a new leader while a leader is silent: a stopped or cut off process keeps its connections open.

A request may be silent for good reasons, as with acks=all while a replica lags. So it is given up only when it has been
silent for a while and metadata names other leaders for all of its partitions; to know that, metadata is asked for again
and again meanwhile. What other brokers' answers tell of leaders counts at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kipmesh.client.metadata import SILENCE_S, Metadata

ASK_INTERVAL_S = 0.25


class LeaderWatch:
    """`async with LeaderWatch(...)` around a request; TimeoutError when nobody waits for its answer any more."""

    def __init__(self, metadata: Metadata, leader_id: int, partitions: Sequence[tuple[str, int]]) -> None:
        self._metadata = metadata
        self._leader_id = leader_id
        self._partitions = partitions
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._listens = False

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(SILENCE_S, self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listens:
            self._metadata.listeners.remove(self._on_news)
        await self._scope.__aexit__(kind, error, trace)

    def _check(self) -> None:
        if self._scope.expired():
            return
        if not self._listens:
            self._listens = True
            self._metadata.listeners.append(self._on_news)
        if self._leads():
            self._metadata.request_refresh({topic for topic, _ in self._partitions})
            self._timer = self._loop.call_later(ASK_INTERVAL_S, self._check)
        else:
            self._scope.reschedule(self._loop.time())

    def _on_news(self) -> None:
        if not self._scope.expired() and not self._leads():
            self._scope.reschedule(self._loop.time())

    def _leads(self) -> bool:
        known = (self._metadata.partition(*each) for each in self._partitions)
        return any(partition is not None and partition.leader_id == self._leader_id for partition in known)
