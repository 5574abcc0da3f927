"""ListOffsets (API key 2), OffsetForLeaderEpoch (23) and DeleteRecords (21), on leaders.

A follower answers ListOffsets to readers that chose it (392-16): of its own log, below its own high watermark.

A new leader does not know its high watermark until it reaches its own epoch: until then the latest offset, and
timestamps beyond, are OFFSET_NOT_AVAILABLE ("Log truth", 392-09). A consumer's answers end at the high watermark.
"""

from __future__ import annotations

import asyncio

from kipmesh import messages as m
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.replica.serving import check_lister, epoch_end_for
from kipmesh.transport.grpc.server import RequestContext

LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL_TIMESTAMP = -4
LATEST_TIERED_TIMESTAMP = -5


class OffsetsHandler:
    """Answers the three."""

    def __init__(self, hosted_replicas: HostedReplicas) -> None:
        self._hosted_replicas = hosted_replicas

    async def list_offsets(self, request: m.ListOffsetsRequest, context: RequestContext) -> m.ListOffsetsResponse:
        """The offset of a timestamp, or of the log's ends."""

        async def respond(topic_id: bytes, name: str, asked: m.ListOffsetsPartition) -> m.ListOffsetsPartitionResponse:
            try:
                replica = self._hosted_replicas.require(topic_id, name, asked.partition_index)
                return await self._list(replica, asked, request.replica_id)
            except KafkaError as error:
                return m.ListOffsetsPartitionResponse(asked.partition_index, error.code)

        topics = []
        for topic in request.topics:
            partitions = [await respond(topic.topic_id, topic.name, asked) for asked in topic.partitions]
            topics.append(m.ListOffsetsTopicResponse(topic.name, topic.topic_id, partitions))
        return m.ListOffsetsResponse(topics=topics)

    async def _list(
        self, replica: Replica, asked: m.ListOffsetsPartition, replica_id: int
    ) -> m.ListOffsetsPartitionResponse:
        if not replica.has_role or check_lister(is_leader=replica.leader is not None, replica_id=replica_id):
            replica.require_leader(asked.current_leader_epoch)
        replica.require_epoch(asked.current_leader_epoch)
        if replica_id < 0:
            replica.require_connected()
        leader, log, index = replica.leader, replica.log, asked.partition_index
        is_consumer = replica_id < 0
        end = replica.high_watermark if is_consumer else log.log_end_offset
        withheld = is_consumer and leader is not None and not leader.high_watermark_is_known
        if asked.timestamp in (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP):  # all of it is local
            start = log.log_start_offset
            return m.ListOffsetsPartitionResponse(index, 0, -1, start, log.epochs.epoch_of(start))
        if asked.timestamp == LATEST_TIMESTAMP:
            if withheld:
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE)
            return m.ListOffsetsPartitionResponse(index, 0, -1, end, replica.leader_epoch)
        if asked.timestamp == LATEST_TIERED_TIMESTAMP:
            return m.ListOffsetsPartitionResponse(index)
        if asked.timestamp == MAX_TIMESTAMP:
            found = await asyncio.to_thread(log.max_timestamp_offset, end)  # reads and decompresses: off the loop
        elif asked.timestamp >= 0:
            found = await asyncio.to_thread(log.offset_for_timestamp, asked.timestamp, end)
        else:
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"timestamp {asked.timestamp} is not known")
        if found is None:
            if withheld:
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE)
            return m.ListOffsetsPartitionResponse(index)
        return m.ListOffsetsPartitionResponse(index, 0, *found)

    async def offsets_for_leader_epoch(
        self, request: m.OffsetsForLeaderEpochRequest, context: RequestContext
    ) -> m.OffsetsForLeaderEpochResponse:
        """Where a leader epoch ended."""

        def respond(topic_id: bytes, name: str, asked: m.OffsetForLeaderPartition) -> m.OffsetForLeaderPartitionResult:
            try:
                replica = self._hosted_replicas.require(topic_id, name, asked.partition)
                leader = replica.require_leader(asked.current_leader_epoch)
                found = epoch_end_for(
                    request.replica_id,
                    asked.leader_epoch,
                    replica.log.end_offset_for_epoch(asked.leader_epoch),
                    leader_epoch=replica.leader_epoch,
                    high_watermark=replica.high_watermark,
                    high_watermark_is_known=leader.high_watermark_is_known,
                )
            except KafkaError as error:
                return m.OffsetForLeaderPartitionResult(error.code, asked.partition)
            return m.OffsetForLeaderPartitionResult(0, asked.partition, found.epoch, found.end_offset)

        return m.OffsetsForLeaderEpochResponse(
            topics=[
                m.OffsetForLeaderTopicResult(
                    topic.topic,
                    topic.topic_id,
                    [respond(topic.topic_id, topic.topic, asked) for asked in topic.partitions],
                )
                for topic in request.topics
            ]
        )

    async def delete_records(self, request: m.DeleteRecordsRequest, context: RequestContext) -> m.DeleteRecordsResponse:
        """Raise log starts; answered when every live replica has done the same, or the time is over.

        POLICY_VIOLATION for the metadata log, whose start only its snapshots raise (630-07).
        """
        moved: list[tuple[Replica, int]] = []

        def delete(name: str, asked: m.DeleteRecordsPartition) -> m.DeleteRecordsPartitionResult:
            try:
                if name == CLUSTER_METADATA_TOPIC:
                    raise KafkaError(ErrorCode.POLICY_VIOLATION, "only snapshots raise the metadata log's start")
                replica = self._hosted_replicas.require(b"", name, asked.partition_index)
                replica.require_leader()
                offset = replica.high_watermark if asked.offset == -1 else asked.offset
                if not 0 <= offset <= replica.high_watermark:
                    raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
                replica.raise_log_start(offset)
            except KafkaError as error:
                return m.DeleteRecordsPartitionResult(asked.partition_index, error_code=error.code)
            moved.append((replica, offset))
            return m.DeleteRecordsPartitionResult(asked.partition_index, replica.log.log_start_offset)

        topics = [
            m.DeleteRecordsTopicResult(topic.name, [delete(topic.name, asked) for asked in topic.partitions])
            for topic in request.topics
        ]
        codes = await self._wait_for_followers(moved, request.timeout_ms)
        if any(codes.values()):
            topics = [
                topic._replace(
                    partitions=[
                        result._replace(error_code=codes.get((topic.name, result.partition_index), result.error_code))
                        for result in topic.partitions
                    ]
                )
                for topic in topics
            ]
        return m.DeleteRecordsResponse(topics=topics)

    async def _wait_for_followers(
        self, moved: list[tuple[Replica, int]], timeout_ms: int
    ) -> dict[tuple[str, int], ErrorCode]:
        waits = [(replica, replica.when_deleted(offset)) for replica, offset in moved]
        if not waits:
            return {}
        await asyncio.wait([done for _, done in waits], timeout=timeout_ms / 1000)
        codes = {}
        for replica, done in waits:
            codes[replica.topic, replica.partition] = done.result() if done.done() else ErrorCode.REQUEST_TIMED_OUT
            done.cancel()
        return codes
