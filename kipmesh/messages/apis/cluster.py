"""DescribeCluster (60) and DescribeTopicPartitions (75)."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int8, Int16, Int32, Message, Uuid, field


class DescribeClusterRequest(Message):
    include_cluster_authorized_operations: Bool = field()
    endpoint_type: Int8 = field(versions="1+", default=1)


class DescribeClusterBroker(Message):
    broker_id: Int32 = field()
    host: str = field()
    port: Int32 = field()
    rack: str | None = field()


class DescribeClusterResponse(Message):
    throttle_time_ms: Int32 = field()
    error_code: Int16 = field()
    error_message: str | None = field()
    endpoint_type: Int8 = field(versions="1+", default=1)
    cluster_id: str = field()
    controller_id: Int32 = field(default=-1)
    brokers: Sequence[DescribeClusterBroker] = field()
    cluster_authorized_operations: Int32 = field(default=-2147483648)


class TopicRequest(Message):
    name: str = field()


class Cursor(Message):
    topic_name: str = field()
    partition_index: Int32 = field()


class DescribeTopicPartitionsRequest(Message):
    topics: Sequence[TopicRequest] = field()
    response_partition_limit: Int32 = field(default=2000)
    cursor: Cursor | None = field()


class DescribeTopicPartitionsResponsePartition(Message):
    error_code: Int16 = field()
    partition_index: Int32 = field()
    leader_id: Int32 = field(default=-1)
    leader_epoch: Int32 = field(default=-1)
    replica_nodes: Sequence[Int32] = field()
    isr_nodes: Sequence[Int32] = field()
    eligible_leader_replicas: Sequence[Int32] | None = field(default=())
    last_known_elr: Sequence[Int32] | None = field(default=())
    offline_replicas: Sequence[Int32] = field()


class DescribeTopicPartitionsResponseTopic(Message):
    error_code: Int16 = field()
    name: str | None = field()
    topic_id: Uuid = field()
    is_internal: Bool = field()
    partitions: Sequence[DescribeTopicPartitionsResponsePartition] = field()
    topic_authorized_operations: Int32 = field(default=-2147483648)


class DescribeTopicPartitionsResponse(Message):
    throttle_time_ms: Int32 = field()
    topics: Sequence[DescribeTopicPartitionsResponseTopic] = field(mirrors="topics")
    next_cursor: Cursor | None = field()
