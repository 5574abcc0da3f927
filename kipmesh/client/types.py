"""Arguments and results of the client library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import NamedTuple

from kipmesh.core.config.base import AlterOperation as AlterOperation
from kipmesh.core.config.base import ConfigSource as ConfigSource
from kipmesh.core.config.base import ResourceType as ResourceType
from kipmesh.core.errors import KafkaError
from kipmesh.core.fetch_session.types import FetchSessionDescription as FetchSessionDescription

Headers = Sequence[tuple[str, bytes | None]]

TIMESTAMP_LATEST = -1
TIMESTAMP_EARLIEST = -2
TIMESTAMP_MAX = -3
"""ListOffsets: select the record with the largest timestamp."""


class TopicPartition(NamedTuple):
    """A topic name and a partition number."""

    topic: str
    partition: int


class RecordMetadata(NamedTuple):
    """The position of an acknowledged record. The offset is -1 if unknown, as with acks=0. The timestamp is in ms."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class TimestampType(IntEnum):
    """Whether the producer (CREATE_TIME) or the broker (LOG_APPEND_TIME) set a record's timestamp."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class ConsumerRecord(NamedTuple):
    """A consumed record. `timestamp` is in ms since 1970, `timestamp_type` a value of TimestampType."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    leader_epoch: int


class FetchedBatches(NamedTuple):
    """Undecoded record batches of one partition. The first batch may start before `position`.

    Skip its records below `position`. `next_position` is the offset after the last batch.
    """

    topic: str
    partition: int
    topic_id: bytes
    position: int
    next_position: int
    high_watermark: int
    log_start_offset: int
    records: bytes


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Fetch counters of one consumer since it started; `sessions` and `partitions` are current values."""

    sessions: int = 0
    """Open fetch sessions."""
    partitions: int = 0
    """Partitions in the open fetch sessions."""
    full_fetches: int = 0
    """Full fetch requests: those that create a session, and those sent without one."""
    incremental_fetches: int = 0
    """Incremental fetch requests."""
    fetches_aside: int = 0
    """Requests outside the session, for partitions that could not wait until its pending request completes."""
    resets: Counter[str] = field(default_factory=Counter)
    """Sessions abandoned by the client, by error name, TRANSPORT or MALFORMED (227-19)."""
    bytes_by_node: Counter[int] = field(default_factory=Counter)
    """Fetched record bytes by broker id (392-18)."""
    redirects: Counter[int] = field(default_factory=Counter)
    """Redirects to a preferred read replica, by broker id of the replica (392-13)."""
    returns: Counter[str] = field(default_factory=Counter)
    """Returns of a partition from a follower to the leader, by cause (392-14)."""
    truncations: int = 0
    """Detected truncations that removed records already returned to the application (392-08)."""
    selector_failures: int = 0
    """Failures of the consumer's replica selector (392-11)."""

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(*[getattr(self, each.name) + getattr(other, each.name) for each in fields(self)])


class OffsetAndTimestamp(NamedTuple):
    """The offset, timestamp (ms) and leader epoch of a record, as returned by ListOffsets; -1 if not applicable."""

    offset: int
    timestamp: int
    leader_epoch: int


class Node(NamedTuple):
    """The id, host, port and rack (None: no rack) of a broker."""

    node_id: int
    host: str
    port: int
    rack: str | None = None

    @property
    def address(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PartitionMetadata(NamedTuple):
    """The metadata of a partition. Replicas are broker ids. `leader_id` is -1 while the partition has no leader."""

    partition: int
    leader_id: int
    leader_epoch: int
    replicas: Sequence[int]
    isr: Sequence[int]
    offline_replicas: Sequence[int]
    error_code: int = 0
    preferred_read_replica: int = -1
    last_known_elr: Sequence[int] = ()
    """Members of the last ISR that had a leader. Empty if the ISR still lists them."""

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The offline brokers that must return before a leader can be elected; empty if there is a leader (REP-07)."""
        if self.leader_id >= 0:
            return ()
        return tuple([broker for broker in self.isr or self.last_known_elr if broker in self.offline_replicas])


class TopicMetadata(NamedTuple):
    """The metadata of a topic, with its partitions by number."""

    name: str
    topic_id: bytes
    partitions: Mapping[int, PartitionMetadata]
    is_internal: bool = False


class ClusterDescription(NamedTuple):
    """The brokers of a cluster, and the id of its active controller (-1: unknown)."""

    cluster_id: str | None
    controller_id: int
    brokers: Sequence[Node]


class NewTopic(NamedTuple):
    """A topic to create.

    -1 selects the cluster's default number of partitions or replicas. `assignments` maps partitions to replicas.
    """

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    configs: Mapping[str, str] = {}
    assignments: Mapping[int, Sequence[int]] = {}


class CreatedTopic(NamedTuple):
    """A created topic or, with `validate_only`, a topic that passed validation."""

    name: str
    topic_id: bytes
    num_partitions: int
    replication_factor: int


class ConfigResource(NamedTuple):
    """The topic or broker that a configuration belongs to. `name` is the topic's name, or the broker id as a str."""

    resource_type: int
    name: str


class ConfigValue(NamedTuple):
    """The value of one configuration key. `source`, a value of ConfigSource, says where the value is set."""

    name: str
    value: str | None
    read_only: bool
    source: int
    documentation: str | None


class ConfigAlteration(NamedTuple):
    """A change of one configuration key. `operation` is a value of AlterOperation; `value` is None for DELETE."""

    name: str
    value: str | None
    operation: int = AlterOperation.SET


class BrokerSessions(NamedTuple):
    """The fetch sessions of one broker. If the request to it failed, `error` is set and `sessions` is empty."""

    node_id: int
    sessions: Sequence[FetchSessionDescription]
    error: KafkaError | None = None


class QuorumReplica(NamedTuple):
    """State of a voter or observer as known to the quorum leader; -1 if unknown. Timestamps are ms since 1970."""

    replica_id: int
    log_end_offset: int
    last_fetch_timestamp: int
    last_caught_up_timestamp: int


class QuorumDescription(NamedTuple):
    """State of the metadata quorum as reported by its leader."""

    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: Sequence[QuorumReplica]
    observers: Sequence[QuorumReplica]
    nodes: Sequence[Node]
