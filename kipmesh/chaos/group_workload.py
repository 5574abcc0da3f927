"""The consumer group of a workload: members that commit by hand what they have read, leave, die and are replaced.

Each event is recorded where the checker needs it: partitions before anything is read of them, records before they are
committed, a commit before it is sent. A member that dies says nothing to the group; its session has to end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from kipmesh.chaos import values
from kipmesh.chaos.experiment import GroupPart
from kipmesh.chaos.recorder import Recorder
from kipmesh.client import Consumer, ConsumerRecord, RebalanceListener, TopicPartition
from kipmesh.core.errors import KafkaError
from kipmesh.testing.history import (
    Assigned,
    Commit,
    CommitOk,
    CommitUnknown,
    NotRecovered,
    OffsetsFetched,
    Read,
    ReaderKind,
)

GROUP = "chaos-group"
OBSERVER = "observer"
POLL_MS = 250
RETRY_S = 0.1
GOING_S = 60.0
"""More than a commit, a goodbye and the end of the connections may take."""
MEMBER_CONFIG = {
    "auto.offset.reset": "earliest",
    "request.timeout.ms": "2000",
    "default.api.timeout.ms": "10000",
    "fetch.max.wait.ms": "250",
    "session.timeout.ms": "6000",
    "heartbeat.interval.ms": "500",
    "max.poll.interval.ms": "20000",
}
_OURS = {"group.id": GROUP, "enable.auto.commit": "false"}


class Member(RebalanceListener):
    """One member, from `run` to its end by cancelling that; then `leave` or `die`."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        part: GroupPart,
        recorder: Recorder,
        positions: dict[int, int],
        name: str,
        client: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._bootstrap = bootstrap
        self._config = {**(client or {}), **MEMBER_CONFIG, **part.config, "client.id": name, **_OURS}
        self._consumer = Consumer(bootstrap, **self._config)
        self._topic = topic
        self._interval_s = part.commit_interval_s
        self._recorder = recorder
        self._positions = positions
        self._read: dict[int, int] = {}
        """Of the partitions it has, where it goes on; those that it has read nothing of are left out."""
        self._is_closing = False

    async def run(self) -> None:
        """Read and commit until cancelled."""
        loop = asyncio.get_running_loop()
        await self._start()
        self._consumer.subscribe([self._topic], self)
        committed_at = loop.time()
        while True:
            try:
                self._note(await self._consumer.poll(POLL_MS))
            except KafkaError as error:
                self._recorder.note(f"{self.name}: {error}")
                await asyncio.sleep(RETRY_S)
            if loop.time() - committed_at >= self._interval_s:
                committed_at = loop.time()
                await self._commit(self._read)

    async def leave(self) -> None:
        """Commit what it has read, and say goodbye; its consumer is closed however the commit ends."""
        try:
            await self._commit(self._read)
        finally:
            self._is_closing = True
            await self._consumer.close(commit=False)

    async def die(self) -> None:
        """No commit and no goodbye."""
        self._is_closing = True
        await self._consumer.close(commit=False, leave=False)

    # -- told by the group

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """Written down before anything is read of them; then the group's offsets are asked for once more."""
        who, recorder = self._consumer.group_metadata(), self._recorder
        if who.generation_id < 0:
            return  # lost meanwhile: they go before anything is read of them
        mine = [where.partition for where in self._consumer.assignment()]
        added = [where.partition for where in partitions]
        for number in added:
            self._read.pop(number, None)
        recorder.add(Assigned(recorder.now, GROUP, self.name, who.generation_id, mine, added))
        if added:
            await record_offsets(self._consumer, partitions, recorder, self.name)

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """The next owner is to go on where this one has stopped."""
        gone = [where.partition for where in partitions]
        if not self._is_closing:
            await self._commit({number: self._read[number] for number in gone if number in self._read})
        self._drop(gone)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """Others may have them."""
        self._drop([where.partition for where in partitions])

    # -- inside

    async def _start(self) -> None:
        """When somebody answers."""
        while True:
            try:
                return await self._consumer.start()
            except KafkaError as error:
                self._recorder.note(f"{self.name} does not start: {error}")
            await asyncio.sleep(RETRY_S)
            self._consumer = Consumer(self._bootstrap, **self._config)

    def _drop(self, partitions: list[int]) -> None:
        for number in partitions:
            self._read.pop(number, None)

    def _note(self, records: list[ConsumerRecord]) -> None:
        found: dict[int, list[tuple[int, str]]] = {}
        for record in records:
            found.setdefault(record.partition, []).append((record.offset, values.decode(record.value)))
        for number, mine in found.items():
            watermark = self._consumer.high_watermark((self._topic, number))
            known = -1 if watermark is None else watermark
            self._recorder.add(Read(self._recorder.now, self.name, ReaderKind.MEMBER, number, mine, known))
            self._read[number] = mine[-1][0] + 1
            self._positions[number] = max(self._positions.get(number, 0), self._read[number])

    async def _commit(self, offsets: Mapping[int, int]) -> None:
        generation, recorder = self._consumer.group_metadata().generation_id, self._recorder
        if not offsets or generation < 0:
            return
        number, now = recorder.next_commit(), recorder.now
        recorder.add(Commit(now, number, GROUP, self.name, generation, sorted(offsets.items())))
        try:
            await self._consumer.commit({(self._topic, where): offset for where, offset in offsets.items()})
        except KafkaError as error:
            recorder.add(CommitUnknown(recorder.now, number, str(error)))
        else:
            recorder.add(CommitOk(recorder.now, number))


