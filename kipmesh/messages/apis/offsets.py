"""ListOffsets (2), OffsetForLeaderEpoch (23), DeleteRecords (21)."""

from collections.abc import Sequence

from kipmesh.messages.schema import Int8, Int16, Int32, Int64, Message, Uuid, field


class ListOffsetsPartition(Message):
    partition_index: Int32 = field(1)
    current_leader_epoch: Int32 = field(2, versions="4+", default=-1)
    # In ms; -1 latest, -2 earliest, -3 the offset of the largest timestamp.
    timestamp: Int64 = field(3)


class ListOffsetsTopic(Message):
    name: str = field(1)
    topic_id: Uuid = field(2, versions="")
    partitions: Sequence[ListOffsetsPartition] = field(3)


class ListOffsetsRequest(Message):
    replica_id: Int32 = field(1, default=-1)
    isolation_level: Int8 = field(2, versions="2+")
    topics: Sequence[ListOffsetsTopic] = field(3)
    timeout_ms: Int32 = field(4, versions="10+")


class ListOffsetsPartitionResponse(Message):
    partition_index: Int32 = field(1)
    error_code: Int16 = field(2)
    timestamp: Int64 = field(3, versions="1+", default=-1)
    offset: Int64 = field(4, versions="1+", default=-1)
    leader_epoch: Int32 = field(5, versions="4+", default=-1)


class ListOffsetsTopicResponse(Message):
    name: str = field(1)
    topic_id: Uuid = field(2, versions="")
    partitions: Sequence[ListOffsetsPartitionResponse] = field(3, mirrors="partitions")


class ListOffsetsResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="2+")
    topics: Sequence[ListOffsetsTopicResponse] = field(2, mirrors="topics")


class OffsetForLeaderPartition(Message):
    partition: Int32 = field(1)
    current_leader_epoch: Int32 = field(2, versions="2+", default=-1)
    leader_epoch: Int32 = field(3)


class OffsetForLeaderTopic(Message):
    topic: str = field(1)
    topic_id: Uuid = field(2, versions="")
    partitions: Sequence[OffsetForLeaderPartition] = field(3)


class OffsetsForLeaderEpochRequest(Message):
    # -1 from a consumer: the response is limited to the high watermark (392-09).
    replica_id: Int32 = field(1, versions="3+", default=-1)
    topics: Sequence[OffsetForLeaderTopic] = field(2)


class OffsetForLeaderPartitionResult(Message):
    error_code: Int16 = field(2)
    partition: Int32 = field(1)
    leader_epoch: Int32 = field(3, versions="1+", default=-1)
    end_offset: Int64 = field(4, default=-1)


class OffsetForLeaderTopicResult(Message):
    topic: str = field(1)
    topic_id: Uuid = field(2, versions="")
    partitions: Sequence[OffsetForLeaderPartitionResult] = field(3, mirrors="partitions")


class OffsetsForLeaderEpochResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="2+")
    topics: Sequence[OffsetForLeaderTopicResult] = field(2, mirrors="topics")


class DeleteRecordsPartition(Message):
    partition_index: Int32 = field(1)
    # -1: the high watermark.
    offset: Int64 = field(2)


class DeleteRecordsTopic(Message):
    name: str = field(1)
    partitions: Sequence[DeleteRecordsPartition] = field(2)


class DeleteRecordsRequest(Message):
    topics: Sequence[DeleteRecordsTopic] = field(1)
    timeout_ms: Int32 = field(2)


class DeleteRecordsPartitionResult(Message):
    partition_index: Int32 = field(1)
    low_watermark: Int64 = field(2, default=-1)
    error_code: Int16 = field(3)


class DeleteRecordsTopicResult(Message):
    name: str = field(1)
    partitions: Sequence[DeleteRecordsPartitionResult] = field(2, mirrors="partitions")


class DeleteRecordsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    topics: Sequence[DeleteRecordsTopicResult] = field(2, mirrors="topics")
