"""BrokerRegistration, BrokerHeartbeat and AlterPartition, as in `protos/kipmesh/v1/broker_lifecycle.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Listener(NamedTuple):
    name: str = ""
    host: str = ""
    port: int = 0
    security_protocol: int = 0


class Feature(NamedTuple):
    name: str = ""
    min_supported_version: int = 0
    max_supported_version: int = 0


class BrokerRegistrationRequest(NamedTuple):
    broker_id: int = 0
    cluster_id: str = ""
    incarnation_id: bytes = b""
    listeners: Sequence[Listener] = ()
    features: Sequence[Feature] = ()
    rack: str | None = None
    log_dirs: Sequence[bytes] = ()
    previous_broker_epoch: int = -1


class BrokerRegistrationResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    broker_epoch: int = -1
    error_message: str | None = None


class PartitionLogEnd(NamedTuple):
    topic_id: bytes = b""
    partition: int = 0
    last_epoch: int = 0
    log_end_offset: int = 0


class BrokerHeartbeatRequest(NamedTuple):
    broker_id: int = 0
    broker_epoch: int = -1
    current_metadata_offset: int = -1
    want_fence: bool = False
    want_shut_down: bool = False
    log_ends: Sequence[PartitionLogEnd] = ()
    offline_log_dirs: Sequence[bytes] = ()


class TopicIdPartition(NamedTuple):
    topic_id: bytes = b""
    partition: int = 0


class BrokerHeartbeatResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    is_caught_up: bool = False
    is_fenced: bool = False
    should_shut_down: bool = False
    wanted_log_ends: Sequence[TopicIdPartition] = ()


class IsrMember(NamedTuple):
    broker_id: int = 0
    broker_epoch: int = -1


class AlterPartitionPartition(NamedTuple):
    partition_index: int = 0
    leader_epoch: int = 0
    partition_epoch: int = 0
    new_isr_with_epochs: Sequence[IsrMember] = ()
    leader_recovery_state: int = 0


class AlterPartitionTopic(NamedTuple):
    topic_id: bytes = b""
    partitions: Sequence[AlterPartitionPartition] = ()


class AlterPartitionRequest(NamedTuple):
    broker_id: int = 0
    broker_epoch: int = -1
    topics: Sequence[AlterPartitionTopic] = ()


class AlterPartitionPartitionResponse(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    leader_id: int = 0
    leader_epoch: int = 0
    isr: Sequence[int] = ()
    leader_recovery_state: int = 0
    partition_epoch: int = 0


class AlterPartitionTopicResponse(NamedTuple):
    topic_id: bytes = b""
    partitions: Sequence[AlterPartitionPartitionResponse] = ()


class AlterPartitionResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    topics: Sequence[AlterPartitionTopicResponse] = ()
