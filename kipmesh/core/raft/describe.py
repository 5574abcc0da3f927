"""DescribeQuorum, answered from a leader's state; anybody else answers NOT_LEADER_OR_FOLLOWER with what it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC

if TYPE_CHECKING:
    from kipmesh.core.raft.machine import Machine


def describe_quorum(
    machine: Machine, request: m.DescribeQuorumRequest, now_ms: int, wall_ms: int
) -> m.DescribeQuorumResponse:
    """Without topics it describes the metadata partition."""
    asked = [(topic.topic_name, topic.partition_indexes) for topic in request.topics] or [
        (CLUSTER_METADATA_TOPIC, (0,))
    ]
    topics = []
    for name, partitions in asked:
        described = [
            _partition(machine, now_ms, wall_ms)
            if name == CLUSTER_METADATA_TOPIC and partition == 0
            else m.DescribeQuorumPartition(partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            for partition in partitions
        ]
        topics.append(m.DescribeQuorumTopicResponse(name, tuple(described)))
    return m.DescribeQuorumResponse(topics=tuple(topics))


def _partition(machine: Machine, now_ms: int, wall_ms: int) -> m.DescribeQuorumPartition:
    election = machine.told_election
    found = m.DescribeQuorumPartition(0, leader_id=election.leader_id, leader_epoch=election.epoch)
    if machine.leadership is None:
        return found._replace(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    voters, observers = machine.leadership.described(machine.log.log_end_offset, now_ms, wall_ms)
    return found._replace(
        high_watermark=machine.high_watermark, current_voters=tuple(voters), observers=tuple(observers)
    )
