"""Metadata (API key 3), on every broker, from its own metadata cache.

An empty topic list asks for no topic (526-09). Topics are named or given by id; an unknown one has its error in its
place. Brokers that are fenced are not listed (but for a moment, on Kafka's listeners), and a replica on one counts as
offline; so does one whose data folder has failed. A response that names a leader whose connection has just broken
waits for newer metadata: see `unreachable_leaders`. A broker without metadata responds with BROKER_NOT_AVAILABLE. With
`replica.selection.mode=metadata`, partitions carry the replica that the client's rack is to read from (392-15).

Missing topics are created with the cluster's defaults if the request and `auto.create.topics.enable` allow it; the
response waits for that for `CREATE_TIMEOUT_S` at most.
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
"""Results of a creation after which the broker may still see the topic."""


@dataclass(eq=False)
class MetadataHandler:
    """Responds to Metadata."""

    config: BrokerConfig
    image: Callable[[], MetadataImage | None]
    """The metadata that this broker acts on; None before the first."""
    _: KW_ONLY
    controller_id: Callable[[], int]
    selection: ReplicaSelection | None = None
    forwarder: Forwarder | None = None
    """Creates topics; without it none are created."""
    on_response: Callable[[m.MetadataRequest, int], None] | None = None
    """Receives requests and the number of topics in their responses."""
    gate: UnreachableLeaderGate | None = None

    async def metadata(self, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse:
        """Respond to one request."""
        image = self.image()
        if image is None:
            return m.MetadataResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE)
        refused: Mapping[str, int] = {}
        if request.allow_auto_topic_creation and self.config.auto_create_topics_enable and self.forwarder is not None:
            missing = {one.name for one in request.topics or () if one.name and not one.topic_id}
            missing = {name for name in missing if image.topic_by_name(name) is None}
            if missing:
                refused = await self._create(self.forwarder, sorted(missing), context)
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
            topics = [_asked(image, asked.topic_id, asked.name, available) for asked in request.topics]
            if refused:
                topics = [_refused(topic, refused) for topic in topics]
        if self.selection is not None and self.selection.advises(request.rack_id):
            client = self.selection.client(request.rack_id, context)
            topics = [_advised(self.selection, image, topic, client) for topic in topics]
        if self.on_response is not None:
            self.on_response(request, len(topics))
        return m.MetadataResponse(
            brokers=brokers, cluster_id=self.config.cluster_id, controller_id=self.controller_id(), topics=topics
        )

    async def _create(self, forwarder: Forwarder, names: Sequence[str], context: RequestContext) -> dict[str, int]:
        """Create topics; return the error code of each that this broker does not know then.

        That is LEADER_NOT_AVAILABLE, which clients retry, if the topic may still be created.
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
            listed.update(self.gate.still_listed(listener))
        brokers = []
        for broker in image.brokers.values():
            endpoint = broker.endpoints.get(listener or self.config.inter_broker_listener_name)
            if broker.broker_id in listed and endpoint is not None:
                host, port = endpoint
                brokers.append(m.MetadataResponseBroker(broker.broker_id, host, port, broker.rack))
        return brokers


def _leaders(image: MetadataImage, request: m.MetadataRequest) -> set[int]:
    """Of the topics that are named."""
    topics = [_find(image, asked.topic_id, asked.name) for asked in request.topics or ()]
    return {state.leader for topic in topics if topic is not None for state in topic.partitions.values()}


def _find(image: MetadataImage, topic_id: bytes, name: str | None) -> TopicState | None:
    return image.topics.get(topic_id) if topic_id else image.topic_by_name(name or "")


def _asked(
    image: MetadataImage, topic_id: bytes, name: str | None, available: AbstractSet[int]
) -> m.MetadataResponseTopic:
    topic = _find(image, topic_id, name)
    if topic is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID if topic_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return m.MetadataResponseTopic(code, name, topic_id)
    return _topic(topic, available)


def _refused(topic: m.MetadataResponseTopic, codes: Mapping[str, int]) -> m.MetadataResponseTopic:
    """The answer with the reason why the topic was not made."""
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


def _advised(
    selection: ReplicaSelection, image: MetadataImage, response: m.MetadataResponseTopic, client: ClientMetadata
) -> m.MetadataResponseTopic:
    """The answer with preferred replicas."""
    topic = image.topics.get(response.topic_id)
    if topic is None or response.error_code:
        return response
    partitions = []
    for partition in response.partitions:
        index = partition.partition_index
        nearer = selection.by_metadata(topic.name, topic.topic_id, index, topic.partitions[index], client)
        partitions.append(partition._replace(preferred_read_replica=nearer) if nearer >= 0 else partition)
    return response._replace(partitions=partitions)
