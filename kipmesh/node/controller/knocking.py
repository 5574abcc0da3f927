"""Brokers that died together with the controller before this one: nothing listens where they were.

A new controller has seen no connection of theirs break, and their sessions begin anew. But whose process died refuses
who connects, where one that is held, slow or cut off lets him wait. So a controller that begins knocks where brokers
are of which it has not heard yet: those that refuse at every address, each time, are missing, as if their connection
had broken (`kipmesh.core.metadata.sessions`); a heartbeat still ends that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog

from kipmesh.node.knock import Address, refuses

log = structlog.get_logger(__name__)

KNOCKS = 2


class Knocking:
    """The knocks of one epoch of activity, from `start` to `stop` at the latest."""

    def __init__(
        self,
        unheard: Callable[[], Mapping[int, Collection[Address]]],
        refused: Callable[[int], None],
        interval_s: float,
    ) -> None:
        """`unheard` gives the brokers not heard of yet, with their addresses; `refused` is told who is missing."""
        self._unheard = unheard
        self._refused = refused
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the first knock is one interval from now."""
        self._task = asyncio.create_task(self._run(), name="kipmesh-knocking")

    def stop(self) -> None:
        """No more knocks."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        suspects: set[int] | None = None
        for _ in range(KNOCKS):
            await asyncio.sleep(self._interval_s)
            unheard = self._unheard()
            if suspects is not None:
                unheard = {broker_id: unheard[broker_id] for broker_id in suspects & unheard.keys()}
            answers = await asyncio.gather(*[self._is_gone(addresses) for addresses in unheard.values()])
            suspects = {broker_id for broker_id, is_gone in zip(unheard, answers, strict=True) if is_gone}
            if not suspects:
                return
        for broker_id in sorted(suspects or ()):
            self._refused(broker_id)

    async def _is_gone(self, addresses: Collection[Address]) -> bool:
        answers = await asyncio.gather(*[refuses(address, self._interval_s) for address in addresses])
        return bool(answers) and all(answers)
