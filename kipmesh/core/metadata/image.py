"""The cluster's metadata image, built from the records of `__cluster_metadata`, with the delta of each update.

One task owns an image and applies records in log order. `replay_steps` yields in between; other tasks may then read the
image. Values inside (BrokerState, PartitionState) are immutable, so readers may keep them. `capture` returns an
immutable view (630-03); topics are copied on their first change after it. `difference` computes the delta between two
images.

Invariants: the leader is in the ISR; the ISR is a subset of the replicas; a partition without a leader has a member in
its last ISR; leader and partition epochs never decrease; equal records give equal images. The indexes follow from the
partitions. A record that contradicts the image raises CorruptRecordError, a newer fencing level
KafkaError(UNSUPPORTED_VERSION); the image is then failed (630-15).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import fencing
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.states import (
    BROKER_RESOURCE,
    FencingEffect,
    LeaderExample,
    apply_change,
    broker_state,
    is_lost,
    metric_name,
    partition_state,
)
from kipmesh.core.metadata.states import CLUSTER_METADATA_TOPIC as CLUSTER_METADATA_TOPIC
from kipmesh.core.metadata.states import CLUSTER_METADATA_TOPIC_ID as CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.metadata.states import TOPIC_RESOURCE as TOPIC_RESOURCE
from kipmesh.core.metadata.states import BrokerState as BrokerState
from kipmesh.core.metadata.states import CapturedImage as CapturedImage
from kipmesh.core.metadata.states import MetadataDelta as MetadataDelta
from kipmesh.core.metadata.states import PartitionKey as PartitionKey
from kipmesh.core.metadata.states import PartitionState as PartitionState
from kipmesh.core.metadata.states import TopicState as TopicState
from kipmesh.core.scram import ScramCredential

_V = TypeVar("_V")

STEP_RECORDS = 1000
"""Records applied in one step. A step does not end between the partitions of a new topic."""

STEP_PARTITIONS = 2000
"""Partitions of a fenced broker that change in one step: about 10 ms in an image of a million partitions."""
TOPICS_BETWEEN_STEPS = 100
"""Topics compared in one step of `difference_steps`."""
EXAMPLES_MAX = 3
"""Partitions named in one `FencingEffect`."""

_NO_CONFIG: Mapping[str, str] = MappingProxyType({})
_NO_CREDENTIALS: Mapping[int, ScramCredential] = MappingProxyType({})
_NO_PARTITIONS: Mapping[PartitionKey, None] = MappingProxyType({})
_NO_OFFSETS: Mapping[PartitionKey, int] = MappingProxyType({})


def common(some: Collection[PartitionKey], others: Collection[PartitionKey]) -> list[PartitionKey]:
    """Return the sorted partitions that are in both collections. Costs one lookup per element of the smaller
    collection."""
    fewer, more = (some, others) if len(some) < len(others) else (others, some)
    return sorted([key for key in fewer if key in more])


def _discard(index: dict[int, dict[PartitionKey, _V]], broker_id: int, key: PartitionKey) -> None:
    """Remove the key from the broker's entry of an index, if present. Drop the entry when it becomes empty."""
    keys = index.get(broker_id)
    if keys is not None:
        keys.pop(key, None)
        if not keys:
            del index[broker_id]


