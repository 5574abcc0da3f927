"""Streams of records for HTTP clients (readers). Each stream has its own consumer and polls only as fast as its reader
receives.

A stream buffers one poll of records besides its consumer's prefetch (`fetch.max.bytes`); a stalled reader is dropped
after `stream.write.timeout.ms`. The end of a stream closes its consumer and releases its slot (`streams.max`).

With `from=committed` the stream, not the service, is a group member. It commits only when polling and ending, so no
unsent record is committed. If the reader disconnects or stalls, the end commits nothing. Delivery is at least once,
except for records in network buffers. The time limit `timeout_ms` of a member starts with its first assignment, which
must arrive within `default.api.timeout.ms`.
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
"""Maximum time between checks of a stream's limits. New records end the wait early."""
JOIN_POLL_S = 0.5
"""Interval of checks for the first assignment of a stream with a time limit."""


class StreamsExhaustedError(Exception):
    """The service already has `streams.max` streams (HTTP 503)."""


class End(StrEnum):
    """Reason for the end of a stream."""

    END_OFFSET = "end_offset"
    LIMIT = "limit"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"
    ERROR = "error"
    READER_GONE = "reader_gone"
    READER_STALLED = "reader_stalled"


_COMMITTING_ENDS = frozenset({End.LIMIT, End.TIMEOUT, End.SHUTDOWN})


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """Parameters of a stream.

    The stream ends after `limit` records, or after `timeout_ms` without a record; None means no limit. Without
    `follow`, it ends at the end offsets at the time that it began.
    """

    topic: str
    partitions: Sequence[int]
    start: Start
    limit: int | None
    timeout_ms: int | None
    follow: bool


class Delivered(NamedTuple):
    """A partition and its `position`: one past the highest offset that this service delivered."""

    topic: str
    partition: int
    position: int


