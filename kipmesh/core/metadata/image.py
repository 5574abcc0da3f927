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
raises CorruptRecordError and the image must not be used any more (630-15). So does one of a newer kipmesh, with
UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import fencing
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.indexes import PartitionIndexes
from kipmesh.core.metadata.states import (
    BROKER_RESOURCE,
    CLUSTER_METADATA_TOPIC,
    CLUSTER_METADATA_TOPIC_ID,
    LEADER_ROLE_FEATURE,
    TOPIC_RESOURCE,
    BrokerState,
    CapturedImage,
    Departure,
    LeaderExample,
    MetadataDelta,
    PartitionKey,
    PartitionState,
    RecordKey,
    TopicState,
    added,
    changed,
    is_lost,
    registered,
    unified,
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

EXAMPLES_MAX = 3
STEP_PARTITIONS = 2000
"""Of a broker, that change in one step: about 10 ms in an image of a million."""
STEP_RECORDS = 1000
"""Applied in one step, and more while they are partitions: nobody sees a part of a topic that is new."""

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_PARTITIONS: Mapping[PartitionKey, None] = MappingProxyType({})
_NO_OFFSETS: Mapping[PartitionKey, int] = MappingProxyType({})


class MetadataImage:
    """All metadata up to `offset`."""

    __slots__ = (
        "_at",
        "_configs",
        "_effect",
        "_generation",
        "_indexes",
        "_is_within_batch",
        "_topic_names",
        "_unified_names",
        "brokers",
        "epoch",
        "failed",
        "features",
        "next_producer_id",
        "offset",
        "timestamp_ms",
        "topics",
    )

    def __init__(self, offset: int = -1, epoch: int = 0, timestamp_ms: int = -1) -> None:
        """Empty: before the log's first record, or at the end of a snapshot whose records are to be applied."""
        self.offset = offset
        """Offset of the last applied record, -1 for none; within a batch still that of the batch before."""
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
        self._topic_names: dict[str, bytes] = {}
        self._unified_names: dict[str, str] = {}
        # The inner mappings are replaced, never changed.
        self._configs: dict[tuple[int, str], Mapping[str, str]] = {}
        self._generation = 0
        # What the record that was applied last implies, before that is done.
        self._effect: Iterator[None] | None = None
        self._is_within_batch = False
        self._at = offset  # of the record that is applied
        self._indexes = PartitionIndexes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataImage):
            return NotImplemented
        compared = [name for name in self.__slots__ if name != "_generation"]
        return all(getattr(self, name) == getattr(other, name) for name in compared)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_within_batch(self) -> bool:
        """Whether `replay_steps` stopped between the records of a batch: no state to capture, nor for decisions."""
        return self._is_within_batch

    def capture(self) -> CapturedImage:
        """This moment, to be read slice by slice while records are applied; RuntimeError after a failure (630-15).

        The cost is a copy of the outer mappings: some milliseconds for a million topics.
        """
        if self.failed:
            raise RuntimeError("an image that failed to apply a record is no state to keep")
        if self._is_within_batch:
            raise RuntimeError("within a batch the image is no state of the cluster")
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

    def broker_config(self, name: str) -> Mapping[str, str]:
        """The dynamic configuration of the broker whose id is `name`, or of all brokers for an empty one."""
        return self._configs.get((BROKER_RESOURCE, name), _NOTHING)

    def topic_config(self, name: str) -> Mapping[str, str]:
        """The topic's own configuration (without defaults), dotted keys."""
        return self._configs.get((TOPIC_RESOURCE, name), _NOTHING)

    def partitions_of_broker(self, broker_id: int) -> Collection[PartitionKey]:
        """(topic id, partition) of every partition that the broker has a replica of; a view, not a copy."""
        return self._indexes.of_broker.get(broker_id, _NO_PARTITIONS).keys()

    @property
    def partition_count(self) -> int:
        """Of all topics."""
        return self._indexes.count

    @property
    def leaderless(self) -> Collection[PartitionKey]:
        """The partitions without a leader; a view, not a copy."""
        return self._indexes.leaderless.keys()

    @property
    def imbalanced(self) -> Mapping[int, Collection[PartitionKey]]:
        """Preferred leader -> the partitions that it does not lead; a view, not a copy."""
        return self._indexes.imbalanced

    @property
    def reassigning(self) -> Collection[PartitionKey]:
        """The partitions whose replicas are being moved; a view, not a copy."""
        return self._indexes.reassigning.keys()

    @property
    def fencing_level(self) -> int:
        """What records about brokers mean for their partitions: see `fencing`."""
        return self.features.get(fencing.FENCING_FEATURE, 0)

    def unproven(self, leader: int) -> Mapping[PartitionKey, int]:
        """Partitions with a last known ELR that this broker leads -> offset of the record that made it so."""
        return self._indexes.unproven.get(leader, _NO_OFFSETS)

    def waiting_for(self, topic_id: bytes, partition: int) -> tuple[int, ...]:
        """The brokers without which a partition that has no leader gets none: those not here of the last clean ISR,
        or of the last ISR when no clean member is left. Empty when it has a leader, or when all are here."""
        state = self.partition(topic_id, partition)
        if state is None or state.leader != r.NO_LEADER:
            return ()
        members = state.isr or state.last_isr
        return tuple([member for member in members if not self._is_live(member) or is_lost(state, member)])

    def _is_live(self, broker_id: int) -> bool:
        broker = self.brokers.get(broker_id)
        return broker is not None and broker.can_lead

    def replay(self, batches: bytes, delta: MetadataDelta) -> None:
        """Apply whole record batches of the log, in order; what is at or below `offset` is skipped.

        Raises CorruptRecordError on bytes or records that cannot be applied.
        """
        for _ in self.replay_steps(batches, delta):
            pass

    def replay_steps(self, batches: bytes, delta: MetadataDelta) -> Iterator[None]:
        """The same, in steps of about 10 ms: an event about a broker may change tens of thousands of partitions.

        Between two steps the image may be within a batch: it can be read, but it is no state to capture, nor for
        decisions. Whoever begins must come to the end, or give the image up.
        """
        try:
            for position, header in record_batch.iterate(batches):
                if header.last_offset > self.offset:
                    yield from self._replay_batch(batches, position, header, delta)
        except BaseException:
            self.failed = True
            raise

    def _replay_batch(
        self, batches: bytes, position: int, header: record_batch.BatchHeader, delta: MetadataDelta
    ) -> Iterator[None]:
        self.epoch = header.partition_leader_epoch
        if not header.is_control:
            self._is_within_batch, applied = True, 0
            for record in record_batch.read_records(batches, position, header):
                if record.value is None:
                    raise CorruptRecordError(f"the metadata record at offset {record.offset} has no value")
                decoded = r.decode_record(record.value)
                if applied >= STEP_RECORDS and not isinstance(decoded, r.PartitionRecord):
                    applied = 0
                    yield
                self._at, applied = record.offset, applied + 1
                self._apply(decoded, delta)
                if self._effect is not None:
                    yield from self._take_effect()
            self._is_within_batch = False
        self.offset = self._at = header.last_offset
        self.timestamp_ms = header.max_timestamp

    def apply(self, record: r.Record, delta: MetadataDelta) -> None:
        """Apply one record; the caller has set `offset` (and `epoch`) to the record's. Prefer `replay`."""
        self._at = self.offset
        try:
            self._apply(record, delta)
            for _ in self._take_effect():
                pass
        except BaseException:
            self.failed = True
            raise

    def _take_effect(self) -> Iterator[None]:
        """The steps of what the last record implies."""
        effect, self._effect = self._effect, None
        return effect or iter(())

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
                fencing.check_level(record.name, record.feature_level)
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
                self._change_partitions_of(record, delta)
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
                f"offset {self._at}: no registration of broker {broker_id} with epoch {broker_epoch}"
            )
        delta.outdated.add(("broker", broker_id))
        return broker

    def _change_partitions_of(self, record: r.BrokerRegistrationChangeRecord, delta: MetadataDelta) -> None:
        """What follows from the record for the broker's partitions (630-16)."""
        level = self.fencing_level
        if fencing.is_departure(level, record):
            self._effect = self._depart(record.broker_id, fencing.successors(self.brokers, record), delta)
        elif fencing.is_proof(level, record):
            for key in list(self.unproven(record.broker_id)):
                topic = self._topic_to_change(key[0])
                state = topic.partitions[key[1]] = fencing.proved(topic.partitions[key[1]])
                self._indexes.leader_changed(key, state.leader, state, self._at)
                delta.changed_partitions.add(key)
                delta.outdated.add(key)

    def _depart(self, broker_id: int, can_lead: Collection[int], delta: MetadataDelta) -> Iterator[None]:
        """The broker leaves its partitions: O(them)."""
        keys = iter(self._indexes.of_broker.get(broker_id, _NO_PARTITIONS))
        total = Departure(broker_id, 0, 0, 0, ())
        while some := list(islice(keys, STEP_PARTITIONS)):
            total = self._depart_some(some, total, can_lead, delta)
            yield
        delta.departures.append(total)

    def _depart_some(
        self, keys: Sequence[PartitionKey], so_far: Departure, can_lead: Collection[int], delta: MetadataDelta
    ) -> Departure:
        """One step of it: thousands, so without any call that can be saved."""
        broker_id, generation, offset = so_far.broker_id, self._generation, self._at
        leaderless, unproven = self._indexes.leaderless, self._indexes.unproven
        balance = self._indexes.balance
        own = unproven.pop(broker_id, {})
        topics = [self.topics[topic_id] for topic_id, _ in keys]
        states = [topic.partitions[key[1]] for topic, key in zip(topics, keys, strict=True)]
        all_after = fencing.departures(states, broker_id, can_lead)
        examples, changes = [*so_far.examples], []
        moved = without_leader = 0
        for key, topic, before, after in zip(keys, topics, states, all_after, strict=True):
            if after is None:
                continue
            changes.append(key)
            own_topic = topic if topic.generation == generation else self._topic_to_change(key[0])
            own_topic.partitions[key[1]] = after
            leader, leader_before = after.leader, before.leader
            if leader != leader_before:
                moved += 1
                balance(key, after.replicas[0], leader)
                if len(examples) < EXAMPLES_MAX:
                    examples.append(LeaderExample(key, leader_before, leader))
                own.pop(key, None)
                if leader == r.NO_LEADER:
                    without_leader += 1
                    leaderless[key] = None
                elif leader_before == r.NO_LEADER:
                    del leaderless[key]
            if leader != r.NO_LEADER and after.last_known_elr:
                of_leader = unproven.get(leader)
                if of_leader is None:
                    of_leader = unproven[leader] = {}
                of_leader[key] = offset
        if own:
            unproven[broker_id] = own
        delta.changed_partitions.update(changes)
        delta.outdated.update(changes)
        partitions, elected, offline = so_far[1:4]
        elected, offline = elected + moved - without_leader, offline + without_leader
        return Departure(broker_id, partitions + len(changes), elected, offline, tuple(examples))

    def _add_topic(self, record: r.TopicRecord) -> None:
        if record.name in self._topic_names or record.topic_id in self.topics:
            raise CorruptRecordError(f"offset {self._at}: topic {record.name!r} exists")
        self.topics[record.topic_id] = TopicState(record.name, record.topic_id, generation=self._generation)
        self._topic_names[record.name] = record.topic_id
        if "." in record.name or "_" in record.name:
            self._unified_names[unified(record.name)] = record.name

    def _topic(self, topic_id: bytes) -> TopicState:
        topic = self.topics.get(topic_id)
        if topic is None:
            raise CorruptRecordError(f"offset {self._at}: no topic of id {topic_id.hex()}")
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
            self._indexes.remove(key, state)
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
        state = added(record)
        before = topic.partitions.get(record.partition_id)
        if before is not None:
            self._indexes.remove(key, before)
            delta.outdated.add(key)
        topic.partitions[record.partition_id] = state
        self._indexes.add(key, state, self._at)
        delta.changed_partitions.add(key)

    def _change_partition(self, record: r.PartitionChangeRecord, delta: MetadataDelta) -> None:
        topic = self._topic_to_change(record.topic_id)
        key = (topic.topic_id, record.partition_id)
        partitions = topic.partitions
        before = partitions.get(record.partition_id)
        if before is None:
            raise CorruptRecordError(f"offset {self._at}: no partition {record.partition_id} to change")
        state = changed(before, record)
        if state.replicas != before.replicas:
            self._indexes.remove(key, before)
            self._indexes.add(key, state, self._at)
        else:
            self._indexes.reassignment_changed(key, state)
            self._indexes.leader_changed(key, before.leader, state, self._at)
        partitions[record.partition_id] = state
        delta.changed_partitions.add(key)
        delta.outdated.add(key)
