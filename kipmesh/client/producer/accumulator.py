"""Records on their way: their partition, the batches of each, the futures of their delivery, and their memory.

All of it belongs to one event loop. A partition's queue holds closed batches in order, then at most one open batch that
takes records. Invariants: a record is in exactly one batch; a batch is in one queue or in flight or finished; a queue
is in the order of its records, also after retries; bytes reserved = the sum over unfinished batches.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import Context
from itertools import count
from typing import Any

from murmurhash2 import murmurhash2

from kipmesh.client.records import new_builder
from kipmesh.client.types import RecordMetadata
from kipmesh.core.errors import KafkaError
from kipmesh.core.producer.sequences import Numbers, PartitionSequences

_MURMUR2_SEED = 0x9747B28C


class Batch:
    """Records of one partition that are sent together. Times are seconds of the loop's clock."""

    __slots__ = (
        "append",
        "attempts",
        "base_offset",
        "builder",
        "callbacks",
        "children",
        "count",
        "created_s",
        "error",
        "finished",
        "leader_epoch",
        "log_append_time_ms",
        "numbers",
        "order",
        "payload",
        "queue",
        "reserved_bytes",
        "retried_for",
        "ripe",
        "stamp",
        "waiter",
    )

    def __init__(
        self,
        queue: PartitionQueue,
        reserved_bytes: int,
        size_bytes_max: int,
        created_s: float,
        order: tuple[int, ...] | None = None,
    ) -> None:
        self.queue = queue
        self.order = queue.next_order() if order is None else order
        self.numbers: Numbers | None = None  # of an idempotent producer, from when it is first sent
        self.stamp: tuple[int, int, int] | None = None  # those that are in the payload
        self.reserved_bytes = reserved_bytes
        self.created_s = created_s
        self.builder: Any = new_builder(size_bytes_max)
        self.append = self.builder.append
        self.count = 0
        self.attempts = 0
        self.leader_epoch = -1  # of the last try
        self.payload: bytes | None = None
        self.base_offset = -1
        self.log_append_time_ms = -1
        self.error: KafkaError | None = None
        self.retried_for: KafkaError | None = None  # the last error that another try may mend
        self.finished = False
        self.ripe = False
        self.waiter: asyncio.Future[None] | None = None
        self.callbacks: list[Callable[[], None]] = []
        self.children: list[tuple[int, Batch]] = []

    def size_bytes(self) -> int:
        """Bytes on the wire, or before compression an upper bound."""
        return len(self.payload) if self.payload is not None else int(self.builder.size())

    def finish(self) -> None:
        """Everything is known: wake who waits. Set the outcome before."""
        self.finished = True
        self.builder = self.append = self.payload = None
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Done when the batch is finished, whatever the outcome."""
        if self.waiter is None:
            self.waiter = loop.create_future()
            if self.finished:
                self.waiter.set_result(None)
        return self.waiter


class Delivery:
    """The outcome of one record: a future of RecordMetadata or KafkaError, much cheaper than asyncio.Future.

    It can be awaited, gathered, waited for and given callbacks like one. `cancel` ends the waiting only: a record that
    is under way cannot be called back.
    """

    __slots__ = ("_batch", "_callbacks", "_index", "_timestamp")

    # asyncio takes objects with this attribute as futures (`asyncio.isfuture`).
    _asyncio_future_blocking = False

    def __init__(self, batch: Batch, index: int, timestamp: int) -> None:
        self._batch = batch
        self._index = index  # -1: cancelled
        self._timestamp = timestamp
        self._callbacks: list[tuple[Callable[[Any], object], Context | None]] | None = None

    def _place(self) -> tuple[Batch, int]:
        batch, index = self._batch, self._index
        while batch.children and index >= 0:
            first, child = next(pair for pair in reversed(batch.children) if pair[0] <= index)
            batch, index = child, index - first
        return batch, index

    def done(self) -> bool:
        """Whether the outcome is known, or the waiting was cancelled."""
        return self._index < 0 or self._place()[0].finished

    def cancelled(self) -> bool:
        """Whether `cancel` ended the waiting."""
        return self._index < 0

    def cancel(self, msg: object = None) -> bool:
        """Wait no longer; false when the outcome is known. The record is sent all the same."""
        if self.done():
            return False
        self._index = -1
        self._call_back()
        return True

    def _check(self) -> tuple[Batch, int]:
        batch, index = self._place()
        if index < 0:
            raise asyncio.CancelledError
        if not batch.finished:
            raise asyncio.InvalidStateError("the record is not delivered yet")
        return batch, index

    def exception(self) -> KafkaError | None:
        """The error, or None; InvalidStateError while the outcome is not known."""
        return self._check()[0].error

    def result(self) -> RecordMetadata:
        """Where the record is; raises the delivery's KafkaError, or InvalidStateError."""
        batch, index = self._check()
        if batch.error is not None:
            raise batch.error.with_traceback(None)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        timestamp = self._timestamp if batch.log_append_time_ms < 0 else batch.log_append_time_ms
        return RecordMetadata(batch.queue.topic, batch.queue.partition, offset, timestamp)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The producer's event loop."""
        return self._batch.queue.loop

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Call `callback(self)` soon after the outcome is known."""
        if self.done():
            self.get_loop().call_soon(callback, self, context=context)
        elif self._callbacks is None:
            self._callbacks = [(callback, context)]
            self._place()[0].callbacks.append(self._call_back)
        else:
            self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[Any], object]) -> int:
        """Do not call `callback`; how many were removed."""
        before = self._callbacks or []
        self._callbacks = [pair for pair in before if pair[0] != callback] if before else self._callbacks
        return len(before) - len(self._callbacks or [])

    def _call_back(self) -> None:
        if not self.done():  # the batch was split
            self._place()[0].callbacks.append(self._call_back)
            return
        callbacks, self._callbacks = self._callbacks or [], []
        for callback, context in callbacks:
            self.get_loop().call_soon(callback, self, context=context)

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        while not self.done():
            # A cancelled waiter must not cancel what the other records of the batch wait for.
            yield from asyncio.shield(self._place()[0].future(self.get_loop())).__await__()
        return self.result()


class PartitionQueue:
    """Batches of one partition, oldest first; `open` is the last of them or None."""

    __slots__ = (
        "_on_closed",
        "_orders",
        "batches",
        "failed_epoch",
        "in_flight",
        "loop",
        "open",
        "partition",
        "retry_at_s",
        "sequences",
        "topic",
    )

    def __init__(
        self, topic: str, partition: int, loop: asyncio.AbstractEventLoop, on_closed: Callable[[int, int], None]
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.loop = loop
        self.batches: deque[Batch] = deque()
        self.open: Batch | None = None
        self.in_flight: list[Batch] = []
        self.sequences: PartitionSequences | None = None
        self.retry_at_s = 0.0
        self.failed_epoch = -1  # the leader epoch of the last try that failed
        self._on_closed = on_closed
        self._orders = count()

    def next_order(self) -> tuple[int, ...]:
        """The place of a new batch among all of the queue."""
        return (next(self._orders),)

    def put_back(self, batch: Batch) -> None:
        """A batch is to be sent again, before all that were made after it."""
        place = 0
        while place < len(self.batches) and self.batches[place].order < batch.order:
            place += 1
        self.batches.insert(place, batch)

    def report_closed(self, batch: Batch) -> None:
        """The open batch takes no more records: tell the partitioner."""
        self._on_closed(self.partition, batch.size_bytes())


class BufferMemory:
    """`buffer.memory`: bytes that batches reserve; who finds no room waits in order."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self.waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size_bytes: int) -> bool:
        """Reserve at once; false when there is no room or somebody waits already."""
        if self.waiters or self.free_bytes < size_bytes:
            return False
        self.free_bytes -= size_bytes
        return True

    async def wait(self, size_bytes: int, timeout_s: float) -> bool:
        """Reserve, waiting at most so long; false when there was no room in time, or never will be."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (size_bytes, future)
        self.waiters.append(waiter)
        self._grant()
        try:
            await asyncio.wait([future], timeout=timeout_s)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(size_bytes)
            raise
        finally:
            if not future.done():
                self.waiters.remove(waiter)
                self._grant()
        return future.done() and not future.cancelled()

    def give(self, size_bytes: int) -> None:
        """Return what a batch had reserved."""
        self.free_bytes += size_bytes
        self._grant()

    def refuse_waiters(self) -> None:
        """Nobody who waits now will get room."""
        while self.waiters:
            self.waiters.popleft()[1].cancel()

    def _grant(self) -> None:
        while self.waiters and self.free_bytes >= self.waiters[0][0]:
            size_bytes, future = self.waiters.popleft()
            self.free_bytes -= size_bytes
            future.set_result(None)


def partition_of_key(key: bytes, partition_count: int) -> int:
    """The partition of `key`: Kafka's positive murmur2, modulo the number of partitions."""
    return int((murmurhash2(key, _MURMUR2_SEED) & 0x7FFFFFFF) % partition_count)


class StickyPartitioner:
    """One topic's partition for records without a key, as in Kafka's default partitioner (KIP-794).

    They stick to one partition until about `batch.size` bytes went to it, which makes full batches and still spreads
    bytes evenly. The caller reports each batch's bytes as it is closed.
    """

    __slots__ = ("_bytes", "_bytes_max", "_random", "partition")

    def __init__(self, bytes_max: int, source: random.Random) -> None:
        self.partition = -1
        self._bytes = 0
        self._bytes_max = bytes_max
        self._random = source

    def closed(self, partition: int, size_bytes: int) -> None:
        """A batch of `partition` takes no more records."""
        if partition == self.partition:
            self._bytes += size_bytes

    def next(self, available: Sequence[int]) -> int:
        """The partition for a new batch: the current one until its share is used up, then any of `available`."""
        if self._bytes >= self._bytes_max or self.partition not in available:
            others = [each for each in available if each != self.partition] or available
            self.partition = self._random.choice(others)
            self._bytes = 0
        return self.partition
