"""Vote, BeginQuorumEpoch, EndQuorumEpoch and DescribeQuorum, as in `protos/kipmesh/v1/quorum.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages.fetch import NodeEndpoint


class VotePartition(NamedTuple):
    partition_index: int = 0
    candidate_epoch: int = 0
    candidate_id: int = 0
    last_offset_epoch: int = 0
    last_offset: int = 0


class VoteTopic(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[VotePartition] = ()


class VoteRequest(NamedTuple):
    cluster_id: str | None = None
    topics: Sequence[VoteTopic] = ()


class VotePartitionResponse(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    leader_id: int = -1
    leader_epoch: int = 0
    vote_granted: bool = False


class VoteTopicResponse(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[VotePartitionResponse] = ()


class VoteResponse(NamedTuple):
    error_code: int = 0
    topics: Sequence[VoteTopicResponse] = ()
    node_endpoints: Sequence[NodeEndpoint] = ()


class QuorumEpochPartition(NamedTuple):
    partition_index: int = 0
    leader_id: int = 0
    leader_epoch: int = 0
    preferred_successors: Sequence[int] = ()


class QuorumEpochTopic(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[QuorumEpochPartition] = ()


class BeginQuorumEpochRequest(NamedTuple):
    cluster_id: str | None = None
    topics: Sequence[QuorumEpochTopic] = ()


class QuorumEpochPartitionResponse(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    leader_id: int = -1
    leader_epoch: int = 0


class QuorumEpochTopicResponse(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[QuorumEpochPartitionResponse] = ()


class BeginQuorumEpochResponse(NamedTuple):
    error_code: int = 0
    topics: Sequence[QuorumEpochTopicResponse] = ()
    node_endpoints: Sequence[NodeEndpoint] = ()


class EndQuorumEpochRequest(NamedTuple):
    cluster_id: str | None = None
    topics: Sequence[QuorumEpochTopic] = ()


class EndQuorumEpochResponse(NamedTuple):
    error_code: int = 0
    topics: Sequence[QuorumEpochTopicResponse] = ()
    node_endpoints: Sequence[NodeEndpoint] = ()


class DescribeQuorumTopic(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[int] = ()


class DescribeQuorumRequest(NamedTuple):
    topics: Sequence[DescribeQuorumTopic] = ()


class ReplicaState(NamedTuple):
    replica_id: int = 0
    replica_directory_id: bytes = b""
    log_end_offset: int = 0
    last_fetch_timestamp: int = -1
    last_caught_up_timestamp: int = -1


class DescribeQuorumPartition(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    error_message: str | None = None
    leader_id: int = -1
    leader_epoch: int = 0
    high_watermark: int = -1
    current_voters: Sequence[ReplicaState] = ()
    observers: Sequence[ReplicaState] = ()


class DescribeQuorumTopicResponse(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[DescribeQuorumPartition] = ()


class DescribeQuorumResponse(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    topics: Sequence[DescribeQuorumTopicResponse] = ()
    nodes: Sequence[NodeEndpoint] = ()
