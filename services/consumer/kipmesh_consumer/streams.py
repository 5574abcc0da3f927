"""One answer of records: a consumer of its own, read only as fast as the reader takes.

Rules:
- A stream holds at most one poll of records beside what its consumer has fetched ahead (`fetch.max.bytes`) and the
  socket's buffer: a stalled reader costs that much and no more, and is dropped after `stream.write.timeout.ms`.
- At most `streams.max` streams at a time; one more is refused, before anything was opened for it.
- Whatever ends a stream (limit, end, reader gone, error, shutdown) closes its consumer and frees its place.

Rules of a stream that is a member of the service's group, which says what it reads, and where it begins:
- The member is the stream, not the service: partitions are shared among readers, and none waits for a service that has
  no reader. A reader that takes nothing for `max.poll.interval.ms` loses its partitions.
- A poll begins when all records of the one before have gone to the reader, and only polls and ends commit: no record is
  committed that was not sent.
- A stream that ends otherwise than by itself (its reader is gone, or takes nothing) commits nothing at its end: what
  its reader may not have got since the last commit goes to another one, so records are delivered at least once as far
  as the service can see. What lies in the buffers between service and reader it cannot see.
- The time without a record (`timeout_ms`) begins with the first assignment, also an empty one: joining takes what it
  takes (`group.initial.rebalance.delay.ms`, other members), but no longer than `default.api.timeout.ms`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kipmesh.client import Consumer, ConsumerRecord, FetchStats, RebalanceListener, TopicPartition
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh_consumer.metrics import ServiceMetrics
from kipmesh_consumer.parameters import Edge, Start

IDLE_POLL_MS_MAX = 60_000
"""A follower of a quiet topic looks at its own limits at least this often; records wake it at once."""
JOIN_POLL_S = 0.5
"""So often a stream with a time limit looks whether its group has let it in."""


class StreamsExhaustedError(Exception):
    """All places for streams are taken (HTTP 503)."""


class End(StrEnum):
    """Why a stream ended."""

    END_OFFSET = "end_offset"
    LIMIT = "limit"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"
    ERROR = "error"
    READER_GONE = "reader_gone"
    READER_STALLED = "reader_stalled"


_BY_ITSELF = frozenset({End.LIMIT, End.TIMEOUT, End.SHUTDOWN})


@dataclass(frozen=True, slots=True)
class Request:
    """What a stream is to deliver."""

    topic: str
    partitions: Sequence[int]
    start: Start
    limit: int | None
    timeout_ms: int | None
    follow: bool


class Delivered(NamedTuple):
    """The offset after the furthest record that was delivered."""

    topic: str
    partition: int
    position: int


class DeliveredPositions:
    """What this service has delivered, by topic and partition: the basis of its lag.

    Lag here is the end offset minus the offset after the last record that any stream of this service delivered; a
    group's lag, by what is committed, is its coordinator's business (`kafka_consumergroup_lag`). At most
    `partitions_max` partitions are remembered; the one used longest ago goes first.
    """

    def __init__(self, partitions_max: int) -> None:
        self._partitions_max = partitions_max
        self._positions: OrderedDict[tuple[str, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._positions)

    def deliver(self, topic: str, partition: int, next_offset: int) -> None:
        """Note that everything of a stream below `next_offset` was delivered."""
        key = (topic, partition)
        self._positions[key] = max(next_offset, self._positions.get(key, 0))
        self._positions.move_to_end(key)
        while len(self._positions) > self._partitions_max:
            self._positions.popitem(last=False)

    def forget(self, topic: str, partition: int) -> None:
        """The partition is gone, or began anew."""
        self._positions.pop((topic, partition), None)

    def of(self, topic: str | None) -> list[Delivered]:
        """All positions, or those of one topic, in order."""
        return [Delivered(*key, at) for key, at in sorted(self._positions.items()) if topic in (None, key[0])]


class Streams:
    """All streams of a service, and what they share: places, delivered positions, metrics."""

    def __init__(self, config: ConsumerServiceConfig, metrics: ServiceMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.delivered = DeliveredPositions(config.lag_partitions_max)
        self.stopping = asyncio.Event()
        self.open: dict[int, Stream] = {}
        self.fetch_stats = FetchStats()
        """Of all streams there are and were, as `count_fetches` last saw them."""
        self._past_fetches = FetchStats()
        self._places = config.streams_max
        self._ids = itertools.count(1)

    def take_place(self) -> int:
        """Reserve a place; returns the stream's id. Raises StreamsExhaustedError."""
        if self._places == 0:
            self.metrics.streams_refused.inc()
            raise StreamsExhaustedError(f"all {self.config.streams_max} streams are in use (streams.max)")
        self._places -= 1
        self.metrics.streams_open.inc()
        return next(self._ids)

    def free_place(self, stream_id: int) -> None:
        """Give a place back."""
        self.open.pop(stream_id, None)
        self._places += 1
        self.metrics.streams_open.dec()

    def count_fetches(self) -> None:
        """Bring `fetch_stats` up to date. On the event loop, for a scrape on another thread."""
        self.fetch_stats = sum((stream.fetch_stats for stream in self.open.values()), self._past_fetches)

    def keep_fetches(self, stats: FetchStats) -> None:
        """A stream's consumer was closed."""
        self._past_fetches += replace(stats, sessions=0, partitions=0)

    async def open_stream(self, request: Request, make_consumer: Callable[[], Consumer], kind: type[Stream]) -> Stream:
        """Begin a stream with a consumer of its own; raises StreamsExhaustedError or KafkaError."""
        stream_id = self.take_place()
        stream = kind(self, stream_id, request, make_consumer())
        try:
            await stream.begin()
        except BaseException:
            await stream.close(End.ERROR)
            raise
        self.open[stream_id] = stream
        return stream