async def record_offsets(consumer: Consumer, partitions: list[TopicPartition], recorder: Recorder, reader: str) -> bool:
    """Ask for the committed offsets of these and record the answer; whether there was one."""
    since = recorder.now
    try:
        found = await consumer.committed(partitions)
    except KafkaError as error:
        recorder.note(f"{reader} was not told the committed offsets: {error}")
        return False
    offsets = [(where.partition, found.get(where, -1)) for where in partitions]
    recorder.add(OffsetsFetched(recorder.now, since, GROUP, reader, offsets))
    return True


class Members:
    """All members of the group; `async with` from their start to their end. One event loop."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: int,
        part: GroupPart,
        recorder: Recorder,
        seed: int,
        client: Mapping[str, str] | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._client = client or {}
        self._topic = topic
        self._partitions = partitions
        self._part = part
        self._recorder = recorder
        self._random = random.Random(seed)
        self._running: dict[Member, asyncio.Task[None]] = {}
        self._count = 0
        self._churning: asyncio.Task[None] | None = None
        self._going: set[asyncio.Task[None]] = set()
        """Those that leave or die, and those whose end has failed."""
        self._is_closing = False
        self.positions: dict[int, int] = {}
        """How far the group has read, by partition."""

    def start(self) -> None:
        """The members."""
        for _ in range(self._part.members):
            self._add()

    def start_churning(self) -> None:
        """From now on members leave and die, and others come for them, if the experiment says so."""
        if self._part.churn_s is not None:
            self._churning = asyncio.create_task(self._churn(self._part.churn_s))

    def check(self) -> None:
        """Raise what a member ended with: a bug of its, or of a client."""
        for task in [*self._running.values(), *self._going, self._churning]:
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def stop_churning(self) -> None:
        """Nobody else leaves; one that is about to is not held up, and another one comes for it.

        Raises what the churning had ended with before.
        """
        task, self._churning = self._churning, None
        await _cancelled(task)

    async def close(self) -> None:
        """All leave, with what they have read committed, and those that were going are gone.

        Raises what one of them had ended with before, else what its leaving ended with; all consumers are closed then.
        """
        self._is_closing = True
        ended: list[BaseException | None] = [*await asyncio.gather(self.stop_churning(), return_exceptions=True)]
        members, self._running = self._running, {}
        try:
            ended += await asyncio.gather(*(_cancelled(task) for task in members.values()), return_exceptions=True)
        finally:  # also if the caller waits no longer
            leaving = [member.leave() for member in members]
            left = await asyncio.gather(self._wait_gone(), *leaving, return_exceptions=True)
        for error in [*ended, *left]:
            if error is not None:
                raise error

    async def record_end(self) -> None:
        """What is committed when no member is left, asked by somebody who is none."""
        config: dict[str, Any] = {**self._client, **MEMBER_CONFIG, "group.id": GROUP}
        places = [TopicPartition(self._topic, number) for number in range(self._partitions)]
        try:
            async with Consumer(self._bootstrap, **config) as consumer:
                if await record_offsets(consumer, places, self._recorder, OBSERVER):
                    return
        except KafkaError as error:
            self._recorder.note(f"{OBSERVER}: {error}")
        self._recorder.add(NotRecovered(self._recorder.now, "nobody says what the group has committed"))

    # -- inside

    def _add(self) -> None:
        self._count += 1
        name = f"member-{self._count}"
        member = Member(self._bootstrap, self._topic, self._part, self._recorder, self.positions, name, self._client)
        self._running[member] = asyncio.create_task(member.run())

    async def _churn(self, mean_s: float) -> None:
        """One after the other leaves or dies, and another one comes for it."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / mean_s))
            member = self._random.choice(list(self._running))
            dies = self._random.random() < 0.5
            self._recorder.note(f"{member.name} {'dies' if dies else 'leaves'}")
            going = asyncio.create_task(self._replace(member, self._running.pop(member), dies))
            self._going.add(going)
            await asyncio.shield(going)  # one that is half gone would be a member that nobody closes
            self._going.discard(going)

    async def _replace(self, member: Member, task: asyncio.Task[None], dies: bool) -> None:
        """It goes, and another one comes for it; raises what it had ended with before, when it is gone."""
        try:
            await _cancelled(task)
        finally:
            await (member.die() if dies else member.leave())
        if not self._is_closing:
            self._add()

    async def _wait_gone(self) -> None:
        """Until those that were going are gone; raises what one of them ended with, TimeoutError after `GOING_S`."""
        going, self._going = self._going, set()
        ended = await asyncio.wait_for(asyncio.gather(*going, return_exceptions=True), GOING_S)
        for error in ended:
            if error is not None:
                raise error


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel it and wait for its end; raises what it had ended with before. The caller may be cancelled meanwhile."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
