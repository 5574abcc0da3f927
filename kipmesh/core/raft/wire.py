"""Messages of the metadata quorum. Each has exactly one topic with exactly one partition.

`only_partition` and `only_response_partition` return that partition, or None for any other message.
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
    """Return the Vote request of a candidate in `epoch` whose log ends at `end_offset` in epoch `last_epoch`."""
    partition = m.VotePartition(0, epoch, config.node_id, last_epoch, end_offset)
    return m.VoteRequest(config.cluster_id, (m.VoteTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_request(
    kind: type[EpochRequest], config: RaftConfig, epoch: int, successors: tuple[int, ...] = ()
) -> EpochRequest:
    """Return a request of type `kind` for `epoch`; EndQuorumEpoch has the preferred `successors`."""
    partition = m.QuorumEpochPartition(0, config.node_id, epoch, successors)
    return kind(config.cluster_id, (m.QuorumEpochTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_request(config: RaftConfig, epoch: int, offset: int, last_epoch: int, log_start: int) -> m.FetchRequest:
    """Return a Fetch request from `offset`. `last_epoch` is that of the record before `offset`; `log_start` is the log
    start of this replica."""
    partition = m.FetchPartition(0, epoch, offset, last_epoch, log_start, config.fetch_max_bytes)
    return m.FetchRequest(
        cluster_id=config.cluster_id,
        replica_id=config.node_id,
        max_wait_ms=config.fetch_max_wait_ms,
        max_bytes=config.fetch_max_bytes,
        topics=(m.FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,)),),
    )


def only_partition(request: Request) -> RequestPartition | None:
    """Return the metadata partition of a request, or None if the request names anything else."""
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
            | m.FetchPartition(partition=0) as partition,
        ) if is_metadata:
            return partition
    return None


# -- responses


def error_response(request: Request, error: ErrorCode) -> Response:
    """Return a response to `request` with a top-level error."""
    return _RESPONSE_TYPES[type(request)](error_code=error)


def vote_response(election: ElectionState, error: ErrorCode, *, granted: bool = False) -> m.VoteResponse:
    """Return a Vote response with the leader and epoch of `election`. `granted` is whether the vote is granted."""
    partition = m.VotePartitionResponse(0, error, election.leader_id, election.epoch, granted)
    return m.VoteResponse(0, (m.VoteTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_response(kind: type[EpochResponse], election: ElectionState, error: ErrorCode) -> EpochResponse:
    """Return a response of type `kind` to BeginQuorumEpoch or EndQuorumEpoch with the known leader and epoch."""
    partition = m.QuorumEpochPartitionResponse(0, error, election.leader_id, election.epoch)
    return kind(0, (m.QuorumEpochTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_response(partition: m.PartitionData) -> m.FetchResponse:
    """Return a Fetch response with one partition."""
    topic = m.FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,))
    return m.FetchResponse(responses=(topic,))


def fetch_error(election: ElectionState, error: ErrorCode) -> m.FetchResponse:
    """Return a Fetch response with a partition error, the known leader and epoch."""
    leader = m.LeaderIdAndEpoch(election.leader_id, election.epoch)
    return fetch_response(m.PartitionData(0, error, current_leader=leader))


def with_records(response: Response, records: bytes) -> m.FetchResponse:
    """Return a Fetch response with `records` in its only partition. Raises TypeError for any other response."""
    partition = only_response_partition(response)
    if not isinstance(partition, m.PartitionData):
        raise TypeError(f"expected a Fetch response with one partition, got {type(response).__name__}")
    return fetch_response(partition._replace(records=records))


def only_response_partition(response: Response) -> ResponsePartition | None:
    """Return the only partition of a response, or None if it does not have exactly one, with index 0."""
    topics = response.responses if isinstance(response, m.FetchResponse) else response.topics
    match topics[0].partitions if len(topics) == 1 else ():
        case (
            m.VotePartitionResponse(partition_index=0)
            | m.QuorumEpochPartitionResponse(partition_index=0)
            | m.PartitionData(partition_index=0) as partition,
        ):
            return partition
    return None
