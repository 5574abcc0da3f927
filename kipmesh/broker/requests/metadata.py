"""Metadata (API key 3), on every broker, from its own metadata image.

An empty topic list requests no topic (526-09). An unknown topic has its error in its place. Fenced brokers are not
listed, except for a moment on Kafka listeners. Their replicas count as offline, as do replicas in failed log
directories. A response that names an unreachable leader waits for newer metadata: see `unreachable_leaders`. A broker
without metadata returns BROKER_NOT_AVAILABLE. With `replica.selection.mode=metadata`, partitions have the preferred
replica of the client's rack (392-15).

Missing topics are created with the cluster's defaults if the request and `auto.create.topics.enable` allow it. The
response waits up to `CREATE_TIMEOUT_S` for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass

from kipmesh import messages as m
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.requests.selection import ReplicaSelection
from kipmesh.broker.requests.unreachable_leaders import HOLD_S, UnreachableLeaderGate
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.coordinator import INTERNAL_TOPICS
from kipmesh.core.metadata.image import MetadataImage, TopicState
from kipmesh.core.metadata.states import is_lost
from kipmesh.core.replica.selection import ClientMetadata
from kipmesh.transport.grpc.server import RequestContext

CREATE_TIMEOUT_S = 5.0
_LATER = frozenset(
    {ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_CONTROLLER}
)
"""Results of CreateTopics after which the broker may still receive the topic."""


@dataclass(eq=False)
class MetadataHandler:
    """Responds to Metadata. `controller_id` returns the id of the active controller, or -1."""

    config: BrokerConfig
    image: Callable[[], MetadataImage | None]
    """Returns the published metadata image, or None before the first."""
    _: KW_ONLY
    controller_id: Callable[[], int]
    selection: ReplicaSelection | None = None
    forwarder: Forwarder | None = None
    """Creates missing topics; None disables that."""
    on_response: Callable[[m.MetadataRequest, int], None] | None = None
    """Receives each request and the number of topics in its response."""
    gate: UnreachableLeaderGate | None = None

    async def metadata(self, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse:
        """Return the brokers and the requested topics. Creates missing topics if that is allowed.

        Before the first metadata image, the response has only the top-level error BROKER_NOT_AVAILABLE. Other errors
        are per topic or partition. Waits up to `HOLD_S` while a leader is unreachable.
        """
        image = self.image()
        if image is None:
            return m.MetadataResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE)
        creation_errors: Mapping[str, int] = {}
        if request.allow_auto_topic_creation and self.config.auto_create_topics_enable and self.forwarder is not None:
            missing = {one.name for one in request.topics or () if one.name and not one.topic_id}
            missing = {name for name in missing if image.topic_by_name(name) is None}
            if missing:
                creation_errors = await self._create(self.forwarder, sorted(missing), context)
                image = self.image() or image
        if self.gate is not None and request.topics:  # a request for all topics does not wait
            known = image
            await self.gate.hold(
                lambda: _leaders(self.image() or known, request), context.listener, context.respond_within(HOLD_S)
            )
            image = self.image() or image
        available = {broker.broker_id for broker in image.brokers.values() if not broker.fenced}
        brokers = self._brokers(image, available, context.listener)
        if request.topics is None:
            topics = [_topic(topic, available) for topic in image.topics.values()]
        else:
            topics = [_requested_topic(image, one.topic_id, one.name, available) for one in request.topics]
            if creation_errors:
                topics = [_with_creation_error(topic, creation_errors) for topic in topics]
        if self.selection is not None and self.selection.advises(request.rack_id):
            client = self.selection.client(request.rack_id, context)
            topics = [_with_preferred_replicas(self.selection, image, topic, client) for topic in topics]
        if self.on_response is not None:
            self.on_response(request, len(topics))
        return m.MetadataResponse(
            brokers=brokers, cluster_id=self.config.cluster_id, controller_id=self.controller_id(), topics=topics
        )

    async def _create(self, forwarder: Forwarder, names: Sequence[str], context: RequestContext) -> dict[str, int]:
        """Create topics and return the error codes, by name, of those that this broker's metadata still lacks.

        The code is LEADER_NOT_AVAILABLE, which clients retry, if the topic may still appear.
        """
        topics = [m.CreatableTopic(name, -1, -1) for name in names]
        results = await forwarder.create_topics(topics, context.respond_within(CREATE_TIMEOUT_S), context)
        codes = {result.name: ErrorCode.of(result.error_code) for result in results}
        image = self.image()
        failed: dict[str, int] = {}
        for name in names:
            code = codes.get(name, ErrorCode.REQUEST_TIMED_OUT)
            if image is None or image.topic_by_name(name) is None:
                failed[name] = ErrorCode.LEADER_NOT_AVAILABLE if code in _LATER else code
        return failed

    def _brokers(
        self, image: MetadataImage, available: AbstractSet[int], listener: str
    ) -> list[m.MetadataResponseBroker]:
        listed = set(available)
        if self.gate is not None:
            listed.update(self.gate.lingering(listener))
        brokers = []
        for broker in image.brokers.values():
            endpoint = broker.endpoints.get(listener or self.config.inter_broker_listener_name)
            if broker.broker_id in listed and endpoint is not None:
                host, port = endpoint
                brokers.append(m.MetadataResponseBroker(broker.broker_id, host, port, broker.rack))
        return brokers


def _leaders(image: MetadataImage, request: m.MetadataRequest) -> set[int]:
    """Return the leader ids of the requested topics' partitions, including -1 if a partition has no leader."""
    topics = [_find(image, one.topic_id, one.name) for one in request.topics or ()]
    return {state.leader for topic in topics if topic is not None for state in topic.partitions.values()}


