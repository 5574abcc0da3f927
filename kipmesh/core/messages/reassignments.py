"""Moving replicas, and brokers that leave, as in `protos/kipmesh/v1/reassignments.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ReassignablePartition(NamedTuple):
    partition_index: int = 0
    replicas: Sequence[int] = ()
    is_cancelled: bool = False


class ReassignableTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[ReassignablePartition] = ()


class AlterPartitionReassignmentsRequest(NamedTuple):
    timeout_ms: int = 60_000
    topics: Sequence[ReassignableTopic] = ()


class ReassignablePartitionResponse(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    error_message: str | None = None


class ReassignableTopicResponse(NamedTuple):
    name: str = ""
    partitions: Sequence[ReassignablePartitionResponse] = ()


class AlterPartitionReassignmentsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    error_message: str | None = None
    responses: Sequence[ReassignableTopicResponse] = ()


class ListPartitionReassignmentsTopics(NamedTuple):
    name: str = ""
    partition_indexes: Sequence[int] = ()


class ListPartitionReassignmentsRequest(NamedTuple):
    timeout_ms: int = 60_000
    topics: Sequence[ListPartitionReassignmentsTopics] = ()
    all_topics: bool = False


class OngoingPartitionReassignment(NamedTuple):
    partition_index: int = 0
    replicas: Sequence[int] = ()
    adding_replicas: Sequence[int] = ()
    removing_replicas: Sequence[int] = ()


class OngoingTopicReassignment(NamedTuple):
    name: str = ""
    partitions: Sequence[OngoingPartitionReassignment] = ()


class ListPartitionReassignmentsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    error_message: str | None = None
    topics: Sequence[OngoingTopicReassignment] = ()


class DrainCursor(NamedTuple):
    walk_id: int = 0
    topic_name: str = ""
    partition_index: int = 0


class PlanBrokerDrainRequest(NamedTuple):
    broker_id: int = 0
    timeout_ms: int = 60_000
    cursor: DrainCursor | None = None
    is_check: bool = False


class PlanBrokerDrainResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    error_message: str | None = None
    topics: Sequence[ReassignableTopic] = ()
    replicas: int = 0
    leaving: int = 0
    next_cursor: DrainCursor | None = None


class UnregisterBrokerRequest(NamedTuple):
    broker_id: int = 0


class UnregisterBrokerResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    error_message: str | None = None
