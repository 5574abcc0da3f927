"""The service Quorum of a single voter: Fetch for observers, DescribeQuorum.

A fetch waits for nothing but its own minimum of bytes or its time: an fsync that moves the high watermark wakes those
that wait, and nothing polls. Observers see only what is below the high watermark. Vote, BeginQuorumEpoch,
EndQuorumEpoch and FetchSnapshot are not there yet (2 of 8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.messages import (
    DescribeQuorumPartition,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    DescribeQuorumTopicResponse,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
    ReplicaState,
)
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.metadata.schema import ZERO_UUID
from kipmesh.node.controller.metadata_log import MetadataLog
from kipmesh.rpc.server import RequestContext

FETCH_MAX_WAIT_MS = 60_000
OBSERVERS_MAX = 10_000
OBSERVER_TIMEOUT_MS = 300_000
"""An observer that has not fetched for that long is not listed any more."""
READ_BYTES_MIN = 1


@dataclass(slots=True)
class _Observer:
    """What is known of a replica that fetches; times are in ms since 1970."""

    log_end_offset: int
    last_fetch_ms: int
    last_caught_up_ms: int
    leader_end_at_last_fetch: int


class QuorumState(NamedTuple):
    """Who is in the quorum; does not change while the node runs."""

    cluster_id: str
    node_id: int
    epoch: int
    voters: tuple[Voter, ...]


class QuorumService:
    """Serves one metadata log, whose high watermark its owner tells."""

    def __init__(
        self,
        state: QuorumState,
        metadata_log: MetadataLog,
        high_watermark: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        self._state = state
        self._log = metadata_log
        self._high_watermark = high_watermark
        self._now_ms = now_ms
        self._observers: dict[int, _Observer] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_stopping = False

    @property
    def waiting_fetches(self) -> int:
        """Fetches that wait for new records."""
        return len(self._waiting)

    @property
    def observers(self) -> int:
        """Replicas that fetch and are no voters. Changes nothing: the thread of /metrics asks too."""
        oldest_ms = self._now_ms() - OBSERVER_TIMEOUT_MS
        return sum(observer.last_fetch_ms >= oldest_ms for observer in list(self._observers.values()))

    def high_watermark_moved(self, _high_watermark: int) -> None:
        """Wake the fetches that wait."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def stop(self) -> None:
        """Answer what waits, and everything from now on, with NOT_LEADER_OR_FOLLOWER."""
        self._is_stopping = True
        self.high_watermark_moved(0)

    async def fetch(self, request: FetchRequest, context: RequestContext) -> FetchResponse:
        """Fetch (API key 1) of `__cluster_metadata-0`."""
        if request.cluster_id not in (None, self._state.cluster_id):
            return FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.max_wait_ms, FETCH_MAX_WAIT_MS) / 1000
        while True:
            response, may_wait = self._read(request)
            left_s = deadline - loop.time()
            if not may_wait or left_s <= 0:
                return response
            await self._wait(left_s)

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting.add(woken)
        timer = loop.call_later(timeout_s, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._waiting.discard(woken)

    def _read(self, request: FetchRequest) -> tuple[FetchResponse, bool]:
        """The response as of now, and whether waiting could make a better one."""
        responses = []
        may_wait = bool(request.topics) and not self._is_stopping
        size = 0
        for topic in request.topics:
            partitions = []
            for asked in topic.partitions:
                data = self._read_partition(request, topic, asked)
                may_wait = may_wait and not data.error_code and data.diverging_epoch is None
                size += len(data.records)
                partitions.append(data)
            responses.append(FetchableTopicResponse(topic.topic, topic.topic_id, tuple(partitions)))
        return FetchResponse(responses=tuple(responses)), may_wait and size < request.min_bytes

    def _read_partition(self, request: FetchRequest, topic: FetchTopic, asked: FetchPartition) -> PartitionData:
        code = self._refusal(topic, asked)
        leader = LeaderIdAndEpoch(self._state.node_id, self._state.epoch)
        if code is not ErrorCode.NONE:
            return PartitionData(asked.partition, code, current_leader=leader)
        high_watermark = self._high_watermark()
        found = PartitionData(
            asked.partition,
            high_watermark=high_watermark,
            last_stable_offset=high_watermark,
            log_start_offset=self._log.start_offset,
            current_leader=leader,
        )
        offset = asked.fetch_offset
        diverging = self._log.diverging_epoch(offset, asked.last_fetched_epoch)
        if diverging is not None:
            return found._replace(diverging_epoch=diverging)
        if not self._log.start_offset <= offset <= self._log.end_offset:
            return found._replace(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        self._observe(request.replica_id, offset)
        if offset >= high_watermark:
            return found
        limit = max(min(request.max_bytes, asked.partition_max_bytes or request.max_bytes), READ_BYTES_MIN)
        try:
            return found._replace(records=self._log.read(offset, limit, high_watermark))
        except KafkaError as error:
            return found._replace(error_code=error.code)

    def _refusal(self, topic: FetchTopic, asked: FetchPartition) -> ErrorCode:
        if self._is_stopping:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if topic.topic_id:
            if topic.topic_id != CLUSTER_METADATA_TOPIC_ID:
                return ErrorCode.UNKNOWN_TOPIC_ID
        elif topic.topic != CLUSTER_METADATA_TOPIC:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if asked.partition != 0:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if asked.current_leader_epoch >= 0:
            if asked.current_leader_epoch < self._state.epoch:
                return ErrorCode.FENCED_LEADER_EPOCH
            if asked.current_leader_epoch > self._state.epoch:
                return ErrorCode.UNKNOWN_LEADER_EPOCH
        return ErrorCode.NONE

    def _observe(self, replica_id: int, offset: int) -> None:
        if replica_id < 0 or replica_id == self._state.node_id:
            return
        now_ms = self._now_ms()
        end = self._high_watermark()
        observer = self._observers.get(replica_id)
        if observer is None:
            if len(self._observers) >= OBSERVERS_MAX:
                self._forget_old_observers()
                if len(self._observers) >= OBSERVERS_MAX:
                    return
            observer = self._observers[replica_id] = _Observer(offset, now_ms, -1, end)
        if offset >= end:
            observer.last_caught_up_ms = now_ms
        elif offset >= observer.leader_end_at_last_fetch:
            observer.last_caught_up_ms = max(observer.last_caught_up_ms, observer.last_fetch_ms)
        observer.log_end_offset = offset
        observer.last_fetch_ms = now_ms
        observer.leader_end_at_last_fetch = end

    def _forget_old_observers(self) -> None:
        oldest_ms = self._now_ms() - OBSERVER_TIMEOUT_MS
        for replica_id in [id_ for id_, observer in self._observers.items() if observer.last_fetch_ms < oldest_ms]:
            del self._observers[replica_id]

    async def describe_quorum(self, request: DescribeQuorumRequest, context: RequestContext) -> DescribeQuorumResponse:
        """DescribeQuorum (API key 55); without topics it describes the metadata partition."""
        topics = []
        asked = [(topic.topic_name, topic.partitions) for topic in request.topics] or [(CLUSTER_METADATA_TOPIC, (0,))]
        for name, partitions in asked:
            known = name == CLUSTER_METADATA_TOPIC
            described = [
                self._describe()
                if known and partition == 0
                else DescribeQuorumPartition(partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                for partition in partitions
            ]
            topics.append(DescribeQuorumTopicResponse(name, tuple(described)))
        nodes = tuple([NodeEndpoint(voter.id, voter.host, voter.port) for voter in self._state.voters])
        return DescribeQuorumResponse(topics=tuple(topics), nodes=nodes)

    def _describe(self) -> DescribeQuorumPartition:
        self._forget_old_observers()
        now_ms = self._now_ms()
        observers = [
            ReplicaState(
                replica_id, ZERO_UUID, observer.log_end_offset, observer.last_fetch_ms, observer.last_caught_up_ms
            )
            for replica_id, observer in sorted(self._observers.items())
        ]
        return DescribeQuorumPartition(
            0,
            leader_id=self._state.node_id,
            leader_epoch=self._state.epoch,
            high_watermark=self._high_watermark(),
            current_voters=(ReplicaState(self._state.node_id, ZERO_UUID, self._log.end_offset, now_ms, now_ms),),
            observers=tuple(observers),
        )


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
