"""The cluster's metadata as the records of `__cluster_metadata` make it, and what changed while they were applied.

One task owns an image, applies records to it in the log's order and may read it at any time; nobody else writes it.
Values inside (BrokerState, PartitionState) are immutable and replaced whole, so that a reader may keep them. So is all
that `capture` gives: topics are copied when they first change after it (630-03).

The log says more than who leads. `PartitionState.last_known_elr` holds the members that left the ISR since a leader
last proved itself alive; together with the ISR they are "the last ISR that had a leader" ("Log truth" of the rules),
see `elections`.

Invariants: a leader is in its ISR; the ISR is a part of the replicas; a partition without a leader has a member in
its last ISR; leader and partition epochs never go back; equal records make equal images. The indexes (partitions of a
broker, partitions without a leader, unproven leaders) follow from the partitions. A record that contradicts the image
raises CorruptRecordError and the image must not be used any more (630-15).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.states import (
    LEADER_ROLE_FEATURE,
    BrokerState,
    CapturedImage,
    MetadataDelta,
    PartitionKey,
    PartitionState,
    RecordKey,
    TopicState,
    changed,
    registered,
)

__all__ = [
    "BROKER_RESOURCE",
    "CLUSTER_METADATA_TOPIC",
    "CLUSTER_METADATA_TOPIC_ID",
    "LEADER_ROLE_FEATURE",
    "TOPIC_RESOURCE",
    "BrokerState",
    "CapturedImage",
    "MetadataDelta",
    "MetadataImage",
    "PartitionKey",
    "PartitionState",
    "RecordKey",
    "TopicState",
    "changed",
    "unified",
]

CLUSTER_METADATA_TOPIC = "__cluster_metadata"
CLUSTER_METADATA_TOPIC_ID = bytes(15) + b"\1"
"""Kafka's fixed id of the metadata topic."""

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_PARTITIONS: Mapping[PartitionKey, None] = MappingProxyType({})
_NO_OFFSETS: Mapping[PartitionKey, int] = MappingProxyType({})


