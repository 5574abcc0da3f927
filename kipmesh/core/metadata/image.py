"""The cluster's metadata as the records of `__cluster_metadata` make it, and what changed while they were applied.

One task owns an image, applies records to it in the log's order and may read it at any time; nobody else writes it.
Values inside (BrokerState, PartitionState) are immutable and replaced whole, so that a reader may keep them. So is all
that `capture` gives: topics are copied when they first change after it (630-03).

`difference` compares two images: the delta for readers of the first that receive the second, from a snapshot.

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
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import fencing
from kipmesh.core.metadata import records as r
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
from kipmesh.core.scram import ScramCredential

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
    "common",
    "unified",
]

STEP_RECORDS = 1000
"""Applied in one step, and more while they are partitions: nobody sees a part of a topic that is new."""

STEP_PARTITIONS = 2000
"""Of a broker, that change in one step: about 10 ms in an image of a million."""
TOPICS_BETWEEN_STEPS = 100
"""Compared in one step of `difference_steps`."""
EXAMPLES_MAX = 3

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_CREDENTIALS: Mapping[int, ScramCredential] = MappingProxyType({})
_NO_PARTITIONS: Mapping[PartitionKey, None] = MappingProxyType({})
_NO_OFFSETS: Mapping[PartitionKey, int] = MappingProxyType({})


def common(some: Collection[PartitionKey], others: Collection[PartitionKey]) -> list[PartitionKey]:
    """The partitions that are in both, sorted; looks at each of the fewer. Both must know quickly what is in them."""
    fewer, more = (some, others) if len(some) < len(others) else (others, some)
    return sorted([key for key in fewer if key in more])


@dataclass(slots=True)
class PartitionIndexes:
    """The partitions of each broker, those without a leader or the preferred one, and those of unproven leaders.

    All of it follows from the partitions. Dicts serve as ordered sets: equal logs must give equal orders, and so equal
    records of decisions.
    """

    of_broker: dict[int, dict[PartitionKey, None]] = field(default_factory=dict)
    """Broker -> what it has a replica of."""
    leaderless: dict[PartitionKey, None] = field(default_factory=dict)
    unproven: dict[int, dict[PartitionKey, int]] = field(default_factory=dict)
    """Leader -> what it leads that has a last known ELR -> offset of the record that made it so."""
    imbalanced: dict[int, dict[PartitionKey, None]] = field(default_factory=dict)
    """Preferred leader -> what somebody else leads, or nobody."""
    reassigning: dict[PartitionKey, None] = field(default_factory=dict)
    """Partitions whose replicas are being moved."""
    count: int = 0
    """Of all partitions."""

    def add(self, key: PartitionKey, state: PartitionState, offset: int) -> None:
        """A partition is new, or has other replicas, by the record at `offset`."""
        self.count += 1
        for replica in state.replicas:
            self.of_broker.setdefault(replica, {})[key] = None
        self.reassignment_changed(key, state)
        self.leader_changed(key, state.leader, state, offset)

    def remove(self, key: PartitionKey, state: PartitionState) -> None:
        """A partition is gone."""
        self.count -= 1
        for replica in state.replicas:
            of_broker = self.of_broker[replica]
            del of_broker[key]
            if not of_broker:
                del self.of_broker[replica]
        self.leaderless.pop(key, None)
        self.reassigning.pop(key, None)
        self.balance(key, state.replicas[0], state.replicas[0])
        self._forget_unproven(key, state.leader)

    def reassignment_changed(self, key: PartitionKey, state: PartitionState) -> None:
        """The partition has other replicas that come or go."""
        if state.adding_replicas or state.removing_replicas:
            self.reassigning[key] = None
        else:
            self.reassigning.pop(key, None)

    def leader_changed(self, key: PartitionKey, before: int, state: PartitionState, offset: int) -> None:
        """The partition was led by `before` and is `state` since the record at `offset`."""
        self._forget_unproven(key, before)
        self.balance(key, state.replicas[0], state.leader)
        if state.leader == r.NO_LEADER:
            self.leaderless[key] = None
            return
        self.leaderless.pop(key, None)
        if state.last_known_elr:
            self.unproven.setdefault(state.leader, {})[key] = offset

    def balance(self, key: PartitionKey, preferred: int, leader: int) -> None:
        """The partition, which `preferred` should lead, is led by `leader`."""
        waiting = self.imbalanced.get(preferred)
        if leader != preferred:
            if waiting is None:
                waiting = self.imbalanced[preferred] = {}
            waiting[key] = None
        elif waiting is not None:
            waiting.pop(key, None)
            if not waiting:
                del self.imbalanced[preferred]

    def _forget_unproven(self, key: PartitionKey, leader: int) -> None:
        unproven = self.unproven.get(leader)
        if unproven is not None:
            unproven.pop(key, None)
            if not unproven:
                del self.unproven[leader]


class MetadataImage:
    """All metadata up to `offset`."""

    __slots__ = (
        "_at",
        "_configs",
        "_generation",
        "_indexes",
        "brokers",
        "credentials",
        "epoch",
        "failed",
        "features",
        "is_within_batch",
        "next_producer_id",
        "offset",
        "timestamp_ms",
        "topic_names",
        "topics",
        "unified_names",
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
        self.is_within_batch = False
        """Whether `replay_steps` stopped between the records of a batch: no state to capture, nor for decisions."""
        self.topics: dict[bytes, TopicState] = {}
        """By topic id."""
        self.topic_names: dict[str, bytes] = {}
        """Topic name -> topic id."""
        self.unified_names: dict[str, str] = {}
        """`unified` name -> topic name, for names with a `.` or `_`: two of one would be one in metrics' names."""
        self.brokers: dict[int, BrokerState] = {}
        self.features: dict[str, int] = {}
        self.credentials: dict[str, Mapping[int, ScramCredential]] = {}
        """User -> Kafka's number of the mechanism -> credential. The inner mappings are replaced, never changed."""
        self.next_producer_id = 0
        # The inner mappings are replaced, never changed.
        self._configs: dict[tuple[int, str], Mapping[str, str]] = {}
        self._at = offset  # of the record that is applied
        self._generation = 0
        self._indexes = PartitionIndexes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataImage):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__ if name != "_generation")

    __hash__ = None  # type: ignore[assignment]

    def capture(self) -> CapturedImage:
        """This moment, to be read slice by slice while records are applied; RuntimeError after a failure (630-15).

        The cost is a copy of the outer mappings: some milliseconds for a million topics.
        """
        if self.failed:
            raise RuntimeError("an image that failed to apply a record is no state to keep")
        if self.is_within_batch:
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
            dict(self.credentials),
        )

    def topic_by_name(self, name: str) -> TopicState | None:
        """The topic of that name."""
        topic_id = self.topic_names.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def partition(self, topic_id: bytes, partition: int) -> PartitionState | None:
        """A partition's state."""
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.partitions.get(partition)

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
    def imbalance_count(self) -> int:
        """How many partitions their preferred leader does not lead; those without a leader count."""
        return sum(len(keys) for keys in list(self._indexes.imbalanced.values()))

    @property
    def reassigning(self) -> Collection[PartitionKey]:
        """The partitions whose replicas are being moved; a view, not a copy."""
        return self._indexes.reassigning.keys()

    def unproven(self, leader: int) -> Mapping[PartitionKey, int]:
        """Partitions with a last known ELR that this broker leads -> offset of the record that made it so."""
        return self._indexes.unproven.get(leader, _NO_OFFSETS)

    def broker_config(self, name: str) -> Mapping[str, str]:
        """The dynamic configuration of the broker whose id is `name`, or of all brokers for an empty one."""
        return self._configs.get((BROKER_RESOURCE, name), _NOTHING)

    def topic_config(self, name: str) -> Mapping[str, str]:
        """The topic's own configuration (without defaults), dotted keys."""
        return self._configs.get((TOPIC_RESOURCE, name), _NOTHING)

    def credentials_of(self, user: str) -> Mapping[int, ScramCredential]:
        """The user's SCRAM credentials by Kafka's numbers of the mechanisms; empty for one that there is not."""
        return self.credentials.get(user, _NO_CREDENTIALS)

    @property
    def fencing_level(self) -> int:
        """What records about brokers mean for their partitions: see `fencing`."""
        return self.features.get(fencing.FENCING_FEATURE, 0)

    def waiting_for(self, topic_id: bytes, partition: int) -> tuple[int, ...]:
        """The brokers without which a partition that has no leader gets none: those not here of the last clean ISR,
        or of the last ISR when no clean member is left. Empty when it has a leader, or when all are here."""
        state = self.partition(topic_id, partition)
        if state is None or state.leader != r.NO_LEADER:
            return ()
        members = state.isr or state.last_isr
        return tuple([member for member in members if not self.can_lead(member) or is_lost(state, member)])

    def can_lead(self, broker_id: int) -> bool:
        """Whether the broker may be elected: registered, unfenced and not shutting down."""
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
            self.is_within_batch, applied = True, 0
            for record in record_batch.read_records(batches, position, header):
                if record.value is None:
                    raise CorruptRecordError(f"the metadata record at offset {record.offset} has no value")
                decoded = r.decode_record(record.value)
                if applied >= STEP_RECORDS and not isinstance(decoded, r.PartitionRecord):
                    applied = 0
                    yield
                self._at, applied = record.offset, applied + 1
                implied = self._apply(decoded, delta)
                if implied is not None:
                    yield from implied
            self.is_within_batch = False
        self.offset = self._at = header.last_offset
        self.timestamp_ms = header.max_timestamp

    def apply(self, record: r.Record, delta: MetadataDelta) -> None:
        """Apply one record; the caller has set `offset` (and `epoch`) to the record's. Prefer `replay`."""
        self._at = self.offset
        try:
            for _ in self._apply(record, delta) or ():
                pass
        except BaseException:
            self.failed = True
            raise

    def _apply(self, record: r.Record, delta: MetadataDelta) -> Iterator[None] | None:
        """Returns the steps that apply what the record implies for other partitions, None for nothing."""
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
            case r.UserScramCredentialRecord() | r.RemoveUserScramCredentialRecord():
                self._set_credential(record, delta)
            case r.FeatureLevelRecord():
                fencing.check_level(record.name, record.feature_level)
                if record.name in self.features:
                    delta.outdated.add(("feature", record.name))
                self.features[record.name] = record.feature_level
            case r.ProducerIdsRecord():
                if self.next_producer_id:
                    delta.outdated.add(("producer ids",))
                self.next_producer_id = record.next_producer_id
            case r.BrokerRegistrationChangeRecord():
                return self._change_broker(record, delta)
            case r.RegisterBrokerRecord():
                if record.broker_id in self.brokers:
                    delta.outdated.add(("broker", record.broker_id))
                self.brokers[record.broker_id] = registered(record)
                delta.changed_brokers.add(record.broker_id)
            case r.FenceBrokerRecord() | r.UnfenceBrokerRecord():
                broker = self._broker_to_change(record.id, record.epoch, delta)
                self.brokers[record.id] = broker._replace(fenced=isinstance(record, r.FenceBrokerRecord))
            case r.UnregisterBrokerRecord():
                self._broker_to_change(record.broker_id, record.broker_epoch, delta)
                del self.brokers[record.broker_id]
        return None

    # --- brokers

    def _broker_to_change(self, broker_id: int, broker_epoch: int, delta: MetadataDelta) -> BrokerState:
        broker = self.brokers.get(broker_id)
        if broker is None or broker.broker_epoch != broker_epoch:
            raise CorruptRecordError(
                f"offset {self._at}: no registration of broker {broker_id} with epoch {broker_epoch}"
            )
        delta.outdated.add(("broker", broker_id))
        delta.changed_brokers.add(broker_id)
        return broker

    def _change_broker(self, record: r.BrokerRegistrationChangeRecord, delta: MetadataDelta) -> Iterator[None] | None:
        """Apply the record, and return the steps of what it implies for the broker's partitions (630-16)."""
        broker = self._broker_to_change(record.broker_id, record.broker_epoch, delta)
        self.brokers[record.broker_id] = broker._replace(
            fenced=record.fenced > 0 if record.fenced else broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown or record.in_controlled_shutdown > 0,
            log_dirs=tuple(record.log_dirs) or broker.log_dirs,
        )
        if fencing.is_departure(self.fencing_level, record):
            return self._depart(record.broker_id, fencing.successors(self.brokers, record), delta)
        if fencing.is_proof(self.fencing_level, record):
            self._prove(record.broker_id, delta)
        return None

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

    def _prove(self, broker_id: int, delta: MetadataDelta) -> None:
        """The broker was alive after the last change of every partition that it leads."""
        for key in list(self.unproven(broker_id)):
            topic = self._topic_to_change(key[0])
            state = topic.partitions[key[1]] = fencing.proved(topic.partitions[key[1]])
            self._indexes.leader_changed(key, state.leader, state, self._at)
            delta.changed_partitions.add(key)
            delta.outdated.add(key)

    # --- topics and partitions

    def _add_topic(self, record: r.TopicRecord) -> None:
        if record.name in self.topic_names or record.topic_id in self.topics:
            raise CorruptRecordError(f"offset {self._at}: topic {record.name!r} exists")
        self.topics[record.topic_id] = TopicState(record.name, record.topic_id, generation=self._generation)
        self.topic_names[record.name] = record.topic_id
        if "." in record.name or "_" in record.name:
            self.unified_names[unified(record.name)] = record.name

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
        del self.topic_names[topic.name]
        if self.unified_names.get(unified(topic.name)) == topic.name:
            del self.unified_names[unified(topic.name)]
        delta.deleted_topics.append(topic)
        configs = self._configs.pop((TOPIC_RESOURCE, topic.name), _NOTHING)
        delta.outdated.update([("config", TOPIC_RESOURCE, topic.name, name) for name in configs])
        delta.changed_topic_configs.discard(topic.name)

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

    # --- configurations and credentials

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

    def _set_credential(
        self, record: r.UserScramCredentialRecord | r.RemoveUserScramCredentialRecord, delta: MetadataDelta
    ) -> None:
        """A credential is new, another one, or gone. One of a mechanism that is not known here is kept as it is."""
        own = dict(self.credentials_of(record.name))
        if own.pop(record.mechanism, None) is not None:
            delta.outdated.add(("credential", record.name, record.mechanism))
        elif isinstance(record, r.RemoveUserScramCredentialRecord):
            raise CorruptRecordError(
                f"offset {self._at}: user {record.name!r} has no credential of mechanism {record.mechanism} to remove"
            )
        if isinstance(record, r.UserScramCredentialRecord):
            own[record.mechanism] = ScramCredential(
                record.salt, record.stored_key, record.server_key, record.iterations
            )
        if own:
            self.credentials[record.name] = own
        else:
            del self.credentials[record.name]


