"""A stream that is a member of the service's group: the group says which partitions it reads, and where it begins.

Rules:
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

import time

from kipmesh.client import Consumer, RebalanceListener, TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh_consumer.streams import End, Stream

_BY_ITSELF = frozenset({End.LIMIT, End.TIMEOUT, End.SHUTDOWN})


class MemberStream(Stream):
    """A stream of `from=committed`. It goes on with new records until a limit, a time or the service ends it."""

    _assigned_at: float | None = None

    async def begin(self) -> None:
        """Connect; the group is joined by the first polls. Raises KafkaError."""
        consumer = self._require_consumer()
        await consumer.start()
        consumer.subscribe([self.request.topic], _Listener(self))

    def came(self, partitions: list[TopicPartition]) -> None:
        """The group gave these; it may give none."""
        if self._assigned_at is None:
            self._assigned_at = time.monotonic()
        self._streams.metrics.partitions_assigned.inc(len(partitions))

    def went(self, partitions: list[TopicPartition]) -> None:
        """These are others' now; where this one was in them does not matter any more."""
        for one in partitions:
            self.positions.pop(one.partition, None)
        self._streams.metrics.partitions_assigned.dec(len(partitions))

    def _reading_since(self, begun: float) -> float | None:
        """Since the first assignment; raises KafkaError(REQUEST_TIMED_OUT) when the group takes too long to give it."""
        config = self._require_consumer().config
        if self._assigned_at is None and time.monotonic() > begun + config.default_api_timeout_ms / 1000:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"group {config.group_id!r} lets nobody in")
        return self._assigned_at

    async def _disconnect(self, consumer: Consumer) -> None:
        await consumer.close(commit=self.end in _BY_ITSELF)


class _Listener(RebalanceListener):
    def __init__(self, stream: MemberStream) -> None:
        self._stream = stream

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._stream.came(partitions)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._stream.went(partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self._stream.went(partitions)