class MetadataImage:
    """All metadata up to `offset`."""

    __slots__ = (
        "_configs",
        "_generation",
        "_leaderless",
        "_of_broker",
        "_topic_names",
        "_unified_names",
        "_unproven",
        "brokers",
        "epoch",
        "failed",
        "features",
        "next_producer_id",
        "offset",
        "partition_count",
        "timestamp_ms",
        "topics",
    )

    def __init__(self, offset: int = -1, epoch: int = 0, timestamp_ms: int = -1) -> None:
        """Empty: before the log's first record, or at the end of a snapshot whose records are to be applied."""
        self.offset = offset
        """Offset of the last applied record, -1 for none."""
        self.epoch = epoch
        """Quorum epoch of the last applied record."""
        self.timestamp_ms = timestamp_ms
        """When the last replayed batch was appended; a snapshot's header has it."""
        self.failed = False
        """Whether a record could not be applied: then this is no state of the cluster."""
        self.brokers: dict[int, BrokerState] = {}
        self.topics: dict[bytes, TopicState] = {}
        """By topic id."""
        self.features: dict[str, int] = {}
        self.next_producer_id = 0
        self.partition_count = 0
        self._topic_names: dict[str, bytes] = {}
        self._unified_names: dict[str, str] = {}
        # The inner mappings are replaced, never changed.
        self._configs: dict[tuple[int, str], Mapping[str, str]] = {}
        self._generation = 0
        # Dicts as ordered sets: equal logs must give equal orders, and so equal records.
        self._of_broker: dict[int, dict[PartitionKey, None]] = {}
        self._leaderless: dict[PartitionKey, None] = {}
        self._unproven: dict[int, dict[PartitionKey, int]] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataImage):
            return NotImplemented
        compared = [name for name in self.__slots__ if name != "_generation"]
        return all(getattr(self, name) == getattr(other, name) for name in compared)

    __hash__ = None  # type: ignore[assignment]

    def capture(self) -> CapturedImage:
        """This moment, to be read slice by slice while records are applied; RuntimeError after a failure (630-15).

        The cost is a copy of the outer mappings: some milliseconds for a million topics.
        """
        if self.failed:
            raise RuntimeError("an image that failed to apply a record is no state to keep")
        self._generation += 1
        return CapturedImage(
            self.offset,
            self.epoch,
            self.timestamp_ms,
            dict(self.brokers),
            dict(self.topics),
            dict(self.features),
            self.next_producer_id,
            dict(self._configs),
        )

    @property
    def topic_names(self) -> Mapping[str, bytes]:
        """Topic name -> topic id."""
        return MappingProxyType(self._topic_names)

    def topic_by_name(self, name: str) -> TopicState | None:
        """The topic of that name."""
        topic_id = self._topic_names.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def colliding_topic(self, name: str) -> str | None:
        """The topic whose name differs from this one only in `.` for `_`: the two would be one in metrics' names."""
        return self._unified_names.get(unified(name))

    def partition(self, topic_id: bytes, partition: int) -> PartitionState | None:
        """A partition's state."""
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.partitions.get(partition)

    def topic_config(self, name: str) -> Mapping[str, str]:
        """The topic's own configuration (without defaults), dotted keys."""
        return self._configs.get((TOPIC_RESOURCE, name), _NOTHING)

    def partitions_of_broker(self, broker_id: int) -> Collection[PartitionKey]:
        """(topic id, partition) of every partition that the broker has a replica of; a view, not a copy."""
        return self._of_broker.get(broker_id, _NO_PARTITIONS).keys()

    @property
    def leaderless(self) -> Collection[PartitionKey]:
        """The partitions without a leader; a view, not a copy."""
        return self._leaderless.keys()

    def unproven(self, leader: int) -> Mapping[PartitionKey, int]:
        """Partitions with a last known ELR that this broker leads -> offset of the record that made it so."""
        return self._unproven.get(leader, _NO_OFFSETS)

    def waiting_for(self, topic_id: bytes, partition: int) -> tuple[int, ...]:
        """The brokers without which a partition that has no leader gets none: those not here of the last clean ISR,
        or of the last ISR when no clean member is left. Empty when it has a leader, or when all are here."""
        state = self.partition(topic_id, partition)
        if state is None or state.leader != r.NO_LEADER:
            return ()
        return tuple([broker for broker in state.isr or state.last_isr if not self._is_live(broker)])

    def _is_live(self, broker_id: int) -> bool:
        broker = self.brokers.get(broker_id)
        return broker is not None and broker.can_lead

    def replay(self, batches: bytes, delta: MetadataDelta) -> None:
        """Apply whole record batches of the log, in order; what is at or below `offset` is skipped.

        Raises CorruptRecordError on bytes or records that cannot be applied.
        """
        try:
            for position, header in record_batch.iterate(batches):
                if header.last_offset > self.offset:
                    self._replay_batch(batches, position, header, delta)
        except BaseException:
            self.failed = True
            raise

    def _replay_batch(
        self, batches: bytes, position: int, header: record_batch.BatchHeader, delta: MetadataDelta
    ) -> None:
        self.epoch = header.partition_leader_epoch
        if not header.is_control:
            for record in record_batch.read_records(batches, position, header):
                if record.value is None:
                    raise CorruptRecordError(f"the metadata record at offset {record.offset} has no value")
                self.offset = record.offset
                self._apply(r.decode_record(record.value), delta)
        self.offset = header.last_offset
        self.timestamp_ms = header.max_timestamp

    def apply(self, record: r.Record, delta: MetadataDelta) -> None:
        """Apply one record; the caller has set `offset` (and `epoch`) to the record's. Prefer `replay`."""
        try:
            self._apply(record, delta)
        except BaseException:
            self.failed = True
            raise

    def _apply(self, record: r.Record, delta: MetadataDelta) -> None:
        match record:
            case r.PartitionChangeRecord():
                self._change_partition(record, delta)
            case r.PartitionRecord():
                self._add_partition(record, delta)
            case r.TopicRecord():
                self._add_topic(record)
            case r.RemoveTopicRecord():
                self._remove_topic(record, delta)
            case r.ConfigRecord():
                self._set_config(record, delta)
            case r.FeatureLevelRecord():
                if record.name in self.features:
                    delta.outdated.add(("feature", record.name))
                self.features[record.name] = record.feature_level
            case r.ProducerIdsRecord():
                if self.next_producer_id:
                    delta.outdated.add(("producer ids",))
                self.next_producer_id = record.next_producer_id
            case _:
                self._apply_to_broker(record, delta)

    def _apply_to_broker(self, record: r.Record, delta: MetadataDelta) -> None:
        match record:
            case r.RegisterBrokerRecord():
                if record.broker_id in self.brokers:
                    delta.outdated.add(("broker", record.broker_id))
                self.brokers[record.broker_id] = registered(record)
                delta.changed_brokers.add(record.broker_id)
            case r.BrokerRegistrationChangeRecord():
                broker = self._outdated_broker(record.broker_id, record.broker_epoch, delta)
                self.brokers[record.broker_id] = broker._replace(
                    fenced=record.fenced > 0 if record.fenced else broker.fenced,
                    in_controlled_shutdown=broker.in_controlled_shutdown or record.in_controlled_shutdown > 0,
                    log_dirs=tuple(record.log_dirs) or broker.log_dirs,
                )
                delta.changed_brokers.add(record.broker_id)
            case r.FenceBrokerRecord() | r.UnfenceBrokerRecord():
                broker = self._outdated_broker(record.id, record.epoch, delta)
                self.brokers[record.id] = broker._replace(fenced=isinstance(record, r.FenceBrokerRecord))
                delta.changed_brokers.add(record.id)
            case r.UnregisterBrokerRecord():
                self._outdated_broker(record.broker_id, record.broker_epoch, delta)
                del self.brokers[record.broker_id]
                delta.changed_brokers.add(record.broker_id)

    def _outdated_broker(self, broker_id: int, broker_epoch: int, delta: MetadataDelta) -> BrokerState:
        broker = self.brokers.get(broker_id)
        if broker is None or broker.broker_epoch != broker_epoch:
            raise CorruptRecordError(
                f"offset {self.offset}: no registration of broker {broker_id} with epoch {broker_epoch}"
            )
        delta.outdated.add(("broker", broker_id))
        return broker

    def _add_topic(self, record: r.TopicRecord) -> None:
        if record.name in self._topic_names or record.topic_id in self.topics:
            raise CorruptRecordError(f"offset {self.offset}: topic {record.name!r} exists")
        self.topics[record.topic_id] = TopicState(record.name, record.topic_id, generation=self._generation)
        self._topic_names[record.name] = record.topic_id
        if "." in record.name or "_" in record.name:
            self._unified_names[unified(record.name)] = record.name

    def _topic(self, topic_id: bytes) -> TopicState:
        topic = self.topics.get(topic_id)
        if topic is None:
            raise CorruptRecordError(f"offset {self.offset}: no topic of id {topic_id.hex()}")
        return topic

    def _topic_to_change(self, topic_id: bytes) -> TopicState:
        """The topic, as a value of this image's own."""
        topic = self._topic(topic_id)
        if topic.generation != self._generation:
            topic = TopicState(topic.name, topic.topic_id, dict(topic.partitions), self._generation)
            self.topics[topic.topic_id] = topic
        return topic

    def _remove_topic(self, record: r.RemoveTopicRecord, delta: MetadataDelta) -> None:
        topic = self._topic(record.topic_id)
        for partition, state in topic.partitions.items():
            key = (topic.topic_id, partition)
            self._unindex(key, state)
            delta.changed_partitions.discard(key)
            delta.outdated.add(key)
        delta.outdated.add(("topic", topic.topic_id))
        del self.topics[topic.topic_id]
        del self._topic_names[topic.name]
        if self._unified_names.get(unified(topic.name)) == topic.name:
            del self._unified_names[unified(topic.name)]
        configs = self._configs.pop((TOPIC_RESOURCE, topic.name), _NOTHING)
        delta.outdated.update([("config", TOPIC_RESOURCE, topic.name, name) for name in configs])
        delta.changed_topic_configs.discard(topic.name)
        delta.deleted_topics.append(topic)

    def _set_config(self, record: r.ConfigRecord, delta: MetadataDelta) -> None:
        resource = (record.resource_type, record.resource_name)
        configs = dict(self._configs.get(resource, _NOTHING))
        if configs.pop(record.name, None) is not None:
            delta.outdated.add(("config", *resource, record.name))
        if record.value is not None:
            configs[record.name] = record.value
        if configs:
            self._configs[resource] = configs
        else:
            self._configs.pop(resource, None)
        if record.resource_type == TOPIC_RESOURCE:
            delta.changed_topic_configs.add(record.resource_name)

    def _add_partition(self, record: r.PartitionRecord, delta: MetadataDelta) -> None:
        topic = self._topic_to_change(record.topic_id)
        key = (topic.topic_id, record.partition_id)
        replicas = tuple(record.replicas)
        isr = tuple(record.isr)
        state = PartitionState(
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
        before = topic.partitions.get(record.partition_id)
        if before is not None:
            self._unindex(key, before)
            delta.outdated.add(key)
        topic.partitions[record.partition_id] = state
        self._index(key, state)
        delta.changed_partitions.add(key)

    def _change_partition(self, record: r.PartitionChangeRecord, delta: MetadataDelta) -> None:
        topic = self._topic_to_change(record.topic_id)
        key = (topic.topic_id, record.partition_id)
        partitions = topic.partitions
        before = partitions.get(record.partition_id)
        if before is None:
            raise CorruptRecordError(f"offset {self.offset}: no partition {record.partition_id} to change")
        state = changed(before, record)
        if state.replicas != before.replicas:
            self._unindex(key, before)
            self._index(key, state)
        else:
            self._reindex_leader(key, before.leader, state)
        partitions[record.partition_id] = state
        delta.changed_partitions.add(key)
        delta.outdated.add(key)

    def _index(self, key: PartitionKey, state: PartitionState) -> None:
        self.partition_count += 1
        for replica in state.replicas:
            self._of_broker.setdefault(replica, {})[key] = None
        self._reindex_leader(key, state.leader, state)

    def _unindex(self, key: PartitionKey, state: PartitionState) -> None:
        self.partition_count -= 1
        for replica in state.replicas:
            of_broker = self._of_broker[replica]
            del of_broker[key]
            if not of_broker:
                del self._of_broker[replica]
        self._leaderless.pop(key, None)
        self._forget_unproven(key, state.leader)

    def _reindex_leader(self, key: PartitionKey, leader_before: int, state: PartitionState) -> None:
        self._forget_unproven(key, leader_before)
        if state.leader == r.NO_LEADER:
            self._leaderless[key] = None
            return
        self._leaderless.pop(key, None)
        if state.last_known_elr:
            self._unproven.setdefault(state.leader, {})[key] = self.offset

    def _forget_unproven(self, key: PartitionKey, leader: int) -> None:
        unproven = self._unproven.get(leader)
        if unproven is not None:
            unproven.pop(key, None)
            if not unproven:
                del self._unproven[leader]


def unified(topic_name: str) -> str:
    """The name as metrics show it."""
    return topic_name.replace(".", "_")