def difference(before: MetadataImage, after: MetadataImage) -> MetadataDelta:
    """The delta from one to the other. A topic that was deleted and made again is in it as both."""
    delta = MetadataDelta()
    for _ in difference_steps(before, after, delta):
        pass
    return delta


def difference_steps(before: MetadataImage, after: MetadataImage, delta: MetadataDelta) -> Iterator[None]:
    """The same into an empty delta, some topics at a time; neither image may change meanwhile.

    Invariant: a reader that has published the first image and handles this delta knows all of the second. `outdated`
    is empty: the count for the next snapshot starts again. SCRAM credentials are in no delta: they are looked up in the
    image when a client authenticates.
    """
    for index, (topic_id, topic) in enumerate(before.topics.items()):
        if topic_id not in after.topics:
            delta.deleted_topics.append(topic)
        if index % TOPICS_BETWEEN_STEPS == 0:
            yield
    for index, topic in enumerate(after.topics.values()):
        _compare(before, after, topic, delta)
        if index % TOPICS_BETWEEN_STEPS == 0:
            yield
    for broker_id in {**before.brokers, **after.brokers}:
        if before.brokers.get(broker_id) != after.brokers.get(broker_id):
            delta.changed_brokers.add(broker_id)


def _compare(before: MetadataImage, after: MetadataImage, topic: TopicState, delta: MetadataDelta) -> None:
    known = before.topics.get(topic.topic_id)
    known_partitions = {} if known is None else known.partitions
    for partition, state in topic.partitions.items():
        if known_partitions.get(partition) != state:
            delta.changed_partitions.add((topic.topic_id, partition))
    if before.topic_config(topic.name) != after.topic_config(topic.name):
        delta.changed_topic_configs.add(topic.name)