@dataclass(slots=True)
class PartitionIndexes:
    """Indexes over the partitions of all topics. Dicts serve as ordered sets, so that equal logs give equal orders and
    equal decisions."""

    of_broker: dict[int, dict[PartitionKey, None]] = field(default_factory=dict)
    """Broker -> partitions with a replica on it."""
    leaderless: dict[PartitionKey, None] = field(default_factory=dict)
    unproven: dict[int, dict[PartitionKey, int]] = field(default_factory=dict)
    """Leader -> partitions that it leads and that have a last known ELR -> offset of the record that set this state."""
    imbalanced: dict[int, dict[PartitionKey, None]] = field(default_factory=dict)
    """Preferred leader -> partitions that it does not lead."""
    reassigning: dict[PartitionKey, None] = field(default_factory=dict)
    """Partitions with a running reassignment."""
    count: int = 0
    """Number of all partitions."""

    def add(self, key: PartitionKey, state: PartitionState, offset: int) -> None:
        """Add a partition whose state was set by the record at `offset`."""
        self.count += 1
        for replica in state.replicas:
            self.of_broker.setdefault(replica, {})[key] = None
        self.reassignment_changed(key, state)
        self.leader_changed(key, state.leader, state, offset)

    def remove(self, key: PartitionKey, state: PartitionState) -> None:
        """Remove a partition, whose last state is `state`, from all indexes."""
        self.count -= 1
        for replica in state.replicas:
            _discard(self.of_broker, replica, key)
        self.leaderless.pop(key, None)
        self.reassigning.pop(key, None)
        _discard(self.imbalanced, state.replicas[0], key)
        _discard(self.unproven, state.leader, key)

    def reassignment_changed(self, key: PartitionKey, state: PartitionState) -> None:
        """Update `reassigning` for the partition's new state."""
        if state.adding_replicas or state.removing_replicas:
            self.reassigning[key] = None
        else:
            self.reassigning.pop(key, None)

    def leader_changed(self, key: PartitionKey, before: int, state: PartitionState, offset: int) -> None:
        """Update the indexes for a partition whose leader was `before` and whose new state was set by the record at
        `offset`."""
        _discard(self.unproven, before, key)
        self.balance(key, state.replicas[0], state.leader)
        if state.leader == r.NO_LEADER:
            self.leaderless[key] = None
            return
        self.leaderless.pop(key, None)
        if state.last_known_elr:
            self.unproven.setdefault(state.leader, {})[key] = offset

    def balance(self, key: PartitionKey, preferred: int, leader: int) -> None:
        """Update `imbalanced` for a partition with this preferred leader and this leader."""
        if leader == preferred:
            _discard(self.imbalanced, preferred, key)
        else:
            self.imbalanced.setdefault(preferred, {})[key] = None


