"""Members that join, leave and die, and producers that write meanwhile: for `python -m bench.groups`.

A member is a consumer with its own connections. All members share one event loop. A member commits every `COMMIT_S`,
when partitions are revoked, and before it leaves. A member that dies does neither: its tasks end, and the group notices
at the end of its session.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.group_ledger import End, Ledger, LogFacts, facts_of_log
from kipmesh.client import Consumer, Producer, RebalanceListener, TopicPartition
from kipmesh.core.errors import KafkaError
from kipmesh.core.group.coordinator import GROUP_METADATA_TOPIC, partition_for
from kipmesh.core.group.records import Record, decode_record

TOPIC, GROUP = "events", "readers"
HEARTBEATS_PER_SESSION = 10
"""Heartbeats per session timeout, similar to Kafka's defaults."""
REBALANCE_MS = 60_000
POLL_MS = 500
COMMIT_S = 5.0
STEP_S = 0.5
REPLACE_S = 3.0
"""Maximum time until another member replaces one that has ended."""


class Settings(NamedTuple):
    """Behaviour of members: assignment strategy, durations in seconds and share of deaths."""

    strategy: str
    life_s: float
    """Mean duration of a life. Durations are from 0.2 to 1.8 times the mean."""
    deaths: float
    """Share of lives that end without leaving the group."""
    session_s: float
    """Session timeout: time until the group notices a death."""


@dataclass(slots=True)
class Stage:
    """State and settings that all members share."""

    bootstrap: str
    ledger: Ledger
    settings: Settings
    random: random.Random
    lives: int = 0
    stays: bool = False
    """Whether members stay until `ends` is set."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all members must leave."""

    async def slot(self) -> None:
        """Run one member after another until `ends` is set, with a pause of up to `REPLACE_S` before each."""
        while not self.ends.is_set():
            await _sleep(self.random.uniform(0, REPLACE_S), self.ends)
            if not self.ends.is_set():
                self.lives += 1
                await Member(self, self.lives).live(self.random.uniform(0.2, 1.8) * self.settings.life_s)


class Member(RebalanceListener):
    """One member of the group from its start to its end. `number` is the number of its life."""

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
            "heartbeat.interval.ms": int(stage.settings.session_s * 1000 / HEARTBEATS_PER_SESSION),
            "max.poll.interval.ms": REBALANCE_MS,
            "default.api.timeout.ms": 15_000,
            "partition.assignment.strategy": stage.settings.strategy,
        }
        self._consumer = Consumer(stage.bootstrap, **config)

    async def live(self, seconds: float) -> None:
        """Read for `seconds`, then leave or die. While the stage's `stays` is set, keep reading instead, and leave when
        `ends` is set.

        A KafkaError from the start ends the life, one from `poll` does not. Both are counted.
        """
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
                await self._commit()
        if not stage.ends.is_set() and stage.random.random() < stage.settings.deaths:
            await self._die()
        else:
            await self._leave()

    async def _commit(self) -> bool:
        try:
            await self._consumer.commit()
        except KafkaError:
            self._ledger.failed_commits += 1
            return False
        return True

    def _owned(self) -> list[int]:
        return [each.partition for each in self._consumer.assignment()]

    async def _die(self) -> None:
        self._is_going = True
        self._ledger.deaths += 1
        self._ledger.ended(self._number, self._owned(), End.DIED)
        await self._consumer.close(commit=False, leave=False)

    async def _leave(self) -> None:
        self._is_going = True
        self._ledger.leaves += 1
        end = End.COMMITTED if await self._commit() else End.UNCOMMITTED
        self._ledger.ended(self._number, self._owned(), end)
        await self._consumer.close()

    # --- rebalances --------------------------------------------------------------------------------------------------

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """Record the whole assignment of the new generation in the ledger."""
        known = self._consumer.group_metadata()
        self._ledger.assigned(known.generation_id, known.member_id, self._owned())

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """Commit, so that the next owner resumes at this position, and record the end of the ownership."""
        if not self._is_going:
            end = End.COMMITTED if await self._commit() else End.UNCOMMITTED
            self._ledger.ended(self._number, [each.partition for each in partitions], end)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """Record the loss of the membership. Another member may have read further."""
        self._ledger.losses += not self._is_going
        self._ledger.ended(self._number, [each.partition for each in partitions], End.LOST)


class Writer:
    """An idempotent producer of `records_s` records per second, which go to all partitions in rotation."""

    def __init__(self, bootstrap: str, partitions: int, records_s: float, number: int) -> None:
        self.acknowledged: list[tuple[int, int]] = []
        """Partition and offset of each acknowledged record."""
        self.failed = 0
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._records_s = records_s
        self._number = number

    async def write(self, ends: asyncio.Event) -> None:
        """Produce until `ends` is set, and until each record is acknowledged or has failed. Raises KafkaError if `send`
        rejects a record.
        """
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
            metadata = delivery.result()
            self.acknowledged.append((metadata.partition, metadata.offset))


class Lateness:
    """Measures the maximum delay of the event loop, and thus of heartbeats, in seconds."""

    STEP_S = 0.1

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        """Measure and update `longest_s` until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.STEP_S
            await asyncio.sleep(self.STEP_S)
            self.longest_s = max(self.longest_s, loop.time() - due)


async def read_log(bootstrap: str) -> LogFacts:
    """Read `__consumer_offsets`, check the records of the group and return the facts. Raises KafkaError."""
    return facts_of_log(GROUP, TOPIC, [record async for record in _records(bootstrap)])


async def _records(bootstrap: str) -> AsyncIterator[Record]:
    async with Consumer(bootstrap, **{"auto.offset.reset": "earliest", "max.poll.records": 10_000}) as consumer:
        known = await consumer.partitions_for(GROUP_METADATA_TOPIC)
        partition = TopicPartition(GROUP_METADATA_TOPIC, partition_for(GROUP, len(known.partitions)))
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        while await consumer.position(partition) < end:
            for found in await consumer.poll(1000):
                record = decode_record(found.key or b"", found.value)
                if record is not None:
                    yield record


async def _sleep(seconds: float, unless: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await unless.wait()
