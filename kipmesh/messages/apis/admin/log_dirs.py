"""DescribeLogDirs (35) and AssignReplicasToDirs (73)."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int16, Int32, Int64, Message, Uuid, field


class AssignReplicasToDirsPartition(Message):
    partition_index: Int32 = field(1)


class AssignReplicasToDirsTopic(Message):
    topic_id: Uuid = field(1)
    partitions: Sequence[AssignReplicasToDirsPartition] = field(2)


class AssignReplicasToDirsDirectory(Message):
    # 16 bytes: the id of a log directory, or Kafka's id for lost directories.
    id: bytes = field(1)
    topics: Sequence[AssignReplicasToDirsTopic] = field(2)


class AssignReplicasToDirsRequest(Message):
    broker_id: Int32 = field(1)
    broker_epoch: Int64 = field(2, default=-1)
    directories: Sequence[AssignReplicasToDirsDirectory] = field(3)


class AssignReplicasToDirsPartitionResponse(Message):
    partition_index: Int32 = field(1)
    error_code: Int32 = field(2)


class AssignReplicasToDirsTopicResponse(Message):
    topic_id: Uuid = field(1)
    partitions: Sequence[AssignReplicasToDirsPartitionResponse] = field(2)


class AssignReplicasToDirsDirectoryResponse(Message):
    id: bytes = field(1)
    topics: Sequence[AssignReplicasToDirsTopicResponse] = field(2)


class AssignReplicasToDirsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    directories: Sequence[AssignReplicasToDirsDirectoryResponse] = field(3)


class DescribableLogDirTopic(Message):
    topic: str = field(1)
    partitions: Sequence[Int32] = field(2)


class DescribeLogDirsRequest(Message):
    # None: all. A topic without partitions means all its partitions.
    topics: Sequence[DescribableLogDirTopic] | None = field(1, default=())


class DescribeLogDirsPartition(Message):
    partition_index: Int32 = field(1)
    # The size of the segments in bytes.
    partition_size: Int64 = field(2)
    # Offsets between log end and high watermark.
    offset_lag: Int64 = field(3)
    # Always false: logs do not move between directories.
    is_future_key: Bool = field(4)


class DescribeLogDirsTopic(Message):
    name: str = field(1)
    partitions: Sequence[DescribeLogDirsPartition] = field(2)


class DescribeLogDirsResult(Message):
    # KAFKA_STORAGE_ERROR for an offline directory.
    error_code: Int16 = field(1)
    log_dir: str = field(2)
    topics: Sequence[DescribeLogDirsTopic] = field(3)
    total_bytes: Int64 = field(4, versions="4+", default=-1)
    usable_bytes: Int64 = field(5, versions="4+", default=-1)
    # The reason why the directory is offline. Not in Apache Kafka.
    error_message: str | None = field(6, versions="")


class DescribeLogDirsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2, versions="3+")
    results: Sequence[DescribeLogDirsResult] = field(3)
