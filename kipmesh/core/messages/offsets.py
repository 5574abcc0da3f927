"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords, as in `protos/kipmesh/v1/offsets.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ListOffsetsPartition(NamedTuple):
    partition_index: int = 0
    current_leader_epoch: int = -1
    timestamp: int = 0


class ListOffsetsTopic(NamedTuple):
    name: str = ""
    topic_id: bytes = b""
    partitions: Sequence[ListOffsetsPartition] = ()


class ListOffsetsRequest(NamedTuple):
    replica_id: int = -1
    isolation_level: int = 0
    topics: Sequence[ListOffsetsTopic] = ()
    timeout_ms: int = 0


class ListOffsetsPartitionResponse(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    timestamp: int = -1
    offset: int = -1
    leader_epoch: int = -1


class ListOffsetsTopicResponse(NamedTuple):
    name: str = ""
    topic_id: bytes = b""
    partitions: Sequence[ListOffsetsPartitionResponse] = ()


class ListOffsetsResponse(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[ListOffsetsTopicResponse] = ()


class OffsetForLeaderPartition(NamedTuple):
    partition: int = 0
    current_leader_epoch: int = -1
    leader_epoch: int = 0


class OffsetForLeaderTopic(NamedTuple):
    topic: str = ""
    topic_id: bytes = b""
    partitions: Sequence[OffsetForLeaderPartition] = ()


class OffsetsForLeaderEpochRequest(NamedTuple):
    replica_id: int = -1
    topics: Sequence[OffsetForLeaderTopic] = ()


class OffsetForLeaderPartitionResult(NamedTuple):
    partition: int = 0
    error_code: int = 0
    leader_epoch: int = -1
    end_offset: int = -1


class OffsetForLeaderTopicResult(NamedTuple):
    topic: str = ""
    topic_id: bytes = b""
    partitions: Sequence[OffsetForLeaderPartitionResult] = ()


class OffsetsForLeaderEpochResponse(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[OffsetForLeaderTopicResult] = ()


class DeleteRecordsPartition(NamedTuple):
    partition_index: int = 0
    offset: int = 0


class DeleteRecordsTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[DeleteRecordsPartition] = ()


class DeleteRecordsRequest(NamedTuple):
    topics: Sequence[DeleteRecordsTopic] = ()
    timeout_ms: int = 0


class DeleteRecordsPartitionResult(NamedTuple):
    partition_index: int = 0
    low_watermark: int = -1
    error_code: int = 0


class DeleteRecordsTopicResult(NamedTuple):
    name: str = ""
    partitions: Sequence[DeleteRecordsPartitionResult] = ()


class DeleteRecordsResponse(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[DeleteRecordsTopicResult] = ()
