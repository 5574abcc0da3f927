"""BrokerRegistration (62), BrokerHeartbeat (63), AlterPartition (56): a broker and the active controller."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int32, Int64, Message, Uuid, field


class Listener(Message):
    name: str = field(1)
    host: str = field(2)
    port: Int32 = field(3)
    security_protocol: Int32 = field(4)


class Feature(Message):
    name: str = field(1)
    min_supported_version: Int32 = field(2)
    max_supported_version: Int32 = field(3)


class BrokerRegistrationRequest(Message):
    broker_id: Int32 = field(1)
    cluster_id: str = field(2)
    # A random id of the process, 16 bytes.
    incarnation_id: Uuid = field(3)
    listeners: Sequence[Listener] = field(4)
    features: Sequence[Feature] = field(5)
    rack: str | None = field(6)
    log_dirs: Sequence[bytes] = field(7)
    # The broker epoch in the clean-shutdown marker, -1 after an unclean stop.
    previous_broker_epoch: Int64 = field(8, default=-1)


class BrokerRegistrationResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    broker_epoch: Int64 = field(3, default=-1)
    error_message: str | None = field(4)


class PartitionLogEnd(Message):
    topic_id: Uuid = field(1)
    partition: Int32 = field(2)
    # The epoch of the last batch in the log, -1 for an empty log.
    last_epoch: Int32 = field(3)
    log_end_offset: Int64 = field(4)


class BrokerHeartbeatRequest(Message):
    broker_id: Int32 = field(1)
    broker_epoch: Int64 = field(2, default=-1)
    # The highest metadata offset that the broker has applied.
    current_metadata_offset: Int64 = field(3, default=-1)
    want_fence: Bool = field(4)
    want_shut_down: Bool = field(5)
    # Log ends that the last response requested.
    log_ends: Sequence[PartitionLogEnd] = field(6)
    # Ids of log directories that have failed since the broker registered.
    offline_log_dirs: Sequence[bytes] = field(7)


class TopicIdPartition(Message):
    topic_id: Uuid = field(1)
    partition: Int32 = field(2)


class BrokerHeartbeatResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    is_caught_up: Bool = field(3)
    is_fenced: Bool = field(4)
    should_shut_down: Bool = field(5)
    # Partitions without a clean leader: the controller compares their log ends before it elects (REP-07).
    wanted_log_ends: Sequence[TopicIdPartition] = field(6)


class IsrMember(Message):
    broker_id: Int32 = field(1)
    broker_epoch: Int64 = field(2, default=-1)


class AlterPartitionPartition(Message):
    partition_index: Int32 = field(1)
    leader_epoch: Int32 = field(2)
    partition_epoch: Int32 = field(3)
    new_isr_with_epochs: Sequence[IsrMember] = field(4)
    leader_recovery_state: Int32 = field(5)


class AlterPartitionTopic(Message):
    topic_id: Uuid = field(1)
    partitions: Sequence[AlterPartitionPartition] = field(2)


class AlterPartitionRequest(Message):
    broker_id: Int32 = field(1)
    broker_epoch: Int64 = field(2, default=-1)
    topics: Sequence[AlterPartitionTopic] = field(3)


class AlterPartitionPartitionResponse(Message):
    partition_index: Int32 = field(1)
    error_code: Int32 = field(2)
    leader_id: Int32 = field(3)
    leader_epoch: Int32 = field(4)
    isr: Sequence[Int32] = field(5)
    leader_recovery_state: Int32 = field(6)
    partition_epoch: Int32 = field(7)


class AlterPartitionTopicResponse(Message):
    topic_id: Uuid = field(1)
    partitions: Sequence[AlterPartitionPartitionResponse] = field(2)


class AlterPartitionResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    topics: Sequence[AlterPartitionTopicResponse] = field(3)
