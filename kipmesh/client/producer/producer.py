"""The asynchronous producer. Appends records to batches, which `Sender` delivers.

`send` waits only while the topic's metadata is missing or `buffer.memory` is used up. It yields to the event loop once
per full batch, so that a loop of sends overlaps with delivery. With `enable.idempotence` retries never duplicate a
record; without it, a retry after a lost response may. Records of one partition keep the order of the calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from time import time
from typing import Any

from kipmesh.client.arguments import TIMESTAMP, check_text, counted
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
    """`send_nowait` would have to wait for metadata or buffer memory. The error code is REQUEST_TIMED_OUT."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.REQUEST_TIMED_OUT, message)


@dataclass(slots=True, eq=False)
class _Topic:
    sticky: StickyPartitioner
    sticky_queue: PartitionQueue | None = None
    metadata: TopicMetadata | None = None
    queues: list[PartitionQueue] = field(default_factory=list)
    available: Sequence[int] = ()


def _checked_timestamp(timestamp_ms: int) -> int:
    if not isinstance(timestamp_ms, int):
        raise TypeError(f"timestamp_ms must be {TIMESTAMP}, got {timestamp_ms!r}")
    if not 0 <= timestamp_ms <= MAX_INT64:
        text = f"timestamp_ms must be milliseconds since 1970, at least 0, got {timestamp_ms}"
        raise KafkaError(ErrorCode.INVALID_TIMESTAMP, text)
    return timestamp_ms


