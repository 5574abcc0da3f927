"""Continuous load on a QuorumCluster: topics that are created, and records that are produced, until a block ends.

The time of each acknowledgement is kept, so that `gap_s` returns the longest time without one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

from bench.quorum_cluster import QuorumCluster
from kipmesh.client import AdminClient, Producer
from kipmesh.client.sync import Portal
from kipmesh.client.types import NewTopic
from kipmesh.core.errors import ErrorCode, KafkaError

WAIT_S = 60.0
CREATORS = 3
CREATION_PAUSE_S = 0.01
TOPIC = "records"
PRODUCERS = 3
RECORD_PAUSE_S = 0.005


class ContinuousLoad:
    """Load by `tasks` tasks on the event loop of `portal`, from the beginning to the end of a `with` block.

    The end of the block raises the first error of a task. After an error in the block, the tasks are cancelled.
    """

    def __init__(self, portal: Portal, tasks: int) -> None:
        self.times: list[float] = []
        """Time of each acknowledgement (`time.monotonic`), in order."""
        self._portal = portal
        self._count = tasks
        self._ends = False
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived = asyncio.Event()

    def __enter__(self) -> Self:
        self._portal.call(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._end(cancel=error is not None))

    def more(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Wait for `count` more acknowledgements. Raises TimeoutError after `timeout_s`, or the error of a task that
        failed.
        """
        self._portal.call(self._more(count, timeout_s))

    def gap_s(self, since: float) -> float:
        """Return the longest time in seconds between two acknowledgements, the second of them at or after `since`
        (`time.monotonic`). Returns 0 if there are none.
        """
        return max([after - before for before, after in pairwise(self.times) if after >= since], default=0.0)

    async def _work(self, number: int) -> None:
        """Run one of the tasks, numbered from 0, until `_ends`. Calls `_acknowledge` for each success."""
        raise NotImplementedError

    def _acknowledge(self) -> None:
        self.times.append(time.monotonic())
        self._arrived.set()

    async def _begin(self) -> None:
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(self._count)]

    async def _end(self, *, cancel: bool) -> None:
        self._ends = True
        if cancel:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures and not cancel:
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


class Creations(ContinuousLoad):
    """Load by clients that create topics PREFIX-CLIENT-NUMBER.

    The client repeats a request without a response, and may then find the topic that it created. TOPIC_ALREADY_EXISTS
    therefore counts as acknowledged.

    Args: brokers: bootstrap addresses; each client begins with a different one.
    """

    def __init__(
        self, portal: Portal, brokers: Sequence[str], prefix: str, *, creators: int = CREATORS, replicas: int = 1
    ) -> None:
        super().__init__(portal, creators)
        self.acknowledged: dict[str, bytes] = {}
        """Topic id by name; empty if the response was TOPIC_ALREADY_EXISTS."""
        self.unknown: dict[str, KafkaError] = {}
        """Errors by topic name. These topics may exist."""
        self._brokers = list(brokers)
        self._prefix = prefix
        self._replicas = replicas

    async def _work(self, number: int) -> None:
        first = number % len(self._brokers)
        bootstrap = ",".join([*self._brokers[first:], *self._brokers[:first]])
        async with AdminClient(bootstrap, **{"default.api.timeout.ms": int(WAIT_S * 1000)}) as admin:
            count = 0
            while not self._ends:
                await self._create_one(admin, f"{self._prefix}-{number}-{count:05}")
                count += 1
                await asyncio.sleep(CREATION_PAUSE_S)

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


class Records(ContinuousLoad):
    """Load by producers, each of which sends one record after the other to `TOPIC` with acks=all."""

    def __init__(self, cluster: QuorumCluster) -> None:
        super().__init__(cluster.portal, PRODUCERS)
        self.failed = 0
        """Number of records whose delivery failed."""
        self._bootstrap = cluster.bootstrap

    async def _work(self, number: int) -> None:
        async with Producer(self._bootstrap, acks="all", **{"linger.ms": 0}) as producer:
            while not self._ends:
                try:
                    await (await producer.send(TOPIC, b"x" * 100))
                except KafkaError:
                    self.failed += 1
                    continue
                self._acknowledge()
                await asyncio.sleep(RECORD_PAUSE_S)
