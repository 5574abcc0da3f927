"""ElectLeaders (43)."""

from collections.abc import Sequence
from enum import IntEnum

from kipmesh.messages.schema import ITEM, Int8, Int16, Int32, Message, field


class ElectionType(IntEnum):
    """The kind of election that ElectLeaders requests."""

    PREFERRED = 0
    UNCLEAN = 1


class TopicPartitions(Message):
    topic: str = field(1)
    partitions: Sequence[Int32] = field(2)


class ElectLeadersRequest(Message):
    # 0 preferred, 1 unclean: the replica with the longest log, for a partition without a leader.
    election_type: Int8 = field(1, versions="1+")
    topic_partitions: Sequence[TopicPartitions] | None = field(3, default=(), null_flag=("all_partitions", 2))
    timeout_ms: Int32 = field(4, default=60000)


class PartitionResult(Message):
    partition_id: Int32 = field(1, mirrors=ITEM)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)


class ReplicaElectionResult(Message):
    topic: str = field(1)
    partition_result: Sequence[PartitionResult] = field(2, mirrors="partitions")


class ElectLeadersResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2, versions="1+")
    replica_election_results: Sequence[ReplicaElectionResult] = field(3, mirrors="topic_partitions")
