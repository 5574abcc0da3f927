"""Metadata of a producer. `TopicTracker` (KIP-526) decides which topics to request and when.

A waiting `send` and every undelivered batch hold their topic, so that it is not evicted. Waiters wake only for
responses about their topic, and `take_changed` lists the changed topics. Unrelated topics therefore cost nothing.

Connecting sends a request without topics, which returns the brokers only; the metrics do not count it. All later
requests name topics (526-09).

Invariant: the tracker tracks every cached topic, except those it reports as forgotten in its next step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from kipmesh import messages as m
from kipmesh.client.calls import raise_failure
from kipmesh.client.metadata import Metadata, TopicEntry
from kipmesh.client.types import TopicMetadata
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.producer import RefreshRequest, TopicTracker, TrackerConfig, TrackerMetrics
from kipmesh.transport.grpc.client import ConnectionPool, Meter

log = logging.getLogger(__name__)


def _now_ms() -> float:
    return time.monotonic() * 1000


class ProducerMetadata(Metadata):
    """The metadata cache of one producer, whose `TopicTracker` selects the topics to request (KIP-526)."""

    def __init__(self, bootstrap: str | Sequence[str], pool: ConnectionPool, config: ProducerConfig) -> None:
        super().__init__(bootstrap, pool, config)
        self._tracker = TopicTracker(
            TrackerConfig(
                config.metadata_max_age_ms,
                config.metadata_evict_ms,
                config.retry_backoff_ms,
                lambda attempts: self._backoff.delay_s(attempts) * 1000,
                config.metadata_refresh,
            )
        )
        self._topic_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._changed: dict[str, None] = {}
        self._is_closed = False
        self._blocked_s = 0.0

    # -- called by the producer

    def hold(self, name: str) -> None:
        """Request the topic if needed and keep it cached until the matching `release` (526-01)."""
        self._tracker.hold(name, _now_ms())
        self._entry(name)

    def release(self, name: str) -> None:
        """End one `hold`. The topic may be evicted when no hold is left and no records are sent to it for a while."""
        self._tracker.release(name, _now_ms())

    def is_cached(self, name: str) -> bool:
        """Whether the topic has a cache entry, with or without metadata."""
        return name in self._entries

    def take_changed(self) -> tuple[str, ...]:
        """Return the topics whose metadata was refreshed or evicted since the last call."""
        changed, self._changed = self._changed, {}
        return tuple(changed)

    def request_refresh(self, topics: Iterable[str] = ()) -> None:
        """Mark the metadata of these topics as stale, so that it is requested soon (526-04)."""
        now_ms = _now_ms()
        for name in topics:
            self._tracker.changed(name, now_ms)
        self._wake.set()

    async def wait_for_topic(self, name: str, timeout_s: float, *, patient: bool = False) -> TopicMetadata:
        """Return the topic's metadata, requesting it if it is not cached.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION after several responses without the topic, or only after
        `timeout_s` if `patient`; the topic's error; REQUEST_TIMED_OUT; NETWORK_EXCEPTION if no broker responds. Raises
        RuntimeError if the producer is closed.
        """
        self.hold(name)
        try:
            known = self._entry(name).metadata
            return known if known is not None else await self._wait_for_metadata(name, timeout_s, patient)
        finally:
            self.release(name)

    async def _wait_for_metadata(self, name: str, timeout_s: float, patient: bool) -> TopicMetadata:
        entry = self._entry(name)
        entry.unknown_responses = 0
        entry.error = ErrorCode.NONE
        begin = time.monotonic()
        try:
            while (metadata := entry.require(is_patient=patient)) is None:
                remaining_s = begin + timeout_s - time.monotonic()
                if remaining_s <= 0:
                    raise self._timeout(f"topic {name!r}", timeout_s, entry)
                await self.wait_for_response(name, remaining_s)
            return metadata
        finally:
            self._blocked_s += time.monotonic() - begin
            if entry.metadata is None:
                self._wake.set()  # the tracker may now forget the topic

    async def wait_for_response(self, name: str, timeout_s: float) -> None:
        """Wait for the next response about a topic, at most `timeout_s`.

        Raises KafkaError if the refresh task has failed, and RuntimeError if the producer is closed.
        """
        raise_failure(self.failure)
        if self._is_closed:
            raise RuntimeError("producer is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._topic_waiters.setdefault(name, []).append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            if not waiter.done():
                waiters = self._topic_waiters[name]
                waiters.remove(waiter)
                if not waiters:
                    del self._topic_waiters[name]

    def refuse_waiters(self) -> None:
        """Make current and later waits for a topic raise RuntimeError, because the producer is closing."""
        self._is_closed = True
        self._wake_topic_waiters(list(self._topic_waiters))

    async def close(self) -> None:
        """Stop the refresh task. Current and later waits for a topic raise RuntimeError. Idempotent."""
        self.refuse_waiters()
        await super().close()

    def metrics(self) -> tuple[TrackerMetrics, float]:
        """Return the tracker's counters, and the seconds that `send` calls have waited for metadata (526-10)."""
        return self._tracker.metrics(), self._blocked_s

    # -- the task

    async def _run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            step = self._tracker.poll(_now_ms())
            for name in step.forgotten:
                self._entries.pop(name, None)
                self._changed[name] = None
            if step.forgotten:
                self._notify()
            if step.request is not None:
                await self._refresh(step.request)
            elif not self.brokers:
                failures += 1
                if not await self._connect():
                    await asyncio.sleep(self._backoff.delay_s(failures))
            else:
                wait_until_ms = step.wait_until_ms
                await self._sleep(None if wait_until_ms is None else max(wait_until_ms - _now_ms(), 0) / 1000)

    async def _connect(self) -> bool:
        """Request the brokers and return whether the request succeeded."""
        try:
            response = await self._request(())
            self._apply((), response)
        except Exception as error:
            self._fail(error)
        else:
            self.last_failure = None
        self._notify()
        return self.last_failure is None

    async def _refresh(self, request: RefreshRequest) -> None:
        try:
            response = await self._request(request.topics)
            self._apply(request.topics, response)
        except Exception as error:
            self._fail(error)
            self._tracker.failed(_now_ms())
        else:
            self.last_failure = None
            entries = [entry for name in request.topics if (entry := self._entries.get(name)) is not None]
            resolved = {entry.name for entry in entries if not entry.urgent}
            lost = {entry.name for entry in entries if entry.metadata is None}
            self._tracker.completed(_now_ms(), resolved, lost)
        self._notify()
        self._wake_topic_waiters(request.topics)

    def _meter(self) -> Meter:
        return self._tracker.transferred

    def _apply_topic(self, entry: TopicEntry, topic: m.MetadataResponseTopic, now: float) -> None:
        super()._apply_topic(entry, topic, now)
        self._changed[entry.name] = None

    def _wake_waiters(self) -> None:
        super()._wake_waiters()
        if self.failure is not None:
            self._wake_topic_waiters(list(self._topic_waiters))

    def _wake_topic_waiters(self, names: Iterable[str]) -> None:
        for name in names:
            for waiter in self._topic_waiters.pop(name, ()):
                if not waiter.done():
                    waiter.set_result(None)
