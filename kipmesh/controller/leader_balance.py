"""Automatic election of preferred leaders (`auto.leader.rebalance.enable`).

Every `leader.imbalance.check.interval.seconds`, the active controller runs a round: it moves the leadership of
partitions back to their first replica where that replica is alive, in sync and not shutting down. A round moves at most
ELECTIONS_MAX partitions. If more remain, the next round starts after SOON_S. A later round retries what failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from kipmesh.controller.decision_queue import Do
from kipmesh.core.errors import KafkaError
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.image import PartitionKey

log = structlog.get_logger(__name__)

OPERATION = "BalanceLeaders"
ELECTIONS_MAX = 1000
"""Maximum number of partitions that one round moves, as in Apache Kafka."""
CHECKED_MAX = 5000
"""Maximum number of partitions that one decision checks."""
SOON_S = 1.0
"""Time until the next round after a round that reached ELECTIONS_MAX."""


class LeaderBalance:
    """Moves leadership to preferred leaders during one epoch of an active controller.

    Args: do: makes one decision of the controller; interval_s: time between two rounds.
    """

    def __init__(self, do: Do, interval_s: float) -> None:
        self._do = do
        self._interval_s = interval_s

    async def run(self) -> None:
        """Run rounds until cancelled. The first round starts after one interval, so that brokers can reconnect first.
        Errors in a round are logged."""
        wait_s = self._interval_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._interval_s
            try:
                if await self.round():
                    wait_s = min(SOON_S, self._interval_s)
            except KafkaError as error:  # the epoch ended, the queue or the disk is full
                log.info("leader balancing refused", error=str(error))
            except Exception as error:  # a bug: the controller keeps working without balanced leaders
                log.error("leader balancing failed", exc_info=error)

    async def round(self) -> bool:
        """Run one round and return whether it moved ELECTIONS_MAX partitions, in which case more may remain. Raises
        KafkaError if a decision is refused."""
        keys: Sequence[PartitionKey] = await self._do(OPERATION, lambda controller: controller.preferred_candidates())
        moved = 0
        for first in range(0, len(keys), CHECKED_MAX):
            batch, limit = keys[first : first + CHECKED_MAX], ELECTIONS_MAX - moved
            moved += await self._do(OPERATION, partial(MetadataController.elect_preferred, keys=batch, count_max=limit))
            if moved == ELECTIONS_MAX:
                break
        if moved:
            log.info("preferred leaders elected", partitions=moved)
        return moved == ELECTIONS_MAX
