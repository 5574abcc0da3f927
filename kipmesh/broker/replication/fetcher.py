"""A follower's fetches from one leader, over one stream and in one fetch session ("Log truth", 227-07, 227-19, 227-21).

All partitions that follow the same leader share one request at a time. A request names those whose position changed,
and an answer those with news: a round costs O(changed) here, too. Whatever goes wrong with the session, the next
request is a full one, at once, and nobody needs to know but the metrics.

A new or re-elected partition does not wait for the running long poll: the stream is dropped and opened anew. That loses
the session, and where the full fetch would cost more than the wait, the poll runs to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.replica import Disk, Replica
from kipmesh.broker.replication.throttle import ReplicationThrottle
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.fetch_session import FetchedPartition, FetchSessionHandler, SessionRequest, SessionResponse
from kipmesh.core.fetch_session.handler import MALFORMED, TRANSPORT
from kipmesh.transport.grpc.client import Connection, FetchStream, TransportError

log = structlog.get_logger(__name__)

DELAY_MS_MAX = 5000
FAILURES_TO_WARN = 5
CLOSE_TIMEOUT_S = 0.3
INTERRUPT_PARTITIONS_MAX = 1000
"""A session with more partitions is not given up to end a long poll early."""


@dataclass(eq=False)
class ReplicaFetcher:
    """Follows one leader for any number of partitions until stopped.

    `reach_changed` is told of the leader when its stream breaks, and when it answers again or at the end.
    """

    leader_id: int
    connection: Connection
    config: BrokerConfig
    disk: Disk
    metrics: BrokerMetrics
    now_ms: Callable[[], int]
    broker_epoch: Callable[[], int]
    after_truncation: Callable[[], Awaitable[None]]
    on_done: Callable[[asyncio.Task[None]], None]
    throttle: ReplicationThrottle
    reach_changed: Callable[[int, bool], None] = lambda _leader_id, _is_lost: None

    def __post_init__(self) -> None:
        self.address = self.connection.address
        self._is_lost = False
        self._held: dict[Replica, None] = {}  # no room for them now
        self._release: asyncio.TimerHandle | None = None
        self._has_truncated = False
        self._session = FetchSessionHandler(enabled=self.config.enable_incremental_fetch)
        self._by_key: dict[tuple[bytes, int], Replica] = {}
        self._moved: dict[Replica, None] = {}  # what is asked of them is to be made anew
        self._delayed: set[Replica] = set()
        self._failures: dict[Replica, int] = {}  # in a row
        self._stream: FetchStream | None = None
        self._wake = asyncio.Event()
        self._is_waiting = False
        self._task = asyncio.create_task(self._run(), name=f"fetcher-{self.leader_id}")
        self._task.add_done_callback(self.on_done)

    @property
    def partition_count(self) -> int:
        """Partitions that follow this leader here."""
        return len(self._by_key)

    def follow(self, replicas: Iterable[Replica]) -> None:
        """Fetch these from now on, in their present leader epoch."""
        for replica in replicas:
            self._by_key[replica.topic_id, replica.partition] = replica
            self._moved[replica] = None
            self._held.pop(replica, None)
            self._delayed.discard(replica)
            self._failures.pop(replica, None)
        self._interrupt()

    def forget(self, replica: Replica) -> None:
        """Fetch it no more."""
        if self._follows(replica):
            del self._by_key[replica.topic_id, replica.partition]
            self._session.unwant(replica.topic, replica.topic_id, replica.partition)
            self._moved.pop(replica, None)
            self._held.pop(replica, None)
            self._delayed.discard(replica)
            self._failures.pop(replica, None)

    def _follows(self, replica: Replica) -> bool:
        return self._by_key.get((replica.topic_id, replica.partition)) is replica

    def reconnect(self, connection: Connection) -> None:
        """The leader has moved to another address."""
        self.connection = connection
        self.address = connection.address
        self._wake.set()
        self._drop_stream()

    async def stop(self) -> None:
        """End the task and the stream; the leader keeps the session until `close`."""
        if self._release is not None:
            self._release.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._drop_stream()
        self._reached(is_lost=False)

    def _reached(self, *, is_lost: bool) -> None:
        if is_lost != self._is_lost:
            self._is_lost = is_lost
            self.reach_changed(self.leader_id, is_lost)

    async def close(self) -> None:
        """After `stop`: tell the leader, if it is there, that the session is over (227-17)."""
        request = self._session.close()
        if request is not None:
            with contextlib.suppress(TransportError):
                await self.connection.call("Broker", "Fetch", request.fill(self._request()), CLOSE_TIMEOUT_S)

    def _interrupt(self) -> None:
        self._wake.set()
        if self._is_waiting and len(self._session) <= INTERRUPT_PARTITIONS_MAX:
            self._drop_stream()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _delay(self, replica: Replica, reason: ErrorCode) -> None:
        """Leave a partition out for `replica.fetch.backoff.ms`, twice as long after each failure in a row."""
        if replica in self._delayed or not self._follows(replica):
            return
        self._moved.pop(replica, None)
        self._session.unwant(replica.topic, replica.topic_id, replica.partition)
        failures = self._failures[replica] = self._failures.get(replica, 0) + 1
        delay_ms = min(self.config.replica_fetch_backoff_ms << min(failures - 1, 10), DELAY_MS_MAX)
        note = log.warning if failures == FAILURES_TO_WARN else log.debug
        note(
            "partition cannot be fetched",
            topic=replica.topic,
            partition=replica.partition,
            leader=self.leader_id,
            error=reason.name,
            failures=failures,
            again_in_ms=delay_ms,
        )
        self._delayed.add(replica)
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._end_delay, replica)

    def _end_delay(self, replica: Replica) -> None:
        if replica in self._delayed:
            self._delayed.discard(replica)
            self._moved[replica] = None
            self._interrupt()

    async def _run(self) -> None:
        failures = 0  # once is the session's fault, or a connection's: the next request goes at once
        while True:
            self._wake.clear()
            self._say_what_moved()
            if not len(self._session):
                await self._wake.wait()
                continue
            request = self._session.next_request()
            try:
                response = await self._exchange(request.fill(self._request()))
            except TransportError as error:
                self._drop_stream()
                self._session.handle_error(request)
                self.metrics.session_resets.labels(TRANSPORT).inc()
                if not self._wake.is_set():
                    failures += 1
                    self._reached(is_lost=True)
                    note = log.warning if failures == FAILURES_TO_WARN else log.debug
                    note("fetch failed", leader=self.leader_id, error=str(error), failures=failures)
                    self.metrics.fetches_failed.inc()
                    if failures > 1:
                        await self._pause()
                continue
            failures = 0
            self._reached(is_lost=False)
            taken = self._take(request, response)
            if taken.is_accepted:
                await self._process(taken.partitions)
            elif not taken.again_at_once:
                await self._pause()

    def _take(self, request: SessionRequest, response: m.FetchResponse) -> SessionResponse:
        """What an answer means for the session; a session that was lost is no news to anybody (227-19)."""
        taken = self._session.handle_response(request, response)
        self.metrics.session_fetched(is_full=request.is_full)
        if not taken.is_accepted:
            note = log.debug if taken.again_at_once or not taken.error else log.warning
            note("fetch refused", leader=self.leader_id, error=taken.error.name, session=request.session_id)
            self.metrics.session_resets.labels(taken.error.name if taken.error else MALFORMED).inc()
        return taken

    async def _pause(self) -> None:
        await asyncio.sleep(self.config.replica_fetch_backoff_ms / 1000)

    async def _exchange(self, request: m.FetchRequest) -> m.FetchResponse:
        if self._stream is None:
            self._stream = self.connection.fetch_stream("Broker")
        self._is_waiting = True
        try:
            response: m.FetchResponse = await self._stream.exchange(
                request, self.config.replica_socket_timeout_ms / 1000
            )
            return response
        finally:
            self._is_waiting = False

    def _say_what_moved(self) -> None:
        """Tell the session the positions of the partitions whose logs or epochs changed: O(changed)."""
        moved, self._moved = self._moved, {}
        throttled_bytes = 0
        for replica in moved:
            if self.throttle.applies_to(replica):
                if not self.throttle.has_room(throttled_bytes):
                    self._hold(replica)
                    continue
                throttled_bytes += self.config.replica_fetch_max_bytes
            held = replica.log
            asked = m.FetchPartition(
                replica.partition,
                replica.leader_epoch,
                held.log_end_offset,
                held.latest_epoch,
                held.log_start_offset,
                self.config.replica_fetch_max_bytes,
            )
            self._session.want(replica.topic, replica.topic_id, asked)

    def _hold(self, replica: Replica) -> None:
        """Leave it out of the session until there is room. Nothing else waits for that, no running poll is ended."""
        self._session.unwant(replica.topic, replica.topic_id, replica.partition)
        self._held[replica] = None
        if self._release is None:
            self._release = asyncio.get_running_loop().call_later(self.throttle.wait_s, self._release_held)

    def _release_held(self) -> None:
        self._release = None
        self._moved.update(self._held)
        self._held.clear()
        self._wake.set()

    def _request(self) -> m.FetchRequest:
        config = self.config
        return m.FetchRequest(
            cluster_id=config.cluster_id,
            replica_id=config.node_id,
            replica_epoch=self.broker_epoch(),
            max_wait_ms=config.replica_fetch_wait_max_ms,
            min_bytes=config.replica_fetch_min_bytes,
            max_bytes=config.replica_fetch_response_max_bytes,
        )

    async def _process(self, partitions: Iterable[FetchedPartition]) -> None:
        now_ms = self.now_ms()
        unsynced = []
        for fetched in partitions:
            asked, data = fetched.asked, fetched.data
            replica = self._by_key.get((fetched.topic_id, asked.partition))
            if replica is None:
                continue  # left this leader while the answer was under way
            if replica in self._moved or replica in self._delayed:
                # In another epoch by now: the leader takes the high watermark as told, and so it is.
                if not data.error_code and data.diverging_epoch is None:
                    replica.high_watermark_told(data.high_watermark)
                continue
            try:
                self._apply(replica, asked, data, now_ms)
            except KafkaError as error:
                log.warning("append failed", topic=replica.topic, partition=replica.partition, error=str(error))
                self.metrics.replication_failed.labels(error.code.name).inc()
                self._delay(replica, error.code)
            else:
                if data.records and replica.must_flush:
                    unsynced.append(replica)
        if self._has_truncated:
            self._has_truncated = False
            await self.after_truncation()
        for replica in unsynced:
            try:
                await self.disk.run(replica.log.flush)
            except KafkaError as error:
                self._delay(replica, error.code)

    def _apply(self, replica: Replica, asked: m.FetchPartition, data: m.PartitionData, now_ms: int) -> None:
        if data.diverging_epoch is not None:
            self._has_truncated = True
            end = replica.truncate_diverged(data.diverging_epoch)
            log.info(
                "truncated",
                topic=replica.topic,
                partition=replica.partition,
                leader_epoch=replica.leader_epoch,
                diverging_epoch=data.diverging_epoch.epoch,
                before=asked.fetch_offset,
                log_end_offset=end,
            )
            self._moved[replica] = None
        elif data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and replica.restart_in_range(
            data.log_start_offset, data.high_watermark
        ):
            self._has_truncated = True
            log.info("restarted at the leader's log start", topic=replica.topic, partition=replica.partition)
            self._moved[replica] = None
        elif data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and replica.truncate_future_epochs():
            self._has_truncated = True
            log.warning(
                "truncated a leader epoch that there has not been yet",
                topic=replica.topic,
                partition=replica.partition,
                leader_epoch=replica.leader_epoch,
                before=asked.fetch_offset,
                log_end_offset=replica.log.log_end_offset,
            )
            self._moved[replica] = None
        elif data.error_code:
            self._delay(replica, ErrorCode.of(data.error_code))
        else:
            self._failures.pop(replica, None)
            was_held = self.throttle.applies_to(replica)
            size_bytes = replica.append_from_leader(data, now_ms)
            self.metrics.replicated(size_bytes)
            self.throttle.received(replica, size_bytes, was_held=was_held)
            if data.records or replica.log.log_start_offset != asked.log_start_offset:
                self._moved[replica] = None
