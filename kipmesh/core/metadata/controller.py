"""All decisions of the active controller.

Sans-IO. The owner passes times (monotonic clock, ms) and the offset of the next record. It appends the records of each
decision as one batch and passes the batch to `applied` before the next decision. Alternatively it applies the batch to
the image itself and passes the delta to `changed`.

Decisions about single requests are functions in the module of their subject, bound here by the name of their API.
Decisions about brokers that need a clock are in `brokers`, their sessions in `sessions`.

Invariant: the image changes only by appended batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kipmesh import messages as m
from kipmesh.core.config import ControllerConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import configs, credentials, draining, elections, partitions, reassignments, topics
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.brokers import BrokerLifecycle
from kipmesh.core.metadata.decision import ControllerState, Decision, is_registered
from kipmesh.core.metadata.fencing import FENCING_FEATURE, FENCING_LEVEL
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, PartitionKey, common
from kipmesh.messages.schema import MAX_INT64

PRODUCER_ID_BLOCK_SIZE = 1000
"""Producer ids per AllocateProducerIds response; Kafka's value."""


class MetadataController(ControllerState):
    """All decisions of the active controller over one image, which must have replayed the whole log."""

    alter_partition = partitions.alter_partition
    assign_replicas_to_dirs = partitions.assign_replicas_to_dirs
    partitions_to_elect = elections.partitions_to_elect
    preferred_candidates = elections.preferred_candidates
    elect_preferred = elections.elect_preferred
    alter_partition_reassignments = reassignments.alter_partition_reassignments
    list_partition_reassignments = reassignments.list_partition_reassignments
    unregister_broker = draining.unregister_broker
    create_topics = topics.create_topics
    delete_topics = topics.delete_topics
    create_partitions = topics.create_partitions
    incremental_alter_configs = configs.alter_configs
    describe_configs = configs.describe_configs
    alter_user_scram_credentials = credentials.alter_user_scram_credentials
    describe_user_scram_credentials = credentials.describe_user_scram_credentials

    def __init__(self, config: ControllerConfig, image: MetadataImage, new_topic_id: Callable[[], bytes]) -> None:
        super().__init__(config, image, new_topic_id)
        self.brokers = BrokerLifecycle(self)
        self._drains = draining.Drains(image)
        # Reassignments that became complete without an AlterPartition.
        self._completable: dict[PartitionKey, None] = {}

    def activate(self, now_ms: int) -> list[r.Record]:
        """Become the active controller: start a fresh session for each unfenced broker.

        Return the feature records to append: `metadata.version` if the log lacks it, and `kipmesh.fencing` if its level
        is below FENCING_LEVEL.
        """
        for broker in self.image.brokers.values():
            if not broker.fenced:
                self.sessions.grant(broker.broker_id, broker.broker_epoch, now_ms)
        self._note_completable(self.image.reassigning)
        features: list[r.Record] = []
        if r.METADATA_VERSION not in self.image.features:
            features.append(r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL))
        if self.image.fencing_level < FENCING_LEVEL:
            features.append(r.FeatureLevelRecord(FENCING_FEATURE, FENCING_LEVEL))
        return features

    def applied(self, batch: bytes) -> MetadataDelta:
        """Apply an appended batch to the image. Return its delta.

        Raises CorruptRecordError for a batch that cannot be applied, KafkaError(UNSUPPORTED_VERSION) for an unknown
        level of `kipmesh.fencing`.
        """
        delta = MetadataDelta()
        self.image.replay(batch, delta)
        self.changed(delta)
        return delta

    def changed(self, delta: MetadataDelta) -> None:
        """Update pending elections and reassignments for the delta of an appended batch that the owner has applied to
        the image."""
        self.brokers.forget_decided(delta)
        self._note_completable(common(self.image.reassigning, delta.changed_partitions))

    def _note_completable(self, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            state = self.image.partition(*key)
            if state is not None and reassignments.is_complete(state, self.image.can_lead):
                self._completable[key] = None

    def heartbeat(
        self, request: m.BrokerHeartbeatRequest, now_ms: int, next_offset: int, connection: int = 0
    ) -> Decision[m.BrokerHeartbeatResponse]:
        """Decide BrokerHeartbeat. A heartbeat that causes no records completes up to COMPLETIONS_MAX pending
        reassignments.

        Error codes: BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH. Args: see `BrokerLifecycle.heartbeat`.
        """
        decision = self.brokers.heartbeat(request, now_ms, next_offset, connection)
        if self._completable and not decision.records:
            completions = []
            for key in list(islice(self._completable, reassignments.COMPLETIONS_MAX)):
                state = self.image.partition(*key)
                completion = None if state is None else reassignments.with_completion(self.image, key, state, None)
                # A completed reassignment stays listed until the change is applied, because the append may fail.
                if completion is None:
                    del self._completable[key]
                else:
                    completions.append(completion)
            return Decision(completions, decision.response)
        return decision

    def elect_leaders(
        self, election_type: m.ElectionType, partitions: Sequence[elections.TopicPartition]
    ) -> Decision[list[elections.ElectionResult]]:
        """Decide ElectLeaders for these partitions. The response has one result per distinct partition, with the error
        codes of the table in `elections`."""
        return elections.elect_leaders(self, election_type, partitions, self.brokers.elect_unclean)

    def withdraw_elections(self, partitions: Iterable[elections.TopicPartition]) -> Decision[None]:
        """Cancel pending unclean elections of these partitions, because no client waits for them. Unknown topics are
        ignored."""
        names = self.image.topic_names
        self.brokers.cancel_unclean([(names[topic], partition) for topic, partition in partitions if topic in names])
        return Decision((), None)

    def plan_broker_drain(self, request: m.PlanBrokerDrainRequest) -> Decision[m.PlanBrokerDrainResponse]:
        """Decide PlanBrokerDrain: plan moves of some of a broker's replicas, without records. Error codes:
        BROKER_ID_NOT_REGISTERED, INVALID_REPLICATION_FACTOR."""
        return Decision((), self._drains.plan(request))

    def allocate_producer_ids(self, request: m.AllocateProducerIdsRequest) -> Decision[m.AllocateProducerIdsResponse]:
        """Decide AllocateProducerIds: return the next block of PRODUCER_ID_BLOCK_SIZE producer ids, which no other
        broker receives.

        As in Kafka, a `ProducerIdsRecord` stores the start of the next block, and unused ids of a block are lost. Error
        codes: STALE_BROKER_EPOCH (also for an unregistered broker), UNKNOWN_SERVER_ERROR (ids exhausted).
        """
        if not is_registered(self.image, request.broker_id, request.broker_epoch):
            return Decision((), m.AllocateProducerIdsResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
        start, end = self.image.next_producer_id, self.image.next_producer_id + PRODUCER_ID_BLOCK_SIZE
        if end > MAX_INT64:
            return Decision((), m.AllocateProducerIdsResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR))
        record = r.ProducerIdsRecord(request.broker_id, request.broker_epoch, end)
        response = m.AllocateProducerIdsResponse(producer_id_start=start, producer_id_len=PRODUCER_ID_BLOCK_SIZE)
        return Decision((record,), response)
