"""A producer's metadata: `TopicTracker` (KIP-526) decides what is asked for and when, and this asks it.

What needs a topic holds it: a `send` that waits, and each batch until it is delivered. Who waits for a topic is woken
by answers about that topic only, and `take_news` names the topics whose metadata is new, so that a producer of many
topics pays for those that something happened to.

Connecting asks for the brokers by a request that names no topic and gets none. After that there is no such request
(526-09): what a producer asks for is what the tracker says. The counters leave it out.

Invariant: the tracker knows each topic that has an entry, but for those whose end it reports at its next step.
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
    """The cache and its task; not shared between event loops."""

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
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._news: dict[str, None] = {}
        self._is_closed = False
        self._blocked_s = 0.0

    # -- from the producer

    def hold(self, name: str) -> None:
        """Something of this topic waits or is under way until `release`: it is asked for if need be, and kept."""
        self._tracker.hold(name, _now_ms())
        if name not in self._entries:
            self._entry(name)

    def release(self, name: str) -> None:
        """One `hold` ends."""
        self._tracker.release(name, _now_ms())

    def is_kept(self, name: str) -> bool:
        """Whether the topic is not forgotten yet."""
        return name in self._entries

    def take_news(self) -> tuple[str, ...]:
        """Topics whose metadata came, changed or went since the last call."""
        news, self._news = self._news, {}
        return tuple(news)

    def request_refresh(self, topics: Iterable[str] = ()) -> None:
        """The metadata of these topics is out of date (526-04)."""
        now_ms = _now_ms()
        for name in topics:
            self._tracker.changed(name, now_ms)
        self._wake.set()

    async def wait_for_topic(self, name: str, timeout_s: float, *, patient: bool = False) -> TopicMetadata:
        """The topic's metadata; raises KafkaError when it is not to be had, RuntimeError when the producer is closed.

        A topic that nobody knows is given up after a few answers, or, for the `patient`, at the end of `timeout_s`.
        """
        self.hold(name)
        try:
            known = self._entry(name).metadata
            return known if known is not None else await self._missing(name, timeout_s, patient)
        finally:
            self.release(name)

    async def _missing(self, name: str, timeout_s: float, patient: bool) -> TopicMetadata:
        entry = self._entry(name)
        entry.unknown_answers = 0
        entry.error = ErrorCode.NONE
        begin = time.monotonic()
        try:
            while entry.known(is_patient=patient) is None:
                left = begin + timeout_s - time.monotonic()
                if left <= 0:
                    raise self._timeout(f"topic {name!r}", timeout_s, entry)
                await self.wait_for_answer(name, left)
            assert entry.metadata is not None
            return entry.metadata
        finally:
            self._blocked_s += time.monotonic() - begin
            if entry.metadata is None:
                self._wake.set()  # perhaps nobody wants it any more

    async def wait_for_answer(self, name: str, timeout_s: float) -> None:
        """Wait for the next answer about a topic, at most so long; raises when there will be none."""
        raise_failure(self.failure)
        if self._is_closed:
            raise RuntimeError("the producer is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            if not waiter.done():
                waiters = self._waiting[name]
                waiters.remove(waiter)
                if not waiters:
                    del self._waiting[name]

    def end_waits(self) -> None:
        """The producer takes no more records: who waits for a topic is told."""
        self._is_closed = True
        self._wake_for(list(self._waiting))

    async def close(self) -> None:
        """Stop the task; who waits is told."""
        self.end_waits()
        await super().close()

    def metrics(self) -> tuple[TrackerMetrics, float]:
        """526-10: the tracker's counters, and the seconds that calls of `send` have waited for metadata."""
        return self._tracker.metrics(), self._blocked_s

    # -- the task

    async def _run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            step = self._tracker.poll(_now_ms())
            for name in step.forgotten:
                self._entries.pop(name, None)
                self._news[name] = None
            if step.forgotten:
                self._notify()
            if step.request is not None:
                await self._ask(step.request)
            elif not self.brokers:
                failures += 1
                if not await self._connect():
                    await asyncio.sleep(self._backoff.delay_s(failures))
            else:
                wait_until_ms = step.wait_until_ms
                await self._sleep(None if wait_until_ms is None else max(wait_until_ms - _now_ms(), 0) / 1000)

    async def _connect(self) -> bool:
        """Learn the brokers; whether it worked."""
        try:
            response = await self._request(())
            self._apply((), response)
        except Exception as error:
            self._fail(error)
        else:
            self.last_failure = None
        self._notify()
        return self.last_failure is None

    async def _ask(self, request: RefreshRequest) -> None:
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
            self._tracker.answered(_now_ms(), resolved, lost)
        self._notify()
        self._wake_for(request.topics)

    def _meter(self) -> Meter:
        return self._tracker.transferred

    def _apply_topic(self, entry: TopicEntry, answer: m.MetadataResponseTopic, now: float) -> None:
        super()._apply_topic(entry, answer, now)
        self._news[entry.name] = None

    def _wake_waiters(self) -> None:
        super()._wake_waiters()
        if self.failure is not None:
            self._wake_for(list(self._waiting))

    def _wake_for(self, names: Iterable[str]) -> None:
        for name in names:
            for waiter in self._waiting.pop(name, ()):
                if not waiter.done():
                    waiter.set_result(None)
