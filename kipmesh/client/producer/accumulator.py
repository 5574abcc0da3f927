"""Undelivered records of a producer: partitioning, batches and their queues, delivery futures, and buffer memory.

All objects belong to one event loop. A partition's queue holds closed batches in order, then at most one open batch
that accepts records. Invariants: a record is in exactly one batch; a batch is queued, in flight or finished; a queue
keeps the order of its records, even after retries; the reserved memory is the sum over unfinished batches.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import Context
from dataclasses import InitVar, dataclass, field
from itertools import count
from typing import Any

from murmurhash2 import murmurhash2

from kipmesh.client.records import new_builder
from kipmesh.client.types import RecordMetadata
from kipmesh.core.errors import KafkaError
from kipmesh.core.producer.sequences import BatchSequence, PartitionSequences

_MURMUR2_SEED = 0x9747B28C


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Records of one partition that are sent together. Times are seconds of the loop's clock."""

    queue: PartitionQueue
    reserved_bytes: int
    size_bytes_max: InitVar[int]
    created_s: float
    order: tuple[int, ...] = ()
    """Position among all batches of the queue. Empty: the batch is the newest."""
    numbers: BatchSequence | None = None
    """Sequences of an idempotent producer, assigned before the first attempt."""
    stamp: tuple[int, int, int] | None = None
    """Producer id, producer epoch and base sequence in the payload."""
    builder: Any = field(init=False)
    append: Any = field(init=False)
    count: int = 0
    attempts: int = 0
    leader_epoch: int = -1
    """Leader epoch of the last attempt."""
    payload: bytes | None = None
    base_offset: int = -1
    log_append_time_ms: int = -1
    error: KafkaError | None = None
    retried_for: KafkaError | None = None
    """The last retriable error."""
    finished: bool = False
    linger_expired: bool = False
    waiter: asyncio.Future[None] | None = None
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    children: list[tuple[int, Batch]] = field(default_factory=list)
    """After a split: the index of the first record of each part, and the part."""

    def __post_init__(self, size_bytes_max: int) -> None:
        self.order = self.order or self.queue.next_order()
        self.builder = new_builder(size_bytes_max)
        self.append = self.builder.append

    def size_bytes(self) -> int:
        """Return the size in bytes: of the payload if there is one, otherwise of the records before compression."""
        return len(self.payload) if self.payload is not None else int(self.builder.size())

    def finish(self) -> None:
        """Wake the waiters and run the callbacks. The caller must have set the outcome: the offset or `error`."""
        self.finished = True
        self.builder = self.append = self.payload = None
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that is done when the batch is finished, successfully or not."""
        if self.waiter is None:
            self.waiter = loop.create_future()
            if self.finished:
                self.waiter.set_result(None)
        return self.waiter


class Delivery:
    """A future for one record's RecordMetadata or KafkaError, with less overhead than asyncio.Future.

    It supports await, asyncio.gather, asyncio.wait and done callbacks. `cancel` only cancels the future; the record is
    still sent.
    """

    __slots__ = ("_batch", "_callbacks", "_index", "_timestamp")

    # asyncio treats objects with this attribute as futures (`asyncio.isfuture`).
    _asyncio_future_blocking = False

    def __init__(self, batch: Batch, index: int, timestamp: int) -> None:
        self._batch = batch
        self._index = index  # -1: cancelled
        self._timestamp = timestamp
        self._callbacks: list[tuple[Callable[[Any], object], Context | None]] | None = None

    def _locate(self) -> tuple[Batch, int]:
        """Return the batch that contains the record now, and the record's index in it."""
        batch, index = self._batch, self._index
        while batch.children and index >= 0:
            first, child = next(pair for pair in reversed(batch.children) if pair[0] <= index)
            batch, index = child, index - first
        return batch, index

    def done(self) -> bool:
        """Whether the outcome is known or the future was cancelled."""
        return self._index < 0 or self._locate()[0].finished

    def cancelled(self) -> bool:
        """Whether the future was cancelled."""
        return self._index < 0

    def cancel(self, msg: object = None) -> bool:
        """Cancel the future; return False if the outcome is already known. The record is still sent."""
        if self.done():
            return False
        self._index = -1
        self._run_callbacks()
        return True

    def _finished_batch(self) -> tuple[Batch, int]:
        batch, index = self._locate()
        if index < 0:
            raise asyncio.CancelledError
        if not batch.finished:
            raise asyncio.InvalidStateError("record is not delivered yet")
        return batch, index

    def exception(self) -> KafkaError | None:
        """Return the delivery error, or None on success.

        Raises asyncio.InvalidStateError before the outcome is known, and CancelledError after `cancel`.
        """
        return self._finished_batch()[0].error

    def result(self) -> RecordMetadata:
        """Return the record's position. Raises KafkaError if delivery failed.

        Raises asyncio.InvalidStateError before the outcome is known, and CancelledError after `cancel`.
        """
        batch, index = self._finished_batch()
        if batch.error is not None:
            raise batch.error.with_traceback(None)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        timestamp = self._timestamp if batch.log_append_time_ms < 0 else batch.log_append_time_ms
        return RecordMetadata(batch.queue.topic, batch.queue.partition, offset, timestamp)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the producer's event loop."""
        return self._batch.queue.loop

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Schedule `callback(self)` on the event loop when the outcome is known."""
        if self.done():
            self.get_loop().call_soon(callback, self, context=context)
        elif self._callbacks is None:
            self._callbacks = [(callback, context)]
            self._locate()[0].callbacks.append(self._run_callbacks)
        else:
            self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[Any], object]) -> int:
        """Remove all registrations of `callback` and return their number."""
        before = self._callbacks or []
        self._callbacks = [pair for pair in before if pair[0] != callback] if before else self._callbacks
        return len(before) - len(self._callbacks or [])

    def _run_callbacks(self) -> None:
        if not self.done():  # the batch was split
            self._locate()[0].callbacks.append(self._run_callbacks)
            return
        callbacks, self._callbacks = self._callbacks or [], []
        for callback, context in callbacks:
            self.get_loop().call_soon(callback, self, context=context)

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        while not self.done():
            # All records of the batch share this future, so cancelling one waiter must not cancel it.
            yield from asyncio.shield(self._locate()[0].future(self.get_loop())).__await__()
        return self.result()


@dataclass(slots=True, eq=False, repr=False)
class PartitionQueue:
    """Unsent batches of one partition, oldest first, and those in flight.

    `open` is the last batch while it accepts records, otherwise None. `on_closed` is called with the partition and the
    size in bytes of each batch that stops accepting records.
    """

    topic: str
    partition: int
    loop: asyncio.AbstractEventLoop
    on_closed: Callable[[int, int], None]
    batches: deque[Batch] = field(default_factory=deque)
    open: Batch | None = None
    in_flight: list[Batch] = field(default_factory=list)
    sequences: PartitionSequences | None = None
    retry_at_s: float = 0.0
    failed_epoch: int = -1
    """Leader epoch of the last failed attempt."""
    _orders: count[int] = field(default_factory=count)

    def next_order(self) -> tuple[int, ...]:
        """Return the `order` of a new batch, after all earlier ones."""
        return (next(self._orders),)

    def put_back(self, batch: Batch) -> None:
        """Queue a batch for a retry, in its original position: before all batches created after it."""
        index = 0
        while index < len(self.batches) and self.batches[index].order < batch.order:
            index += 1
        self.batches.insert(index, batch)

    def close_batch(self, batch: Batch) -> None:
        """Stop adding records to the open batch, and report its size to `on_closed`."""
        self.open = None
        self.on_closed(self.partition, batch.size_bytes())


class BufferMemory:
    """The memory budget `buffer.memory`. Waiters are served in order."""

    def __init__(self, total_bytes: int) -> None:
        self.free_bytes = total_bytes
        self.waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve memory without waiting. Returns False if there is too little or others are waiting."""
        if self.waiters or self.free_bytes < size_bytes:
            return False
        self.free_bytes -= size_bytes
        return True

    async def reserve(self, size_bytes: int, timeout_s: float) -> bool:
        """Reserve memory, waiting up to `timeout_s`. Returns False on timeout or after `refuse_waiters`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (size_bytes, future)
        self.waiters.append(waiter)
        self._grant()
        try:
            await asyncio.wait([future], timeout=timeout_s)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(size_bytes)
            raise
        finally:
            if not future.done():
                self.waiters.remove(waiter)
                self._grant()
        return future.done() and not future.cancelled()

    def release(self, size_bytes: int) -> None:
        """Free reserved memory and serve waiters."""
        self.free_bytes += size_bytes
        self._grant()

    def refuse_waiters(self) -> None:
        """Let all current `reserve` calls return False."""
        while self.waiters:
            self.waiters.popleft()[1].cancel()

    def _grant(self) -> None:
        while self.waiters and self.free_bytes >= self.waiters[0][0]:
            size_bytes, future = self.waiters.popleft()
            self.free_bytes -= size_bytes
            future.set_result(None)


def partition_of_key(key: bytes, partition_count: int) -> int:
    """Return the partition of a key as in Kafka: positive murmur2 hash modulo the number of partitions."""
    return int((murmurhash2(key, _MURMUR2_SEED) & 0x7FFFFFFF) % partition_count)


@dataclass(slots=True, eq=False)
class StickyPartitioner:
    """Selects the partition for a topic's records without a key, like Kafka's default partitioner (KIP-794).

    All records go to one random partition until about `bytes_max` bytes (`batch.size`) have been sent to it. This fills
    batches and still distributes bytes evenly.
    """

    bytes_max: int
    source: random.Random
    partition: int = -1
    _bytes: int = 0

    def batch_closed(self, partition: int, size_bytes: int) -> None:
        """Count the bytes of a batch that accepts no more records, if it belongs to the current partition."""
        if partition == self.partition:
            self._bytes += size_bytes

    def next(self, available: Sequence[int]) -> int:
        """Return the partition of a new batch: the current one until `bytes_max`, then another one, at random.

        Only partitions in `available`, which is not empty, are returned.
        """
        if self._bytes >= self.bytes_max or self.partition not in available:
            others = [each for each in available if each != self.partition] or available
            self.partition = self.source.choice(others)
            self._bytes = 0
        return self.partition
