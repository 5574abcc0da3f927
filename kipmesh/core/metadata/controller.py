"""The active controller's decisions in one place: what a request changes, and what is answered once that is durable.

Sans-IO: the owner passes times (a monotonic clock, ms) and the offset that the next record will get, appends the
records of each decision as one batch and gives that batch to `applied` before it asks for the next decision; or it
applies the batch to the image itself, and tells what that changed by `changed`.

Invariant: no decision changes the image; `applied` alone does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from kipmesh import messages as m
from kipmesh.core.config import ControllerConfig
from kipmesh.core.config.base import dotted
from kipmesh.core.metadata import configs, credentials, draining, log_dirs, preferred, reassignments, topics
from kipmesh.core.metadata.brokers import BrokerLifecycle, UncleanAllowed
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.fencing import FENCING_FEATURE, FENCING_LEVEL
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, PartitionKey
from kipmesh.core.metadata.indexes import common
from kipmesh.core.metadata.partitions import alter_partition
from kipmesh.core.metadata.producer_ids import allocate_producer_ids
from kipmesh.core.metadata.records import METADATA_VERSION, METADATA_VERSION_LEVEL, FeatureLevelRecord, Record
from kipmesh.core.metadata.sessions import BrokerSessions


class MetadataController:
    """The decisions over one image. Not before the log has been replayed into the image."""

    def __init__(self, config: ControllerConfig, image: MetadataImage, new_topic_id: Callable[[], bytes]) -> None:
        self.image = image
        self._sessions = BrokerSessions(config.broker_session_timeout_ms, config.broker_connection_loss_timeout_ms)
        self._unclean_allowed: UncleanAllowed = lambda name: configs.unclean_election_allowed(
            image, name, default=config.unclean_leader_election_enable
        )
        self._brokers = BrokerLifecycle(
            image,
            self._sessions,
            config.cluster_id,
            self._unclean_allowed,
            frozenset(voter.id for voter in config.voters),
        )
        self._defaults = topics.TopicDefaults(
            config.num_partitions, config.default_replication_factor, config.max_partitions_per_request
        )
        self._topic_defaults = configs.TopicDefaultValues(
            {
                configs.MIN_INSYNC_REPLICAS: config.min_insync_replicas,
                configs.UNCLEAN_LEADER_ELECTION: config.unclean_leader_election_enable,
            },
            {dotted(name) for name in config.model_fields_set},
        )
        self._new_topic_id = new_topic_id
        self._drains = draining.Drains(image)
        # Reassignments that something else than AlterPartition has made complete.
        self._completable: dict[PartitionKey, None] = {}

    def activate(self, now_ms: int) -> list[Record]:
        """Become the active controller: fresh sessions for all; what a new log begins with, or an older one lacks."""
        for broker in self.image.brokers.values():
            if not broker.fenced:
                self._sessions.grant(broker.broker_id, broker.broker_epoch, now_ms)
        self._note_completable(self.image.reassigning)
        features: list[Record] = []
        if METADATA_VERSION not in self.image.features:
            features.append(FeatureLevelRecord(METADATA_VERSION, METADATA_VERSION_LEVEL))
        if self.image.fencing_level < FENCING_LEVEL:
            features.append(FeatureLevelRecord(FENCING_FEATURE, FENCING_LEVEL))
        return features

    def applied(self, batch: bytes) -> MetadataDelta:
        """Apply a batch that was appended; says what changed."""
        delta = MetadataDelta()
        self.image.replay(batch, delta)
        self.changed(delta)
        return delta

    def changed(self, delta: MetadataDelta) -> None:
        """A batch that was appended was applied to the image by its owner."""
        self._brokers.forget_decided(delta)
        self._note_completable(common(self.image.reassigning, delta.changed_partitions))

    def _note_completable(self, keys: Iterable[PartitionKey]) -> None:
        can_lead = reassignments.can_lead_in(self.image)
        for key in keys:
            state = self.image.partition(*key)
            if state is not None and reassignments.is_complete(state, can_lead):
                self._completable[key] = None

    # --- brokers

    def register(
        self, request: m.BrokerRegistrationRequest, now_ms: int, next_offset: int
    ) -> Decision[m.BrokerRegistrationResponse]:
        """BrokerRegistration."""
        return self._brokers.register(request, now_ms, next_offset)

    def heartbeat(
        self, request: m.BrokerHeartbeatRequest, now_ms: int, next_offset: int, connection: int = 0
    ) -> Decision[m.BrokerHeartbeatResponse]:
        """BrokerHeartbeat, over a connection whose end will be told to `disconnected`, or 0."""
        decision = self._brokers.heartbeat(request, now_ms, next_offset, connection)
        if self._completable and not decision.records:
            keys = list(islice(self._completable, reassignments.COMPLETIONS_MAX))
            completions = reassignments.complete(self.image, keys)
            # Those that are completed stay until they are: an append may fail.
            left = {(completion.topic_id, completion.partition_id) for completion in completions}
            for key in keys:
                if key not in left:
                    del self._completable[key]
            return Decision(completions, decision.response)
        return decision

    def disconnected(self, broker_id: int, connection: int, now_ms: int) -> bool:
        """That connection is over; says whether the broker is missing from now on, and `next_deadline_ms` sooner."""
        return self._brokers.disconnected(broker_id, connection, now_ms)

    def unheard(self) -> dict[int, Collection[tuple[str, int]]]:
        """Where those brokers are that should be there, and of which this controller has not heard yet."""
        return self._brokers.unheard()

    def refused(self, broker_id: int, now_ms: int) -> bool:
        """Nothing listens there; says whether the broker is missing from now on, and `next_deadline_ms` sooner."""
        return self._brokers.refused(broker_id, now_ms)

    @property
    def look_ms(self) -> int:
        """How long `expired` is not asked, at most, while a broker is missing."""
        return self._sessions.look_ms

    def alter_partition(self, request: m.AlterPartitionRequest) -> Decision[m.AlterPartitionResponse]:
        """AlterPartition."""
        return alter_partition(self.image, request)

    def assign_replicas_to_dirs(
        self, request: m.AssignReplicasToDirsRequest
    ) -> Decision[m.AssignReplicasToDirsResponse]:
        """AssignReplicasToDirs."""
        return log_dirs.assign_replicas(self.image, request, reassignments.can_lead_in(self.image))

    def allocate_producer_ids(self, request: m.AllocateProducerIdsRequest) -> Decision[m.AllocateProducerIdsResponse]:
        """AllocateProducerIds."""
        return allocate_producer_ids(self.image, request)

    def next_deadline_ms(self) -> int | None:
        """When `expired` should be asked next; None for never, as things are."""
        return self._sessions.next_deadline_ms()

    def missing(self) -> frozenset[int]:
        """Brokers whose connection broke or address refused, and of which nothing was heard since."""
        return self._sessions.missing()

    def expired(self, now_ms: int) -> list[int]:
        """Brokers that are to be fenced, one after the other."""
        return self._brokers.expired(now_ms)

    def extend_sessions(self, now_ms: int) -> None:
        """The controller itself was away: nobody's silence means anything."""
        self._sessions.extend(now_ms)

    def fence(self, broker_ids: list[int]) -> list[Record]:
        """Fence the first of the brokers, electing none of them; the records are to be applied before the next."""
        return self._brokers.fence(broker_ids[0], broker_ids[1:])

    def elect_pending(self) -> list[Record]:
        """Elections that fencing or a configuration has made possible."""
        return self._brokers.elect_pending()

    # --- elections that are asked for

    def electable(self, election_type: m.ElectionType) -> Decision[list[preferred.TopicPartition]]:
        """The partitions that ElectLeaders is for when it names none."""
        return Decision((), preferred.electable(self.image, election_type))

    def elect_leaders(
        self, election_type: m.ElectionType, partitions: Sequence[preferred.TopicPartition]
    ) -> Decision[list[preferred.ElectionResult]]:
        """ElectLeaders for some partitions."""
        return preferred.elect_leaders(self.image, election_type, partitions, self._brokers.elect_unclean)

    def withdraw_elections(self, partitions: Iterable[preferred.TopicPartition]) -> Decision[None]:
        """Nobody waits any more for unclean elections that were asked for and not made."""
        names = self.image.topic_names
        self._brokers.withdraw([(names[topic], partition) for topic, partition in partitions if topic in names])
        return Decision((), None)

    def returnable(self) -> Decision[list[PartitionKey]]:
        """The partitions that may go back to their preferred leader."""
        return Decision((), preferred.returnable(self.image))

    def elect_preferred(self, keys: Iterable[PartitionKey], count_max: int) -> Decision[int]:
        """Let the preferred leaders of these partitions lead, at most so many; says how many do."""
        records = preferred.elect_preferred(self.image, keys, count_max)
        return Decision(records, len(records))

    # --- replicas move, and brokers leave

    def alter_partition_reassignments(
        self, request: m.AlterPartitionReassignmentsRequest
    ) -> Decision[m.AlterPartitionReassignmentsResponse]:
        """AlterPartitionReassignments."""
        return reassignments.alter_reassignments(
            self.image, request, self._unclean_allowed, partitions_max=self._defaults.max_partitions_per_request
        )

    def list_partition_reassignments(
        self, request: m.ListPartitionReassignmentsRequest
    ) -> Decision[m.ListPartitionReassignmentsResponse]:
        """ListPartitionReassignments."""
        return Decision((), reassignments.list_reassignments(self.image, request))

    def plan_broker_drain(self, request: m.PlanBrokerDrainRequest) -> Decision[m.PlanBrokerDrainResponse]:
        """PlanBrokerDrain."""
        return Decision((), self._drains.plan(request))

    def unregister_broker(self, request: m.UnregisterBrokerRequest) -> Decision[m.UnregisterBrokerResponse]:
        """UnregisterBroker."""
        session = self._sessions.get(request.broker_id)
        return draining.unregister(self.image, request, is_running=session is not None and session.heard)

    # --- administration

    def create_topics(self, request: m.CreateTopicsRequest) -> Decision[m.CreateTopicsResponse]:
        """CreateTopics."""
        return topics.create_topics(self.image, request, self._defaults, self._new_topic_id)

    def delete_topics(self, request: m.DeleteTopicsRequest) -> Decision[m.DeleteTopicsResponse]:
        """DeleteTopics."""
        return topics.delete_topics(self.image, request)

    def create_partitions(self, request: m.CreatePartitionsRequest) -> Decision[m.CreatePartitionsResponse]:
        """CreatePartitions."""
        return topics.create_partitions(self.image, request, self._defaults)

    def incremental_alter_configs(
        self, request: m.IncrementalAlterConfigsRequest
    ) -> Decision[m.IncrementalAlterConfigsResponse]:
        """IncrementalAlterConfigs."""
        return configs.alter_configs(self.image, request)

    def describe_configs(self, request: m.DescribeConfigsRequest) -> Decision[m.DescribeConfigsResponse]:
        """DescribeConfigs."""
        return Decision((), configs.describe_configs(self.image, request, self._topic_defaults))

    def alter_user_scram_credentials(
        self, request: m.AlterUserScramCredentialsRequest
    ) -> Decision[m.AlterUserScramCredentialsResponse]:
        """AlterUserScramCredentials."""
        return credentials.alter_credentials(self.image, request)

    def describe_user_scram_credentials(
        self, request: m.DescribeUserScramCredentialsRequest
    ) -> Decision[m.DescribeUserScramCredentialsResponse]:
        """DescribeUserScramCredentials."""
        return Decision((), credentials.describe_credentials(self.image, request))
