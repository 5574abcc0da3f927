"""Metadata (3): brokers and topics."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int16, Int32, Message, Uuid, field


class MetadataRequestTopic(Message):
    topic_id: Uuid = field(1, versions="10+")
    name: str | None = field(2, nullable="10+")


class MetadataRequest(Message):
    # Null means all topics. An empty list requests none, except in version 0 (526-09).
    topics: Sequence[MetadataRequestTopic] | None = field(1, nullable="1+", default=(), null_flag=("all_topics", 2))
    allow_auto_topic_creation: Bool = field(3, versions="4+")
    include_cluster_authorized_operations: Bool = field(versions="8-10")
    include_topic_authorized_operations: Bool = field(4, versions="8+")
    # The client's rack, for replica.selection.mode=metadata (392-15).
    rack_id: str = field(5, versions="")


class MetadataResponseBroker(Message):
    node_id: Int32 = field(1)
    host: str = field(2)
    port: Int32 = field(3)
    rack: str | None = field(4, versions="1+")


class MetadataResponsePartition(Message):
    error_code: Int16 = field(1)
    partition_index: Int32 = field(2)
    leader_id: Int32 = field(3, default=-1)
    leader_epoch: Int32 = field(4, versions="7+", default=-1)
    replica_nodes: Sequence[Int32] = field(5)
    isr_nodes: Sequence[Int32] = field(6)
    offline_replicas: Sequence[Int32] = field(7, versions="5+")
    # The draft of KIP-392 (392-15); -1 if the broker has none.
    preferred_read_replica: Int32 = field(8, versions="", default=-1)
    # The last members of the ISR. With an empty ISR and no leader, the controller waits for them.
    last_known_elr: Sequence[Int32] = field(9, versions="")


class MetadataResponseTopic(Message):
    error_code: Int16 = field(1)
    name: str | None = field(2, nullable="12+")
    topic_id: Uuid = field(3, versions="10+")
    is_internal: Bool = field(4, versions="1+")
    partitions: Sequence[MetadataResponsePartition] = field(5)
    topic_authorized_operations: Int32 = field(versions="8+", default=-2147483648)


class MetadataResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="3+")
    brokers: Sequence[MetadataResponseBroker] = field(3)
    cluster_id: str | None = field(4, versions="2+")
    controller_id: Int32 = field(5, versions="1+", default=-1)
    topics: Sequence[MetadataResponseTopic] = field(6)
    cluster_authorized_operations: Int32 = field(versions="8-10", default=-2147483648)
    error_code: Int16 = field(2, versions="13+")
