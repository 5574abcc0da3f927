"""Values of the metadata image: brokers, partitions, topics, and the delta of changes.

BrokerState and PartitionState are immutable. Invariant: leader epochs and partition epochs never decrease.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kipmesh.core.metadata import records as r
from kipmesh.core.scram import ScramCredential
from kipmesh.messages import SnapshotId

CLUSTER_METADATA_TOPIC = "__cluster_metadata"
CLUSTER_METADATA_TOPIC_ID = bytes(15) + b"\1"
"""Topic id of `__cluster_metadata`, fixed by Kafka."""

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4

LEADER_ROLE_FEATURE = "kipmesh.leader"
"""Feature that a leader service registers. Such a broker is preferred as leader."""

UNASSIGNED_DIRECTORY = bytes(15) + b"\1"
LOST_DIRECTORY = bytes(15) + b"\2"
"""Kafka's directory ids of a replica without a log directory yet, and of one whose log directory has failed."""

PartitionKey = tuple[bytes, int]
"""(topic id, partition)."""

RecordKey = tuple[bytes | str | int, ...]
"""Identity of a record in a snapshot: a PartitionKey, or a kind and an id such as `("broker", 1)`."""


class BrokerState(NamedTuple):
    """A registered broker, fenced or not."""

    broker_id: int
    broker_epoch: int
    """Offset of the registration record."""
    incarnation_id: bytes
    endpoints: Mapping[str, tuple[str, int]]
    """Listener name -> (host, port)."""
    rack: str | None
    fenced: bool
    """A fenced broker may not lead, and is in an ISR only as the last member."""
    in_controlled_shutdown: bool
    is_leader_role: bool
    """Whether the broker is a leader service, which is preferred as leader."""
    features: Sequence[r.BrokerFeature] = ()
    log_dirs: Sequence[bytes] = ()

    @property
    def can_lead(self) -> bool:
        """Whether the broker may be elected and may join an ISR: unfenced and not shutting down."""
        return not self.fenced and not self.in_controlled_shutdown


class PartitionState(NamedTuple):
    """State of a partition: replicas, ISR, leader and epochs."""

    replicas: Sequence[int]
    """Broker ids in order of preference; the first is the preferred leader."""
    isr: Sequence[int]
    """Empty only when every member stopped uncleanly; the next leader is then elected from `last_isr`."""
    leader: int
    """-1 without a leader."""
    leader_epoch: int
    partition_epoch: int
    leader_recovery_state: int = 0
    """1 from an unclean election until the leader reports that it has recovered, else 0."""
    last_known_elr: Sequence[int] = ()
    """Replicas that left the ISR since a leader last proved itself alive (see `elections`)."""
    eligible_leader_replicas: Sequence[int] = ()
    removing_replicas: Sequence[int] = ()
    adding_replicas: Sequence[int] = ()
    directories: Sequence[bytes] = ()

    @property
    def last_isr(self) -> tuple[int, ...]:
        """ISR and last known ELR in replica order: the last ISR whose leader was certainly alive."""
        return in_replica_order(self.replicas, {*self.isr, *self.last_known_elr})


def in_replica_order(replicas: Sequence[int], members: Container[int]) -> tuple[int, ...]:
    """Return the replicas that are in `members`, in the order of `replicas`."""
    return tuple([replica for replica in replicas if replica in members])


@dataclass(slots=True)
class TopicState:
    """A topic and its partitions."""

    name: str
    topic_id: bytes
    partitions: dict[int, PartitionState] = field(default_factory=dict)
    generation: int = field(default=0, compare=False, repr=False)
    """Number of captures that preceded this value. A value of an older generation may be in a CapturedImage and must be
    copied before it changes."""


class LeaderExample(NamedTuple):
    """A partition whose leader changed, as an example for a log message. `before` and `after` are broker ids, or -1."""

    key: PartitionKey
    before: int
    after: int


@dataclass(slots=True)
class FencingEffect:
    """Effect of one fencing or shutdown record on the broker's partitions (see `fencing`)."""

    broker_id: int
    partitions: int = 0
    """Number of changed partitions."""
    elected: int = 0
    """Number of partitions with a new leader."""
    without_leader: int = 0
    """Number of partitions that lost their leader and have none now."""
    examples: list[LeaderExample] = field(default_factory=list)
    """Some partitions whose leader changed."""


@dataclass(slots=True)
class MetadataDelta:
    """Changes made by one or more batches of records. Partitions of a deleted topic are only in `deleted_topics`."""

    changed_partitions: set[PartitionKey] = field(default_factory=set)
    """New and changed partitions."""
    deleted_topics: list[TopicState] = field(default_factory=list)
    """Deleted topics with their last state."""
    changed_brokers: set[int] = field(default_factory=set)
    """Ids of new, changed and removed brokers."""
    changed_topic_configs: set[str] = field(default_factory=set)
    """Names of existing topics whose configuration changed."""
    outdated: set[RecordKey] = field(default_factory=set)
    """Identities of existing records that were changed or deleted; new records do not count (630-04)."""
    fencing_effects: list[FencingEffect] = field(default_factory=list)
    """Effects of fencing and shutdown records, whose partitions are in `changed_partitions` too."""

    def __bool__(self) -> bool:
        return bool(
            self.changed_partitions or self.deleted_topics or self.changed_brokers or self.changed_topic_configs
        )


class CapturedImage(NamedTuple):
    """Immutable view of all metadata at one offset."""

    offset: int
    """Offset of the last included record."""
    epoch: int
    timestamp_ms: int
    """Time when that record was appended."""
    brokers: Mapping[int, BrokerState]
    topics: Mapping[bytes, TopicState]
    features: Mapping[str, int]
    next_producer_id: int
    configs: Mapping[tuple[int, str], Mapping[str, str]]
    """(resource type, resource name) -> key -> value."""
    credentials: Mapping[str, Mapping[int, ScramCredential]]
    """User -> Kafka's mechanism number -> credential."""

    @property
    def snapshot_id(self) -> SnapshotId:
        """Id of a snapshot with this content (630-01)."""
        return SnapshotId(self.offset + 1, self.epoch)


def partition_state(record: r.PartitionRecord) -> PartitionState:
    """Return the state of the partition that the record defines."""
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
    """Return the log directory id for a new replica: the id of the broker's only directory, or zeros if the broker is
    None or will choose a directory itself."""
    return broker.log_dirs[0] if broker is not None and len(broker.log_dirs) == 1 else r.ZERO_UUID


def is_lost(state: PartitionState, broker_id: int) -> bool:
    """Return whether the broker's replica is lost: its log directory has failed."""
    return broker_id in lost_replicas(state)


def lost_replicas(state: PartitionState) -> frozenset[int]:
    """Return the ids of brokers whose replicas are lost: their log directories have failed."""
    if LOST_DIRECTORY not in state.directories:
        return frozenset()
    placed = zip(state.replicas, state.directories, strict=False)
    return frozenset([replica for replica, directory in placed if directory == LOST_DIRECTORY])


def apply_change(state: PartitionState, record: r.PartitionChangeRecord) -> PartitionState:
    """Return the state after the change. This increments the partition epoch, and also the leader epoch if the record
    sets a leader, even to the same leader or to none."""

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


def broker_state(record: r.RegisterBrokerRecord) -> BrokerState:
    """Return the state of the broker that the record registers."""
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


def metric_name(topic_name: str) -> str:
    """Return the topic name as used in metric names, with each `.` replaced by `_`."""
    return topic_name.replace(".", "_")
