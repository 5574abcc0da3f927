"""The values that an image of the metadata is made of, and what records changed of them.

BrokerState and PartitionState are immutable. Invariant: a leader epoch and a partition epoch never go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kipmesh.core.metadata import records as r
from kipmesh.core.scram import ScramCredential
from kipmesh.messages import SnapshotId

CLUSTER_METADATA_TOPIC = "__cluster_metadata"
CLUSTER_METADATA_TOPIC_ID = bytes(15) + b"\1"
"""Kafka's fixed id of the metadata topic."""

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4

LEADER_ROLE_FEATURE = "kipmesh.leader"
"""A broker that registers this feature is a leader service: preferred as leader."""

UNASSIGNED_DIRECTORY = bytes(15) + b"\1"
LOST_DIRECTORY = bytes(15) + b"\2"
"""Kafka's ids for a replica that is in no data folder yet, and for one whose folder has failed."""

PartitionKey = tuple[bytes, int]
"""Topic id and partition."""

RecordKey = tuple[bytes | str | int, ...]
"""What one record of a snapshot is about: a PartitionKey, or a kind and an identity, as `("broker", 1)`."""


class BrokerState(NamedTuple):
    """A registered broker."""

    broker_id: int
    broker_epoch: int
    """The offset of its registration's record."""
    incarnation_id: bytes
    endpoints: Mapping[str, tuple[str, int]]
    """Listener name -> (host, port)."""
    rack: str | None
    fenced: bool
    """Whether it may neither lead nor be in an ISR (but as its last member)."""
    in_controlled_shutdown: bool
    is_leader_role: bool
    """Whether it is a leader service: preferred as leader."""
    features: Sequence[r.BrokerFeature] = ()
    log_dirs: Sequence[bytes] = ()

    @property
    def can_lead(self) -> bool:
        """Whether it may be elected and may join an ISR."""
        return not self.fenced and not self.in_controlled_shutdown


class PartitionState(NamedTuple):
    """A partition: who has it, who is in sync, who leads."""

    replicas: Sequence[int]
    """In the order of preference; the first is the preferred leader."""
    isr: Sequence[int]
    """Empty only when every member stopped uncleanly; then the last ISR decides."""
    leader: int
    """-1 when there is none."""
    leader_epoch: int
    partition_epoch: int
    leader_recovery_state: int = 0
    """1 from an unclean election until the leader says that it has recovered."""
    last_known_elr: Sequence[int] = ()
    """Those who left the ISR since a leader last proved itself alive."""
    eligible_leader_replicas: Sequence[int] = ()
    removing_replicas: Sequence[int] = ()
    adding_replicas: Sequence[int] = ()
    directories: Sequence[bytes] = ()

    @property
    def last_isr(self) -> tuple[int, ...]:
        """The members of the last ISR whose leader was certainly alive, in replica order."""
        members = {*self.isr, *self.last_known_elr}
        return tuple([replica for replica in self.replicas if replica in members])


@dataclass(slots=True)
class TopicState:
    """A topic and its partitions."""

    name: str
    topic_id: bytes
    partitions: dict[int, PartitionState] = field(default_factory=dict)
    generation: int = field(default=0, compare=False, repr=False)
    """How many captures the image had made when this value was; an older one may be somebody else's to read."""


class LeaderExample(NamedTuple):
    """One of many partitions that got another leader."""

    key: PartitionKey
    before: int
    after: int


class Departure(NamedTuple):
    """What one record about a broker did to its partitions (`fencing`)."""

    broker_id: int
    partitions: int
    """That were changed, in whatever way."""
    elected: int
    """That another broker leads now."""
    without_leader: int
    """That had a leader and have none now."""
    examples: Sequence[LeaderExample]
    """A few of the last two."""


@dataclass(slots=True)
class MetadataDelta:
    """What records changed; one may collect several batches. A deleted topic's partitions count as neither."""

    changed_partitions: set[PartitionKey] = field(default_factory=set)
    """New ones too."""
    deleted_topics: list[TopicState] = field(default_factory=list)
    """As they were."""
    changed_brokers: set[int] = field(default_factory=set)
    """New and removed ones too."""
    changed_topic_configs: set[str] = field(default_factory=set)
    """Names of topics that exist."""
    outdated: set[RecordKey] = field(default_factory=set)
    """What was there before and is changed or deleted, however it came: new things are not in it (630-04)."""
    departures: list[Departure] = field(default_factory=list)
    """Of brokers that were fenced or shut down by one record; their partitions are in `changed_partitions`, too."""

    def __bool__(self) -> bool:
        return bool(
            self.changed_partitions or self.deleted_topics or self.changed_brokers or self.changed_topic_configs
        )