@dataclass(slots=True, repr=False)
class MetadataImage:
    """All metadata up to and including `offset`. A new image is empty.

    To apply the records of a snapshot, pass its last offset, epoch and timestamp; otherwise pass no arguments.
    """

    offset: int = -1
    """Offset of the last applied record, or -1. Within a batch: the last offset of the batch before."""
    epoch: int = 0
    """Quorum epoch of the last applied record."""
    timestamp_ms: int = -1
    """Append time of the last replayed batch; written to the snapshot header."""
    failed: bool = field(default=False, init=False)
    """Whether applying a record failed. The image is then inconsistent."""
    is_within_batch: bool = field(default=False, init=False)
    """Whether `replay_steps` yielded within a batch. The image can be read, but not captured or used for decisions."""
    topics: dict[bytes, TopicState] = field(default_factory=dict, init=False)
    """Topic id -> topic."""
    topic_names: dict[str, bytes] = field(default_factory=dict, init=False)
    """Topic name -> topic id."""
    metric_names: dict[str, str] = field(default_factory=dict, init=False)
    """Metric name -> topic name, for names with `.` or `_`. Two topics must not share a metric name."""
    brokers: dict[int, BrokerState] = field(default_factory=dict, init=False)
    features: dict[str, int] = field(default_factory=dict, init=False)
    credentials: dict[str, Mapping[int, ScramCredential]] = field(default_factory=dict, init=False)
    """User -> Kafka's mechanism number -> credential. The inner mappings are replaced, never changed."""
    next_producer_id: int = field(default=0, init=False)
    # The inner mappings are replaced, never changed.
    _configs: dict[tuple[int, str], Mapping[str, str]] = field(default_factory=dict, init=False)
    _record_offset: int = field(default=-1, init=False, compare=False)  # offset of the record being applied
    _generation: int = field(default=0, init=False, compare=False)
    _indexes: PartitionIndexes = field(default_factory=PartitionIndexes, init=False)

    def capture(self) -> CapturedImage:
        """Return an immutable view of the image. Copies the outer mappings, which takes a few ms for a million topics.

        Raises RuntimeError if the image has failed (630-15) or is within a batch.
        """
        if self.failed:
            raise RuntimeError("cannot capture an image that failed to apply a record")
        if self.is_within_batch:
            raise RuntimeError("cannot capture an image within a batch")
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
        """Return the topic with this name, or None if it does not exist."""
        topic_id = self.topic_names.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def partition(self, topic_id: bytes, partition: int) -> PartitionState | None:
        """Return the partition's state, or None if the topic or partition does not exist."""
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.partitions.get(partition)

    def partitions_of_broker(self, broker_id: int) -> Collection[PartitionKey]:
        """Return the (topic id, partition) of every replica on the broker, empty for an unknown broker; a view, not a
        copy."""
        return self._indexes.of_broker.get(broker_id, _NO_PARTITIONS).keys()

    @property
    def partition_count(self) -> int:
        """Number of partitions of all topics."""
        return self._indexes.count

    @property
    def leaderless(self) -> Collection[PartitionKey]:
        """Partitions without a leader; a view, not a copy."""
        return self._indexes.leaderless.keys()

    @property
    def imbalanced(self) -> Mapping[int, Collection[PartitionKey]]:
        """Preferred leader -> partitions that it does not lead; a view, not a copy."""
        return self._indexes.imbalanced

    @property
    def imbalance_count(self) -> int:
        """Number of partitions that their preferred leader does not lead, including those without a leader."""
        return sum(len(keys) for keys in list(self._indexes.imbalanced.values()))

    @property
    def reassigning(self) -> Collection[PartitionKey]:
        """Partitions with a running reassignment; a view, not a copy."""
        return self._indexes.reassigning.keys()

    def unproven(self, leader: int) -> Mapping[PartitionKey, int]:
        """Return partition -> offset of the record that set this state, for partitions with a last known ELR that this
        broker leads."""
        return self._indexes.unproven.get(leader, _NO_OFFSETS)

    def broker_config(self, name: str) -> Mapping[str, str]:
        """Return the broker's dynamic configuration, key -> value. `name` is the broker id, or empty for the
        cluster-wide default."""
        return self._configs.get((BROKER_RESOURCE, name), _NO_CONFIG)

    def topic_config(self, name: str) -> Mapping[str, str]:
        """Return the topic's own configuration, without defaults: key -> value. Empty for an unknown topic."""
        return self._configs.get((TOPIC_RESOURCE, name), _NO_CONFIG)

    def credentials_of(self, user: str) -> Mapping[int, ScramCredential]:
        """Return the user's SCRAM credentials: Kafka's mechanism number -> credential. Empty for an unknown user."""
        return self.credentials.get(user, _NO_CREDENTIALS)

    @property
    def fencing_level(self) -> int:
        """Level of the feature `kipmesh.fencing`, which defines the effects of broker records (see `fencing`); 0 if it
        is not set."""
        return self.features.get(fencing.FENCING_FEATURE, 0)

    def required_brokers(self, topic_id: bytes, partition: int) -> tuple[int, ...]:
        """Return the unavailable brokers that a leaderless partition needs (one or all of them) to elect a leader.

        These are the unavailable members of the ISR, or of the last ISR if the ISR is empty. Empty if the partition has
        a leader or does not exist, or all members are available.
        """
        state = self.partition(topic_id, partition)
        if state is None or state.leader != r.NO_LEADER:
            return ()
        members = state.isr or state.last_isr
        return tuple([member for member in members if not self.can_lead(member) or is_lost(state, member)])

    def can_lead(self, broker_id: int) -> bool:
        """Return whether the broker may be elected: registered, unfenced and not shutting down."""
        broker = self.brokers.get(broker_id)
        return broker is not None and broker.can_lead

    def replay(self, batches: bytes, delta: MetadataDelta) -> None:
        """Apply whole record batches in log order and add the changes to `delta`. Batches at or below `offset` are
        skipped.

        Raises CorruptRecordError for bytes or records that cannot be applied, KafkaError(UNSUPPORTED_VERSION) for an
        unknown level of `kipmesh.fencing`. The image is then `failed`.
        """
        for _ in self.replay_steps(batches, delta):
            pass

    def replay_steps(self, batches: bytes, delta: MetadataDelta) -> Iterator[None]:
        """Apply batches like `replay`, with its errors, and yield None after each step of about 10 ms.

        One broker record may change tens of thousands of partitions. Between two steps the image may be within a batch
        (`is_within_batch`). The caller must exhaust the iterator or discard the image.
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
                self._record_offset, applied = record.offset, applied + 1
                implied = self._apply(decoded, delta)
                if implied is not None:
                    yield from implied
            self.is_within_batch = False
        self.offset = header.last_offset
        self.timestamp_ms = header.max_timestamp

    def apply(self, record: r.Record, delta: MetadataDelta) -> None:
        """Apply one record whose offset and epoch the caller has set as `offset` and `epoch`. Prefer `replay`.

        Raises CorruptRecordError for a record that cannot be applied, KafkaError(UNSUPPORTED_VERSION) for an unknown
        level of `kipmesh.fencing`. The image is then `failed`.
        """
        self._record_offset = self.offset
        try:
            for _ in self._apply(record, delta) or ():
                pass
        except BaseException:
            self.failed = True
            raise

    def _apply(self, record: r.Record, delta: MetadataDelta) -> Iterator[None] | None:
        """Apply the record. Return an iterator of the steps that change other partitions, which the caller must
        exhaust, or None if there are none."""
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
                self.brokers[record.broker_id] = broker_state(record)
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
            text = f"no registration of broker {broker_id} with epoch {broker_epoch}"
            raise CorruptRecordError(f"offset {self._record_offset}: {text}")
        delta.outdated.add(("broker", broker_id))
        delta.changed_brokers.add(broker_id)
        return broker

    def _change_broker(self, record: r.BrokerRegistrationChangeRecord, delta: MetadataDelta) -> Iterator[None] | None:
        """Apply the record. Return an iterator of the steps that apply its effect on the broker's partitions (630-16),
        or None if there are none."""
        broker = self._broker_to_change(record.broker_id, record.broker_epoch, delta)
        self.brokers[record.broker_id] = broker._replace(
            fenced=record.fenced > 0 if record.fenced else broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown or record.in_controlled_shutdown > 0,
            log_dirs=tuple(record.log_dirs) or broker.log_dirs,
        )
        if fencing.removes_broker(self.fencing_level, record):
            return self._remove_fenced(record.broker_id, fencing.successors(self.brokers, record), delta)
        if fencing.proves_liveness(self.fencing_level, record):
            self._clear_last_known_elr(record.broker_id, delta)
        return None

    def _remove_fenced(self, broker_id: int, can_lead: Collection[int], delta: MetadataDelta) -> Iterator[None]:
        """Remove the fenced broker from ISRs and leaderships, and yield None after each step."""
        keys = iter(self._indexes.of_broker.get(broker_id, _NO_PARTITIONS))
        effect = FencingEffect(broker_id)
        while some := list(islice(keys, STEP_PARTITIONS)):
            self._remove_fenced_step(some, effect, can_lead, delta)
            yield
        delta.fencing_effects.append(effect)

    def _remove_fenced_step(
        self, keys: Sequence[PartitionKey], effect: FencingEffect, can_lead: Collection[int], delta: MetadataDelta
    ) -> None:
        """Do one step of `_remove_fenced`. Handles thousands of partitions, so it inlines the index updates."""
        broker_id, generation, offset = effect.broker_id, self._generation, self._record_offset
        leaderless, unproven = self._indexes.leaderless, self._indexes.unproven
        balance = self._indexes.balance
        own = unproven.pop(broker_id, {})
        topics = [self.topics[topic_id] for topic_id, _ in keys]
        states = [topic.partitions[key[1]] for topic, key in zip(topics, keys, strict=True)]
        all_after = fencing.without_broker(states, broker_id, can_lead)
        changes = []
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
                if len(effect.examples) < EXAMPLES_MAX:
                    effect.examples.append(LeaderExample(key, leader_before, leader))
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
        effect.partitions += len(changes)
        effect.elected += moved - without_leader
        effect.without_leader += without_leader

    def _clear_last_known_elr(self, broker_id: int, delta: MetadataDelta) -> None:
        """Clear the last known ELR of every partition that the broker leads."""
        for key in list(self.unproven(broker_id)):
            topic = self._topic_to_change(key[0])
            state = topic.partitions[key[1]] = fencing.without_last_known_elr(topic.partitions[key[1]])
            self._indexes.leader_changed(key, state.leader, state, self._record_offset)
            delta.changed_partitions.add(key)
            delta.outdated.add(key)

    # --- topics and partitions

    def _add_topic(self, record: r.TopicRecord) -> None:
        if record.name in self.topic_names or record.topic_id in self.topics:
            raise CorruptRecordError(f"offset {self._record_offset}: topic {record.name!r} already exists")
        self.topics[record.topic_id] = TopicState(record.name, record.topic_id, generation=self._generation)
        self.topic_names[record.name] = record.topic_id
        if "." in record.name or "_" in record.name:
            self.metric_names[metric_name(record.name)] = record.name

    def _topic(self, topic_id: bytes) -> TopicState:
        topic = self.topics.get(topic_id)
        if topic is None:
            raise CorruptRecordError(f"offset {self._record_offset}: no topic has id {topic_id.hex()}")
        return topic

    def _topic_to_change(self, topic_id: bytes) -> TopicState:
        """Return the topic, copied first if a captured image may hold it."""
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
        if self.metric_names.get(metric_name(topic.name)) == topic.name:
            del self.metric_names[metric_name(topic.name)]
        delta.deleted_topics.append(topic)
        configs = self._configs.pop((TOPIC_RESOURCE, topic.name), _NO_CONFIG)
        delta.outdated.update([("config", TOPIC_RESOURCE, topic.name, name) for name in configs])
        delta.changed_topic_configs.discard(topic.name)

    def _add_partition(self, record: r.PartitionRecord, delta: MetadataDelta) -> None:
        topic = self._topic_to_change(record.topic_id)
        key = (topic.topic_id, record.partition_id)
        state = partition_state(record)
        before = topic.partitions.get(record.partition_id)
        if before is not None:
            self._indexes.remove(key, before)
            delta.outdated.add(key)
        topic.partitions[record.partition_id] = state
        self._indexes.add(key, state, self._record_offset)
        delta.changed_partitions.add(key)

    def _change_partition(self, record: r.PartitionChangeRecord, delta: MetadataDelta) -> None:
        topic = self._topic_to_change(record.topic_id)
        key = (topic.topic_id, record.partition_id)
        partitions = topic.partitions
        before = partitions.get(record.partition_id)
        if before is None:
            raise CorruptRecordError(f"offset {self._record_offset}: no partition {record.partition_id} to change")
        state = apply_change(before, record)
        if state.replicas != before.replicas:
            self._indexes.remove(key, before)
            self._indexes.add(key, state, self._record_offset)
        else:
            self._indexes.reassignment_changed(key, state)
            self._indexes.leader_changed(key, before.leader, state, self._record_offset)
        partitions[record.partition_id] = state
        delta.changed_partitions.add(key)
        delta.outdated.add(key)

    # --- configurations and credentials

    def _set_config(self, record: r.ConfigRecord, delta: MetadataDelta) -> None:
        resource = (record.resource_type, record.resource_name)
        configs = dict(self._configs.get(resource, _NO_CONFIG))
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
        """Set or remove a credential. Credentials of unknown mechanisms are kept."""
        own = dict(self.credentials_of(record.name))
        if own.pop(record.mechanism, None) is not None:
            delta.outdated.add(("credential", record.name, record.mechanism))
        elif isinstance(record, r.RemoveUserScramCredentialRecord):
            text = f"user {record.name!r} has no credential of mechanism {record.mechanism} to remove"
            raise CorruptRecordError(f"offset {self._record_offset}: {text}")
        if isinstance(record, r.UserScramCredentialRecord):
            own[record.mechanism] = ScramCredential(
                record.salt, record.stored_key, record.server_key, record.iterations
            )
        if own:
            self.credentials[record.name] = own
        else:
            del self.credentials[record.name]


def difference(before: MetadataImage, after: MetadataImage) -> MetadataDelta:
    """Return the delta from `before` to `after`. A topic that was deleted and recreated counts as deleted and as new.
    `outdated` and credentials are not included."""
    delta = MetadataDelta()
    for _ in difference_steps(before, after, delta):
        pass
    return delta


def difference_steps(before: MetadataImage, after: MetadataImage, delta: MetadataDelta) -> Iterator[None]:
    """Fill the empty `delta` with the changes from `before` to `after`, and yield None every TOPICS_BETWEEN_STEPS
    topics. Neither image may change meanwhile.

    Invariant: a reader that has published `before` and handles this delta has published all of `after`. `outdated`
    stays empty, because the count for the next snapshot restarts. SCRAM credentials are in no delta: they are read from
    the image when a client authenticates.
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
