"""What a forwarded request has done already, when it was repeated at the next active controller.

A controller that dies between its decision and its answer leaves open what became of the request. Apache Kafka's
brokers repeat it, and its clients see TOPIC_ALREADY_EXISTS for a topic that they have made themselves. Here the broker
compares what the metadata has now with what it had when the request came: a topic that was not there and is now just as
the request wants it, or was there and is gone, was the request's own work, and is answered as done.

What this cannot tell: the same change asked for by somebody else in the same moment. Both are told that it is done, as
it is. And a client that repeats a request itself, because its broker died, may still see TOPIC_ALREADY_EXISTS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    CreatableTopic,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from kipmesh.core.metadata.image import MetadataImage, TopicState

SETTLE_TIMEOUT_S = 5.0
"""How long a broker waits to see what the controller spoke of: its own image may be behind."""

Image = Callable[[], MetadataImage]
Until = Callable[[Callable[[], bool], float], Awaitable[bool]]
"""Waits until a condition over the published metadata holds, for at most so many seconds; whether it did."""

_NOT_THERE = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


def _has_metadata(image: MetadataImage) -> bool:
    """Whether it says anything: a broker that has just started knows of no topic, and that means nothing."""
    return image.offset >= 0


class Creation:
    """One CreateTopics; make it when the request comes."""

    def __init__(self, request: CreateTopicsRequest, image: Image, until: Until) -> None:
        self._asked = {topic.name: topic for topic in request.topics}
        self._new = {name for name in self._asked if _has_metadata(image()) and image().topic_by_name(name) is None}
        self._validate_only = request.validate_only
        self._image = image
        self._until = until

    async def settle(self, response: CreateTopicsResponse) -> CreateTopicsResponse:
        """The answer to the repeated request, with its own work as success."""
        refused = {
            result.name for result in response.topics if result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
        } & self._new
        if not refused or self._validate_only:
            return response
        await self._until(lambda: all(self._image().topic_by_name(name) for name in refused), SETTLE_TIMEOUT_S)
        topics = [self._settled(result) if result.name in refused else result for result in response.topics]
        return response._replace(topics=topics)

    def _settled(self, result: CreatableTopicResult) -> CreatableTopicResult:
        topic = self._image().topic_by_name(result.name)
        if topic is None or not _is_as_asked(self._asked[result.name], topic, self._image()):
            return result
        replicas = len(topic.partitions[0].replicas)
        return CreatableTopicResult(result.name, topic.topic_id, 0, None, len(topic.partitions), replicas)


def _is_as_asked(asked: CreatableTopic, topic: TopicState, image: MetadataImage) -> bool:
    if dict(image.topic_config(topic.name)) != {entry.name: entry.value for entry in asked.configs}:
        return False
    if asked.assignments:
        assigned = {each.partition_index: tuple(each.broker_ids) for each in asked.assignments}
        return assigned == {index: tuple(state.replicas) for index, state in topic.partitions.items()}
    replicas = len(topic.partitions[0].replicas)
    return asked.num_partitions in (-1, len(topic.partitions)) and asked.replication_factor in (-1, replicas)


class Deletion:
    """One DeleteTopics; make it when the request comes."""

    def __init__(self, request: DeleteTopicsRequest, image: Image) -> None:
        self._known = _known(request.topics, image())

    def settle(self, response: DeleteTopicsResponse) -> DeleteTopicsResponse:
        """The answer to the repeated request, with its own work as success."""
        responses = []
        for result in response.responses:
            topic = self._known.get(result.topic_id or result.name or "")
            if topic is not None and result.error_code in _NOT_THERE:
                result = result._replace(topic_id=topic.topic_id, error_code=0, error_message=None)
            responses.append(result)
        return response._replace(responses=responses)


def _known(topics: Collection[DeleteTopicState], image: MetadataImage) -> dict[bytes | str, TopicState]:
    known: dict[bytes | str, TopicState] = {}
    for asked in topics:
        topic = image.topics.get(asked.topic_id) if asked.topic_id else image.topic_by_name(asked.name or "")
        if topic is not None:
            known[asked.topic_id or asked.name or ""] = topic
    return known


class Growth:
    """One CreatePartitions; make it when the request comes."""

    def __init__(self, request: CreatePartitionsRequest, image: Image, until: Until) -> None:
        topics = [(topic, image().topic_by_name(topic.name)) for topic in request.topics]
        self._asked = {topic.name: topic.count for topic, had in topics if had and len(had.partitions) < topic.count}
        self._validate_only = request.validate_only
        self._image = image
        self._until = until

    def _has(self, name: str) -> bool:
        topic = self._image().topic_by_name(name)
        return topic is not None and len(topic.partitions) == self._asked[name]

    async def settle(self, response: CreatePartitionsResponse) -> CreatePartitionsResponse:
        """The answer to the repeated request, with its own work as success."""
        refused = {result.name for result in response.results if result.error_code == ErrorCode.INVALID_PARTITIONS}
        refused &= self._asked.keys()
        if not refused or self._validate_only:
            return response
        await self._until(lambda: all(self._has(name) for name in refused), SETTLE_TIMEOUT_S)
        results: list[Any] = [
            result._replace(error_code=0, error_message=None)
            if result.name in refused and self._has(result.name)
            else result
            for result in response.results
        ]
        return response._replace(results=results)
