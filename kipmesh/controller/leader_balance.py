"""The way back to the leader services by itself: `auto.leader.rebalance.enable`.

While a controller is active it looks every `leader.imbalance.check.interval.seconds` for partitions that somebody else
leads than their first replica, and lets that one lead where it is alive, in sync and not about to stop. A round moves
ELECTIONS_MAX partitions at most, some in each decision; when there are more, the next round is soon.

Nothing waits for a round to be committed, and what fails is tried again in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from kipmesh.controller.owner import Do
from kipmesh.core.errors import KafkaError
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.image import PartitionKey

log = structlog.get_logger(__name__)

OPERATION = "BalanceLeaders"
ELECTIONS_MAX = 1000
"""Partitions that get another leader in one round; Kafka's number."""
LOOKED_AT_MAX = 5000
"""Partitions that one decision looks at."""
SOON_S = 1.0
"""Time after a round that left some."""


class LeaderBalance:
    """Rounds for one epoch of activity."""

    def __init__(self, do: Do, interval_s: float) -> None:
        self._do = do
        self._interval_s = interval_s

    async def run(self) -> None:
        """Rounds until it is cancelled; the first one interval from now, when brokers have had time to come back."""
        wait_s = self._interval_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._interval_s
            try:
                if await self.round():
                    wait_s = min(SOON_S, self._interval_s)
            except KafkaError as error:  # the epoch ends, too much is waiting, the disk is full
                log.info("leaders are not balanced now", error=str(error))
            except Exception as error:  # a bug is no reason to stop being a controller
                log.error("leaders cannot be balanced", exc_info=error)

    async def round(self) -> bool:
        """Move what can be moved, and say whether there is more; raises KafkaError."""
        keys: Sequence[PartitionKey] = await self._do(OPERATION, lambda controller: controller.returnable())
        moved = 0
        for first in range(0, len(keys), LOOKED_AT_MAX):
            some, most = keys[first : first + LOOKED_AT_MAX], ELECTIONS_MAX - moved
            moved += await self._do(OPERATION, partial(MetadataController.elect_preferred, keys=some, count_max=most))
            if moved == ELECTIONS_MAX:
                break
        if moved:
            log.info("partitions are led by their preferred leader again", partitions=moved)
        return moved == ELECTIONS_MAX
