"""The workload of an experiment: producers, a consumer per rack, and a consumer group.

Idempotent producers have `IN_FLIGHT` records in flight, others one, which preserves the order of their records. A value
is the operation's number and padding derived from it, so it identifies its operation, and a changed byte is detected.

Group members commit what they have read, leave, die and are replaced. Events are recorded in the order that the checker
needs: an assignment before its records, records before their commit, a commit before its request. A member that dies
does not leave the group; its session expires.
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
LEAVE_TIMEOUT_S = 60.0
"""More than the last commit, LeaveGroup and closing the connections may take."""
MEMBER_CONFIG = {
    **CONSUMER_CONFIG,
    "session.timeout.ms": "6000",
    "heartbeat.interval.ms": "500",
    "max.poll.interval.ms": "20000",
}
_OURS = {"group.id": GROUP, "enable.auto.commit": "false"}


def encode_value(operation: int, size_bytes: int) -> bytes:
    """Return the record value of an operation: its number, padded to at least `size_bytes`."""
    head = b"%d " % operation
    filling = hashlib.shake_128(head).digest(max(size_bytes - len(head), 0) // 2).hex().encode()
    return (head + filling).ljust(size_bytes, b".")


def decode_value(value: bytes | None) -> str:
    """Return the operation number as a string. Returns `null` for None, and `not ours: ...` for a value that
    `encode_value` did not write.
    """
    if value is None:
        return "null"
    number = value.partition(b" ")[0]
    if number.isdigit() and len(number) < 19 and encode_value(int(number), len(value)) == value:
        return number.decode()
    return f"not ours: {value[:40]!r}"


def decode_batches(data: bytes, *, allow_partial: bool = False) -> Iterator[tuple[BatchHeader, list[tuple[int, str]]]]:
    """Yield (header, records) of each batch of log data. Records are (offset, decoded value).

    Raises KafkaError for an invalid batch, and for an incomplete last batch unless `allow_partial` is set.
    """
    for position, header in record_batch.iterate(data, allow_partial=allow_partial):
        record_batch.check_crc(data, position, header)
        yield header, [(one.offset, decode_value(one.value)) for one in read_batch(data, position, header)]


def by_partition(records: Iterable[ConsumerRecord]) -> dict[int, list[tuple[int, str]]]:
    """Return (offset, decoded value) of each record by partition, in the order of `records`."""
    found: dict[int, list[tuple[int, str]]] = {}
    for record in records:
        found.setdefault(record.partition, []).append((record.offset, decode_value(record.value)))
    return found


def is_exactly_once(part: WorkloadPart) -> bool:
    """Whether the producers of the workload are idempotent."""
    config = ProducerConfig.parse({**PRODUCER_CONFIG, **part.producer_config})
    return config.enable_idempotence


def consumer_names(part: WorkloadPart) -> list[str]:
    """Return the names of the readers in the history: one consumer per rack, and the group as one reader."""
    return [*(f"consumer-{rack}" for rack in part.racks), *([GROUP] if part.group is not None else [])]


class Workload:
    """Runs producers, consumers and group members from `__aenter__` on. Belongs to one event loop.

    End it in this order: `stop_producing`, `catch_up`, `members.close`, `__aexit__`.
    """

    def __init__(self, clients: RunClients, part: WorkloadPart, seed: int = 0) -> None:
        self._shared = clients
        self._part = part
        self._recorder = clients.recorder
        self._clients: list[Producer | Consumer] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.acknowledged: dict[int, int] = {}
        """Number of acknowledged records by partition."""
        self.positions: dict[str, dict[int, int]] = {}
        """Next offset by consumer and partition."""
        self.members: Members | None = None
        if part.group is not None:
            self.members = Members(clients, part.partitions, part.group, seed)
            self.positions[GROUP] = self.members.positions

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def _start(self) -> None:
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
            consumer.assign([TopicPartition(shared.topic, partition) for partition in range(self._part.partitions)])
            consumer.seek_to_beginning()
            self.positions[name] = {}
            self._consuming.append(asyncio.create_task(self._consume(consumer, name)))
        if self.members is not None:
            self.members.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._producing, *self._consuming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # After an error the last records may never be delivered, so an aborted run limits the wait.
        limit_s = None if error is None else ABORT_S
        clients = [*self._clients, *([self.members] if self.members is not None else [])]
        closing = [asyncio.wait_for(client.close(), limit_s) for client in clients]
        await asyncio.gather(*closing, return_exceptions=error is not None)

    def check(self) -> None:
        """Raise the error of a failed producer, consumer or member. The cause is a bug in the workload or a client."""
        for task in [*self._producing, *self._consuming]:
            if task.done() and not task.cancelled():
                task.result()
        if self.members is not None:
            self.members.check()

    async def stop_producing(self) -> None:
        """Start no more writes, and wait until all earlier ones have an outcome. Raises the error of a failed producer
        task.
        """
        self._stopping.set()
        await asyncio.gather(*self._producing)

    async def catch_up(self, ends: Mapping[int, int], timeout_s: float) -> bool:
        """Wait until every consumer and the group have read up to the end offsets. Returns False if that takes more
        than `timeout_s`. Raises the errors of `check`.
        """
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
            while not self._stopping.is_set():
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
        """Send one record. Return a coroutine that waits for its outcome and records it, or None if the producer
        refused the record.
        """
        recorder, operation = self._recorder, self._recorder.next_operation()
        recorder.add(h.Invoke(recorder.now, operation, name, partition, str(operation)))
        value = encode_value(operation, self._part.value_bytes)
        try:
            delivery = await producer.send(self._shared.topic, value, partition=partition)
        except KafkaError as error:  # the record was refused before it was sent
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
                    high_watermark = watermarks[partition] = -1 if watermark is None else watermark
                    now = self._recorder.now
                    self._recorder.add(h.Read(now, name, h.ReaderKind.CONSUMER, partition, mine, high_watermark))
                if mine:
                    self.positions[name][partition] = mine[-1][0] + 1


def _is_over(task: asyncio.Task[None]) -> bool:
    """Whether the task is done. Raises the task's error."""
    if task.done():
        task.result()
    return task.done()


