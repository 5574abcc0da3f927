"""Passes records from any thread to an asynchronous producer on its event loop.

One coroutine at a time appends the records in call order. Records of a topic without metadata are deferred to a task
per topic, so that no topic waits for another. Invariants: records of one topic keep their order; every record gets an
outcome; at most `QUEUED_MAX` records are queued, deferred ones included.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kipmesh.client.portal import Portal
from kipmesh.client.producer.accumulator import Delivery
from kipmesh.client.producer.producer import Producer
from kipmesh.client.types import RecordMetadata
from kipmesh.core.errors import KafkaError

QUEUED_MAX = 2000


@dataclass(slots=True, eq=False, repr=False)
class PendingRecord:
    """The pending outcome of a record that was sent by a blocking producer."""

    _portal: Portal
    _arguments: tuple[Any, ...]
    error: BaseException | None = None
    """The error of appending the record to the producer."""
    begin_s: float = field(default_factory=time.monotonic)
    _delivery: Delivery | None = None
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def done(self) -> bool:
        """Whether the record is acknowledged or has failed."""
        return self.error is not None or (self._delivery is not None and self._delivery.done())

    def result(self, timeout_s: float | None = None) -> RecordMetadata:
        """Return the record's position, waiting up to `timeout_s` (None: without limit).

        Raises TimeoutError, the record's KafkaError, the error that the asynchronous `send` raised, or RuntimeError if
        the producer was closed before.
        """
        if self.error is None and self._delivery is not None and self._delivery.done():
            return self._delivery.result()
        future = self._portal.submit(self._outcome())
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    async def _outcome(self) -> RecordMetadata:
        if self._delivery is None and self.error is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self._delivery is None:
            raise self.error or RuntimeError("producer is closed")
        return await self._delivery

    @property
    def destination(self) -> tuple[str, int | None]:
        """Topic and requested partition (None: chosen by the producer). Valid until the record is appended."""
        return self._arguments[0], self._arguments[3]

    async def append(self, client: Producer) -> None:
        """Append the record to the producer; an error becomes the outcome. Runs on the event loop."""
        try:
            self._delivery = await client.send(*self._arguments)
        except Exception as error:
            self.fail(error)
        except BaseException as error:
            self.fail(error)
            raise
        else:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Complete the record with an error. Runs on the event loop."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        self._arguments = ()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Pump:
    """The queue between blocking `send` calls and one producer. Any thread may call `send` and `drain`."""

    def __init__(self, client: Producer) -> None:
        self._client = client
        self._capacity = threading.Semaphore(QUEUED_MAX)
        self._lock = threading.Lock()
        self._queue: deque[PendingRecord] = deque()
        self._appending: Future[None] | None = None
        self._deferred: dict[str, tuple[deque[PendingRecord], asyncio.Task[None]]] = {}  # used on the event loop only

    def send(self, portal: Portal, arguments: tuple[Any, ...]) -> PendingRecord:
        """Queue a record with the arguments of `Producer.send`. Blocks while `QUEUED_MAX` records are queued.

        Raises RuntimeError if the portal is closed or belongs to another process.
        """
        record = PendingRecord(portal, arguments)
        self._capacity.acquire()
        with self._lock:
            self._queue.append(record)
            if self._appending is None:
                self._appending = portal.submit(self._append_all())
        return record

    def drain(self, portal: Portal, topic: str | None = None) -> None:
        """Block until all queued records (or those of `topic`) are appended to the producer or have failed.

        Does not wait for their delivery.
        """
        with self._lock:
            appending = self._appending
        if appending is not None:
            appending.result()
        if self._deferred:
            portal.call(self._wait_deferred(topic))

    async def _wait_deferred(self, topic: str | None) -> None:
        tasks = [task for name, (_, task) in self._deferred.items() if topic in (None, name)]
        if tasks:
            await asyncio.wait(tasks)

    async def _append_all(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._queue:
                        self._appending = None
                        return
                    record = self._queue.popleft()
                if not self._defer(record):
                    self._capacity.release()
                    await record.append(self._client)
        except BaseException:  # the portal is closing: a later send resubmits this coroutine, which raises there
            with self._lock:
                self._appending = None
            raise

    def _defer(self, record: PendingRecord) -> bool:
        """Defer the record if its topic lacks metadata or has deferred records. Returns whether it was deferred."""
        topic, partition = record.destination
        try:
            deferred = self._deferred.get(topic)
            if deferred is None and self._client.has_metadata(topic, partition):
                return False
        except (TypeError, ValueError):  # invalid topic or partition: `send` raises a better error
            return False
        if deferred is not None:
            deferred[0].append(record)
        else:
            records = deque([record])
            self._deferred[topic] = (records, asyncio.create_task(self._append_deferred(topic, records)))
        return True

    async def _append_deferred(self, topic: str, records: deque[PendingRecord]) -> None:
        try:
            while records:
                record = records.popleft()
                try:
                    await record.append(self._client)
                finally:
                    self._capacity.release()
                error = record.error
                if isinstance(error, KafkaError) and not self._client.has_metadata(topic):
                    self._fail_expired(records, error)
        finally:
            del self._deferred[topic]
            for record in records:
                record.fail(RuntimeError("producer is closed"))
                self._capacity.release()

    def _fail_expired(self, records: deque[PendingRecord], error: KafkaError) -> None:
        """Fail the records that were sent more than `max.block.ms` ago, instead of waiting again for each of them."""
        while records and (time.monotonic() - records[0].begin_s) * 1000 >= self._client.config.max_block_ms:
            records.popleft().fail(error)
            self._capacity.release()
