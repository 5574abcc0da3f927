"""The asynchronous producer: appends records to batches, and lets `Sender` deliver them.

`send` awaits only when the topic's metadata is missing or `buffer.memory` is used up; it also lets the event loop run
once for each batch that becomes full, so that a loop of sends overlaps with sending. A record is written exactly once,
however often it is sent, unless `enable.idempotence` is off: then a retry after an answer that was lost may write a
batch twice. The order of a partition's records is that of the calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from time import time
from typing import Any

from kipmesh.client.calls import raise_failure
from kipmesh.client.cluster import Client, parse_config
from kipmesh.client.producer.accumulator import (
    Batch,
    BufferMemory,
    Delivery,
    PartitionQueue,
    StickyPartitioner,
    partition_of_key,
)
from kipmesh.client.producer.producer_metadata import ProducerMetadata
from kipmesh.client.producer.sender import Sender
from kipmesh.client.records import check_fields, record_bytes_max
from kipmesh.client.types import Headers, TopicMetadata
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.topics import check_topic_name
from kipmesh.messages.schema import MAX_INT64
from kipmesh.transport.grpc.client import ConnectionPool


class WouldBlockError(KafkaError):
    """`send_nowait` would have to wait, for metadata or for room."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.REQUEST_TIMED_OUT, message)


class _Topic:
    """A topic that records go to."""

    __slots__ = ("available", "metadata", "queues", "sticky", "sticky_queue")

    def __init__(self, sticky: StickyPartitioner) -> None:
        self.metadata: TopicMetadata | None = None
        self.queues: list[PartitionQueue] = []
        self.available: Sequence[int] = ()
        self.sticky = sticky
        self.sticky_queue: PartitionQueue | None = None


def _checked_timestamp(timestamp_ms: int) -> int:
    if not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms <= MAX_INT64:
        raise KafkaError(ErrorCode.INVALID_TIMESTAMP, f"{timestamp_ms!r} is not a number of milliseconds since 1970")
    return timestamp_ms


