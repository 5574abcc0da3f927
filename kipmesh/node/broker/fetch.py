"""Fetch (API key 1), on leaders, for consumers and for followers.

Every fetch is a full one today: a response names all partitions of its request, and no session is made (227-04 to
227-06 as a node without session slots answers them; 3 of the rules' section 1 bring the cache here). A fetch waits
by events only: the partitions that change mark themselves dirty in it, and only those are read again (227-21).
Consumers are served by the leader alone until section 2 of the rules arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import FetchableTopicResponse, FetchPartition, FetchRequest, FetchResponse, PartitionData
from kipmesh.core.replica.leader import IsrChange
from kipmesh.node.broker.metrics import BrokerMetrics
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import ReadResult, Replica
from kipmesh.rpc.server import RequestContext

WAIT_MS_MAX = 300_000
"""Longest wait of a fetch, whatever it asks for."""

_FINAL_EPOCH, _INITIAL_EPOCH = -1, 0


class _Fetch:
    """One fetch while it runs: what it asked, what was found, and which partitions changed since."""

    __slots__ = ("_bytes", "_changed", "_dirty", "_expired", "_has_news", "asked", "isr_joins", "request", "results")

    def __init__(self, request: FetchRequest, partitions: Partitions) -> None:
        self.request = request
        self.asked: list[tuple[Replica | None, FetchPartition]] = []
        self.results: list[PartitionData] = []
        self.isr_joins: list[tuple[Replica, IsrChange]] = []
        self._bytes = 0
        self._has_news = False
        self._expired = False
        self._dirty: set[int] = set()
        self._changed: asyncio.Future[None] | None = None
        for topic in request.topics:
            replicas, code = partitions.find_topic(topic.topic_id, topic.topic)
            for asked in topic.partitions:
                replica = replicas.get(asked.partition)
                if replica is None:
                    missing = code or partitions.missing_code(topic.topic_id, topic.topic, asked.partition)
                    self.results.append(PartitionData(asked.partition, missing))
                    self._has_news = True
                else:
                    self.results.append(PartitionData())
                    self._read(len(self.asked), replica, asked)
                self.asked.append((replica, asked))

    def _read(self, index: int, replica: Replica, asked: FetchPartition) -> None:
        request = self.request
        self._bytes -= len(self.results[index].records)
        limit = min(asked.partition_max_bytes, request.max_bytes - self._bytes)
        result: ReadResult = replica.read(asked, request.replica_id, request.replica_epoch, limit, self._bytes == 0)
        self.results[index] = result.data
        self._bytes += len(result.data.records)
        self._has_news |= result.has_news
        if result.isr_to_join is not None:
            self.isr_joins.append((replica, result.isr_to_join))

    @property
    def is_complete(self) -> bool:
        """Whether it is answered now."""
        return self._bytes >= self.request.min_bytes or self._has_news or not self.asked

    @property
    def size_bytes(self) -> int:
        """Bytes of records found."""
        return self._bytes

    def partition_changed(self, token: int) -> None:
        """Called by a partition; wakes the wait once."""
        self._dirty.add(token)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _expire(self) -> None:
        self._expired = True
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until complete or `max_wait_ms` have passed."""
        for token, (replica, _) in enumerate(self.asked):
            if replica is not None:
                replica.watch(self, token, self.request.replica_id)
        timer = loop.call_later(self.request.max_wait_ms / 1000, self._expire)
        try:
            while not self.is_complete and not self._expired:
                self._changed = loop.create_future()
                if not self._dirty:
                    await self._changed
                dirty, self._dirty = self._dirty, set()
                for token in sorted(dirty):
                    replica, asked = self.asked[token]
                    if replica is not None:
                        self._read(token, replica, asked)
        finally:
            timer.cancel()
            for replica, _ in self.asked:
                if replica is not None:
                    replica.unwatch(self)

    def response(self) -> FetchResponse:
        """All results, by topic, in the request's order."""
        responses, position = [], 0
        for topic in self.request.topics:
            count = len(topic.partitions)
            responses.append(
                FetchableTopicResponse(topic.topic, topic.topic_id, self.results[position : position + count])
            )
            position += count
        return FetchResponse(responses=responses)


class FetchHandler:
    """Answers Fetch."""

    def __init__(
        self,
        partitions: Partitions,
        metrics: BrokerMetrics,
        propose_isr: Callable[[Replica, IsrChange], None],
        *,
        cluster_id: str,
        response_bytes_max: int,
        follower_bytes_max: int,
    ) -> None:
        self._partitions = partitions
        self._metrics = metrics
        self._propose_isr = propose_isr
        self._cluster_id = cluster_id
        self._response_bytes_max = response_bytes_max
        self._follower_bytes_max = follower_bytes_max

    async def fetch(self, request: FetchRequest, context: RequestContext) -> FetchResponse:
        """Answer one request; waits up to `max_wait_ms` for `min_bytes`."""
        if request.cluster_id is not None and request.cluster_id != self._cluster_id:
            return FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        if request.session_epoch not in (_FINAL_EPOCH, _INITIAL_EPOCH):
            return FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)  # 227-05
        is_follower = request.replica_id >= 0
        if is_follower and request.replica_epoch < self._partitions.broker_epoch(request.replica_id):
            # A registration that is no more: what it says of its log is not true of the one that followed.
            return FetchResponse(error_code=ErrorCode.STALE_BROKER_EPOCH)
        bytes_max = self._follower_bytes_max if is_follower else self._response_bytes_max
        request = request._replace(
            max_bytes=min(request.max_bytes, bytes_max), max_wait_ms=min(request.max_wait_ms, WAIT_MS_MAX)
        )
        fetch = _Fetch(request, self._partitions)
        if not fetch.is_complete and request.max_wait_ms > 0:
            self._send_joins(fetch)
            await fetch.wait(asyncio.get_running_loop())
        self._send_joins(fetch)
        self._metrics.fetched(is_follower, fetch.size_bytes)
        return fetch.response()

    def _send_joins(self, fetch: _Fetch) -> None:
        for replica, isr in fetch.isr_joins:
            self._propose_isr(replica, isr)
        fetch.isr_joins.clear()