class Producer(Client):
    """Sends records to a cluster. Use `async with`, or `start` and `close`.

    Belongs to one event loop; any number of its tasks may share it. `config` takes Kafka's producer settings with dots
    or underscores; the constructor raises InvalidConfigError.
    """

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
        """Connect to the cluster.

        Raises KafkaError if no bootstrap server responds within `request.timeout.ms` and `max.block.ms`, and
        RuntimeError if the producer was started or closed before.
        """
        if self._sender is not None or self._closing:
            raise RuntimeError("producer was already started; create a new one")
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
        """Deliver the buffered records, each within `delivery.timeout.ms`, and disconnect. Idempotent.

        Does not raise the errors of failed records; their futures do.
        """
        if self._closing:
            return
        self._closing = True
        self._refuse()
        self._metadata.refuse_waiters()
        try:
            if self._sender is not None:
                await self._sender.flush()
        finally:
            if self._sender is not None:
                await self._sender.close()
            await self._metadata.close()
            await self._pool.close()

    async def flush(self) -> None:
        """Send all buffered records now and return when each is delivered or has failed.

        Raises KafkaError only if the producer itself has failed, not for failed records, and RuntimeError if the
        producer is not running.
        """
        sender = self._running()
        await sender.flush()
        raise_failure(sender.failure)

    async def partitions_for(self, topic: str) -> TopicMetadata:
        """Return a topic's metadata, requesting it if needed. `send_nowait` then accepts records for the topic.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION after several responses without the topic, another error of the
        topic, or REQUEST_TIMED_OUT or NETWORK_EXCEPTION after `max.block.ms`. Raises RuntimeError if the producer is
        not running.
        """
        check_text("topic", topic)
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
        """Append a record to a batch and return a future for its RecordMetadata or KafkaError.

        Waits up to `max.block.ms` for metadata and buffer memory. Raises KafkaError if the record is not accepted:
        MESSAGE_TOO_LARGE, INVALID_TOPIC_EXCEPTION, INVALID_TIMESTAMP, UNKNOWN_TOPIC_OR_PARTITION (for a missing topic
        only after `max.block.ms`), REQUEST_TIMED_OUT or NETWORK_EXCEPTION after `max.block.ms`, or the error that ended
        the producer. Raises TypeError for an argument of the wrong type, ValueError for a header name that is not valid
        UTF-8, RuntimeError if the producer is not running.
        """
        timestamp_ms = int(time() * 1000) if timestamp_ms is None else _checked_timestamp(timestamp_ms)
        try:
            delivery = self._append(topic, value, key, partition, timestamp_ms, headers, 0)
            if delivery is None:
                self._running()
                append = partial(self._append, topic, value, key, partition, timestamp_ms, headers)
                return await self._append_waiting(append, topic, partition, self._needed_bytes(key, value, headers))
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
        """Append a record like `send`, but raise WouldBlockError instead of waiting for metadata or buffer memory.

        The caller must yield to the event loop between calls, or nothing is sent.
        """
        timestamp_ms = int(time() * 1000) if timestamp_ms is None else _checked_timestamp(timestamp_ms)
        try:
            delivery = self._append(topic, value, key, partition, timestamp_ms, headers, 0)
        except (TypeError, ValueError):
            check_fields(topic, key, value, partition, headers)
            raise
        if delivery is None:
            self._running()
            if topic not in self._topics:
                check_text("topic", topic)
                check_topic_name(topic)
                raise WouldBlockError(f"no metadata for topic {topic!r}; call partitions_for first")
            raise WouldBlockError(f"buffer.memory is used up or partition {partition} of {topic!r} is unknown")
        return delivery

    def has_metadata(self, topic: str, partition: int | None = None) -> bool:
        """Whether the metadata of the topic, and of the partition unless it is None, is cached.

        If so, `send` does not wait for it.
        """
        state = self._topics.get(topic)
        return state is not None and (partition is None or 0 <= partition < len(state.queues))

    def metrics(self) -> dict[str, int | float]:
        """Return the metadata counters since the start (526-10), with the prefix `metadata_`.

        They are `urgent_requests`, `non_urgent_requests`, `failed_requests`, `urgent_topics` and `non_urgent_topics`
        (topics requested), `urgent_bytes` and `non_urgent_bytes` (sent and received), `cached_topics` (current number),
        `evictions`, and `blocked_s` (seconds that `send` has waited for metadata).
        """
        counters, blocked_s = self._metadata.metrics()
        metrics: dict[str, int | float] = {f"metadata_{name}": value for name, value in asdict(counters).items()}
        metrics["metadata_blocked_s"] = blocked_s
        return metrics

    # -- internals

    def _running(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("producer is not started; call start or use async with")
        if self._closing:
            raise RuntimeError("producer is closed")
        raise_failure(self._sender.failure)
        return self._sender

    def _refuse(self) -> None:
        """Make `_append` return None, so that its callers raise the error of `_running`."""
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
        """Append without waiting; return None if metadata or memory is missing or the producer is not running.

        Uses `reserved_bytes` for a new batch. If none is needed, releases them unless it returns None.
        """
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
                batch = self._open_batch(queue, key, value, headers, reserved_bytes)
                if batch is None:
                    return None
                reserved_bytes = 0
            index = batch.count
            try:
                appended = batch.append(index, timestamp_ms, key, value, fields)
            except Exception:  # a field has the wrong type
                if batch.count == 0:
                    self._running().discard(batch)
                if reserved_bytes:
                    self._memory.release(reserved_bytes)
                raise
            if appended is not None:
                batch.count = index + 1
                if reserved_bytes:
                    self._memory.release(reserved_bytes)
                return Delivery(batch, index, timestamp_ms)
            self._close_full(batch)

    def _open_batch(
        self, queue: PartitionQueue, key: bytes | None, value: bytes | None, headers: Headers, reserved_bytes: int
    ) -> Batch | None:
        needed = reserved_bytes or self._needed_bytes(key, value, headers)
        if not reserved_bytes and not self._memory.try_reserve(needed):
            return None
        # Bounded by max.request.size, so that a larger record never fits an open batch: `_needed_bytes` rejects it.
        size_max = min(self.config.batch_size, self.config.max_request_size)
        batch = Batch(queue, needed, size_max, queue.loop.time())
        queue.open = batch
        queue.batches.append(batch)
        self._running().batch_opened(batch)
        self._hold_topic(batch)
        return batch

    def _hold_topic(self, batch: Batch) -> None:
        """Keep the topic cached until the batch is finished (526-01)."""
        self._metadata.hold(batch.queue.topic)
        batch.callbacks.append(partial(self._release_topic, batch))

    def _release_topic(self, batch: Batch) -> None:
        for _, child in batch.children:
            self._hold_topic(child)
        self._metadata.release(batch.queue.topic)

    def _close_full(self, batch: Batch) -> None:
        batch.queue.close_batch(batch)
        self._batch_closed = True
        self._running().batch_full(batch.queue)

    def _needed_bytes(self, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        size = record_bytes_max(key, value, headers)
        limits = (("max.request.size", self.config.max_request_size), ("buffer.memory", self.config.buffer_memory))
        for name, limit in limits:
            if size > limit:
                raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"record of {size} bytes exceeds {name}={limit}")
        return min(max(size, self.config.batch_size), self.config.buffer_memory)

    async def _append_waiting(
        self, append: Callable[[int], Delivery | None], topic: str, partition: int | None, needed_bytes: int
    ) -> Delivery:
        """Wait for metadata and buffer memory, then call `append` with the number of reserved bytes (0: none yet)."""
        sender = self._running()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.max_block_ms / 1000
        if partition is not None and not isinstance(partition, int):
            raise TypeError
        check_text("topic", topic)
        check_topic_name(topic)
        await self._wait_for_partition(topic, partition, deadline)
        delivery = append(0)
        while delivery is None:
            sender.wake.set()  # with a waiter for memory, the sender does not wait for `linger.ms`
            if not await self._memory.reserve(needed_bytes, max(deadline - loop.time(), 0)):
                self._running()
                text = f"buffer.memory of {self.config.buffer_memory} bytes was full for {self.config.max_block_ms} ms"
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
            delivery = append(needed_bytes)
            if delivery is None:
                self._memory.release(needed_bytes)
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
        was_refreshed = False
        while True:
            remaining_s = max(deadline - loop.time(), 0)
            metadata = await self._metadata.wait_for_topic(topic, remaining_s, patient=True)
            self._use(topic, metadata)
            if metadata.partitions and (partition is None or partition in metadata.partitions):
                return
            if was_refreshed or remaining_s <= 0:
                count = counted(len(metadata.partitions), "partition")
                text = f"topic {topic!r} has no partition {partition}, it has {count}"
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
            was_refreshed = True
            self._metadata.request_refresh((topic,))
            while self._metadata.topic(topic) is metadata and deadline > loop.time():
                await self._metadata.wait_for_response(topic, deadline - loop.time())

    def _on_metadata(self) -> None:
        for name in self._metadata.take_changed():
            metadata = self._metadata.topic(name)
            state = self._known.get(name)
            if metadata is None:
                self._topics.pop(name, None)
                if state is not None and not self._metadata.is_cached(name):
                    self._forget(name, state)
            elif state is not None and (metadata is not state.metadata or name not in self._topics):
                self._use(name, metadata)
        if self._sender is not None:
            self._sender.wake.set()
            if self._metadata.failure is not None:
                self._sender.fail(self._metadata.failure)

    def _forget(self, name: str, state: _Topic) -> None:
        """Drop the queues of an evicted topic (526-01), unless they still have batches (of failed records)."""
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
            state.queues.append(PartitionQueue(name, index, loop, state.sticky.batch_closed))
        with_leader = tuple(each.partition for each in metadata.partitions.values() if each.leader_id >= 0)
        state.available = with_leader or tuple(metadata.partitions)
        if state.queues:
            self._topics[name] = state