def _find(image: MetadataImage, topic_id: bytes, name: str | None) -> TopicState | None:
    return image.topics.get(topic_id) if topic_id else image.topic_by_name(name or "")


def _requested_topic(
    image: MetadataImage, topic_id: bytes, name: str | None, available: AbstractSet[int]
) -> m.MetadataResponseTopic:
    topic = _find(image, topic_id, name)
    if topic is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID if topic_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return m.MetadataResponseTopic(code, name, topic_id)
    return _topic(topic, available)


def _with_creation_error(topic: m.MetadataResponseTopic, codes: Mapping[str, int]) -> m.MetadataResponseTopic:
    """Replace the error of a missing topic with the reason why it was not created."""
    return topic._replace(error_code=codes.get(topic.name or "", topic.error_code)) if topic.error_code else topic


def _topic(topic: TopicState, available: AbstractSet[int]) -> m.MetadataResponseTopic:
    partitions = [
        m.MetadataResponsePartition(
            ErrorCode.NONE if state.leader >= 0 else ErrorCode.LEADER_NOT_AVAILABLE,
            index,
            state.leader,
            state.leader_epoch,
            state.replicas,
            state.isr,
            [replica for replica in state.replicas if replica not in available or is_lost(state, replica)],
            last_known_elr=state.last_known_elr,
        )
        for index, state in sorted(topic.partitions.items())
    ]
    return m.MetadataResponseTopic(
        ErrorCode.NONE, topic.name, topic.topic_id, topic.name in INTERNAL_TOPICS, partitions
    )


def _with_preferred_replicas(
    selection: ReplicaSelection, image: MetadataImage, response: m.MetadataResponseTopic, client: ClientMetadata
) -> m.MetadataResponseTopic:
    """Return a topic's response with the preferred read replicas. A response with an error is unchanged."""
    topic = image.topics.get(response.topic_id)
    if topic is None or response.error_code:
        return response
    partitions = []
    for partition in response.partitions:
        index = partition.partition_index
        preferred = selection.by_metadata(topic.name, topic.topic_id, index, topic.partitions[index], client)
        partitions.append(partition._replace(preferred_read_replica=preferred) if preferred >= 0 else partition)
    return response._replace(partitions=partitions)
