"""Records on their way from any thread to an asynchronous producer's event loop.

One coroutine at a time takes the records in the order of the calls. Records of a topic without metadata are put aside,
and a task of the topic's own hands them over in their order once there is metadata; so no topic waits for another.
Invariants: records of one topic keep the order of the calls; every record gets an outcome; at most `AHEAD_MAX` records
wait here, aside or not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from kipmesh.client.portal import Portal
from kipmesh.client.producer.accumulator import Delivery
from kipmesh.client.producer.producer import Producer
from kipmesh.client.types import RecordMetadata
from kipmesh.core.errors import KafkaError

AHEAD_MAX = 2000


class PendingRecord:
    """The outcome of one record that was sent by a blocking producer."""

    __slots__ = ("_arguments", "_delivery", "_portal", "_waiters", "begin_s", "error")

    def __init__(self, portal: Portal, arguments: tuple[Any, ...]) -> None:
        self._portal = portal
        self._arguments = arguments
        self.begin_s = time.monotonic()
        self._delivery: Delivery | None = None
        self.error: BaseException | None = None
        """Why it was not handed over."""
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.error is not None or (self._delivery is not None and self._delivery.done())

    def result(self, timeout_s: float | None = None) -> RecordMetadata:
        """Wait for the outcome; raises the record's KafkaError, or TimeoutError."""
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
            raise self.error or RuntimeError("the producer is closed")
        return await self._delivery

    @property
    def where(self) -> tuple[str, int | None]:
        """Topic, and partition if the caller named one; until it is handed over."""
        return self._arguments[0], self._arguments[3]

    async def append(self, client: Producer) -> None:
        """On the loop: hand the record to the producer."""
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
        """On the loop: the record is not handed over."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        self._arguments = ()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Pump:
    """See the module. `send` and `drain` may be called by any thread."""

    def __init__(self, client: Producer) -> None:
        self._client = client
        self._room = threading.Semaphore(AHEAD_MAX)
        self._lock = threading.Lock()
        self._waiting: deque[PendingRecord] = deque()
        self._appending: Future[None] | None = None
        self._aside: dict[str, tuple[deque[PendingRecord], asyncio.Task[None]]] = {}  # of the loop only

    def send(self, portal: Portal, arguments: tuple[Any, ...]) -> PendingRecord:
        """Take a record; blocks when too many wait."""
        record = PendingRecord(portal, arguments)
        self._room.acquire()
        with self._lock:
            self._waiting.append(record)
            if self._appending is None:
                self._appending = portal.submit(self._append_all())
        return record

    def drain(self, portal: Portal, topic: str | None = None) -> None:
        """Wait until the producer has what was sent, or that of one topic."""
        with self._lock:
            appending = self._appending
        if appending is not None:
            appending.result()
        if self._aside:
            portal.call(self._aside_done(topic))

    async def _aside_done(self, topic: str | None) -> None:
        tasks = [task for name, (_, task) in self._aside.items() if topic in (None, name)]
        if tasks:
            await asyncio.wait(tasks)

    async def _append_all(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._waiting:
                        self._appending = None
                        return
                    record = self._waiting.popleft()
                if not self._is_put_aside(record):
                    self._room.release()
                    await record.append(self._client)
        except BaseException:  # the portal's end: what still waits is tried by the next send, and refused by it
            with self._lock:
                self._appending = None
            raise

    def _is_put_aside(self, record: PendingRecord) -> bool:
        try:
            return self._put_aside(record)
        except (TypeError, ValueError):  # what is no topic or partition: the producer says so
            return False

    def _put_aside(self, record: PendingRecord) -> bool:
        topic, partition = record.where
        found = self._aside.get(topic)
        if found is not None:
            found[0].append(record)
            return True
        if self._client.has_metadata(topic, partition):
            return False
        records = deque([record])
        self._aside[topic] = (records, asyncio.create_task(self._append_later(topic, records)))
        return True

    async def _append_later(self, topic: str, records: deque[PendingRecord]) -> None:
        try:
            while records:
                record = records.popleft()
                try:
                    await record.append(self._client)
                finally:
                    self._room.release()
                error = record.error
                if isinstance(error, KafkaError) and not self._client.has_metadata(topic):
                    self._give_up(records, error)
        finally:
            del self._aside[topic]
            for record in records:
                record.fail(RuntimeError("the producer is closed"))
                self._room.release()

    def _give_up(self, records: deque[PendingRecord], error: KafkaError) -> None:
        """Records that have waited for `max.block.ms`, too, do not wait once more for each other."""
        while records and (time.monotonic() - records[0].begin_s) * 1000 >= self._client.config.max_block_ms:
            records.popleft().fail(error)
            self._room.release()
