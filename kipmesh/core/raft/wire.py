"""Messages with the one partition of the metadata quorum in them: made, and taken apart.

Kafka's messages are lists of topics of partitions; the quorum's have exactly one. `only_*` give its partition, or None
where a message is about anything else.
"""

from __future__ import annotations

from typing import TypeVar

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.raft.types import ElectionState, RaftConfig, Response

EpochRequest = TypeVar("EpochRequest", m.BeginQuorumEpochRequest, m.EndQuorumEpochRequest)
EpochResponse = TypeVar("EpochResponse", m.BeginQuorumEpochResponse, m.EndQuorumEpochResponse)


# -- requests


def vote_request(config: RaftConfig, epoch: int, last_epoch: int, end_offset: int) -> m.VoteRequest:
    """Ask for a vote in `epoch`."""
    partition = m.VotePartition(0, epoch, config.node_id, last_epoch, end_offset)
    return m.VoteRequest(config.cluster_id, (m.VoteTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_request(
    kind: type[EpochRequest], config: RaftConfig, epoch: int, successors: tuple[int, ...] = ()
) -> EpochRequest:
    """This node leads `epoch`, or leads it no more."""
    partition = m.QuorumEpochPartition(0, config.node_id, epoch, successors)
    return kind(config.cluster_id, (m.QuorumEpochTopic(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_request(config: RaftConfig, epoch: int, offset: int, last_epoch: int, log_start: int) -> m.FetchRequest:
    """Ask for records from `offset` on, the one before being of `last_epoch`."""
    partition = m.FetchPartition(0, epoch, offset, last_epoch, log_start, config.fetch_max_bytes)
    return m.FetchRequest(
        cluster_id=config.cluster_id,
        replica_id=config.node_id,
        max_wait_ms=config.fetch_max_wait_ms,
        max_bytes=config.fetch_max_bytes,
        topics=(m.FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,)),),
    )


def only_vote(request: m.VoteRequest) -> m.VotePartition | None:
    """The partition of a vote request."""
    match request.topics:
        case (m.VoteTopic(topic_name=name, partitions=(m.VotePartition(partition_index=0) as found,)),):
            return found if name == CLUSTER_METADATA_TOPIC else None
    return None


def only_epoch(request: m.BeginQuorumEpochRequest | m.EndQuorumEpochRequest) -> m.QuorumEpochPartition | None:
    """The partition of a request about an epoch."""
    match request.topics:
        case (m.QuorumEpochTopic(topic_name=name, partitions=(m.QuorumEpochPartition(partition_index=0) as found,)),):
            return found if name == CLUSTER_METADATA_TOPIC else None
    return None


def only_fetch(request: m.FetchRequest) -> m.FetchPartition | None:
    """The partition of a fetch request."""
    match request.topics:
        case (m.FetchTopic(partitions=(m.FetchPartition(partition=0) as found,)) as topic,):
            named = topic.topic_id == CLUSTER_METADATA_TOPIC_ID if topic.topic_id else False
            return found if named or (not topic.topic_id and topic.topic == CLUSTER_METADATA_TOPIC) else None
    return None


# -- responses


def vote_response(election: ElectionState, error: ErrorCode, *, granted: bool = False) -> m.VoteResponse:
    """The answer to a vote request."""
    partition = m.VotePartitionResponse(0, error, election.leader_id, election.epoch, granted)
    return m.VoteResponse(0, (m.VoteTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def epoch_response(kind: type[EpochResponse], election: ElectionState, error: ErrorCode) -> EpochResponse:
    """The answer to a request about an epoch."""
    partition = m.QuorumEpochPartitionResponse(0, error, election.leader_id, election.epoch)
    return kind(0, (m.QuorumEpochTopicResponse(CLUSTER_METADATA_TOPIC, (partition,)),))


def fetch_response(partition: m.PartitionData) -> m.FetchResponse:
    """The answer to a fetch request."""
    topic = m.FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, (partition,))
    return m.FetchResponse(responses=(topic,))


def with_records(response: Response, records: bytes) -> m.FetchResponse:
    """A fetch answer with the records that its `Read` asked for."""
    partition = only_data(response) if isinstance(response, m.FetchResponse) else None
    if partition is None:
        raise TypeError("not a fetch answer of the quorum")
    return fetch_response(partition._replace(records=records))


def only_data(response: m.FetchResponse) -> m.PartitionData | None:
    """The partition of a fetch response."""
    match response.responses:
        case (m.FetchableTopicResponse(partitions=(m.PartitionData(partition_index=0) as found,)),):
            return found
    return None


def only_vote_answer(response: m.VoteResponse) -> m.VotePartitionResponse | None:
    """The partition of a vote response."""
    match response.topics:
        case (m.VoteTopicResponse(partitions=(m.VotePartitionResponse(partition_index=0) as found,)),):
            return found
    return None


def only_epoch_answer(
    response: m.BeginQuorumEpochResponse | m.EndQuorumEpochResponse,
) -> m.QuorumEpochPartitionResponse | None:
    """The partition of a response about an epoch."""
    match response.topics:
        case (m.QuorumEpochTopicResponse(partitions=(m.QuorumEpochPartitionResponse(partition_index=0) as found,)),):
            return found
    return None