class CapturedImage(NamedTuple):
    """All metadata at one offset; nothing in it changes any more, whatever the image goes on to be."""

    offset: int
    """Of the last record that is in it."""
    epoch: int
    timestamp_ms: int
    """When that record was appended."""
    brokers: Mapping[int, BrokerState]
    topics: Mapping[bytes, TopicState]
    features: Mapping[str, int]
    next_producer_id: int
    configs: Mapping[tuple[int, str], Mapping[str, str]]
    """By type and name of the resource."""
    credentials: Mapping[str, Mapping[int, ScramCredential]]
    """By user and Kafka's number of the mechanism."""

    @property
    def snapshot_id(self) -> SnapshotId:
        """Of the snapshot that says this (630-01)."""
        return SnapshotId(self.offset + 1, self.epoch)


def added(record: r.PartitionRecord) -> PartitionState:
    """The partition that the record says all of."""
    replicas, isr = tuple(record.replicas), tuple(record.isr)
    return PartitionState(
        replicas,
        replicas if isr == replicas else isr,
        record.leader,
        record.leader_epoch,
        record.partition_epoch,
        record.leader_recovery_state,
        tuple(record.last_known_elr or ()),
        tuple(record.eligible_leader_replicas or ()),
        tuple(record.removing_replicas),
        tuple(record.adding_replicas),
        tuple(record.directories),
    )


def new_directory(broker: BrokerState | None) -> bytes:
    """The log directory of a new replica: the broker's only one, or the one that the broker is going to choose."""
    return broker.log_dirs[0] if broker is not None and len(broker.log_dirs) == 1 else r.ZERO_UUID


def is_lost(state: PartitionState, broker_id: int) -> bool:
    """Whether the broker's replica was in a data folder that failed (`log_dirs`)."""
    return LOST_DIRECTORY in state.directories and (broker_id, LOST_DIRECTORY) in zip(
        state.replicas, state.directories, strict=False
    )


def lost_replicas(state: PartitionState) -> frozenset[int]:
    """The brokers whose replicas were in data folders that failed."""
    if LOST_DIRECTORY not in state.directories:
        return frozenset()
    return frozenset([replica for replica in state.replicas if is_lost(state, replica)])


def changed(state: PartitionState, record: r.PartitionChangeRecord) -> PartitionState:
    """The partition after the change: one more partition epoch, and one more leader epoch if a leader is named."""

    def new(part: Sequence[int] | None, before: Sequence[int]) -> Sequence[int]:
        return before if part is None else tuple(part)

    named = record.leader != r.NO_LEADER_CHANGE
    return PartitionState(
        new(record.replicas, state.replicas),
        new(record.isr, state.isr),
        record.leader if named else state.leader,
        state.leader_epoch + named,
        state.partition_epoch + 1,
        state.leader_recovery_state if record.leader_recovery_state < 0 else record.leader_recovery_state,
        new(record.last_known_elr, state.last_known_elr),
        new(record.eligible_leader_replicas, state.eligible_leader_replicas),
        new(record.removing_replicas, state.removing_replicas),
        new(record.adding_replicas, state.adding_replicas),
        state.directories if record.directories is None else tuple(record.directories),
    )


def registered(record: r.RegisterBrokerRecord) -> BrokerState:
    """The broker that the record registers."""
    return BrokerState(
        record.broker_id,
        record.broker_epoch,
        record.incarnation_id,
        {endpoint.name: (endpoint.host, endpoint.port) for endpoint in record.end_points},
        record.rack,
        record.fenced,
        record.in_controlled_shutdown,
        any(feature.name == LEADER_ROLE_FEATURE and feature.max_supported_version > 0 for feature in record.features),
        tuple(record.features),
        tuple(record.log_dirs),
    )


def unified(topic_name: str) -> str:
    """The name as metrics show it."""
    return topic_name.replace(".", "_")