class Stream:
    """Reads the requested records in the order they arrive; belongs to the task of its HTTP request."""

    def __init__(self, streams: Streams, stream_id: int, request: Request, consumer: Consumer) -> None:
        self.stream_id = stream_id
        self.request = request
        self.end: End | None = None
        self.positions: dict[int, int] = {}
        self._streams = streams
        self._consumer: Consumer | None = consumer
        self._end_offsets: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._left = request.limit

    async def begin(self) -> None:
        """Find the offsets to begin at; raises KafkaError(OFFSET_OUT_OF_RANGE) for one that is not there."""
        consumer = self._require_consumer()
        await consumer.start()
        request = self.request
        wanted = [TopicPartition(request.topic, partition) for partition in request.partitions]
        first = await consumer.beginning_offsets(wanted)
        last = await consumer.end_offsets(wanted)
        begin = {one.partition: first[one] for one in wanted}
        end = {one.partition: last[one] for one in wanted}
        self.positions = _start_positions(request.start, begin, end)
        self._end_offsets = end
        self._unread = dict(end)
        consumer.assign(wanted)
        for one in wanted:
            consumer.seek(one, self.positions[one.partition])

    async def batches(self) -> AsyncGenerator[Sequence[ConsumerRecord], None]:
        """Records as they come, some at a time, and `()` when a heartbeat is due; then `end` says why it ended."""
        heartbeat_s = self._streams.config.stream_heartbeat_interval_ms / 1000
        limit_s = self.request.timeout_ms / 1000 if self.request.timeout_ms is not None else None
        begun = last_sign = time.monotonic()
        last_record: float | None = None
        while True:
            if await self._is_done():
                return
            wait_s = min(heartbeat_s, IDLE_POLL_MS_MAX / 1000)
            if limit_s is not None:
                quiet_since = self._reading_since(begun) if last_record is None else last_record
                left_s = JOIN_POLL_S if quiet_since is None else quiet_since + limit_s - time.monotonic()
                if left_s <= 0:
                    self.end = End.TIMEOUT
                    return
                wait_s = min(wait_s, left_s)
            records = self._wanted(await self._poll(wait_s))
            now = time.monotonic()
            if records:
                last_record = last_sign = now
                yield records
            elif now - last_sign >= heartbeat_s:
                last_sign = now
                yield ()

    def note_delivered(self, records: Sequence[ConsumerRecord]) -> None:
        """These records have gone to the reader."""
        topic = self.request.topic
        for record in records:
            self.positions[record.partition] = record.offset + 1
        for partition in {record.partition for record in records}:
            self._streams.delivered.deliver(topic, partition, self.positions[partition])
        self._streams.metrics.records_delivered.inc(len(records))

    @property
    def fetch_stats(self) -> FetchStats:
        """How its consumer fetches."""
        return self._consumer.fetch_stats if self._consumer is not None else FetchStats()

    async def close(self, end: End | None = None) -> None:
        """Free everything; idempotent."""
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        self.end = self.end or end
        self._streams.keep_fetches(consumer.fetch_stats)
        self._streams.free_place(self.stream_id)
        if self.end is not None:
            self._streams.metrics.streams_ended.labels(self.end.value).inc()
        with suppress(Exception):
            await self._disconnect(consumer)

    def _reading_since(self, begun: float) -> float | None:
        """When it could begin to read (monotonic, s), from where `timeout_ms` counts; None: it cannot yet."""
        return begun

    async def _disconnect(self, consumer: Consumer) -> None:
        await consumer.close()

    def _require_consumer(self) -> Consumer:
        if self._consumer is None:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the stream is closed")
        return self._consumer

    async def _poll(self, wait_s: float) -> Sequence[ConsumerRecord]:
        """Up to `max.poll.records`; returns early when the service stops."""
        consumer = self._require_consumer()
        records_max = self._streams.config.max_poll_records
        if self._left is not None:
            records_max = min(records_max, self._left)
        if self._streams.stopping.is_set():
            return ()
        poll = asyncio.ensure_future(consumer.poll(timeout_ms=max(1, round(wait_s * 1000)), max_records=records_max))
        stopping = asyncio.ensure_future(self._streams.stopping.wait())
        try:
            await asyncio.wait([poll, stopping], return_when=asyncio.FIRST_COMPLETED)
            return poll.result() if poll.done() else ()
        finally:
            for task in (poll, stopping):
                task.cancel()
            await asyncio.gather(poll, stopping, return_exceptions=True)

    def _wanted(self, records: Sequence[ConsumerRecord]) -> Sequence[ConsumerRecord]:
        if not self.request.follow:
            end = self._end_offsets
            records = [record for record in records if record.offset < end[record.partition]]
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
        return records

    async def _is_done(self) -> bool:
        if self._left == 0:
            self.end = End.LIMIT
        elif self._streams.stopping.is_set():
            self.end = End.SHUTDOWN
        elif not self.request.follow and await self._is_at_end():
            self.end = End.END_OFFSET
        return self.end is not None

    async def _is_at_end(self) -> bool:
        """By the consumer's position: it is beyond the last record where what follows is none (control batches)."""
        for partition, end in list(self._unread.items()):
            if await self._require_consumer().position((self.request.topic, partition)) < end:
                return False
            del self._unread[partition]
        return True


