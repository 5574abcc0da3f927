"""Metadata (API key 3), on every broker, from its own metadata cache.

An empty topic list asks for no topic (526-09). Topics are named or given by id; an unknown one has its error in its
place. Brokers that are fenced are not listed (but for a moment, on Kafka's listeners), and a replica on one counts as
offline; so does one whose data folder has failed. An answer that names a leader whose connection has just broken waits
for news of it: see `departures`. A broker without metadata yet answers BROKER_NOT_AVAILABLE. With
`replica.selection.mode=metadata`, partitions carry the replica that the client's rack is to read from (392-15).

Who asks for topics that there are not, and allows that they are made, gets them made (`auto.create.topics.enable`) with
the cluster's defaults; the answer waits for that for `CREATE_TIMEOUT_S` at most.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.coordinator import INTERNAL_TOPICS
from kipmesh.core.metadata.image import MetadataImage, TopicState
from kipmesh.core.metadata.states import is_lost
from kipmesh.core.replica.selection import ClientMetadata
from kipmesh.node.broker.departures import HOLD_S, Departures
from kipmesh.node.broker.selection import ReplicaSelection
from kipmesh.rpc.server import RequestContext

CREATE_TIMEOUT_S = 5.0
Create = Callable[[Sequence[str], float, RequestContext], Awaitable[Mapping[str, int]]]
"""Makes topics within a time in s; gives the error code of each that was not made."""


class MetadataHandler:
    """Answers Metadata."""

    def __init__(
        self,
        image: Callable[[], MetadataImage | None],
        *,
        cluster_id: str,
        listener: str,
        controller_id: Callable[[], int],
        selection: ReplicaSelection | None = None,
        create: Create | None = None,
        answered: Callable[[m.MetadataRequest, int], None] | None = None,
        departures: Departures | None = None,
    ) -> None:
        """`create` makes topics; without it none are. `answered` is told requests and the number of topics answered."""
        self._departures = departures
        self._answered = answered
        self._create = create
        self._image = image
        self._cluster_id = cluster_id
        self._listener = listener
        self._controller_id = controller_id
        self._selection = selection

    async def metadata(self, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse:
        """Answer one request."""
        image = self._image()
        if image is None:
            return m.MetadataResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE)
        refused: Mapping[str, int] = {}
        if request.allow_auto_topic_creation and self._create is not None:
            missing = {one.name for one in request.topics or () if one.name and not one.topic_id}
            missing = {name for name in missing if image.topic_by_name(name) is None}
            if missing:
                refused = await self._create(sorted(missing), context.answer_within(CREATE_TIMEOUT_S), context)
                image = self._image() or image
        if self._departures is not None:
            await self._settle(self._departures, image, request, context)
            image = self._image() or image
        available = {broker.broker_id for broker in image.brokers.values() if not broker.fenced}
        brokers = self._brokers(image, available, context.listener)
        if request.topics is None:
            topics = [_topic(topic, available) for topic in image.topics.values()]
        else:
            topics = [_asked(image, asked.topic_id, asked.name, available) for asked in request.topics]
            if refused:
                topics = [_refused(topic, refused) for topic in topics]
        if self._selection is not None and self._selection.advises(request.rack_id):
            client = self._selection.client(request.rack_id, context)
            topics = [_advised(self._selection, image, topic, client) for topic in topics]
        if self._answered is not None:
            self._answered(request, len(topics))
        return m.MetadataResponse(
            brokers=brokers, cluster_id=self._cluster_id, controller_id=self._controller_id(), topics=topics
        )

    async def _settle(
        self, departures: Departures, image: MetadataImage, request: m.MetadataRequest, context: RequestContext
    ) -> None:
        """Wait while a topic that is asked for is led by who is gone; who asks for all topics does not wait."""
        if request.topics:
            await departures.settle(
                lambda: _leaders(self._image() or image, request), context.listener, context.answer_within(HOLD_S)
            )

    def _brokers(
        self, image: MetadataImage, available: AbstractSet[int], listener: str
    ) -> list[m.MetadataResponseBroker]:
        listed = set(available)
        if self._departures is not None:
            listed.update(self._departures.still_listed(listener))
        brokers = []
        for broker in image.brokers.values():
            endpoint = broker.endpoints.get(listener or self._listener)
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
    selection: ReplicaSelection, image: MetadataImage, answer: m.MetadataResponseTopic, client: ClientMetadata
) -> m.MetadataResponseTopic:
    """The answer with preferred replicas."""
    topic = image.topics.get(answer.topic_id)
    if topic is None or answer.error_code:
        return answer
    partitions = []
    for partition in answer.partitions:
        index = partition.partition_index
        nearer = selection.by_metadata(topic.name, topic.topic_id, index, topic.partitions[index], client)
        partitions.append(partition._replace(preferred_read_replica=nearer) if nearer >= 0 else partition)
    return answer._replace(partitions=partitions)
