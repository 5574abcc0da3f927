"""Reconciles forwarded requests that were repeated at another controller with the metadata.

A controller that dies between its decision and its response leaves the outcome open. Apache Kafka's brokers repeat the
request, and clients see TOPIC_ALREADY_EXISTS for a topic that they have created themselves. Here the broker compares
the metadata with that at the time when the request arrived. A topic that was missing and is now as requested, or that
existed and is gone, was the request's own work, and its result is a success.

Limits: the same change by another client at the same moment is a success for both. A client that repeats a request
itself, because its broker died, may still see TOPIC_ALREADY_EXISTS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import MetadataImage, TopicState
from kipmesh.messages.table import APIS, Api

SETTLE_TIMEOUT_S = 5.0
"""How long a broker waits to see the state that the controller reported, because its own image may be behind."""

Image = Callable[[], MetadataImage]
Until = Callable[[Callable[[], bool], float], Awaitable[bool]]
"""Waits until a condition over the published metadata holds, for at most so many seconds; whether it did."""

_NOT_THERE = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


def _has_metadata(image: MetadataImage) -> bool:
    """Whether the broker has loaded any metadata; before that, a missing topic means nothing."""
    return image.offset >= 0


class Creation:
    """One CreateTopics; made when the request arrives."""

    def __init__(self, request: m.CreateTopicsRequest, image: Image, until: Until) -> None:
        self._asked = {topic.name: topic for topic in request.topics}
        self._new = {name for name in self._asked if _has_metadata(image()) and image().topic_by_name(name) is None}
        self._validate_only = request.validate_only
        self._image = image
        self._until = until

    async def settle(self, response: m.CreateTopicsResponse) -> m.CreateTopicsResponse:
        """Return the response to the repeated request, with its own work as success."""
        refused = {
            result.name for result in response.topics if result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
        } & self._new
        if not refused or self._validate_only:
            return response
        await self._until(lambda: all(self._image().topic_by_name(name) for name in refused), SETTLE_TIMEOUT_S)
        topics = [self._settled(result) if result.name in refused else result for result in response.topics]
        return response._replace(topics=topics)

    def _settled(self, result: m.CreatableTopicResult) -> m.CreatableTopicResult:
        topic = self._image().topic_by_name(result.name)
        if topic is None or not _is_as_asked(self._asked[result.name], topic, self._image()):
            return result
        replicas = len(topic.partitions[0].replicas)
        return m.CreatableTopicResult(
            result.name, topic.topic_id, num_partitions=len(topic.partitions), replication_factor=replicas
        )


def _is_as_asked(asked: m.CreatableTopic, topic: TopicState, image: MetadataImage) -> bool:
    if dict(image.topic_config(topic.name)) != {entry.name: entry.value for entry in asked.configs}:
        return False
    if asked.assignments:
        assigned = {each.partition_index: tuple(each.broker_ids) for each in asked.assignments}
        return assigned == {index: tuple(state.replicas) for index, state in topic.partitions.items()}
    replicas = len(topic.partitions[0].replicas)
    return asked.num_partitions in (-1, len(topic.partitions)) and asked.replication_factor in (-1, replicas)


class Deletion:
    """One DeleteTopics; made when the request arrives."""

    def __init__(self, request: m.DeleteTopicsRequest, image: Image, until: Until) -> None:
        self._known = _known(request.topics, image())

    async def settle(self, response: m.DeleteTopicsResponse) -> m.DeleteTopicsResponse:
        """Return the response to the repeated request, with its own work as success."""
        responses = []
        for result in response.responses:
            topic = self._known.get(result.topic_id or result.name or "")
            if topic is not None and result.error_code in _NOT_THERE:
                result = result._replace(topic_id=topic.topic_id, error_code=0, error_message=None)
            responses.append(result)
        return response._replace(responses=responses)


def _known(topics: Collection[m.DeleteTopicState], image: MetadataImage) -> dict[bytes | str, TopicState]:
    known: dict[bytes | str, TopicState] = {}
    for asked in topics:
        topic = image.topics.get(asked.topic_id) if asked.topic_id else image.topic_by_name(asked.name or "")
        if topic is not None:
            known[asked.topic_id or asked.name or ""] = topic
    return known


class Growth:
    """One CreatePartitions; made when the request arrives."""

    def __init__(self, request: m.CreatePartitionsRequest, image: Image, until: Until) -> None:
        topics = [(topic, image().topic_by_name(topic.name)) for topic in request.topics]
        self._asked = {topic.name: topic.count for topic, had in topics if had and len(had.partitions) < topic.count}
        self._validate_only = request.validate_only
        self._image = image
        self._until = until

    def _has(self, name: str) -> bool:
        topic = self._image().topic_by_name(name)
        return topic is not None and len(topic.partitions) == self._asked[name]

    async def settle(self, response: m.CreatePartitionsResponse) -> m.CreatePartitionsResponse:
        """Return the response to the repeated request, with its own work as success."""
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


class Reassignment:
    """One AlterPartitionReassignments: a cancellation that was carried out finds nothing to cancel."""

    def __init__(self, request: m.AlterPartitionReassignmentsRequest, image: Image, until: Until) -> None:
        known = image()
        self._running = {(known.topics[topic_id].name, partition) for topic_id, partition in known.reassigning}

    async def settle(self, response: m.AlterPartitionReassignmentsResponse) -> m.AlterPartitionReassignmentsResponse:
        """Return the response to the repeated request, with its own work as success."""

        def own(topic: str, result: m.ReassignablePartitionResponse) -> m.ReassignablePartitionResponse:
            is_over = result.error_code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
            if is_over and (topic, result.partition_index) in self._running:
                return m.ReassignablePartitionResponse(result.partition_index)
            return result

        responses = [
            topic._replace(partitions=[own(topic.name, result) for result in topic.partitions])
            for topic in response.responses
        ]
        return response._replace(responses=responses)


class Credentials:
    """One AlterUserScramCredentials: to set a credential twice is harmless, to delete one is not."""

    def __init__(self, request: m.AlterUserScramCredentialsRequest, image: Image, until: Until) -> None:
        known = image()
        self._known = {each.name for each in request.deletions if each.mechanism in known.credentials_of(each.name)}

    async def settle(self, response: m.AlterUserScramCredentialsResponse) -> m.AlterUserScramCredentialsResponse:
        """Return the response to the repeated request, with its own work as success."""
        results = [
            m.AlterUserScramCredentialsResult(each.user)
            if each.user in self._known and each.error_code == ErrorCode.RESOURCE_NOT_FOUND
            else each
            for each in response.results
        ]
        return response._replace(results=results)


class Unregistration:
    """One UnregisterBroker."""

    def __init__(self, request: m.UnregisterBrokerRequest, image: Image, until: Until) -> None:
        self._was_known = request.broker_id in image().brokers

    async def settle(self, response: m.UnregisterBrokerResponse) -> m.UnregisterBrokerResponse:
        """Return the response to the repeated request, with its own work as success."""
        is_own = self._was_known and response.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
        return m.UnregisterBrokerResponse() if is_own else response


class _Reconciliation(Protocol):
    def __init__(self, request: Any, image: Image, until: Until) -> None: ...
    async def settle(self, response: Any) -> Any: ...


_BY_API: Mapping[str, type[_Reconciliation]] = {
    "AlterPartitionReassignments": Reassignment,
    "AlterUserScramCredentials": Credentials,
    "CreatePartitions": Growth,
    "CreateTopics": Creation,
    "DeleteTopics": Deletion,
    "UnregisterBroker": Unregistration,
}


class Reconciler:
    """Reconciles the APIs whose row in the table says so."""

    def __init__(self, image: Image, until: Until) -> None:
        if missing := {api.name for api in APIS if api.reconciles} ^ _BY_API.keys():
            raise LookupError(f"the table and this module differ in what is reconciled: {', '.join(sorted(missing))}")
        self._image = image
        self._until = until

    def begin(self, api: Api, request: Any) -> Callable[[Any], Awaitable[Any]]:
        """Note the state before the request; return the function that reconciles the response to a repetition."""
        return _BY_API[api.name](request, self._image, self._until).settle
