"""Messages with the one partition of the metadata quorum in them: made, and taken apart.

Kafka's messages are lists of topics of partitions; the quorum's have exactly one. `only_*` give its partition, or None
where a message is about anything else.
"""

from __future__ import annotations

from typing import TypeVar

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.raft.types import ElectionState, RaftConfig, Response
from kipmesh.messages import (
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
    QuorumEpochPartition,
    QuorumEpochPartitionResponse,
    QuorumEpochTopic,
    QuorumEpochTopicResponse,
    VotePartition,
    VotePartitionResponse,
    VoteRequest,
    VoteResponse,
    VoteTopic,
    VoteTopicResponse,
)

EpochRequest = TypeVar("EpochRequest", BeginQuorumEpochRequest, EndQuorumEpochRequest)
EpochResponse = TypeVar("EpochResponse", BeginQuorumEpochResponse, EndQuorumEpochResponse)


# -- requests


def vote_request(config: RaftConfig, epoch: int, last_epoch: int, end_offset: int) -> VoteRequest:
    """Ask for a vote in `epoch`."""
    partition = VotePartition(0, epoch, config.node_id, last_epoch, end_offset)
    return VoteRequest(config.cluster_id, (VoteTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_request(
    kind: type[EpochRequest], config: RaftConfig, epoch: int, successors: tuple[int, ...] = ()
) -> EpochRequest:
    """This node leads `epoch`, or leads it no more."""
    partition = QuorumEpochPartition(0, config.node_id, epoch, successors)
    return kind(config.cluster_id, (QuorumEpochTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_request(config: RaftConfig, epoch: int, offset: int, last_epoch: int, log_start: int) -> FetchRequest:
    """Ask for records from `offset` on, the one before being of `last_epoch`."""
    partition = FetchPartition(0, epoch, offset, last_epoch, log_start, config.fetch_max_bytes)
    return FetchRequest(
        cluster_id=config.cluster_id,
        replica_id=config.node_id,
        max_wait_ms=config.fetch_max_wait_ms,
        max_bytes=config.fetch_max_bytes,
        topics=(FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,)),),
    )


def only_vote(request: VoteRequest) -> VotePartition | None:
    """The partition of a vote request."""
    match request.topics:
        case (VoteTopic(topic_name=name, partitions=(VotePartition(partition_index=0) as found,)),):
            return found if name == CLUSTER_METADATA_TOPIC else None
    return None


def only_epoch(request: BeginQuorumEpochRequest | EndQuorumEpochRequest) -> QuorumEpochPartition | None:
    """The partition of a request about an epoch."""
    match request.topics:
        case (QuorumEpochTopic(topic_name=name, partitions=(QuorumEpochPartition(partition_index=0) as found,)),):
            return found if name == CLUSTER_METADATA_TOPIC else None
    return None


def only_fetch(request: FetchRequest) -> FetchPartition | None:
    """The partition of a fetch request."""
    match request.topics:
        case (FetchTopic(partitions=(FetchPartition(partition=0) as found,)) as topic,):
            named = topic.topic_id == CLUSTER_METADATA_TOPIC_ID if topic.topic_id else False
            return found if named or (not topic.topic_id and topic.topic == CLUSTER_METADATA_TOPIC) else None
    return None


# -- responses


def vote_response(election: ElectionState, error: ErrorCode, *, granted: bool = False) -> VoteResponse:
    """The answer to a vote request."""
    partition = VotePartitionResponse(0, error, election.leader_id, election.epoch, granted)
    return VoteResponse(0, (VoteTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_response(kind: type[EpochResponse], election: ElectionState, error: ErrorCode) -> EpochResponse:
    """The answer to a request about an epoch."""
    partition = QuorumEpochPartitionResponse(0, error, election.leader_id, election.epoch)
    return kind(0, (QuorumEpochTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_response(partition: PartitionData) -> FetchResponse:
    """The answer to a fetch request."""
    topic = FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,))
    return FetchResponse(responses=(topic,))


def with_records(response: Response, records: bytes) -> FetchResponse:
    """A fetch answer with the records that its `Read` asked for."""
    partition = only_data(response) if isinstance(response, FetchResponse) else None
    if partition is None:
        raise TypeError("not a fetch answer of the quorum")
    return fetch_response(partition._replace(records=records))


def only_data(response: FetchResponse) -> PartitionData | None:
    """The partition of a fetch response."""
    match response.responses:
        case (FetchableTopicResponse(partitions=(PartitionData(partition_index=0) as found,)),):
            return found
    return None


def only_vote_answer(response: VoteResponse) -> VotePartitionResponse | None:
    """The partition of a vote response."""
    match response.topics:
        case (VoteTopicResponse(partitions=(VotePartitionResponse(partition_index=0) as found,)),):
            return found
    return None


def only_epoch_answer(
    response: BeginQuorumEpochResponse | EndQuorumEpochResponse,
) -> QuorumEpochPartitionResponse | None:
    """The partition of a response about an epoch."""
    match response.topics:
        case (QuorumEpochTopicResponse(partitions=(QuorumEpochPartitionResponse(partition_index=0) as found,)),):
            return found
    return None
