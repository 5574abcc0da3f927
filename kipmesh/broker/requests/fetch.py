"""Fetch (API key 1): from followers to leaders, from consumers to any replica; full or within a session (227-04).

The session cache decides about sessions and completion. This module reads the partitions, waits, and applies the
acknowledgements that a follower's fetch implies. A waiting fetch is woken by events and reads only the partitions that
changed (227-10, 227-21), on leaders and followers. `kipmesh.broker.requests.reading` reads a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.broker.requests.reading import Consumer, ConsumerReads, read_for_follower
from kipmesh.broker.requests.selection import ReplicaSelection
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import Fetch, FetchKind, FetchSessionCache, PartitionRead
from kipmesh.core.replica.leader import FollowerFetches, IsrChange
from kipmesh.transport.grpc.server import RequestContext

WAIT_MS_MAX = 300_000
"""Maximum wait of a fetch, whatever `max_wait_ms` requests."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Reader:
    """A `kipmesh.core.fetch_session.Reader` of this broker's replicas, for one Fetch request."""

    handler: FetchHandler
    request: m.FetchRequest
    fetches: FollowerFetches | None
    consumer: Consumer | None
    redirects: set[int] = field(default_factory=set)
    """Ids of the preferred read replicas in the response."""
    leaders: set[m.LeaderIdAndEpoch | None] = field(default_factory=set)
    """Leaders of partitions that this broker could not serve."""

    def read(
        self, topic: str, topic_id: bytes, requested: m.FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Read up to `max_bytes` of one partition, or one larger batch if `min_one_batch`. Errors are in the result."""
        hosted = self.handler.hosted_replicas
        replicas, code = hosted.find_topic(topic_id, topic)
        replica = replicas.get(requested.partition)
        if replica is None:
            code = code or hosted.missing_code(topic_id, topic, requested.partition)
            leader = hosted.leader_hint(code, topic_id, topic, requested.partition)
            self.leaders.add(leader)
            return PartitionRead(
                m.PartitionData(requested.partition, code, current_leader=leader), completes_fetch=True
            )
        if self.consumer is not None:
            result = self.handler.consumer_reads.read(replica, requested, self.consumer, max_bytes, min_one_batch)
            if result.data.error_code:
                self.leaders.add(result.data.current_leader)
            elif result.data.preferred_read_replica >= 0:
                self.redirects.add(result.data.preferred_read_replica)
            return result
        result = read_for_follower(
            replica,
            requested,
            self.request.replica_id,
            self.request.replica_epoch,
            max_bytes,
            min_one_batch,
            self.fetches,
        )
        if result.again:  # the follower is not in the ISR
            isr = replica.isr_to_join(self.request.replica_id)
            if isr is not None:
                self.handler.propose_isr(replica, isr)
        return result

    def topic_name(self, topic_id: bytes) -> str:
        """Return the name of a topic in the metadata image, or an empty string if the id is unknown."""
        topic = self.handler.hosted_replicas.image.topics.get(topic_id)
        return "" if topic is None else topic.name


@dataclass(eq=False)
class FetchHandler:
    """Responds to Fetch and ListFetchSessions."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    sessions: FetchSessionCache
    metrics: BrokerMetrics
    propose_isr: Callable[[Replica, IsrChange], None]
    now_ms: Callable[[], int]
    """Monotonic clock."""
    selection: ReplicaSelection | None = None

    def __post_init__(self) -> None:
        self.consumer_reads = ConsumerReads(self.metrics, self.selection)
        self._followers: WeakValueDictionary[int, FollowerFetches] = WeakValueDictionary()
        """Fetch state of followers by session id. Entries live while a partition's leader uses them."""

    async def fetch(
        self, request: m.FetchRequest, context: RequestContext, *, names_rack: bool = True
    ) -> m.FetchResponse:
        """Read the partitions of one request. Waits up to `max_wait_ms` (at most `WAIT_MS_MAX`) for `min_bytes`.

        Top-level errors of the response: INCONSISTENT_CLUSTER_ID, STALE_BROKER_EPOCH for an earlier process of a
        follower, and session errors such as FETCH_SESSION_ID_NOT_FOUND. Other errors are per partition.

        If `names_rack` is False, the client's protocol version cannot name a rack (392-01), and only leaders serve its
        fetches.
        """
        if request.cluster_id is not None and request.cluster_id != self.config.cluster_id:
            return m.FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        is_follower = request.replica_id >= 0
        if is_follower:
            broker_epoch = self.hosted_replicas.broker_epoch(request.replica_id)
            if request.replica_epoch < broker_epoch:
                # An earlier process: the log of the current one may be shorter.
                return m.FetchResponse(error_code=ErrorCode.STALE_BROKER_EPOCH)
            if request.session_epoch <= 0:
                self.sessions.close_superseded(request.replica_id, broker_epoch)
        known = self._followers.get(request.session_id) if is_follower and request.session_epoch > 0 else None
        if known is not None and known.broker_epoch != request.replica_epoch:
            # The session belongs to an earlier process, whose acknowledgements do not apply to this one.
            return self.sessions.refuse(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        config = self.config
        bytes_max = config.replica_fetch_response_max_bytes if is_follower else config.fetch_max_bytes
        if request.max_bytes > bytes_max or request.max_wait_ms > WAIT_MS_MAX:
            request = request._replace(
                max_bytes=min(request.max_bytes, bytes_max), max_wait_ms=min(request.max_wait_ms, WAIT_MS_MAX)
            )
        fetch = self.sessions.begin(request, context.client_id, self.now_ms())
        fetches = self._follower_fetched(fetch, request, known) if is_follower else None
        consumer = None if is_follower else self._consumer(request, context, names_rack)
        reader = _Reader(handler=self, request=request, fetches=fetches, consumer=consumer)
        try:
            fetch.read(reader)
            if not fetch.is_complete and request.max_wait_ms > 0:
                await self._wait(fetch, reader, request.max_wait_ms)
        except BaseException:
            fetch.cancel()  # the client disconnected: the session does not change
            raise
        response = fetch.respond(self.now_ms())
        if fetches is not None and response.session_id:
            self._followers[response.session_id] = fetches
        self.metrics.fetched(is_follower, fetch.size_bytes)
        if not is_follower and fetch.size_bytes:
            self._count_bytes(response, request.rack_id)
        if reader.redirects or reader.leaders:
            listener = context.listener or config.inter_broker_listener_name
            endpoints = self.hosted_replicas.hinted_endpoints(reader.leaders, reader.redirects, listener)
            response = response._replace(node_endpoints=endpoints)
        return response

    def _consumer(self, request: m.FetchRequest, context: RequestContext, names_rack: bool) -> Consumer:
        if self.selection is None or not names_rack or not request.rack_id:
            return Consumer(request.replica_id, names_rack=names_rack)
        client = self.selection.client(request.rack_id, context)
        return Consumer(request.replica_id, client, True, self.selection.redirects(request.replica_id, client))

    def _count_bytes(self, response: m.FetchResponse, client_rack: str) -> None:
        """Count a consumer's bytes by role of the replica, and whether both are in the same rack (392-18).

        Must run without an await since the last read, so that roles have not changed.
        """
        rack = "unknown"
        if client_rack and self.config.broker_rack:
            rack = "same" if client_rack == self.config.broker_rack else "cross"
        for topic in response.responses:
            replicas, _ = self.hosted_replicas.find_topic(topic.topic_id, topic.topic)
            for data in topic.partitions:
                if data.records and (replica := replicas.get(data.partition_index)) is not None:
                    self.metrics.served(len(data.records), is_leader=replica.leader is not None, rack=rack)

    def _follower_fetched(
        self, fetch: Fetch, request: m.FetchRequest, known: FollowerFetches | None
    ) -> FollowerFetches | None:
        """Return the state of the records that this follower's requests acknowledge, or None after a session error.

        The state covers the whole session, including partitions that the request does not list. The partitions that the
        request removes from the session (`forgotten_topics_data`) are detached from the follower.
        """
        if fetch.kind is FetchKind.ERROR:
            return None
        for topic in request.forgotten_topics_data:
            replicas, _ = self.hosted_replicas.find_topic(topic.topic_id, topic.topic)
            for partition in topic.partitions:
                replica = replicas.get(partition)
                if replica is not None:
                    replica.follower_left(request.replica_id)
        if known is None or fetch.kind is not FetchKind.INCREMENTAL:
            return FollowerFetches(request.replica_epoch, self.now_ms())
        known.last_fetch_ms = self.now_ms()
        return known

    @staticmethod
    async def _wait(fetch: Fetch, reader: _Reader, max_wait_ms: int) -> None:
        wake, is_expired = asyncio.Event(), False

        def expire() -> None:
            nonlocal is_expired
            is_expired = True
            wake.set()

        fetch.wait(wake.set)
        timer = asyncio.get_running_loop().call_later(max_wait_ms / 1000, expire)
        try:
            while not fetch.is_complete and not is_expired:
                await wake.wait()
                wake.clear()
                fetch.read(reader)
        finally:
            timer.cancel()

    async def list_fetch_sessions(
        self, request: m.ListFetchSessionsRequest, context: RequestContext
    ) -> m.ListFetchSessionsResponse:
        """List the fetch sessions of this broker. O(partitions in sessions): meant for operators, not for scrapes."""
        sessions = [m.FetchSession(*session) for session in self.sessions.list(self.now_ms())]
        return m.ListFetchSessionsResponse(node_id=self.config.node_id, sessions=sessions)
