"""Producers and consumers of a run.

A producer has one request in flight and repeats it until it is acknowledged or times out. Without idempotence a
repeated batch may be in the log twice. A consumer runs the production `PartitionReader` of one partition with real
metadata from `ReplicaSelection`. It reads from leaders and followers, and passes records to the checker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from kipmesh import messages as m
from kipmesh.client.consumer.replica_selection import ReplicaSelection
from kipmesh.client.consumer.rules.reader import PartitionReader
from kipmesh.client.consumer.rules.values import (
    AwaitMetadata,
    AwaitResponse,
    BackOff,
    Effects,
    EndOfEpochAtLeader,
    EpochSpan,
    FetchFrom,
    ListOffsetsAtLeader,
    OffsetReset,
    PartitionView,
    RaiseError,
    RefreshMetadata,
    TakeRecords,
    TruncationFound,
)
from kipmesh.client.metadata import topic_metadata
from kipmesh.client.types import PartitionMetadata
from kipmesh.core import record_batch
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.transport.grpc.client import TransportError
from simulation.engine import WALL_MS
from simulation.replicas.checker import Checker
from simulation.replicas.loop import SimLoop
from simulation.replicas.settings import PRODUCE_UNTIL_MS, TOPIC, Settings, address_of
from simulation.replicas.transport import Process, SimNetwork

_FETCH_WAIT_MS = 300
_GIVE_UP_MS = 3000
_LAST_MS = 600
"""Timeout of the final batch to each partition."""
_WAKE_MS = 100
"""Sleeping producers wake this long after the end of production."""


class Client:
    """A client process and its metadata about brokers and partitions."""

    def __init__(self, network: SimNetwork, settings: Settings, checker: Checker, node_id: int, name: str) -> None:
        self.settings = settings
        self.checker = checker
        self.engine = network.engine
        self.counts = network.engine.counts
        self.node_id = node_id
        self.name = name
        self.rng = Random(network.engine.rng.getrandbits(64))
        self.loop = SimLoop(network.engine, network.engine.check_problems)  # type: ignore[abstract]
        self.process = network.processes[node_id] = Process(network, node_id, self.loop, name)
        self.brokers: dict[int, Any] = {}
        self.partitions: dict[int, PartitionMetadata] = {}

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task in this process."""
        self.loop.deliver(lambda: self.loop.create_task(work))

    async def call(self, broker_id: int, method: str, request: Any, timeout_s: float) -> Any:
        """Send one request to a broker and return the response.

        Raises TransportError if the call fails or takes longer than `timeout_s` seconds.
        """
        connection = self.process.pool.get(address_of(broker_id))
        if method == "Fetch":
            return await connection.exchange("Broker", "FetchStream", request, timeout_s)
        return await connection.call("Broker", method, request, timeout_s)

    async def refresh(self) -> bool:
        """Request metadata from a random broker. Return True if the metadata was updated.

        Returns False if the broker did not respond or responded with an error.
        """
        broker_id = self.rng.choice(self.settings.broker_ids)
        request = m.MetadataRequest([m.MetadataRequestTopic(name=TOPIC)])
        try:
            response = await self.call(broker_id, "Metadata", request, 0.3)
        except TransportError:
            return False
        if response.error_code or not response.topics or response.topics[0].error_code:
            return False
        self.brokers = {broker.node_id: broker for broker in response.brokers}
        for index, partition in topic_metadata(TOPIC, response.topics[0]).partitions.items():
            known = self.partitions.get(index)
            if known is None or partition.leader_epoch >= known.leader_epoch:
                self.partitions[index] = partition
        return True


