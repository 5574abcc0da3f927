"""Members that come and go, and producers that write all the while: for `python -m bench.groups`.

A member is a consumer of its own with its own connections; all are on one event loop. It commits by hand: every
`COMMIT_S`, when partitions are taken from it and before it leaves. Who dies does neither: its tasks end, and the group
hears nothing of it until its session ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from bench.group_ledger import End, Ledger, LogFacts, facts_of_log
from kipmesh.client import Consumer, Producer, RebalanceListener, TopicPartition
from kipmesh.core.errors import KafkaError
from kipmesh.core.group.coordinator import GROUP_METADATA_TOPIC, partition_for
from kipmesh.core.group.records import Record, decode_record

TOPIC, GROUP = "events", "readers"
BEATS = 10
"""Heartbeats within a session timeout, as with Kafka's defaults about."""
REBALANCE_MS = 60_000
POLL_MS = 500
COMMIT_S = 5.0
STEP_S = 0.5
AWAY_S = 3.0
"""A member that has gone is followed by another within that."""


class Settings(NamedTuple):
    """How members live."""

    strategy: str
    life_s: float
    """Of a life on average: between a fifth of it and nine fifths."""
    deaths: float
    """Of those that go the share that dies."""
    session_s: float
    """The session timeout: how long the group waits for the dead."""


class Stage:
    """What all members share."""

    def __init__(self, bootstrap: str, ledger: Ledger, settings: Settings, seed: int) -> None:
        self.bootstrap = bootstrap
        self.ledger = ledger
        self.settings = settings
        self.random = random.Random(seed)
        self.lives = 0
        self.stays = False
        """Nobody goes any more."""
        self.ends = asyncio.Event()
        """All leave."""

    async def slot(self) -> None:
        """One member after the other, until the end."""
        while not self.ends.is_set():
            await _sleep(self.random.uniform(0, AWAY_S), self.ends)
            if not self.ends.is_set():
                self.lives += 1
                await Member(self, self.lives).live(self.random.uniform(0.2, 1.8) * self.settings.life_s)


class Member(RebalanceListener):
    """One life."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self._ledger = stage.ledger
        self._number = number
        self._is_going = False
        config: dict[str, Any] = {
            "client.id": f"member-{number}",
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": int(stage.settings.session_s * 1000),
            "heartbeat.interval.ms": int(stage.settings.session_s * 1000 / BEATS),
            "max.poll.interval.ms": REBALANCE_MS,
            "default.api.timeout.ms": 15_000,
            "partition.assignment.strategy": stage.settings.strategy,
        }
        self._consumer = Consumer(stage.bootstrap, **config)

    async def live(self, seconds: float) -> None:
        """From the start to the end; a KafkaError at the start ends it before it was a member."""
        stage, loop = self._stage, asyncio.get_running_loop()
        try:
            await self._consumer.start()
        except KafkaError as error:
            self._ledger.failed_polls[error.code.name] += 1
            return
        self._ledger.joins += 1
        self._consumer.subscribe([TOPIC], self)
        until, commit_at = loop.time() + seconds, loop.time() + COMMIT_S
        while not stage.ends.is_set() and (stage.stays or loop.time() < until):
            try:
                records = await self._consumer.poll(POLL_MS)
            except KafkaError as error:
                self._ledger.failed_polls[error.code.name] += 1
                await asyncio.sleep(0.1)
                continue
            now = loop.time()
            for record in records:
                self._ledger.read(self._number, record.partition, record.offset, record.value or b"", now)
            if now >= commit_at:
                commit_at = now + COMMIT_S
                await self._commits()
        if not stage.ends.is_set() and stage.random.random() < stage.settings.deaths:
            await self._die()
        else:
            await self._leave()

    async def _commits(self) -> bool:
        try:
            await self._consumer.commit()
        except KafkaError:
            self._ledger.failed_commits += 1
            return False
        return True

    def _owned(self) -> list[int]:
        return [where.partition for where in self._consumer.assignment()]

    async def _die(self) -> None:
        self._is_going = True
        self._ledger.deaths += 1
        self._ledger.ended(self._number, self._owned(), End.DIED)
        await self._consumer.close(commit=False, leave=False)

    async def _leave(self) -> None:
        self._is_going = True
        self._ledger.leaves += 1
        end = End.COMMITTED if await self._commits() else End.UNCOMMITTED
        self._ledger.ended(self._number, self._owned(), end)
        await self._consumer.close()

    # --- what the group tells ----------------------------------------------------------------------------------------

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """All that it has now belongs to the new generation."""
        known = self._consumer.group_metadata()
        self._ledger.assigned(known.generation_id, known.member_id, self._owned())

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """The next owner is to begin where this one ends."""
        if not self._is_going:
            end = End.COMMITTED if await self._commits() else End.UNCOMMITTED
            self._ledger.ended(self._number, [where.partition for where in partitions], end)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """Somebody else may have read on already."""
        self._ledger.losses += not self._is_going
        self._ledger.ended(self._number, [where.partition for where in partitions], End.LOST)


class Writer:
    """Idempotent producers, each record to the partition after the last one's, at a steady rate."""

    def __init__(self, bootstrap: str, partitions: int, records_s: float, number: int) -> None:
        self.acknowledged: list[tuple[int, int]] = []
        """Partition and offset of each record."""
        self.failed = 0
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._records_s = records_s
        self._number = number

    async def write(self, ends: asyncio.Event) -> None:
        """Until the end, and until all is acknowledged or has failed."""
        loop = asyncio.get_running_loop()
        async with Producer(self._bootstrap, **{"acks": "all", "enable.idempotence": True}) as producer:
            began, sent = loop.time(), 0
            while not ends.is_set():
                while sent < (loop.time() - began) * self._records_s:
                    value = f"{self._number}:{sent}".encode()
                    delivery = await producer.send(TOPIC, value, partition=sent % self._partitions)
                    delivery.add_done_callback(self._done)
                    sent += 1
                await asyncio.sleep(STEP_S)
            await producer.flush()

    def _done(self, delivery: Any) -> None:
        if delivery.exception() is not None:
            self.failed += 1
        else:
            where = delivery.result()
            self.acknowledged.append((where.partition, where.offset))


class Lateness:
    """How late this process's event loop was at most: that late were heartbeats as well."""

    STEP_S = 0.1

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.STEP_S
            await asyncio.sleep(self.STEP_S)
            self.longest_s = max(self.longest_s, loop.time() - due)


async def read_log(bootstrap: str) -> LogFacts:
    """What `__consumer_offsets` says of the group; KafkaError."""
    return facts_of_log(GROUP, TOPIC, [record async for record in _records(bootstrap)])


async def _records(bootstrap: str) -> AsyncIterator[Record]:
    async with Consumer(bootstrap, **{"auto.offset.reset": "earliest", "max.poll.records": 10_000}) as consumer:
        known = await consumer.partitions_for(GROUP_METADATA_TOPIC)
        where = TopicPartition(GROUP_METADATA_TOPIC, partition_for(GROUP, len(known.partitions)))
        consumer.assign([where])
        end = (await consumer.end_offsets([where]))[where]
        while await consumer.position(where) < end:
            for found in await consumer.poll(1000):
                record = decode_record(found.key or b"", found.value)
                if record is not None:
                    yield record


async def _sleep(seconds: float, unless: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await unless.wait()
    except TimeoutError:
        pass
