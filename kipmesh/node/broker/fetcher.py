"""A follower's fetches from one leader, over one stream ("Log truth", 227-21).

All partitions that follow the same leader share one request at a time. Partitions that returned records go to the
back, so that a byte limit starves nobody (227-11). A new or re-elected partition does not wait for the running long
poll: the stream is dropped and opened anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby

import structlog

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.messages import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData
from kipmesh.node.broker.disk import Disk
from kipmesh.node.broker.metrics import BrokerMetrics
from kipmesh.node.broker.replica import Replica
from kipmesh.rpc.client import Connection, FetchStream, TransportError

log = structlog.get_logger(__name__)

DELAY_MS_MAX = 5000
FAILURES_TO_WARN = 5


class ReplicaFetcher:
    """Follows one leader for any number of partitions until stopped."""

    def __init__(
        self,
        leader_id: int,
        connection: Connection,
        config: BrokerConfig,
        disk: Disk,
        metrics: BrokerMetrics,
        now_ms: Callable[[], int],
        broker_epoch: Callable[[], int],
        after_truncation: Callable[[], Awaitable[None]],
        on_done: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.leader_id = leader_id
        self.address = connection.address
        self._connection = connection
        self._config = config
        self._disk = disk
        self._metrics = metrics
        self._now_ms = now_ms
        self._broker_epoch = broker_epoch
        self._after_truncation = after_truncation
        self._has_truncated = False
        self._asked: dict[Replica, FetchPartition | None] = {}  # in fetch order; None: to be made
        self._by_key: dict[tuple[bytes, int], Replica] = {}
        self._delayed: set[Replica] = set()
        self._failures: dict[Replica, int] = {}  # in a row
        self._stream: FetchStream | None = None
        self._wake = asyncio.Event()
        self._is_waiting = False
        self._task = asyncio.create_task(self._run(), name=f"fetcher-{leader_id}")
        self._task.add_done_callback(on_done)

    @property
    def partition_count(self) -> int:
        """Partitions that follow this leader here."""
        return len(self._asked)

    def follow(self, replicas: Iterable[Replica]) -> None:
        """Fetch these from now on, in their present leader epoch."""
        for replica in replicas:
            self._asked[replica] = None
            self._by_key[replica.topic_id, replica.partition] = replica
            self._delayed.discard(replica)
            self._failures.pop(replica, None)
        self._interrupt()

    def forget(self, replica: Replica) -> None:
        """Fetch it no more."""
        if replica in self._asked:
            del self._asked[replica]
            self._by_key.pop((replica.topic_id, replica.partition), None)
            self._delayed.discard(replica)
            self._failures.pop(replica, None)

    def reconnect(self, connection: Connection) -> None:
        """The leader has moved to another address."""
        self._connection = connection
        self.address = connection.address
        self._wake.set()
        self._drop_stream()

    async def stop(self) -> None:
        """End the task and the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._drop_stream()

    def _interrupt(self) -> None:
        self._wake.set()
        if self._is_waiting:
            self._drop_stream()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _delay(self, replica: Replica, reason: ErrorCode) -> None:
        """Leave a partition out for `replica.fetch.backoff.ms`, twice as long after each failure in a row."""
        if replica in self._delayed or replica not in self._asked:
            return
        failures = self._failures[replica] = self._failures.get(replica, 0) + 1
        delay_ms = min(self._config.replica_fetch_backoff_ms << min(failures - 1, 10), DELAY_MS_MAX)
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
            self._interrupt()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            request = self._request()
            if not request.topics:
                await self._wake.wait()
                continue
            try:
                response = await self._exchange(request)
            except TransportError as error:
                self._drop_stream()
                if not self._wake.is_set():
                    log.debug("fetch failed", leader=self.leader_id, error=str(error))
                    self._metrics.fetch_failed()
                    await self._pause()
                continue
            if response.error_code:
                log.warning("fetch refused", leader=self.leader_id, error=ErrorCode.of(response.error_code).name)
                await self._pause()
                continue
            await self._process(response)

    async def _pause(self) -> None:
        await asyncio.sleep(self._config.replica_fetch_backoff_ms / 1000)

    async def _exchange(self, request: FetchRequest) -> FetchResponse:
        if self._stream is None:
            self._stream = self._connection.fetch_stream("Broker")
        self._is_waiting = True
        try:
            answer: FetchResponse = await self._stream.exchange(request, self._config.replica_socket_timeout_ms / 1000)
            return answer
        finally:
            self._is_waiting = False

    def _request(self) -> FetchRequest:
        config = self._config
        for replica, asked in self._asked.items():
            if asked is None:
                self._asked[replica] = FetchPartition(
                    replica.partition,
                    replica.leader_epoch,
                    replica.log.log_end_offset,
                    replica.log.latest_epoch,
                    replica.log.log_start_offset,
                    config.replica_fetch_max_bytes,
                )
        active = [replica for replica in self._asked if replica not in self._delayed] if self._delayed else self._asked
        topics = []
        for (topic_id, topic), replicas in groupby(active, key=lambda replica: (replica.topic_id, replica.topic)):
            partitions = [asked for replica in replicas if (asked := self._asked[replica]) is not None]
            topics.append(FetchTopic(topic, topic_id, partitions))
        return FetchRequest(
            cluster_id=config.cluster_id,
            replica_id=config.node_id,
            replica_epoch=self._broker_epoch(),
            max_wait_ms=config.replica_fetch_wait_max_ms,
            min_bytes=config.replica_fetch_min_bytes,
            max_bytes=config.replica_fetch_response_max_bytes,
            topics=topics,
        )

    async def _process(self, response: FetchResponse) -> None:
        now_ms = self._now_ms()
        unsynced = []
        for topic in response.responses:
            for data in topic.partitions:
                replica = self._by_key.get((topic.topic_id, data.partition_index))
                asked = self._asked.get(replica) if replica is not None else None
                if replica is None or asked is None:
                    continue  # left this leader, or changed its epoch, while the answer was under way
                try:
                    self._apply(replica, asked, data, now_ms)
                except KafkaError as error:
                    log.warning("append failed", topic=replica.topic, partition=replica.partition, error=str(error))
                    self._metrics.replication_failed(error.code)
                    self._asked[replica] = None
                    self._delay(replica, error.code)
                else:
                    if data.records and replica.must_flush:
                        unsynced.append(replica)
        if self._has_truncated:
            self._has_truncated = False
            await self._after_truncation()
        for replica in unsynced:
            try:
                await self._disk.flush(replica.log)
            except KafkaError as error:
                self._delay(replica, error.code)

    def _apply(self, replica: Replica, asked: FetchPartition, data: PartitionData, now_ms: int) -> None:
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
            self._asked[replica] = None
        elif data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and replica.restart_in_range(
            data.log_start_offset, data.high_watermark
        ):
            log.info("restarted at the leader's log start", topic=replica.topic, partition=replica.partition)
            self._asked[replica] = None
        elif data.error_code:
            self._delay(replica, ErrorCode.of(data.error_code))
        else:
            self._failures.pop(replica, None)
            log_start_offset = replica.log.log_start_offset
            self._metrics.replicated(replica.append_from_leader(data, now_ms))
            if data.records:
                del self._asked[replica]  # to the back
                self._asked[replica] = None
            elif replica.log.log_start_offset != log_start_offset:
                self._asked[replica] = None
