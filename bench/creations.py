"""Topics that are created all the time, by several clients: which were acknowledged, when, and under which id.

A request whose answer is lost is sent again by the client, and may then find its own topic. That one counts as
acknowledged too: the cluster said that it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.acknowledged import Acknowledged
from kipmesh.client import AdminClient
from kipmesh.client.sync import Portal
from kipmesh.client.types import NewTopic
from kipmesh.core.errors import ErrorCode, KafkaError

CREATORS = 3
PAUSE_S = 0.01
WAIT_S = 60.0


class Creations(Acknowledged):
    """`with Creations(...)`: creates from then on, until the end of the block, on the loop of `portal`."""

    def __init__(
        self, portal: Portal, brokers: Sequence[str], prefix: str, *, creators: int = CREATORS, replicas: int = 1
    ) -> None:
        """`brokers` are their addresses; the creators begin at them in turn."""
        super().__init__(portal, creators, WAIT_S)
        self.acknowledged: dict[str, bytes] = {}
        """Name -> topic id; empty for a topic of which only was said that it exists already."""
        self.unknown: dict[str, KafkaError] = {}
        """What failed: the topic may exist or not."""
        self._brokers = list(brokers)
        self._prefix = prefix
        self._replicas = replicas

    async def _work(self, number: int) -> None:
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
        self._acknowledge()
