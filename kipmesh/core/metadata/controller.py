"""The active controller's decisions in one place: what a request changes, and what is answered once that is durable.

Sans-IO: the owner passes times (a monotonic clock, ms) and the offset that the next record will get, appends the
records of each decision as one batch and gives that batch to `applied` before it requests the next decision; or it
applies the batch to the image itself, and passes what that changed to `changed`.

The decisions of single requests are functions of the module of their subject, bound here by the name of their API.
Those about brokers that need a clock are in `brokers`; `sessions` says which brokers are alive.

Invariant: no decision changes the image; `applied` alone does.
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
"""Kafka's."""


class MetadataController(ControllerState):
    """The decisions over one image. Not before the log has been replayed into the image."""

    alter_partition = partitions.alter_partition
    assign_replicas_to_dirs = partitions.assign_replicas_to_dirs
    electable = elections.electable
    returnable = elections.returnable
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
        # Reassignments that something else than AlterPartition has made complete.
        self._completable: dict[PartitionKey, None] = {}

    def activate(self, now_ms: int) -> list[r.Record]:
        """Become the active controller: fresh sessions for all; what a new log begins with, or an older one lacks."""
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
        """Apply a batch that was appended; says what changed."""
        delta = MetadataDelta()
        self.image.replay(batch, delta)
        self.changed(delta)
        return delta

    def changed(self, delta: MetadataDelta) -> None:
        """A batch that was appended was applied to the image by its owner."""
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
        """BrokerHeartbeat; one that decides nothing itself completes reassignments that nothing else completes."""
        decision = self.brokers.heartbeat(request, now_ms, next_offset, connection)
        if self._completable and not decision.records:
            completions = []
            for key in list(islice(self._completable, reassignments.COMPLETIONS_MAX)):
                state = self.image.partition(*key)
                completion = None if state is None else reassignments.completed(self.image, key, state, None)
                # Those that are completed stay until they are: an append may fail.
                if completion is None:
                    del self._completable[key]
                else:
                    completions.append(completion)
            return Decision(completions, decision.response)
        return decision

    def elect_leaders(
        self, election_type: m.ElectionType, partitions: Sequence[elections.TopicPartition]
    ) -> Decision[list[elections.ElectionResult]]:
        """ElectLeaders for some partitions."""
        return elections.elect_leaders(self, election_type, partitions, self.brokers.elect_unclean)

    def withdraw_elections(self, partitions: Iterable[elections.TopicPartition]) -> Decision[None]:
        """No client waits any more for unclean elections that were requested and not made."""
        names = self.image.topic_names
        self.brokers.withdraw([(names[topic], partition) for topic, partition in partitions if topic in names])
        return Decision((), None)

    def plan_broker_drain(self, request: m.PlanBrokerDrainRequest) -> Decision[m.PlanBrokerDrainResponse]:
        """PlanBrokerDrain."""
        return Decision((), self._drains.plan(request))

    def allocate_producer_ids(self, request: m.AllocateProducerIdsRequest) -> Decision[m.AllocateProducerIdsResponse]:
        """AllocateProducerIds: the next block of ids for a broker, which no broker receives again.

        As in Kafka, one `ProducerIdsRecord` a block says where the next one begins. What a broker has not used of its
        block when it ends is lost, which 2^63 ids allow. STALE_BROKER_EPOCH unless it is registered with that epoch.
        """
        if not is_registered(self.image, request.broker_id, request.broker_epoch):
            return Decision((), m.AllocateProducerIdsResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
        start, end = self.image.next_producer_id, self.image.next_producer_id + PRODUCER_ID_BLOCK_SIZE
        if end > MAX_INT64:
            return Decision((), m.AllocateProducerIdsResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR))
        record = r.ProducerIdsRecord(request.broker_id, request.broker_epoch, end)
        response = m.AllocateProducerIdsResponse(producer_id_start=start, producer_id_len=PRODUCER_ID_BLOCK_SIZE)
        return Decision((record,), response)