class Member(RebalanceListener):
    """One member of the consumer group, with its own consumer. Cancel `run` first, then call `leave` or `die`."""

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
        """Next offset by assigned partition, once the member has read from it."""
        self._is_closing = False

    async def run(self) -> None:
        """Read and commit until cancelled. After a KafkaError of the consumer, records a note and retries."""
        loop = asyncio.get_running_loop()
        await self._start()
        self._consumer.subscribe([self._topic], self)
        committed_at = loop.time()
        while True:
            try:
                self._record_read(await self._consumer.poll(POLL_MS))
            except KafkaError as error:
                self._recorder.note(f"{self.name}: {error}")
                await asyncio.sleep(RETRY_S)
            if loop.time() - committed_at >= self._interval_s:
                committed_at = loop.time()
                await self._commit(self._read)

    async def leave(self) -> None:
        """Commit and leave the group. The consumer is closed even if the commit fails."""
        try:
            await self._commit(self._read)
        finally:
            self._is_closing = True
            await self._consumer.close(commit=False)

    async def die(self) -> None:
        """Close the consumer without a commit and without leaving the group."""
        self._is_closing = True
        await self._consumer.close(commit=False, leave=False)

    # -- rebalance listener

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """Record the assignment before any of its records, then the committed offsets. Does nothing if the assignment
        is already lost.
        """
        group, recorder = self._consumer.group_metadata(), self._recorder
        if group.generation_id < 0:
            return  # the partitions were lost meanwhile and nothing is read from them
        mine = [where.partition for where in self._consumer.assignment()]
        added = [where.partition for where in partitions]
        for number in added:
            self._read.pop(number, None)
        recorder.add(h.Assigned(recorder.now, GROUP, self.name, group.generation_id, mine, added))
        if added:
            await record_offsets(self._consumer, partitions, recorder, self.name)

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """Commit the offsets of the revoked partitions, so that the next owner resumes there, and forget their
        positions.
        """
        if not self._is_closing:
            revoked = {where.partition for where in partitions}
            await self._commit({number: offset for number, offset in self._read.items() if number in revoked})
        self.on_partitions_lost(partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """Forget the positions of partitions that another member may own."""
        for where in partitions:
            self._read.pop(where.partition, None)

    # -- inside

    async def _start(self) -> None:
        """Start the consumer; retry without a limit until a broker responds."""
        while True:
            try:
                return await self._consumer.start()
            except KafkaError as error:
                self._recorder.note(f"{self.name} does not start: {error}")
            await asyncio.sleep(RETRY_S)
            self._consumer = Consumer(self._bootstrap, **self._config)

    def _record_read(self, records: list[ConsumerRecord]) -> None:
        for number, mine in by_partition(records).items():
            watermark = self._consumer.high_watermark((self._topic, number))
            high_watermark = -1 if watermark is None else watermark
            self._recorder.add(h.Read(self._recorder.now, self.name, h.ReaderKind.MEMBER, number, mine, high_watermark))
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
    """Fetch and record the committed offsets of partitions. Returns False, with a note, if the fetch raises
    KafkaError.
    """
    since = recorder.now
    try:
        found = await consumer.committed(partitions)
    except KafkaError as error:
        recorder.note(f"{reader} could not fetch the committed offsets: {error}")
        return False
    offsets = [(where.partition, found.get(where, -1)) for where in partitions]
    recorder.add(h.OffsetsFetched(recorder.now, since, GROUP, reader, offsets))
    return True


class Members:
    """All members of the consumer group, from `start` to `close`. Belongs to one event loop."""

    def __init__(self, clients: RunClients, partitions: int, part: GroupPart, seed: int) -> None:
        self._clients = clients
        self._partitions = partitions
        self._part = part
        self._recorder = clients.recorder
        self._random = random.Random(seed)
        self._running: dict[Member, asyncio.Task[None]] = {}
        self._count = 0
        self._churning: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks of members that are leaving or dying, including failed ones."""
        self._is_closing = False
        self.positions: dict[int, int] = {}
        """Next offset of the group by partition."""

    def start(self) -> None:
        """Start all members in tasks and return immediately."""
        for _ in range(self._part.members):
            self._add()

    def start_churning(self) -> None:
        """Start replacing random members at random times, if the experiment has `churn_s`."""
        if self._part.churn_s is not None:
            self._churning = asyncio.create_task(self._churn(self._part.churn_s))

    def check(self) -> None:
        """Raise the error of a failed member or churn task. The cause is a bug in the workload or a client."""
        for task in [*self._running.values(), *self._leaving, self._churning]:
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def stop_churning(self) -> None:
        """Stop replacing members. Does not wait for a replacement in progress, which completes. Raises the error of the
        churn task.
        """
        task, self._churning = self._churning, None
        await _cancelled(task)

    async def close(self) -> None:
        """Let all members commit and leave, and wait for those already leaving.

        Closes every consumer, then raises the first error of a member's `run`, or else of a member's `leave`. Raises
        TimeoutError after `LEAVE_TIMEOUT_S`.
        """
        self._is_closing = True
        ended: list[BaseException | None] = [*await asyncio.gather(self.stop_churning(), return_exceptions=True)]
        members, self._running = self._running, {}
        try:
            ended += await asyncio.gather(*(_cancelled(task) for task in members.values()), return_exceptions=True)
        finally:  # also if the caller is cancelled
            left = await asyncio.gather(
                self._wait_gone(), *(member.leave() for member in members), return_exceptions=True
            )
        for error in [*ended, *left]:
            if error is not None:
                raise error

    async def record_end(self) -> None:
        """Record the committed offsets of the empty group, fetched by a client that is not a member.

        Records NotRecovered if they cannot be fetched.
        """
        config: dict[str, Any] = {**self._clients.config, **MEMBER_CONFIG, "group.id": GROUP}
        places = [TopicPartition(self._clients.topic, number) for number in range(self._partitions)]
        try:
            async with Consumer(self._clients.bootstrap, **config) as consumer:
                if await record_offsets(consumer, places, self._recorder, OBSERVER):
                    return
        except KafkaError as error:
            self._recorder.note(f"{OBSERVER}: {error}")
        self._recorder.add(h.NotRecovered(self._recorder.now, "the committed offsets of the group cannot be fetched"))

    # -- inside

    def _add(self) -> None:
        self._count += 1
        name = f"member-{self._count}"
        member = Member(self._clients, self._part, self.positions, name)
        self._running[member] = asyncio.create_task(member.run())

    async def _churn(self, mean_s: float) -> None:
        """Replace one random member after another, at random intervals with mean `mean_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / mean_s))
            member = self._random.choice(list(self._running))
            dies = self._random.random() < 0.5
            self._recorder.note(f"{member.name} {'dies' if dies else 'leaves'}")
            leaving = asyncio.create_task(self._replace(member, self._running.pop(member), dies))
            self._leaving.add(leaving)
            await asyncio.shield(leaving)  # cancelling it would leave its consumer open
            self._leaving.discard(leaving)

    async def _replace(self, member: Member, task: asyncio.Task[None], dies: bool) -> None:
        """Stop a member and add a new one unless the group is closing. Raises the error of the member's `run` after
        closing the member.
        """
        try:
            await _cancelled(task)
        finally:
            await (member.die() if dies else member.leave())
        if not self._is_closing:
            self._add()

    async def _wait_gone(self) -> None:
        """Wait for members that are leaving. Raises their first error, or TimeoutError after `LEAVE_TIMEOUT_S`."""
        leaving, self._leaving = self._leaving, set()
        ended = await asyncio.wait_for(asyncio.gather(*leaving, return_exceptions=True), LEAVE_TIMEOUT_S)
        for error in ended:
            if error is not None:
                raise error


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, if any, and wait for its end. Raises the task's error. The caller itself may be cancelled."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