class Producer(Client):
    """Sends records. Use `async with`, or `start` and `close`; one event loop, any number of tasks."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        self.config = parse_config(ProducerConfig, config)
        self._pool = ConnectionPool.of(self.config.client_id or "kipmesh-producer", self.config)
        self._metadata: ProducerMetadata = ProducerMetadata(bootstrap, self._pool, self.config)
        self._memory = BufferMemory(self.config.buffer_memory)
        self._sender: Sender | None = None
        self._closing = False
        self._accepting = False
        self._topics: dict[str, _Topic] = {}
        self._known: dict[str, _Topic] = {}
        self._random = random.Random()
        self._no_headers: list[tuple[str, bytes | None]] = []
        self._batch_closed = False

    async def start(self) -> None:
        """Connect; raises KafkaError when no bootstrap address answers."""
        if self._sender is not None or self._closing:
            raise RuntimeError("a producer starts once")
        self._metadata.listeners.append(self._on_metadata)
        try:
            await self._metadata.start(min(self.config.request_timeout_ms, self.config.max_block_ms) / 1000)
        except BaseException:
            self._closing = True
            await self._metadata.close()
            await self._pool.close()
            raise
        self._sender = Sender(self.config, self._metadata, self._pool, self._memory, self._refuse)
        self._accepting = True

    async def close(self) -> None:
        """Deliver what was sent (each record within `delivery.timeout.ms`), then disconnect. May be called again."""
        if self._closing:
            return
        self._closing = True
        self._refuse()
        self._metadata.end_waits()
        try:
            if self._sender is not None:
                await self._sender.flush()
        finally:
            if self._sender is not None:
                await self._sender.close()
            await self._metadata.close()
            await self._pool.close()

    async def flush(self) -> None:
        """Send all waiting records now; returns when each is delivered or has failed.

        Never raises their errors, but that of a producer that cannot go on.
        """
        sender = self._running()
        await sender.flush()
        raise_failure(sender.failure)

    async def partitions_for(self, topic: str) -> TopicMetadata:
        """A topic's metadata, and `send_nowait` takes it from then on; KafkaError when not within `max.block.ms`."""
        self._running()
        metadata = await self._metadata.wait_for_topic(topic, self.config.max_block_ms / 1000)
        self._use(topic, metadata)
        return metadata

    async def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> Delivery:
        """Append a record; the result is a future of its RecordMetadata, or of the KafkaError that it failed with.

        Raises KafkaError when the record cannot be taken: MESSAGE_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION, or
        REQUEST_TIMED_OUT when there is no room within `max.block.ms`; TypeError or ValueError for what is no record.
        """
        timestamp_ms = int(time() * 1000) if timestamp_ms is None else _checked_timestamp(timestamp_ms)
        try:
            delivery = self._append(topic, value, key, partition, timestamp_ms, headers, 0)
            if delivery is None:
                return await self._append_waiting(topic, value, key, partition, timestamp_ms, headers)
        except (TypeError, ValueError):
            check_fields(topic, key, value, partition, headers)
            raise
        if self._batch_closed:
            self._batch_closed = False
            await asyncio.sleep(0)
        return delivery

    def send_nowait(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> Delivery:
        """Like `send`, but raises WouldBlockError instead of waiting. Let the event loop run between calls."""
        timestamp_ms = int(time() * 1000) if timestamp_ms is None else _checked_timestamp(timestamp_ms)
        try:
            delivery = self._append(topic, value, key, partition, timestamp_ms, headers, 0)
        except (TypeError, ValueError):
            check_fields(topic, key, value, partition, headers)
            raise
        if delivery is None:
            self._running()
            if topic not in self._topics:
                check_topic_name(topic)
                raise WouldBlockError(f"no metadata of topic {topic!r} yet: see partitions_for")
            raise WouldBlockError(f"buffer.memory is used up, or partition {partition} of {topic!r} is not known")
        return delivery

    def has_metadata(self, topic: str, partition: int | None = None) -> bool:
        """Whether `send` would not have to wait for metadata."""
        state = self._topics.get(topic)
        return state is not None and (partition is None or 0 <= partition < len(state.queues))

    def metrics(self) -> dict[str, int | float]:
        """Counters since the start, by name: of metadata (526-10).

        `metadata_` and: `urgent_requests`, `non_urgent_requests`, `failed_requests`; `urgent_topics` and
        `non_urgent_topics` that were asked for; `urgent_bytes` and `non_urgent_bytes` both ways; `cached_topics` now;
        `evictions`; `blocked_s`, the seconds that calls of `send` have waited for metadata.
        """
        counters, blocked_s = self._metadata.metrics()
        found: dict[str, int | float] = {f"metadata_{name}": value for name, value in asdict(counters).items()}
        found["metadata_blocked_s"] = blocked_s
        return found

    # -- inside

    def _running(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("the producer is not started")
        if self._closing:
            raise RuntimeError("the producer is closed")
        raise_failure(self._sender.failure)
        return self._sender

    def _refuse(self) -> None:
        """From now on `_append` takes nothing, and `_running` says why."""
        self._accepting = False

    def _append(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int,
        headers: Headers,
        reserved_bytes: int,
    ) -> Delivery | None:
        """Append without waiting; None when that is impossible. `reserved_bytes` goes into a new batch or back."""
        state = self._topics.get(topic)
        if state is None or not self._accepting:
            return None
        fields = headers if type(headers) is list else list(headers) if headers else self._no_headers
        while True:
            queue: PartitionQueue | None
            if partition is not None:
                if not 0 <= partition < len(state.queues):
                    return None
                queue = state.queues[partition]
            elif key is None or self.config.partitioner_ignore_keys:
                queue = state.sticky_queue
            else:
                queue = state.queues[partition_of_key(key, len(state.queues))]
            batch = queue.open if queue is not None else None
            if batch is None:
                if queue is None or (partition is None and queue is state.sticky_queue):
                    chosen = state.queues[state.sticky.next(state.available)]
                    if chosen is not queue:
                        state.sticky_queue = chosen
                        continue
                batch = self._open(queue, key, value, headers, reserved_bytes)
                if batch is None:
                    return None
                reserved_bytes = 0
            index = batch.count
            try:
                appended = batch.append(index, timestamp_ms, key, value, fields)
            except Exception:  # what is not bytes
                if batch.count == 0:
                    self._running().discard(batch)
                if reserved_bytes:
                    self._memory.give(reserved_bytes)
                raise
            if appended is not None:
                batch.count = index + 1
                if reserved_bytes:
                    self._memory.give(reserved_bytes)
                return Delivery(batch, index, timestamp_ms)
            self._close_full(batch)

    def _open(
        self, queue: PartitionQueue, key: bytes | None, value: bytes | None, headers: Headers, reserved_bytes: int
    ) -> Batch | None:
        needed = reserved_bytes or self._needed_bytes(key, value, headers)
        if not reserved_bytes and not self._memory.take(needed):
            return None
        # A record that is larger than a request may be finds no room in an open batch, and is refused here.
        size_max = min(self.config.batch_size, self.config.max_request_size)
        batch = Batch(queue, needed, size_max, queue.loop.time())
        queue.open = batch
        queue.batches.append(batch)
        self._running().opened(batch)
        self._hold(batch)
        return batch

    def _hold(self, batch: Batch) -> None:
        """The topic's metadata is needed until the batch is finished (526-01)."""
        self._metadata.hold(batch.queue.topic)
        batch.callbacks.append(partial(self._finished, batch))

    def _finished(self, batch: Batch) -> None:
        for _, child in batch.children:
            self._hold(child)
        self._metadata.release(batch.queue.topic)

    def _close_full(self, batch: Batch) -> None:
        queue = batch.queue
        queue.open = None
        queue.report_closed(batch)
        self._batch_closed = True
        self._running().closed(queue)

    def _needed_bytes(self, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        size = record_bytes_max(key, value, headers)
        if size > self.config.max_request_size or size > self.config.buffer_memory:
            limit = "max.request.size" if size > self.config.max_request_size else "buffer.memory"
            raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"a record of {size} bytes is larger than {limit}")
        return min(max(size, self.config.batch_size), self.config.buffer_memory)

    async def _append_waiting(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int,
        headers: Headers,
    ) -> Delivery:
        sender = self._running()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.max_block_ms / 1000
        needed = self._needed_bytes(key, value, headers)
        if partition is not None and not isinstance(partition, int):
            raise TypeError
        check_topic_name(topic)
        await self._wait_for_partition(topic, partition, deadline)
        delivery = self._append(topic, value, key, partition, timestamp_ms, headers, 0)
        while delivery is None:
            sender.wake.set()  # it looks who waits when this task does
            if not await self._memory.wait(needed, max(deadline - loop.time(), 0)):
                self._running()
                text = f"buffer.memory of {self.config.buffer_memory} bytes was full for {self.config.max_block_ms} ms"
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
            delivery = self._append(topic, value, key, partition, timestamp_ms, headers, needed)
            if delivery is None:
                self._memory.give(needed)
                self._running()
                await self._wait_for_partition(topic, partition, deadline)
        return delivery

    async def _wait_for_partition(self, topic: str, partition: int | None, deadline: float) -> None:
        self._metadata.hold(topic)
        try:
            await self._wait_held(topic, partition, deadline)
        finally:
            self._metadata.release(topic)

    async def _wait_held(self, topic: str, partition: int | None, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        asked = False
        while True:
            left = max(deadline - loop.time(), 0)
            metadata = await self._metadata.wait_for_topic(topic, left, patient=True)
            self._use(topic, metadata)
            if metadata.partitions and (partition is None or partition in metadata.partitions):
                return
            if asked or left <= 0:
                text = f"partition {partition} of topic {topic!r} ({len(metadata.partitions)} partitions)"
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
            asked = True
            self._metadata.request_refresh((topic,))
            while self._metadata.topic(topic) is metadata and deadline > loop.time():
                await self._metadata.wait_for_answer(topic, deadline - loop.time())

    def _on_metadata(self) -> None:
        for name in self._metadata.take_news():
            metadata = self._metadata.topic(name)
            state = self._known.get(name)
            if metadata is None:
                self._topics.pop(name, None)
                if state is not None and not self._metadata.is_kept(name):
                    self._forget(name, state)
            elif state is not None and (metadata is not state.metadata or name not in self._topics):
                self._use(name, metadata)
        if self._sender is not None:
            self._sender.wake.set()
            if self._metadata.failure is not None:
                self._sender.fail(self._metadata.failure)

    def _forget(self, name: str, state: _Topic) -> None:
        """526-01: nothing of the topic waits; what is still under way has failed already, and its queues are kept."""
        if not any(queue.batches or queue.in_flight for queue in state.queues):
            del self._known[name]

    def _use(self, name: str, metadata: TopicMetadata) -> None:
        state = self._known.get(name)
        if state is None:
            state = self._known[name] = _Topic(StickyPartitioner(self.config.batch_size, self._random))
        loop = asyncio.get_running_loop()
        state.metadata = metadata
        count = max(metadata.partitions, default=-1) + 1
        for index in range(len(state.queues), count):
            state.queues.append(PartitionQueue(name, index, loop, state.sticky.closed))
        with_leader = tuple(each.partition for each in metadata.partitions.values() if each.leader_id >= 0)
        state.available = with_leader or tuple(metadata.partitions)
        if state.queues:
            self._topics[name] = state
