"""A follower's fetcher for one leader: one stream, one fetch session. Rules REP-01, 227-07, 227-19 and 227-21.

All partitions that follow the leader share one request at a time. A request lists the partitions whose position
changed, and the response those with news, so a round costs O(changed). After any session error the next request is a
full fetch, sent without backoff and counted (227-19).

A partition that is new or has a new leader epoch does not wait for the pending long poll: the fetcher reopens the
stream. That gives up the session, so it does not happen if a full fetch would cost more than the wait
(`INTERRUPT_PARTITIONS_MAX`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
"""Maximum delay of a partition after failures in a row."""
FAILURES_TO_WARN = 5
"""Number of failures in a row that is logged as a warning. All others are logged at DEBUG."""
CLOSE_TIMEOUT_S = 0.3
INTERRUPT_PARTITIONS_MAX = 1000
"""Largest session that is given up to end a long poll early."""


@dataclass(eq=False, kw_only=True)
class ReplicaFetcher:
    """Replicates partitions from one leader, from its construction until `stop`.

    Args: broker_epoch: returns the epoch of this broker's registration; after_truncation: runs after logs were
    truncated; on_done: receives the task when it ends; on_reachability_changed: receives the leader id and whether it
    is unreachable, when the stream breaks, when the leader responds again, and at the end.
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
    on_reachability_changed: Callable[[int, bool], None]

    def __post_init__(self) -> None:
        self.address = self.connection.address
        self._is_unreachable = False
        self._throttled: dict[Replica, None] = {}
        """Partitions that wait for the replication throttle."""
        self._release: asyncio.TimerHandle | None = None
        self._has_truncated = False
        self._session = FetchSessionHandler(enabled=self.config.enable_incremental_fetch)
        self._by_key: dict[tuple[bytes, int], Replica] = {}
        self._moved: dict[Replica, None] = {}
        """Partitions whose position in the session must be updated."""
        self._delayed: set[Replica] = set()
        self._failures: dict[Replica, int] = {}
        """Consecutive failures by partition."""
        self._stream: FetchStream | None = None
        self._wake = asyncio.Event()
        self._is_waiting = False
        self._task = asyncio.create_task(self._run(), name=f"fetcher-{self.leader_id}")
        self._task.add_done_callback(self.on_done)

    @property
    def partition_count(self) -> int:
        """Number of partitions that follow this leader."""
        return len(self._by_key)

    def follow(self, replicas: Iterable[Replica]) -> None:
        """Start fetching these replicas, or continue in their current leader epoch."""
        for replica in replicas:
            self._by_key[replica.key] = replica
            self._clear_waits(replica)
            self._moved[replica] = None
        self._interrupt()

    def unfollow(self, replica: Replica) -> None:
        """Stop fetching a replica. No effect if it does not follow this leader."""
        if self._follows(replica):
            del self._by_key[replica.key]
            self._session.unwant(replica.topic, *replica.key)
            self._moved.pop(replica, None)
            self._clear_waits(replica)

    def _clear_waits(self, replica: Replica) -> None:
        self._throttled.pop(replica, None)
        self._delayed.discard(replica)
        self._failures.pop(replica, None)

    def _follows(self, replica: Replica) -> bool:
        return self._by_key.get(replica.key) is replica

    def reconnect(self, connection: Connection) -> None:
        """Fetch over a connection to the leader's new address from now on."""
        self.connection = connection
        self.address = connection.address
        self._wake.set()
        self._drop_stream()

    async def stop(self) -> None:
        """End the task and the stream. The leader keeps the fetch session until `close`."""
        if self._release is not None:
            self._release.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._drop_stream()
        self._set_unreachable(False)

    def _set_unreachable(self, is_unreachable: bool) -> None:
        if is_unreachable != self._is_unreachable:
            self._is_unreachable = is_unreachable
            self.on_reachability_changed(self.leader_id, is_unreachable)

    async def close(self) -> None:
        """Close the fetch session at the leader, unless the leader cannot be reached (227-17). Call it after `stop`."""
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
        """Do not fetch a partition for `replica.fetch.backoff.ms`.

        Each failure in a row doubles the time, up to `DELAY_MS_MAX`.
        """
        if replica in self._delayed or not self._follows(replica):
            return
        self._moved.pop(replica, None)
        self._session.unwant(replica.topic, *replica.key)
        failures = self._failures[replica] = self._failures.get(replica, 0) + 1
        delay_ms = min(self.config.replica_fetch_backoff_ms << min(failures - 1, 10), DELAY_MS_MAX)
        write_log = log.warning if failures == FAILURES_TO_WARN else log.debug
        write_log(
            "partition fetch failed",
            topic=replica.topic,
            partition=replica.partition,
            leader=self.leader_id,
            error=reason.name,
            failures=failures,
            retry_in_ms=delay_ms,
        )
        self._delayed.add(replica)
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._end_delay, replica)

    def _end_delay(self, replica: Replica) -> None:
        if replica in self._delayed:
            self._delayed.discard(replica)
            self._moved[replica] = None
            self._interrupt()

    async def _run(self) -> None:
        failures = 0  # a first failure may be a stale session or connection: the next request is sent without backoff
        while True:
            self._wake.clear()
            self._update_session()
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
                    self._set_unreachable(True)
                    write_log = log.warning if failures == FAILURES_TO_WARN else log.debug
                    write_log("fetch failed", leader=self.leader_id, error=str(error), failures=failures)
                    self.metrics.fetches_failed.inc()
                    if failures > 1:
                        await self._pause()
                continue
            failures = 0
            self._set_unreachable(False)
            result = self._handle_response(request, response)
            if result.is_accepted:
                await self._process(result.partitions)
            elif not result.retry_immediately:
                await self._pause()

    def _handle_response(self, request: SessionRequest, response: m.FetchResponse) -> SessionResponse:
        """Apply a response to the session, and log and count a session error (227-19)."""
        result = self._session.handle_response(request, response)
        self.metrics.session_fetched(is_full=request.is_full)
        if not result.is_accepted:
            write_log = log.debug if result.retry_immediately or not result.error else log.warning
            write_log("fetch refused", leader=self.leader_id, error=result.error.name, session=request.session_id)
            self.metrics.session_resets.labels(result.error.name if result.error else MALFORMED).inc()
        return result

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

    def _update_session(self) -> None:
        """Set the fetch positions of the partitions whose log or epoch changed: O(changed)."""
        moved, self._moved = self._moved, {}
        throttled_bytes = 0
        for replica in moved:
            if self.throttle.applies_to(replica):
                if not self.throttle.has_room(throttled_bytes):
                    self._postpone(replica)
                    continue
                throttled_bytes += self.config.replica_fetch_max_bytes
            replica_log = replica.log
            position = m.FetchPartition(
                replica.partition,
                replica.leader_epoch,
                replica_log.log_end_offset,
                replica_log.latest_epoch,
                replica_log.log_start_offset,
                self.config.replica_fetch_max_bytes,
            )
            self._session.want(replica.topic, replica.topic_id, position)

    def _postpone(self, replica: Replica) -> None:
        """Leave a partition out of the session until the throttle has room, without a delay for the others."""
        self._session.unwant(replica.topic, *replica.key)
        self._throttled[replica] = None
        if self._release is None:
            self._release = asyncio.get_running_loop().call_later(self.throttle.wait_s, self._release_throttled)

    def _release_throttled(self) -> None:
        self._release = None
        self._moved.update(self._throttled)
        self._throttled.clear()
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
            requested, data = fetched.requested, fetched.data
            replica = self._by_key.get((fetched.topic_id, requested.partition))
            if replica is None:
                continue  # it stopped following this leader during the request
            if replica in self._moved or replica in self._delayed:
                # The position is outdated. The leader counts the high watermark as sent, so it must be applied.
                if not data.error_code and data.diverging_epoch is None:
                    replica.update_leader_high_watermark(data.high_watermark)
                continue
            try:
                self._apply(replica, requested, data, now_ms)
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

    def _apply(self, replica: Replica, requested: m.FetchPartition, data: m.PartitionData, now_ms: int) -> None:
        if not data.error_code and data.diverging_epoch is None:
            self._failures.pop(replica, None)
            was_throttled = self.throttle.applies_to(replica)
            size_bytes = replica.append_from_leader(data, now_ms)
            self.metrics.replicated(size_bytes)
            self.throttle.received(replica, size_bytes, was_throttled=was_throttled)
            if data.records or replica.log.log_start_offset != requested.log_start_offset:
                self._moved[replica] = None
            return
        is_out_of_range = data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        if data.diverging_epoch is not None:
            self._has_truncated = True  # even if it raises
            replica.truncate_diverged(data.diverging_epoch)
            diverging_epoch = data.diverging_epoch.epoch
            log.info(
                "truncated to the diverging epoch", diverging_epoch=diverging_epoch, **_positions(replica, requested)
            )
        elif is_out_of_range and replica.restart_in_range(data.log_start_offset, data.high_watermark):
            log.info("restarted at the leader's log start", **_positions(replica, requested))
        elif is_out_of_range and replica.truncate_future_epochs():
            log.warning("truncated batches of a future leader epoch", **_positions(replica, requested))
        else:
            self._delay(replica, ErrorCode.of(data.error_code))
            return
        self._has_truncated = True
        self._moved[replica] = None


def _positions(replica: Replica, requested: m.FetchPartition) -> dict[str, Any]:
    """Return the fields of a replica for a log event about a truncation."""
    return {
        "topic": replica.topic,
        "partition": replica.partition,
        "leader_epoch": replica.leader_epoch,
        "fetch_offset": requested.fetch_offset,
        "log_end_offset": replica.log.log_end_offset,
    }
