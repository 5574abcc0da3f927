"""The workload of an experiment: idempotent producers with five in flight each, a consumer in each rack, and a group.

A workload whose `producer_config` turns idempotence off has one in flight a producer: only so is the order kept. A
record's value is the operation's number and a filling that follows from it. So a record tells whose it is, and a byte
that changed on the way makes it nobody's.

Members of the group commit by hand what they have read, leave, die and are replaced. Each event is recorded where the
checker needs it: partitions before anything is read of them, records before they are committed, a commit before it is
sent. A member that dies says nothing to the group; its session has to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from kipmesh.client import Consumer, ConsumerRecord, Producer, RebalanceListener, RecordMetadata, TopicPartition
from kipmesh.client.records import read_batch
from kipmesh.core import record_batch
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import KafkaError
from kipmesh.core.record_batch import BatchHeader
from kipmesh_chaos import history as h
from kipmesh_chaos.experiment import GroupPart, WorkloadPart
from kipmesh_chaos.recorder import Recorder, RunClients

POLL_MS = 250
PRODUCER_CONFIG = {
    "acks": "all",
    "linger.ms": "0",
    "request.timeout.ms": "2000",
    "max.block.ms": "5000",
    "delivery.timeout.ms": "10000",
    "batch.size": "0",
}
IN_FLIGHT = 5
CONSUMER_CONFIG = {
    "auto.offset.reset": "earliest",
    "request.timeout.ms": "2000",
    "default.api.timeout.ms": "10000",
    "fetch.max.wait.ms": "250",
}
RETRY_S = 0.1
ABORT_S = 1.0
GROUP = "chaos-group"
OBSERVER = "observer"
GOING_S = 60.0
"""More than a commit, a goodbye and the end of the connections may take."""
MEMBER_CONFIG = {
    **CONSUMER_CONFIG,
    "session.timeout.ms": "6000",
    "heartbeat.interval.ms": "500",
    "max.poll.interval.ms": "20000",
}
_OURS = {"group.id": GROUP, "enable.auto.commit": "false"}


def encode_value(operation: int, size_bytes: int) -> bytes:
    """The value of an operation's record."""
    head = b"%d " % operation
    filling = hashlib.shake_128(head).digest(max(size_bytes - len(head), 0) // 2).hex().encode()
    return (head + filling).ljust(size_bytes, b".")


def decode_value(value: bytes | None) -> str:
    """The operation's number as the history has it; of what `encode` did not make, a text that says so."""
    if value is None:
        return "null"
    number = value.partition(b" ")[0]
    if number.isdigit() and len(number) < 19 and encode_value(int(number), len(value)) == value:
        return number.decode()
    return f"not ours: {value[:40]!r}"


def decode_batches(data: bytes, *, allow_partial: bool = False) -> Iterator[tuple[BatchHeader, list[tuple[int, str]]]]:
    """Batches of the log format with their records as (offset, value); raises KafkaError at what is none."""
    for position, header in record_batch.iterate(data, allow_partial=allow_partial):
        record_batch.check_crc(data, position, header)
        yield header, [(one.offset, decode_value(one.value)) for one in read_batch(data, position, header)]


def by_partition(records: Iterable[ConsumerRecord]) -> dict[int, list[tuple[int, str]]]:
    """Records as a history has them: (offset, value)."""
    found: dict[int, list[tuple[int, str]]] = {}
    for record in records:
        found.setdefault(record.partition, []).append((record.offset, decode_value(record.value)))
    return found


def is_exactly_once(part: WorkloadPart) -> bool:
    """Whether its producers are idempotent."""
    config = ProducerConfig.parse({**PRODUCER_CONFIG, **part.producer_config})
    return config.enable_idempotence


def consumer_names(part: WorkloadPart) -> list[str]:
    """Their names in the history; a group is one reader."""
    return [*(f"consumer-{rack}" for rack in part.racks), *([GROUP] if part.group is not None else [])]


class Workload:
    """`async with Workload(...)`: works from then on. `stop_producing`, `catch_up`, `end_group` end it in order."""

    def __init__(self, clients: RunClients, part: WorkloadPart, seed: int = 0) -> None:
        self._shared = clients
        self._part = part
        self._recorder = clients.recorder
        self._clients: list[Producer | Consumer] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._ends = asyncio.Event()
        self.acknowledged: dict[int, int] = {}
        """Of each partition."""
        self.positions: dict[str, dict[int, int]] = {}
        """The next offset of each consumer in each partition."""
        self.members: Members | None = None
        if part.group is not None:
            self.members = Members(clients, part.partitions, part.group, seed)
            self.positions[GROUP] = self.members.positions

    async def __aenter__(self) -> Self:
        try:
            return await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise

    async def _start(self) -> Self:
        shared = self._shared
        for number in range(1, self._part.producers + 1):
            producer = Producer(shared.bootstrap, **{**shared.config, **PRODUCER_CONFIG, **self._part.producer_config})
            self._clients.append(producer)
            await producer.start()
            partition = (number - 1) % self._part.partitions
            self._producing.append(asyncio.create_task(self._produce(producer, f"producer-{number}", partition)))
        for rack, name in zip(self._part.racks, consumer_names(self._part), strict=False):
            config = {**CONSUMER_CONFIG, "client.rack": rack, "client.id": name, **self._part.consumer_config}
            consumer = Consumer(shared.bootstrap, **{**shared.config, **config})
            self._clients.append(consumer)
            await consumer.start()
            consumer.assign(
                [TopicPartition(self._shared.topic, partition) for partition in range(self._part.partitions)]
            )
            consumer.seek_to_beginning()
            self.positions[name] = {}
            self._consuming.append(asyncio.create_task(self._consume(consumer, name)))
        if self.members is not None:
            self.members.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._producing, *self._consuming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A run that ends early does not wait until its last records are delivered: maybe nobody is there.
        limit_s = None if error is None else ABORT_S
        clients = [*self._clients, *([self.members] if self.members is not None else [])]
        closing = [asyncio.wait_for(client.close(), limit_s) for client in clients]
        await asyncio.gather(*closing, return_exceptions=error is not None)

    def check(self) -> None:
        """Raise what a worker ended with: a bug of its, or of a client."""
        for task in [*self._producing, *self._consuming]:
            if task.done() and not task.cancelled():
                task.result()
        if self.members is not None:
            self.members.check()

    async def stop_producing(self) -> None:
        """Begin no more operations; each has its outcome then."""
        self._ends.set()
        await asyncio.gather(*self._producing)

    async def catch_up(self, ends: Mapping[int, int], timeout_s: float) -> bool:
        """Until every consumer has read up to these offsets; whether that was in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(mine.get(partition, 0) < end for mine in self.positions.values() for partition, end in ends.items()):
            self.check()
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    # -- inside

    async def _produce(self, producer: Producer, name: str, partition: int) -> None:
        loop, interval_s = asyncio.get_running_loop(), 1 / self._part.records_per_s
        due = loop.time()
        in_flight: set[asyncio.Task[None]] = set()
        limit = IN_FLIGHT if is_exactly_once(self._part) else 1
        try:
            while not self._ends.is_set():
                outcome = await self._produce_one(producer, name, partition)
                if outcome is not None:
                    in_flight.add(asyncio.create_task(outcome))
                if len(in_flight) == limit:
                    await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                in_flight = {task for task in in_flight if not _is_over(task)}
                due = max(due + interval_s, loop.time() - interval_s)
                await asyncio.sleep(max(due - loop.time(), 0))
            await asyncio.gather(*in_flight)
        finally:
            for task in in_flight:
                task.cancel()

    async def _produce_one(self, producer: Producer, name: str, partition: int) -> Coroutine[Any, Any, None] | None:
        """Send one record; what is to be run until its outcome is known, None if it was not taken."""
        recorder, operation = self._recorder, self._recorder.next_operation()
        recorder.add(h.Invoke(recorder.now, operation, name, partition, str(operation)))
        value = encode_value(operation, self._part.value_bytes)
        try:
            delivery = await producer.send(self._shared.topic, value, partition=partition)
        except KafkaError as error:  # it was not taken: nothing was sent
            recorder.add(h.Failed(recorder.now, operation, str(error)))
            await asyncio.sleep(RETRY_S)
            return None
        return self._outcome(delivery, operation, partition)

    async def _outcome(self, delivery: Awaitable[RecordMetadata], operation: int, partition: int) -> None:
        recorder = self._recorder
        try:
            where = await delivery
        except KafkaError as error:
            recorder.add(h.Unknown(recorder.now, operation, str(error)))
            return
        recorder.add(h.Ok(recorder.now, operation, where.offset))
        self.acknowledged[partition] = self.acknowledged.get(partition, 0) + 1

    async def _consume(self, consumer: Consumer, name: str) -> None:
        watermarks: dict[int, int] = {}
        while True:
            try:
                records = await consumer.poll(POLL_MS)
            except KafkaError as error:
                self._recorder.note(f"{name}: {error}")
                await asyncio.sleep(RETRY_S)
                continue
            found = by_partition(records)
            for partition in range(self._part.partitions):
                watermark = consumer.high_watermark((self._shared.topic, partition))
                mine = found.get(partition, [])
                if mine or (watermark is not None and watermark != watermarks.get(partition)):
                    known = watermarks[partition] = -1 if watermark is None else watermark
                    now = self._recorder.now
                    self._recorder.add(h.Read(now, name, h.ReaderKind.CONSUMER, partition, mine, known))
                if mine:
                    self.positions[name][partition] = mine[-1][0] + 1


def _is_over(task: asyncio.Task[None]) -> bool:
    """Raises what it ended with."""
    if task.done():
        task.result()
    return task.done()


class Member(RebalanceListener):
    """One member, from `run` to its end by cancelling that; then `leave` or `die`."""

    def __init__(self, clients: RunClients, part: GroupPart, positions: dict[int, int], name: str) -> None:
        self.name = name
        self._bootstrap = clients.bootstrap
        self._config = {**clients.config, **MEMBER_CONFIG, **part.config, "client.id": name, **_OURS}
        self._consumer = Consumer(self._bootstrap, **self._config)
        self._topic = clients.topic
        self._interval_s = part.commit_interval_s
        self._recorder = clients.recorder
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
        recorder.add(h.Assigned(recorder.now, GROUP, self.name, who.generation_id, mine, added))
        if added:
            await record_offsets(self._consumer, partitions, recorder, self.name)

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """The next owner is to go on where this one has stopped."""
        if not self._is_closing:
            gone = {where.partition for where in partitions}
            await self._commit({number: offset for number, offset in self._read.items() if number in gone})
        self.on_partitions_lost(partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """Others may have them."""
        for where in partitions:
            self._read.pop(where.partition, None)

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

    def _note(self, records: list[ConsumerRecord]) -> None:
        for number, mine in by_partition(records).items():
            watermark = self._consumer.high_watermark((self._topic, number))
            known = -1 if watermark is None else watermark
            self._recorder.add(h.Read(self._recorder.now, self.name, h.ReaderKind.MEMBER, number, mine, known))
            self._read[number] = mine[-1][0] + 1
            self._positions[number] = max(self._positions.get(number, 0), self._read[number])

    async def _commit(self, offsets: Mapping[int, int]) -> None:
        generation, recorder = self._consumer.group_metadata().generation_id, self._recorder
        if not offsets or generation < 0:
            return
        number, now = recorder.next_commit(), recorder.now
        recorder.add(h.Commit(now, number, GROUP, self.name, generation, sorted(offsets.items())))
        try:
            await self._consumer.commit({(self._topic, where): offset for where, offset in offsets.items()})
        except KafkaError as error:
            recorder.add(h.CommitUnknown(recorder.now, number, str(error)))
        else:
            recorder.add(h.CommitOk(recorder.now, number))


async def record_offsets(consumer: Consumer, partitions: list[TopicPartition], recorder: Recorder, reader: str) -> bool:
    """Ask for the committed offsets of these and record the answer; whether there was one."""
    since = recorder.now
    try:
        found = await consumer.committed(partitions)
    except KafkaError as error:
        recorder.note(f"{reader} was not told the committed offsets: {error}")
        return False
    offsets = [(where.partition, found.get(where, -1)) for where in partitions]
    recorder.add(h.OffsetsFetched(recorder.now, since, GROUP, reader, offsets))
    return True


class Members:
    """All members of the group; `async with` from their start to their end. One event loop."""

    def __init__(self, clients: RunClients, partitions: int, part: GroupPart, seed: int) -> None:
        self._clients = clients
        self._partitions = partitions
        self._part = part
        self._recorder = clients.recorder
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
        config: dict[str, Any] = {**self._clients.config, **MEMBER_CONFIG, "group.id": GROUP}
        places = [TopicPartition(self._clients.topic, number) for number in range(self._partitions)]
        try:
            async with Consumer(self._clients.bootstrap, **config) as consumer:
                if await record_offsets(consumer, places, self._recorder, OBSERVER):
                    return
        except KafkaError as error:
            self._recorder.note(f"{OBSERVER}: {error}")
        self._recorder.add(h.NotRecovered(self._recorder.now, "nobody says what the group has committed"))

    # -- inside

    def _add(self) -> None:
        self._count += 1
        name = f"member-{self._count}"
        member = Member(self._clients, self._part, self.positions, name)
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
