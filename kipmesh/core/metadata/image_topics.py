"""The part of the metadata's image that is about topics: their partitions, who leads them, and what follows from both.

`MetadataImage` is this and the rest (brokers, configurations, credentials, features, producer ids). It gives each
record about topics to the method that applies it; `_depart` and `_prove` are what a record about a broker does to the
broker's partitions (`fencing`).

Invariants: topics are copied when they first change after a capture (`_topic_to_change`), so that whoever has captured
them may go on reading; the indexes follow from the partitions; a record that contradicts the topics raises
CorruptRecordError.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import fencing
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.indexes import PartitionIndexes
from kipmesh.core.metadata.states import (
    Departure,
    LeaderExample,
    MetadataDelta,
    PartitionKey,
    PartitionState,
    TopicState,
    added,
    changed,
    unified,
)

EXAMPLES_MAX = 3
STEP_PARTITIONS = 2000
"""Of a broker, that change in one step: about 10 ms in an image of a million."""

_NO_PARTITIONS: Mapping[PartitionKey, None] = MappingProxyType({})
_NO_OFFSETS: Mapping[PartitionKey, int] = MappingProxyType({})


class TopicsImage:
    """All topics and partitions."""

    __slots__ = ("_at", "_generation", "_indexes", "_topic_names", "_unified_names", "topics")

    def __init__(self, offset: int) -> None:
        """Empty, at the offset of the last record."""
        self.topics: dict[bytes, TopicState] = {}
        """By topic id."""
        self._topic_names: dict[str, bytes] = {}
        self._unified_names: dict[str, str] = {}
        self._generation = 0
        self._at = offset  # of the record that is applied
        self._indexes = PartitionIndexes()

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

    def unproven(self, leader: int) -> Mapping[PartitionKey, int]:
        """Partitions with a last known ELR that this broker leads -> offset of the record that made it so."""
        return self._indexes.unproven.get(leader, _NO_OFFSETS)

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

    def _remove_topic(self, record: r.RemoveTopicRecord, delta: MetadataDelta) -> TopicState:
        """Without the topic's configuration, which is not known here; gives the topic as it was."""
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
        delta.deleted_topics.append(topic)
        return topic

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
