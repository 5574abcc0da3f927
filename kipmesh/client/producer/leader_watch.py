"""Abandons a Produce request to a broker that no longer leads its partitions and does not respond.

A stopped or partitioned broker keeps its connections open, so the request would wait for its full timeout. A slow
response alone is no reason to abandon it: acks=all may wait for a lagging replica. After `SILENCE_S` the watch
refreshes metadata periodically, and abandons the request once all its partitions have another leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kipmesh.client.metadata import SILENCE_S, Metadata

REFRESH_INTERVAL_S = 0.25


class LeaderWatch:
    """Context manager around a request to a leader.

    After `SILENCE_S` it starts to check the leaders. Once `leader_id` no longer leads any of the partitions, it cancels
    the block, and the `async with` statement raises TimeoutError.
    """

    def __init__(self, metadata: Metadata, leader_id: int, partitions: Sequence[tuple[str, int]]) -> None:
        self._metadata = metadata
        self._leader_id = leader_id
        self._partitions = partitions
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_listening = False

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(SILENCE_S, self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_listening:
            self._metadata.listeners.remove(self._on_metadata)
        await self._scope.__aexit__(kind, error, trace)

    def _check(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._metadata.listeners.append(self._on_metadata)
        self._on_metadata()
        if not self._scope.expired() and self._is_leader():
            self._metadata.request_refresh({topic for topic, _ in self._partitions})
            self._timer = self._loop.call_later(REFRESH_INTERVAL_S, self._check)

    def _on_metadata(self) -> None:
        if not self._scope.expired() and not self._is_leader():
            self._scope.reschedule(self._loop.time())

    def _is_leader(self) -> bool:
        known = (self._metadata.partition(*each) for each in self._partitions)
        return any(partition is not None and partition.leader_id == self._leader_id for partition in known)
