"""The workload of an experiment: idempotent producers with five in flight each, a consumer in each rack, and a group.

A workload whose `producer_config` turns idempotence off has one in flight a producer: only so is the order kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from kipmesh.chaos import values
from kipmesh.chaos.experiment import WorkloadPart
from kipmesh.chaos.group_workload import GROUP, Members
from kipmesh.chaos.recorder import Recorder
from kipmesh.client import Consumer, Producer, RecordMetadata, TopicPartition
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import KafkaError
from kipmesh.testing.history import Failed, Invoke, Ok, Read, ReaderKind, Unknown

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


def is_exactly_once(part: WorkloadPart) -> bool:
    """Whether its producers are idempotent."""
    config = ProducerConfig.parse({**PRODUCER_CONFIG, **part.producer_config})
    return config.enable_idempotence


def consumer_names(part: WorkloadPart) -> list[str]:
    """Their names in the history; a group is one reader."""
    return [*(f"consumer-{rack}" for rack in part.racks), *([GROUP] if part.group is not None else [])]


class Workload:
    """`async with Workload(...)`: works from then on. `stop_producing`, `catch_up`, `end_group` end it in order."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        part: WorkloadPart,
        recorder: Recorder,
        seed: int = 0,
        client: Mapping[str, str] | None = None,
    ) -> None:
        """`client`: how clients reach the brokers, beside their addresses (TLS)."""
        self._bootstrap = bootstrap
        self._client = client or {}
        self._topic = topic
        self._part = part
        self._recorder = recorder
        self._clients: list[Producer | Consumer] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._ends = asyncio.Event()
        self.acknowledged: dict[int, int] = {}
        """Of each partition."""
        self.positions: dict[str, dict[int, int]] = {}
        """The next offset of each consumer in each partition."""
        self._members: Members | None = None
        if part.group is not None:
            self._members = Members(bootstrap, topic, part.partitions, part.group, recorder, seed, client)
            self.positions[GROUP] = self._members.positions

    async def __aenter__(self) -> Self:
        try:
            return await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise

    async def _start(self) -> Self:
        for number in range(1, self._part.producers + 1):
            producer = Producer(self._bootstrap, **{**self._client, **PRODUCER_CONFIG, **self._part.producer_config})
            self._clients.append(producer)
            await producer.start()
            partition = (number - 1) % self._part.partitions
            self._producing.append(asyncio.create_task(self._produce(producer, f"producer-{number}", partition)))
        for rack, name in zip(self._part.racks, consumer_names(self._part), strict=False):
            config = {**CONSUMER_CONFIG, "client.rack": rack, "client.id": name, **self._part.consumer_config}
            consumer = Consumer(self._bootstrap, **{**self._client, **config})
            self._clients.append(consumer)
            await consumer.start()
            consumer.assign([TopicPartition(self._topic, partition) for partition in range(self._part.partitions)])
            consumer.seek_to_beginning()
            self.positions[name] = {}
            self._consuming.append(asyncio.create_task(self._consume(consumer, name)))
        if self._members is not None:
            self._members.start()
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
        clients = [*self._clients, *([self._members] if self._members is not None else [])]
        closing = [asyncio.wait_for(client.close(), limit_s) for client in clients]
        await asyncio.gather(*closing, return_exceptions=error is not None)

    def check(self) -> None:
        """Raise what a worker ended with: a bug of its, or of a client."""
        for task in [*self._producing, *self._consuming]:
            if task.done() and not task.cancelled():
                task.result()
        if self._members is not None:
            self._members.check()

    def start_churning(self) -> None:
        """Members of the group leave and die from now on, if there is a group and they are to."""
        if self._members is not None:
            self._members.start_churning()

    async def stop_churning(self) -> None:
        """Those that are there stay."""
        if self._members is not None:
            await self._members.stop_churning()

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

    async def end_group(self) -> None:
        """The members commit and leave, and what is committed then is recorded."""
        if self._members is not None:
            await self._members.close()
            await self._members.record_end()

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
        recorder.add(Invoke(recorder.now, operation, name, partition, str(operation)))
        value = values.encode(operation, self._part.value_bytes)
        try:
            delivery = await producer.send(self._topic, value, partition=partition)
        except KafkaError as error:  # it was not taken: nothing was sent
            recorder.add(Failed(recorder.now, operation, str(error)))
            await asyncio.sleep(RETRY_S)
            return None
        return self._outcome(delivery, operation, partition)

    async def _outcome(self, delivery: Awaitable[RecordMetadata], operation: int, partition: int) -> None:
        recorder = self._recorder
        try:
            where = await delivery
        except KafkaError as error:
            recorder.add(Unknown(recorder.now, operation, str(error)))
            return
        recorder.add(Ok(recorder.now, operation, where.offset))
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
            found: dict[int, list[tuple[int, str]]] = {}
            for record in records:
                found.setdefault(record.partition, []).append((record.offset, values.decode(record.value)))
            for partition in range(self._part.partitions):
                watermark = consumer.high_watermark((self._topic, partition))
                mine = found.get(partition, [])
                if mine or (watermark is not None and watermark != watermarks.get(partition)):
                    known = watermarks[partition] = -1 if watermark is None else watermark
                    now = self._recorder.now
                    self._recorder.add(Read(now, name, ReaderKind.CONSUMER, partition, mine, known))
                if mine:
                    self.positions[name][partition] = mine[-1][0] + 1


def _is_over(task: asyncio.Task[None]) -> bool:
    """Raises what it ended with."""
    if task.done():
        task.result()
    return task.done()
