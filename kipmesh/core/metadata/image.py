"""The cluster's metadata as the records of `__cluster_metadata` make it, and what changed while they were applied.

One task owns an image, applies records to it in the log's order and may read it at any time; nobody else writes it.
Values inside (BrokerState, PartitionState) are immutable and replaced whole, so that a reader may keep them. So is all
that `capture` gives: topics are copied when they first change after it (630-03).

What is of topics and partitions is in `image_topics`; here is the rest, and the replay of records into both.

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

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import fencing
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image_topics import TopicsImage
from kipmesh.core.metadata.states import (
    BROKER_RESOURCE,
    CLUSTER_METADATA_TOPIC,
    CLUSTER_METADATA_TOPIC_ID,
    LEADER_ROLE_FEATURE,
    TOPIC_RESOURCE,
    BrokerState,
    CapturedImage,
    MetadataDelta,
    PartitionKey,
    PartitionState,
    RecordKey,
    TopicState,
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
    "unified",
]

STEP_RECORDS = 1000
"""Applied in one step, and more while they are partitions: nobody sees a part of a topic that is new."""

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_CREDENTIALS: Mapping[int, ScramCredential] = MappingProxyType({})


class MetadataImage(TopicsImage):
    """All metadata up to `offset`."""

    __slots__ = (
        "_configs",
        "_effect",
        "_is_within_batch",
        "brokers",
        "credentials",
        "epoch",
        "failed",
        "features",
        "next_producer_id",
        "offset",
        "timestamp_ms",
    )

    def __init__(self, offset: int = -1, epoch: int = 0, timestamp_ms: int = -1) -> None:
        """Empty: before the log's first record, or at the end of a snapshot whose records are to be applied."""
        super().__init__(offset)
        self.offset = offset
        """Offset of the last applied record, -1 for none; within a batch still that of the batch before."""
        self.epoch = epoch
        """Quorum epoch of the last applied record."""
        self.timestamp_ms = timestamp_ms
        """When the last replayed batch was appended; a snapshot's header has it."""
        self.failed = False
        """Whether a record could not be applied: then this is no state of the cluster."""
        self.brokers: dict[int, BrokerState] = {}
        self.features: dict[str, int] = {}
        self.credentials: dict[str, Mapping[int, ScramCredential]] = {}
        """User -> Kafka's number of the mechanism -> credential. The inner mappings are replaced, never changed."""
        self.next_producer_id = 0
        # The inner mappings are replaced, never changed.
        self._configs: dict[tuple[int, str], Mapping[str, str]] = {}
        # What the record that was applied last implies, before that is done.
        self._effect: Iterator[None] | None = None
        self._is_within_batch = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataImage):
            return NotImplemented
        compared = [name for name in (*TopicsImage.__slots__, *self.__slots__) if name != "_generation"]
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
            dict(self.credentials),
        )

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
                self._forget_configs(self._remove_topic(record, delta), delta)
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
            self._prove(record.broker_id, delta)

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

    def _forget_configs(self, topic: TopicState, delta: MetadataDelta) -> None:
        """Of a topic that is gone."""
        configs = self._configs.pop((TOPIC_RESOURCE, topic.name), _NOTHING)
        delta.outdated.update([("config", TOPIC_RESOURCE, topic.name, name) for name in configs])
        delta.changed_topic_configs.discard(topic.name)

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
