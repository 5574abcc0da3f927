"""Values that the client library takes and gives."""

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
"""ListOffsets: the offset of the largest timestamp."""


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int


class RecordMetadata(NamedTuple):
    """Where an acknowledged record is; the offset is -1 with acks=0."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class TimestampType(IntEnum):
    """Whose clock a record's timestamp is from."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class ConsumerRecord(NamedTuple):
    """A record as it was read; `timestamp_type` is a number of TimestampType."""

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
    """Whole record batches of one partition as they are on disk; the first may begin before `position`."""

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
    """How a consumer fetches. `sessions` and `partitions` are of now, the others count from its start."""

    sessions: int = 0
    """Fetch sessions that brokers keep for it."""
    partitions: int = 0
    """Partitions in them."""
    full_fetches: int = 0
    """Requests that named all partitions: to get a session, or as there is none."""
    incremental_fetches: int = 0
    """Requests that named only what had changed."""
    fetches_aside: int = 0
    """Requests for the few partitions that could not wait for the session's."""
    resets: Counter[str] = field(default_factory=Counter)
    """Sessions that were given up, by error name, TRANSPORT or MALFORMED (227-19)."""
    bytes_by_node: Counter[int] = field(default_factory=Counter)
    """Bytes of records by the broker that served them (392-18)."""
    redirects: Counter[int] = field(default_factory=Counter)
    """How often leaders sent a partition to that replica (392-13)."""
    returns: Counter[str] = field(default_factory=Counter)
    """How often a partition went back to the leader, by cause (392-14)."""
    truncations: int = 0
    """How often records that were returned turned out not to be in the log any more (392-08)."""
    selector_failures: int = 0
    """What the consumer's own selector did wrong (392-11)."""

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(*[getattr(self, each.name) + getattr(other, each.name) for each in fields(self)])


class OffsetAndTimestamp(NamedTuple):
    """A record's place as ListOffsets answers it."""

    offset: int
    timestamp: int
    leader_epoch: int


class Node(NamedTuple):
    """A broker."""

    node_id: int
    host: str
    port: int
    rack: str | None = None

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PartitionMetadata(NamedTuple):
    """What metadata says about a partition; the leader is -1 when there is none."""

    partition: int
    leader_id: int
    leader_epoch: int
    replicas: Sequence[int]
    isr: Sequence[int]
    offline_replicas: Sequence[int]
    error_code: int = 0
    preferred_read_replica: int = -1
    last_known_elr: Sequence[int] = ()
    """Who left the ISR since a leader last proved itself alive."""

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Without a leader: the offline brokers that an election waits for ("Log truth")."""
        if self.leader_id >= 0:
            return ()
        return tuple([broker for broker in self.isr or self.last_known_elr if broker in self.offline_replicas])


class TopicMetadata(NamedTuple):
    """What metadata says about a topic."""

    name: str
    topic_id: bytes
    partitions: Mapping[int, PartitionMetadata]
    is_internal: bool = False


class ClusterDescription(NamedTuple):
    """The brokers of a cluster, and the id of its active controller (-1: not known)."""

    cluster_id: str | None
    controller_id: int
    brokers: Sequence[Node]


class NewTopic(NamedTuple):
    """A topic to create; -1 takes the cluster's default."""

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    configs: Mapping[str, str] = {}
    assignments: Mapping[int, Sequence[int]] = {}


class CreatedTopic(NamedTuple):
    """A topic that was created (or, with `validate_only`, that could be)."""

    name: str
    topic_id: bytes
    num_partitions: int
    replication_factor: int


class ConfigResource(NamedTuple):
    """The owner of a configuration: a topic's name or a broker's id as text."""

    resource_type: int
    name: str


class ConfigValue(NamedTuple):
    """One value of a configuration; `source` is a number of ConfigSource."""

    name: str
    value: str | None
    read_only: bool
    source: int
    documentation: str | None


class ConfigAlteration(NamedTuple):
    """A change of one configuration key."""

    name: str
    value: str | None
    operation: int = AlterOperation.SET


class BrokerSessions(NamedTuple):
    """The fetch sessions at one broker by id, or why it did not say."""

    node_id: int
    sessions: Sequence[FetchSessionDescription]
    error: KafkaError | None = None


class QuorumReplica(NamedTuple):
    """A voter or observer of the metadata quorum, as its leader sees it; -1 where that is not known."""

    replica_id: int
    log_end_offset: int
    last_fetch_timestamp: int
    last_caught_up_timestamp: int


class QuorumDescription(NamedTuple):
    """The metadata quorum."""

    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: Sequence[QuorumReplica]
    observers: Sequence[QuorumReplica]
    nodes: Sequence[Node]
