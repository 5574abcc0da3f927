"""ListOffsets (API key 2), OffsetForLeaderEpoch (23) and DeleteRecords (21), on leaders.

A follower serves ListOffsets to clients that selected it (392-16), from its own log below its own high watermark.

A new leader does not know its high watermark until that reaches the start of its epoch. Until then the latest offset,
and timestamps beyond the known records, are OFFSET_NOT_AVAILABLE (REP-09, 392-09). Results for consumers end at the
high watermark.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice

from kipmesh import messages as m
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.replica.serving import check_list_offsets, epoch_end_for
from kipmesh.transport.grpc.server import RequestContext

LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL_TIMESTAMP = -4
LATEST_TIERED_TIMESTAMP = -5


class OffsetsHandler:
    """Responds to ListOffsets, OffsetForLeaderEpoch and DeleteRecords. Errors are returned per partition."""

    def __init__(self, hosted_replicas: HostedReplicas) -> None:
        self._hosted_replicas = hosted_replicas

    async def list_offsets(self, request: m.ListOffsetsRequest, context: RequestContext) -> m.ListOffsetsResponse:
        """Return for each partition the offset of the first record at or after a timestamp, or a special offset.

        Special timestamps: -1 latest, -2 and -4 earliest, -3 maximum timestamp, -5 latest tiered. The offset is -1 if
        there is no such record; there are never tiered ones. Errors: OFFSET_NOT_AVAILABLE for a consumer while a new
        leader does not know its high watermark; UNSUPPORTED_VERSION below -5; NOT_LEADER_OR_FOLLOWER on a follower,
        unless the replica id is -2; FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH; those of `HostedReplicas.require`.
        """

        async def respond(
            topic_id: bytes, name: str, requested: m.ListOffsetsPartition
        ) -> m.ListOffsetsPartitionResponse:
            try:
                replica = self._hosted_replicas.require(topic_id, name, requested.partition_index)
                return await self._list(replica, requested, request.replica_id)
            except KafkaError as error:
                return m.ListOffsetsPartitionResponse(requested.partition_index, error.code)

        topics = []
        for topic in request.topics:
            partitions = [await respond(topic.topic_id, topic.name, partition) for partition in topic.partitions]
            topics.append(m.ListOffsetsTopicResponse(topic.name, topic.topic_id, partitions))
        return m.ListOffsetsResponse(topics=topics)

    async def _list(
        self, replica: Replica, requested: m.ListOffsetsPartition, replica_id: int
    ) -> m.ListOffsetsPartitionResponse:
        if not replica.has_role or check_list_offsets(is_leader=replica.leader is not None, replica_id=replica_id):
            replica.require_leader(requested.current_leader_epoch)
        replica.require_epoch(requested.current_leader_epoch)
        is_consumer = replica_id < 0
        if is_consumer:
            replica.require_clients_accepted()
        leader, log, index = replica.leader, replica.log, requested.partition_index
        end = replica.high_watermark if is_consumer else log.log_end_offset
        is_withheld = is_consumer and leader is not None and not leader.high_watermark_is_known
        if requested.timestamp in (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP):  # all records are local
            start = log.log_start_offset
            return m.ListOffsetsPartitionResponse(index, 0, -1, start, log.epochs.epoch_of(start))
        if requested.timestamp == LATEST_TIMESTAMP:
            if is_withheld:
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE)
            return m.ListOffsetsPartitionResponse(index, 0, -1, end, replica.leader_epoch)
        if requested.timestamp == LATEST_TIERED_TIMESTAMP:
            return m.ListOffsetsPartitionResponse(index)
        if requested.timestamp == MAX_TIMESTAMP:
            result = await asyncio.to_thread(log.max_timestamp_offset, end)  # off the loop: may decompress
        elif requested.timestamp >= 0:
            result = await asyncio.to_thread(log.offset_for_timestamp, requested.timestamp, end)
        else:
            raise KafkaError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"timestamp must be at least {LATEST_TIERED_TIMESTAMP}, got {requested.timestamp}",
            )
        if result is None:
            if is_withheld:
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE)
            return m.ListOffsetsPartitionResponse(index)
        return m.ListOffsetsPartitionResponse(index, 0, *result)

    async def offsets_for_leader_epoch(
        self, request: m.OffsetsForLeaderEpochRequest, context: RequestContext
    ) -> m.OffsetsForLeaderEpochResponse:
        """Return for each partition the largest epoch that is not above the requested one, and its end offset.

        Consumers get an end offset of at most the high watermark (392-09). Errors: OFFSET_NOT_AVAILABLE while a new
        leader does not know its high watermark; NOT_LEADER_OR_FOLLOWER; FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH;
        those of `HostedReplicas.require`.
        """

        def respond(
            topic_id: bytes, name: str, requested: m.OffsetForLeaderPartition
        ) -> m.OffsetForLeaderPartitionResult:
            try:
                replica = self._hosted_replicas.require(topic_id, name, requested.partition)
                leader = replica.require_leader(requested.current_leader_epoch)
                end = epoch_end_for(
                    request.replica_id,
                    requested.leader_epoch,
                    replica.log.end_offset_for_epoch(requested.leader_epoch),
                    leader_epoch=replica.leader_epoch,
                    high_watermark=replica.high_watermark,
                    high_watermark_is_known=leader.high_watermark_is_known,
                )
            except KafkaError as error:
                return m.OffsetForLeaderPartitionResult(error.code, requested.partition)
            return m.OffsetForLeaderPartitionResult(0, requested.partition, end.epoch, end.end_offset)

        return m.OffsetsForLeaderEpochResponse(
            topics=[
                m.OffsetForLeaderTopicResult(
                    topic.topic,
                    topic.topic_id,
                    [respond(topic.topic_id, topic.topic, partition) for partition in topic.partitions],
                )
                for topic in request.topics
            ]
        )

    async def delete_records(self, request: m.DeleteRecordsRequest, context: RequestContext) -> m.DeleteRecordsResponse:
        """Raise log starts to the requested offsets (-1: the high watermark).

        Responds when every ISR member has done the same, or after `timeout_ms` with REQUEST_TIMED_OUT, in which case
        the leader's log start stays raised. Other errors: POLICY_VIOLATION for the metadata log, whose start only its
        snapshots raise (630-07); OFFSET_OUT_OF_RANGE above the high watermark; NOT_LEADER_OR_FOLLOWER; those of
        `HostedReplicas.require`.
        """

        async def delete(name: str, requested: m.DeleteRecordsPartition) -> m.DeleteRecordsPartitionResult:
            index, code = requested.partition_index, ErrorCode.REQUEST_TIMED_OUT
            try:
                if name == CLUSTER_METADATA_TOPIC:
                    raise KafkaError(
                        ErrorCode.POLICY_VIOLATION, "only snapshots may raise the log start of the metadata log"
                    )
                replica = self._hosted_replicas.require(b"", name, index)
                replica.require_leader()
                offset = replica.high_watermark if requested.offset == -1 else requested.offset
                if not 0 <= offset <= replica.high_watermark:
                    raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
                replica.raise_log_start(offset)
            except KafkaError as error:
                return m.DeleteRecordsPartitionResult(index, error_code=error.code)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.timeout_ms / 1000):
                    code = await replica.when_deleted(offset)
            return m.DeleteRecordsPartitionResult(index, replica.log.log_start_offset, code)

        partitions = [(topic.name, partition) for topic in request.topics for partition in topic.partitions]
        results = iter(await asyncio.gather(*[delete(*partition) for partition in partitions]))
        topics = [
            m.DeleteRecordsTopicResult(topic.name, list(islice(results, len(topic.partitions))))
            for topic in request.topics
        ]
        return m.DeleteRecordsResponse(topics=topics)