class DeliveredPositions:
    """The highest position that any stream of this service has delivered, by topic and partition.

    The service reports its lag from these positions. The group's lag, by committed offsets, is reported by its
    coordinator (`kafka_consumergroup_lag`). Holds at most `partitions_max` partitions. The partition for which no
    record was delivered for longest is evicted first.
    """

    def __init__(self, partitions_max: int) -> None:
        self._partitions_max = partitions_max
        self._positions: OrderedDict[tuple[str, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._positions)

    def deliver(self, topic: str, partition: int, next_offset: int) -> None:
        """Record that a stream delivered the records below `next_offset`. The stored position never decreases."""
        key = (topic, partition)
        self._positions[key] = max(next_offset, self._positions.get(key, 0))
        self._positions.move_to_end(key)
        while len(self._positions) > self._partitions_max:
            self._positions.popitem(last=False)

    def forget(self, topic: str, partition: int) -> None:
        """Remove the position of a deleted partition. Does nothing if there is none."""
        self._positions.pop((topic, partition), None)

    def of(self, topic: str | None) -> list[Delivered]:
        """Return the positions of a topic (None: all topics), sorted by topic and partition."""
        return [Delivered(*key, at) for key, at in sorted(self._positions.items()) if topic in (None, key[0])]


class Streams:
    """All streams of a service, with their shared slots, delivered positions and metrics."""

    def __init__(self, config: ConsumerServiceConfig, metrics: ServiceMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.delivered = DeliveredPositions(config.lag_partitions_max)
        self.stopping = asyncio.Event()
        self.open: dict[int, Stream] = {}
        self.fetch_stats = FetchStats()
        """Fetch counters of all open and closed streams, as of the last `update_fetch_stats`."""
        self._closed_stats = FetchStats()
        self._free_slots = config.streams_max
        self._ids = itertools.count(1)

    def reserve_slot(self) -> int:
        """Reserve a slot and return the id of the new stream. Raises StreamsExhaustedError."""
        if self._free_slots == 0:
            self.metrics.streams_refused.inc()
            raise StreamsExhaustedError(f"all {self.config.streams_max} streams (streams.max) are in use; retry later")
        self._free_slots -= 1
        self.metrics.streams_open.inc()
        return next(self._ids)

    def release_slot(self, stream_id: int) -> None:
        """Release the slot of a stream and remove the stream from `open`. Call it once per reserved slot."""
        self.open.pop(stream_id, None)
        self._free_slots += 1
        self.metrics.streams_open.dec()

    def update_fetch_stats(self) -> None:
        """Set `fetch_stats` to the current counters. Call it on the event loop before a scrape on another thread."""
        self.fetch_stats = sum((stream.fetch_stats for stream in self.open.values()), self._closed_stats)

    def add_closed_stats(self, stats: FetchStats) -> None:
        """Add the counters of a closed stream to the totals, without its open sessions and partitions."""
        self._closed_stats += replace(stats, sessions=0, partitions=0)

    async def open_stream(
        self, request: StreamRequest, make_consumer: Callable[[], Consumer], kind: type[Stream]
    ) -> Stream:
        """Reserve a slot and begin a stream of class `kind`. Closes the stream if `Stream.begin` fails.

        Raises KafkaError, or StreamsExhaustedError if no slot is free.
        """
        stream_id = self.reserve_slot()
        stream = kind(self, stream_id, request, make_consumer())
        try:
            await stream.begin()
        except BaseException:
            await stream.close(End.ERROR)
            raise
        self.open[stream_id] = stream
        return stream


class Stream:
    """A stream of records from fixed partitions. Only the task of its HTTP request may use it."""

    def __init__(self, streams: Streams, stream_id: int, request: StreamRequest, consumer: Consumer) -> None:
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
        """Connect the consumer and seek to the start offsets.

        Raises KafkaError: OFFSET_OUT_OF_RANGE for a start offset outside the log, or an error of the cluster.
        """
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
        """Yield lists of records, and `()` after each `stream.heartbeat.interval.ms` without a record.

        Ends when a limit or the end offset is reached, or the service stops. The attribute `end` then holds the reason.
        Raises KafkaError.
        """
        heartbeat_s = self._streams.config.stream_heartbeat_interval_ms / 1000
        limit_s = self.request.timeout_ms / 1000 if self.request.timeout_ms is not None else None
        begin = last_sent = time.monotonic()
        last_record: float | None = None
        while True:
            if await self._is_done():
                return
            wait_s = min(heartbeat_s, IDLE_POLL_MS_MAX / 1000)
            if limit_s is not None:
                idle_since = self._consuming_since(begin) if last_record is None else last_record
                left_s = JOIN_POLL_S if idle_since is None else idle_since + limit_s - time.monotonic()
                if left_s <= 0:
                    self.end = End.TIMEOUT
                    return
                wait_s = min(wait_s, left_s)
            records = self._within_limits(await self._poll(wait_s))
            now = time.monotonic()
            if records:
                last_record = last_sent = now
                yield records
            elif now - last_sent >= heartbeat_s:
                last_sent = now
                yield ()

    def mark_delivered(self, records: Sequence[ConsumerRecord]) -> None:
        """Advance the delivered positions past these records, which were sent to the reader, and count the records."""
        topic = self.request.topic
        for record in records:
            self.positions[record.partition] = record.offset + 1
        for partition in {record.partition for record in records}:
            self._streams.delivered.deliver(topic, partition, self.positions[partition])
        self._streams.metrics.records_delivered.inc(len(records))

    @property
    def fetch_stats(self) -> FetchStats:
        """Fetch counters of the stream's consumer; all 0 after `close`."""
        return self._consumer.fetch_stats if self._consumer is not None else FetchStats()

    async def close(self, end: End | None = None) -> None:
        """Close the consumer and release the slot. Idempotent, and ignores errors of the consumer.

        `end` is stored as the reason for the end of the stream, unless a reason is stored already.
        """
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        self.end = self.end or end
        self._streams.add_closed_stats(consumer.fetch_stats)
        self._streams.release_slot(self.stream_id)
        if self.end is not None:
            self._streams.metrics.streams_ended.labels(self.end.value).inc()
        with suppress(Exception):
            await self._disconnect(consumer)

    def _consuming_since(self, begin: float) -> float | None:
        """Return when `timeout_ms` starts (monotonic seconds), or None while it has not started."""
        return begin

    async def _disconnect(self, consumer: Consumer) -> None:
        await consumer.close()

    def _require_consumer(self) -> Consumer:
        if self._consumer is None:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "stream is closed")
        return self._consumer

    async def _poll(self, wait_s: float) -> Sequence[ConsumerRecord]:
        """Return up to `max.poll.records` records, none if `wait_s` passes or the service stops. Raises KafkaError."""
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

    def _within_limits(self, records: Sequence[ConsumerRecord]) -> Sequence[ConsumerRecord]:
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
        """Whether the consumer's positions reached all end offsets. Positions also advance past control batches."""
        for partition, end in list(self._unread.items()):
            if await self._require_consumer().position((self.request.topic, partition)) < end:
                return False
            del self._unread[partition]
        return True


class MemberStream(Stream, RebalanceListener):
    """A stream with `from=committed`: a member of the service's group, which assigns its partitions."""

    _assigned_at: float | None = None

    async def begin(self) -> None:
        """Connect and subscribe to the topic. The first polls join the group. Raises KafkaError."""
        consumer = self._require_consumer()
        await consumer.start()
        consumer.subscribe([self.request.topic], self)

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """Add newly assigned partitions to the metric. The first assignment, even an empty one, starts `timeout_ms`."""
        if self._assigned_at is None:
            self._assigned_at = time.monotonic()
        self._streams.metrics.partitions_assigned.inc(len(partitions))

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """Remove the positions of revoked or lost partitions, and subtract the partitions from the metric."""
        for one in partitions:
            self.positions.pop(one.partition, None)
        self._streams.metrics.partitions_assigned.dec(len(partitions))

    on_partitions_lost = on_partitions_revoked

    def _consuming_since(self, begin: float) -> float | None:
        """Return the time of the first assignment (monotonic seconds), or None before it.

        Raises KafkaError(REQUEST_TIMED_OUT) if there is no assignment within `default.api.timeout.ms` after `begin`.
        """
        config = self._require_consumer().config
        timeout_ms = config.default_api_timeout_ms
        if self._assigned_at is None and time.monotonic() > begin + timeout_ms / 1000:
            text = f"no assignment from group {config.group_id!r} within {timeout_ms} ms"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
        return self._assigned_at

    async def _disconnect(self, consumer: Consumer) -> None:
        await consumer.close(commit=self.end in _COMMITTING_ENDS)


def _start_positions(start: Start, begin: Mapping[int, int], end: Mapping[int, int]) -> dict[int, int]:
    if start.edge is Edge.LATEST:
        return dict(end)
    positions = dict(begin)
    for partition, offset in (start.offsets or {}).items():
        if not begin[partition] <= offset <= end[partition]:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset of partition {partition} must be {begin[partition]} to {end[partition]}, got {offset}",
            )
        positions[partition] = offset
    return positions
