"""ElectLeaders (API key 43), as in `protos/kipmesh/v1/elections.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class ElectionType(IntEnum):
    """What an election is for; the numbers are Kafka's."""

    PREFERRED = 0
    """The first replica leads, which is the leader service of the partition."""
    UNCLEAN = 1
    """A partition without a leader gets the one that has the most of its log; what that lacks is lost."""


class TopicPartitions(NamedTuple):
    topic: str = ""
    partitions: Sequence[int] = ()


class ElectLeadersRequest(NamedTuple):
    election_type: int = 0
    all_partitions: bool = False
    topic_partitions: Sequence[TopicPartitions] = ()
    timeout_ms: int = 60_000


class PartitionResult(NamedTuple):
    partition_id: int = 0
    error_code: int = 0
    error_message: str | None = None


class ReplicaElectionResult(NamedTuple):
    topic: str = ""
    partition_result: Sequence[PartitionResult] = ()


class ElectLeadersResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    replica_election_results: Sequence[ReplicaElectionResult] = ()