class Producer(Client):
    """A `Client` that sends batches to random partitions. See the module docstring."""

    def __init__(self, network: SimNetwork, settings: Settings, checker: Checker, number: int) -> None:
        super().__init__(network, settings, checker, 200 + number, f"producer-{number}")
        self.is_done = False
        self.last_acknowledged_ms: dict[int, float] = {}
        self._sequence = 0

    def start(self) -> None:
        """Start producing."""
        self.spawn(self._run())

    async def _run(self) -> None:
        while not self.is_done:
            left_ms = PRODUCE_UNTIL_MS + _WAKE_MS - self.engine.now_ms
            await asyncio.sleep(min(self.rng.expovariate(1 / self.settings.produce_every_ms), left_ms) / 1000)
            if not self.is_done:
                acks = -1 if self.rng.random() < 0.8 else 1
                await self._send(self.rng.randrange(self.settings.partitions), acks, _GIVE_UP_MS)
        for partition in range(self.settings.partitions):
            self.last_acknowledged_ms.pop(partition, None)
            await self._send(partition, -1, _LAST_MS)

    async def _send(self, partition: int, acks: int, timeout_ms: int) -> None:
        self._sequence += 1
        values = [f"{self.node_id}-{self._sequence}-{n}".encode() for n in range(self.rng.choice((1, 1, 3)))]
        batch = record_batch.build(
            [(None, value) for value in values],
            base_offset=0,
            leader_epoch=-1,
            timestamp_ms=WALL_MS + int(self.engine.now_ms),
        )
        was_done = self.is_done
        until_ms = self.loop.now_ms() + timeout_ms
        data = [m.TopicProduceData(TOPIC, self.settings.topic_id, [m.PartitionProduceData(partition, batch)])]
        self.counts["batches sent"] += 1
        while self.loop.now_ms() < until_ms and self.is_done == was_done:
            known = self.partitions.get(partition)
            if known is None or known.leader_id < 0:
                await asyncio.sleep(0.05)
                await self.refresh()
                continue
            try:
                response = await self.call(known.leader_id, "Produce", m.ProduceRequest(None, acks, 1000, data), 1.3)
            except TransportError:
                code, base = int(ErrorCode.NETWORK_EXCEPTION), -1
            else:
                result = response.responses[0].partition_responses[0]
                code, base = result.error_code, result.base_offset
            if not code:
                self.last_acknowledged_ms[partition] = self.engine.now_ms
                if acks == -1:
                    self.checker.check_acknowledged(partition, base, batch)
                return
            self.counts["produce errors"] += 1
            await asyncio.sleep(self.rng.uniform(0.02, 0.1))
            await self.refresh()

    def check_at_end(self, blocked: set[int]) -> None:
        """Check that all partitions except `blocked`, which wait for a lost replica, accepted the final batch.

        Raises InvariantError.
        """
        missing = set(range(self.settings.partitions)) - blocked - self.last_acknowledged_ms.keys()
        if missing:
            self.checker.fail(f"partitions {missing} acknowledged no batch of {self.name} at the end")


