"""AlterPartitionReassignments (45), ListPartitionReassignments (46), and PlanBrokerDrain, which only kipmesh has."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int16, Int32, Int64, Message, field


class ReassignablePartition(Message):
    partition_index: Int32 = field(1)
    # The target replicas, preferred leader first. Null cancels the reassignment.
    replicas: Sequence[Int32] | None = field(2, default=(), null_flag=("is_cancelled", 3))


class ReassignableTopic(Message):
    name: str = field(1)
    partitions: Sequence[ReassignablePartition] = field(2)


class AlterPartitionReassignmentsRequest(Message):
    timeout_ms: Int32 = field(1, default=60000)
    topics: Sequence[ReassignableTopic] = field(2)


class ReassignablePartitionResponse(Message):
    partition_index: Int32 = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)


class ReassignableTopicResponse(Message):
    name: str = field(1)
    partitions: Sequence[ReassignablePartitionResponse] = field(2)


class AlterPartitionReassignmentsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)
    responses: Sequence[ReassignableTopicResponse] = field(4)


class ListPartitionReassignmentsTopics(Message):
    name: str = field(1)
    partition_indexes: Sequence[Int32] = field(2)


class ListPartitionReassignmentsRequest(Message):
    timeout_ms: Int32 = field(1, default=60000)
    topics: Sequence[ListPartitionReassignmentsTopics] | None = field(2, default=(), null_flag=("all_topics", 3))


class OngoingPartitionReassignment(Message):
    partition_index: Int32 = field(1)
    replicas: Sequence[Int32] = field(2)
    adding_replicas: Sequence[Int32] = field(3)
    removing_replicas: Sequence[Int32] = field(4)


class OngoingTopicReassignment(Message):
    name: str = field(1)
    partitions: Sequence[OngoingPartitionReassignment] = field(2)


class ListPartitionReassignmentsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)
    topics: Sequence[OngoingTopicReassignment] = field(4)


class DrainCursor(Message):
    """A position in the iteration `walk_id` over a broker's replicas: the next one is after this partition."""

    walk_id: Int64 = field(1)
    topic_name: str = field(2)
    partition_index: Int32 = field(3)


class PlanBrokerDrainRequest(Message):
    """Plans targets for the replicas of a broker. Changes nothing."""

    broker_id: Int32 = field(1)
    timeout_ms: Int32 = field(2, default=60000)
    # The end of the previous plan; null starts from the beginning.
    cursor: DrainCursor | None = field(3)
    # Only check that each replica has a target; the response has no plan.
    is_check: Bool = field(4)


class PlanBrokerDrainResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    error_message: str | None = field(3)
    # Targets for some of the partitions, for AlterPartitionReassignments.
    topics: Sequence[ReassignableTopic] = field(4)
    # The number of replicas of the broker, and how many of the visited ones a reassignment already removes.
    replicas: Int32 = field(5)
    leaving: Int32 = field(6)
    # The start of the next plan; null at the end.
    next_cursor: DrainCursor | None = field(7)