class MemberStream(Stream, RebalanceListener):
    """A stream of `from=committed`. It goes on with new records until a limit, a time or the service ends it."""

    _assigned_at: float | None = None

    async def begin(self) -> None:
        """Connect; the group is joined by the first polls. Raises KafkaError."""
        consumer = self._require_consumer()
        await consumer.start()
        consumer.subscribe([self.request.topic], self)

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """The group gave these; it may give none."""
        if self._assigned_at is None:
            self._assigned_at = time.monotonic()
        self._streams.metrics.partitions_assigned.inc(len(partitions))

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """These are others' now; where this one was in them does not matter any more."""
        for one in partitions:
            self.positions.pop(one.partition, None)
        self._streams.metrics.partitions_assigned.dec(len(partitions))

    on_partitions_lost = on_partitions_revoked

    def _reading_since(self, begun: float) -> float | None:
        """Since the first assignment; raises KafkaError(REQUEST_TIMED_OUT) when the group takes too long to give it."""
        config = self._require_consumer().config
        if self._assigned_at is None and time.monotonic() > begun + config.default_api_timeout_ms / 1000:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"group {config.group_id!r} lets nobody in")
        return self._assigned_at

    async def _disconnect(self, consumer: Consumer) -> None:
        await consumer.close(commit=self.end in _BY_ITSELF)


def _start_positions(start: Start, begin: Mapping[int, int], end: Mapping[int, int]) -> dict[int, int]:
    if start.edge is Edge.LATEST:
        return dict(end)
    positions = dict(begin)
    for partition, offset in (start.offsets or {}).items():
        if not begin[partition] <= offset <= end[partition]:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"partition {partition} has offsets {begin[partition]} to {end[partition]}, {offset} is none of them",
            )
        positions[partition] = offset
    return positions