class Consumer(Client):
    """A `Client` that reads one partition from its start."""

    def __init__(
        self, network: SimNetwork, settings: Settings, checker: Checker, number: int, partition: int, rack: str
    ) -> None:
        super().__init__(network, settings, checker, 300 + number, f"consumer-{number}")
        self.partition = partition
        self.rack = rack
        config = ConsumerConfig.parse(
            {
                "client.rack": rack,
                "auto.offset.reset": "earliest",
                "metadata.max.age.ms": 3000,
                "retry.backoff.max.ms": 400,
                "fetch.max.wait.ms": _FETCH_WAIT_MS,
            }
        )
        self._cluster = SimpleNamespace(
            metadata=SimpleNamespace(brokers={}), backoff=SimpleNamespace(delay_s=self._delay_s)
        )
        self._selection = ReplicaSelection(config, cast("Any", self._cluster))
        self.reader: PartitionReader = self._selection.reader()
        self.high_watermark = -1
        """The highest received high watermark."""
        self._wake = asyncio.Event()
        self._is_refreshing = False

    def start(self) -> None:
        """Start reading."""
        self.spawn(self._run())
        self.spawn(self._keep_metadata())

    def _delay_s(self, attempts: int) -> float:
        """Return the delay in seconds that `kipmesh.client.calls.Backoff` would use, with jitter from the seeded
        generator.
        """
        return min(0.04 * (1 << min(attempts - 1, 5)), 0.4) * self.rng.uniform(0.8, 1.2)

    async def _keep_metadata(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(self.rng.uniform(0.5, 1.5))

    async def _refresh(self) -> None:
        if self._is_refreshing:
            return
        self._is_refreshing = True
        try:
            if await self.refresh():
                self._cluster.metadata.brokers = self.brokers
                view: PartitionView = self._selection.of(TOPIC, self.partitions.get(self.partition))
                self._apply(self.reader.metadata(view, self.loop.now_ms()))
        finally:
            self._is_refreshing = False
        self._wake.set()

    async def _run(self) -> None:
        reader = self.reader
        while True:
            self._wake.clear()
            now_ms = self.loop.now_ms()
            self._apply(reader.tick(now_ms))
            action = reader.next(now_ms)
            if isinstance(action, FetchFrom | ListOffsetsAtLeader | EndOfEpochAtLeader):
                number = reader.sent(action, now_ms)
                self.loop.create_task(self._exchange(number, action))
                continue
            if isinstance(action, BackOff):
                await self._sleep(action.until_ms - now_ms)
            elif isinstance(action, AwaitMetadata):
                await asyncio.sleep(0.05)
                await self._refresh()
            elif isinstance(action, AwaitResponse):
                deadline_ms = reader.deadline_ms(now_ms)
                await self._sleep(5000 if deadline_ms is None else deadline_ms - now_ms)
            else:
                self.checker.fail(f"{self.name} of partition {self.partition} stopped: {self.reader.state}")

    async def _sleep(self, delay_ms: float) -> None:
        try:
            async with asyncio.timeout(max(delay_ms, 1) / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _exchange(self, number: int, action: FetchFrom | ListOffsetsAtLeader | EndOfEpochAtLeader) -> None:
        try:
            if isinstance(action, FetchFrom):
                effects = await self._fetch(number, action)
            elif isinstance(action, ListOffsetsAtLeader):
                effects = await self._list(number, action)
            else:
                effects = await self._end_of_epoch(number, action)
        except TransportError:
            effects = self.reader.failed(number, ErrorCode.NETWORK_EXCEPTION, self.loop.now_ms())
        self._apply(effects)
        self._wake.set()

    async def _fetch(self, number: int, action: FetchFrom) -> Effects:
        partition = m.FetchPartition(
            self.partition,
            action.current_leader_epoch,
            action.fetch_offset,
            action.last_fetched_epoch,
            -1,
            self.settings.fetch_bytes,
        )
        request = m.FetchRequest(
            replica_id=action.replica_id,
            max_wait_ms=_FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=1 << 20,
            topics=[m.FetchTopic(TOPIC, self.settings.topic_id, [partition])],
            rack_id=self.rack if action.offers_rack else "",
        )
        response = await self.call(action.node_id, "Fetch", request, 1.5)
        if response.error_code:
            return self.reader.failed(number, ErrorCode.of(response.error_code), self.loop.now_ms())
        data: m.PartitionData = response.responses[0].partitions[0]
        batches = list(record_batch.iterate(data.records, allow_partial=True))
        spans = [
            EpochSpan(header.base_offset, header.next_offset, header.partition_leader_epoch) for _, header in batches
        ]
        if data.records and not batches:
            return self.reader.failed(number, ErrorCode.CORRUPT_MESSAGE, self.loop.now_ms())
        is_leader = action.is_leader
        effects = self.reader.fetched(number, data, spans, self.loop.now_ms())
        if any(isinstance(effect, TakeRecords) for effect in effects):
            self._take([header for _, header in batches], is_leader)
        return effects

    def _take(self, batches: Sequence[record_batch.BatchHeader], is_leader: bool) -> None:
        position = self.reader.position or 0
        for header in batches:
            for offset in range(max(position, header.base_offset), header.next_offset):
                entry = (header.partition_leader_epoch, header.crc, offset - header.base_offset)
                self.checker.check_consumed(self, offset, position, entry)
                position = offset + 1
        if batches:
            self.counts["reads of leaders" if is_leader else "reads of followers"] += 1
            self._apply(self.reader.delivered(position))

    async def _list(self, number: int, action: ListOffsetsAtLeader) -> Effects:
        partition = m.ListOffsetsPartition(self.partition, action.current_leader_epoch, action.timestamp)
        request = m.ListOffsetsRequest(
            replica_id=-1, topics=[m.ListOffsetsTopic(TOPIC, self.settings.topic_id, [partition])]
        )
        response = await self.call(action.node_id, "ListOffsets", request, 1.0)
        result = response.topics[0].partitions[0]
        if result.error_code:
            return self.reader.failed(number, ErrorCode.of(result.error_code), self.loop.now_ms())
        return self.reader.listed(number, result.offset)

    async def _end_of_epoch(self, number: int, action: EndOfEpochAtLeader) -> Effects:
        partition = m.OffsetForLeaderPartition(self.partition, action.current_leader_epoch, action.epoch)
        request = m.OffsetsForLeaderEpochRequest(
            replica_id=-1, topics=[m.OffsetForLeaderTopic(TOPIC, self.settings.topic_id, [partition])]
        )
        response = await self.call(action.node_id, "OffsetsForLeaderEpoch", request, 1.0)
        result = response.topics[0].partitions[0]
        if result.error_code:
            return self.reader.failed(number, ErrorCode.of(result.error_code), self.loop.now_ms())
        return self.reader.epoch_ended(number, m.EpochEndOffset(result.leader_epoch, result.end_offset))

    def _apply(self, effects: Effects) -> None:
        """Apply the reader's effects, but do not buffer records."""
        for effect in effects:
            if isinstance(effect, OffsetReset | TruncationFound | RaiseError):
                self.checker.check_consumer_effect(self, effect)
            elif isinstance(effect, RefreshMetadata):
                self.loop.create_task(self._refresh())
            else:
                name = type(effect).__name__
                self.counts[f"consumer {name}"] += name not in ("TakeRecords", "Abandon", "MoveTo")
        self.checker.check_consumer_high_watermark(self)

    def check_at_end(self, blocked: set[int]) -> None:
        """Check that all records were read, unless the partition is in `blocked`, waiting for a lost replica.

        Raises InvariantError.
        """
        end, reader = self.checker.committed[self.partition].end, self.reader
        if reader.position != end and self.partition not in blocked:
            self.checker.fail(f"{self.name} is at offset {reader.position}, the end is {end} ({reader.state})")
