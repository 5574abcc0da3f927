"""Requests and responses of the metadata quorum: each has exactly one topic with exactly one partition.

`only_partition` and `only_response_partition` return that partition, or None for a message about anything else.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.raft.types import ElectionState, RaftConfig, Request, Response

EpochRequest = TypeVar("EpochRequest", m.BeginQuorumEpochRequest, m.EndQuorumEpochRequest)
EpochResponse: TypeAlias = m.BeginQuorumEpochResponse | m.EndQuorumEpochResponse
RequestPartition: TypeAlias = m.VotePartition | m.QuorumEpochPartition | m.FetchPartition
ResponsePartition: TypeAlias = m.VotePartitionResponse | m.QuorumEpochPartitionResponse | m.PartitionData

_RESPONSE_TYPES: dict[type[Request], type[Response]] = {
    m.VoteRequest: m.VoteResponse,
    m.BeginQuorumEpochRequest: m.BeginQuorumEpochResponse,
    m.EndQuorumEpochRequest: m.EndQuorumEpochResponse,
    m.FetchRequest: m.FetchResponse,
}


# -- requests


def vote_request(config: RaftConfig, epoch: int, last_epoch: int, end_offset: int) -> m.VoteRequest:
    """Request a vote in `epoch`."""
    partition = m.VotePartition(0, epoch, config.node_id, last_epoch, end_offset)
    return m.VoteRequest(config.cluster_id, (m.VoteTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_request(
    kind: type[EpochRequest], config: RaftConfig, epoch: int, successors: tuple[int, ...] = ()
) -> EpochRequest:
    """Announce that this node leads `epoch`, or that it resigned."""
    partition = m.QuorumEpochPartition(0, config.node_id, epoch, successors)
    return kind(config.cluster_id, (m.QuorumEpochTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_request(config: RaftConfig, epoch: int, offset: int, last_epoch: int, log_start: int) -> m.FetchRequest:
    """Request records from `offset` on; the record before it is of `last_epoch`."""
    partition = m.FetchPartition(0, epoch, offset, last_epoch, log_start, config.fetch_max_bytes)
    return m.FetchRequest(
        cluster_id=config.cluster_id,
        replica_id=config.node_id,
        max_wait_ms=config.fetch_max_wait_ms,
        max_bytes=config.fetch_max_bytes,
        topics=(m.FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,)),),
    )


def only_partition(request: Request) -> RequestPartition | None:
    """Return the metadata partition of a request."""
    match request.topics:
        case (m.VoteTopic() | m.QuorumEpochTopic() as topic,):
            is_metadata = topic.topic_name == CLUSTER_METADATA_TOPIC
        case (m.FetchTopic(topic_id=b"") as topic,):
            is_metadata = topic.topic == CLUSTER_METADATA_TOPIC
        case (m.FetchTopic() as topic,):
            is_metadata = topic.topic_id == CLUSTER_METADATA_TOPIC_ID
        case _:
            return None
    match topic.partitions:
        case (
            m.VotePartition(partition_index=0)
            | m.QuorumEpochPartition(partition_index=0)
            | m.FetchPartition(partition=0) as found,
        ) if is_metadata:
            return found
    return None


# -- responses


def error_response(request: Request, error: ErrorCode) -> Response:
    """Refuse a whole request."""
    return _RESPONSE_TYPES[type(request)](error_code=error)


def vote_response(election: ElectionState, error: ErrorCode, *, granted: bool = False) -> m.VoteResponse:
    """Respond to a Vote request."""
    partition = m.VotePartitionResponse(0, error, election.leader_id, election.epoch, granted)
    return m.VoteResponse(0, (m.VoteTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_response(kind: type[EpochResponse], election: ElectionState, error: ErrorCode) -> EpochResponse:
    """Respond to a BeginQuorumEpoch or EndQuorumEpoch request."""
    partition = m.QuorumEpochPartitionResponse(0, error, election.leader_id, election.epoch)
    return kind(0, (m.QuorumEpochTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_response(partition: m.PartitionData) -> m.FetchResponse:
    """Respond to a Fetch request."""
    topic = m.FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,))
    return m.FetchResponse(responses=(topic,))


def fetch_error(election: ElectionState, error: ErrorCode) -> m.FetchResponse:
    """Refuse a Fetch request with the leader and the epoch that this node knows."""
    leader = m.LeaderIdAndEpoch(election.leader_id, election.epoch)
    return fetch_response(m.PartitionData(0, error, current_leader=leader))


def with_records(response: Response, records: bytes) -> m.FetchResponse:
    """Add the records that the `Read` of a Fetch response names."""
    partition = only_response_partition(response)
    if not isinstance(partition, m.PartitionData):
        raise TypeError("not a fetch response of the quorum")
    return fetch_response(partition._replace(records=records))


def only_response_partition(response: Response) -> ResponsePartition | None:
    """Return the only partition of a response."""
    topics = response.responses if isinstance(response, m.FetchResponse) else response.topics
    match topics[0].partitions if len(topics) == 1 else ():
        case (
            m.VotePartitionResponse(partition_index=0)
            | m.QuorumEpochPartitionResponse(partition_index=0)
            | m.PartitionData(partition_index=0) as found,
        ):
            return found
    return None
