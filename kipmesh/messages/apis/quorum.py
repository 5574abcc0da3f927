"""Vote (52), BeginQuorumEpoch (53), EndQuorumEpoch (54), DescribeQuorum (55): the metadata quorum.

The first three have the fields of Apache Kafka's version 0, and are sent by gRPC only.
"""

from collections.abc import Sequence

from kipmesh.messages.apis.fetch import NodeEndpoint
from kipmesh.messages.schema import Bool, Int16, Int32, Int64, Message, UInt16, Uuid, field


class VotePartition(Message):
    partition_index: Int32 = field(1)
    candidate_epoch: Int32 = field(2)
    candidate_id: Int32 = field(3)
    last_offset_epoch: Int32 = field(4)
    last_offset: Int64 = field(5)


class VoteTopic(Message):
    topic_name: str = field(1)
    partitions: Sequence[VotePartition] = field(2)


class VoteRequest(Message):
    cluster_id: str | None = field(1)
    topics: Sequence[VoteTopic] = field(2)


class VotePartitionResponse(Message):
    partition_index: Int32 = field(1)
    error_code: Int32 = field(2)
    leader_id: Int32 = field(3, default=-1)
    leader_epoch: Int32 = field(4)
    vote_granted: Bool = field(5)


class VoteTopicResponse(Message):
    topic_name: str = field(1)
    partitions: Sequence[VotePartitionResponse] = field(2)


class VoteResponse(Message):
    error_code: Int32 = field(1)
    topics: Sequence[VoteTopicResponse] = field(2)
    node_endpoints: Sequence[NodeEndpoint] = field(3)


class QuorumEpochPartition(Message):
    partition_index: Int32 = field(1)
    leader_id: Int32 = field(2)
    leader_epoch: Int32 = field(3)
    # EndQuorumEpoch only: the voters that should become candidates, first one first.
    preferred_successors: Sequence[Int32] = field(4)


class QuorumEpochTopic(Message):
    topic_name: str = field(1)
    partitions: Sequence[QuorumEpochPartition] = field(2)


class BeginQuorumEpochRequest(Message):
    cluster_id: str | None = field(1)
    topics: Sequence[QuorumEpochTopic] = field(2)


class QuorumEpochPartitionResponse(Message):
    partition_index: Int32 = field(1)
    error_code: Int32 = field(2)
    leader_id: Int32 = field(3, default=-1)
    leader_epoch: Int32 = field(4)


class QuorumEpochTopicResponse(Message):
    topic_name: str = field(1)
    partitions: Sequence[QuorumEpochPartitionResponse] = field(2)


class BeginQuorumEpochResponse(Message):
    error_code: Int32 = field(1)
    topics: Sequence[QuorumEpochTopicResponse] = field(2)
    node_endpoints: Sequence[NodeEndpoint] = field(3)


class EndQuorumEpochRequest(Message):
    cluster_id: str | None = field(1)
    topics: Sequence[QuorumEpochTopic] = field(2)


class EndQuorumEpochResponse(Message):
    error_code: Int32 = field(1)
    topics: Sequence[QuorumEpochTopicResponse] = field(2)
    node_endpoints: Sequence[NodeEndpoint] = field(3)


class DescribeQuorumPartitionIndex(Message):
    partition_index: Int32 = field(1)


class DescribeQuorumTopic(Message):
    topic_name: str = field(1)
    partition_indexes: Sequence[Int32] = field(2, versions="", proto_name="partitions")
    # Apache Kafka's form of the field above.
    partitions: Sequence[DescribeQuorumPartitionIndex] = field()


class DescribeQuorumRequest(Message):
    topics: Sequence[DescribeQuorumTopic] = field(1)


class ReplicaState(Message):
    replica_id: Int32 = field(1)
    replica_directory_id: Uuid = field(2, versions="2+")
    log_end_offset: Int64 = field(3)
    last_fetch_timestamp: Int64 = field(4, versions="1+", default=-1)
    last_caught_up_timestamp: Int64 = field(5, versions="1+", default=-1)


class DescribeQuorumPartition(Message):
    partition_index: Int32 = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3, versions="2+")
    leader_id: Int32 = field(4, default=-1)
    leader_epoch: Int32 = field(5)
    high_watermark: Int64 = field(6, default=-1)
    current_voters: Sequence[ReplicaState] = field(7)
    observers: Sequence[ReplicaState] = field(8)


class DescribeQuorumTopicResponse(Message):
    topic_name: str = field(1)
    partitions: Sequence[DescribeQuorumPartition] = field(2)


class QuorumListener(Message):
    name: str = field()
    host: str = field()
    port: UInt16 = field()


class QuorumNode(Message):
    node_id: Int32 = field(default=-1)
    listeners: Sequence[QuorumListener] = field()


class DescribeQuorumResponse(Message):
    error_code: Int16 = field(1)
    error_message: str | None = field(2, versions="2+")
    topics: Sequence[DescribeQuorumTopicResponse] = field(3)
    endpoints: Sequence[NodeEndpoint] = field(4, versions="", proto_name="nodes")
    # Apache Kafka's form of the field above.
    nodes: Sequence[QuorumNode] = field(versions="2+")
