"""Forwards administrative requests to the active controller, so that clients connect to brokers only.

While no controller is active, a request waits within its own timeout. Then the response is REQUEST_TIMED_OUT, and the
request may have been carried out.

A controller that fails between decision and response leaves the outcome open. Apache Kafka's brokers repeat the
request, and clients receive TOPIC_ALREADY_EXISTS for a topic that they created. Here, for APIs whose table row
`reconciles`, the broker compares the metadata with its state when the request arrived. A topic that was missing and is
now as requested, or that existed and is deleted, counts as the request's own work, and its result is a success.

Limits: if two clients request the same change at the same time, both succeed. A client that repeats a request itself,
because its broker failed, may still receive TOPIC_ALREADY_EXISTS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import ControllerChannel, is_inactive
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import MetadataImage, TopicState
from kipmesh.messages.table import APIS, CREATE_TOPICS, Api
from kipmesh.transport.grpc.client import TransportError

log = structlog.get_logger(__name__)

SETTLE_TIMEOUT_S = 5.0
"""How long a broker waits until its image has the state that the controller reported."""

WaitUntil = Callable[[Callable[[], bool], float], Awaitable[bool]]
"""Waits until a condition on the published metadata holds, for at most some seconds. Returns whether it holds."""
Reconcile = Callable[[Any], Awaitable[Any]]
"""Turns the response to a repeated request into one that reports the request's own work as success."""

_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
_EXISTS = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)


class Forwarder:
    """Sends requests of one broker to the active controller.

    Raises LookupError if the table of APIs and this module differ in which APIs they reconcile.
    """

    def __init__(self, channel: ControllerChannel, hosted_replicas: HostedReplicas, wait_until: WaitUntil) -> None:
        if differing := {api.name for api in APIS if api.reconciles} ^ _RECONCILES.keys():
            raise LookupError(
                f"the table of APIs and forwarder.py differ in the APIs to reconcile: {', '.join(sorted(differing))}"
            )
        self._channel = channel
        self._hosted_replicas = hosted_replicas
        self._wait_until = wait_until

    async def forward(self, api: Api, request: Any, context: RequestContext) -> Any:
        """Return the active controller's response.

        Returns the API's error response with INVALID_REQUEST if the request is too large, and with REQUEST_TIMED_OUT if
        no controller responded in time.
        """
        reconcile: Reconcile | None = None
        if api.reconciles:
            reconcile = _RECONCILES[api.name](request, self._hosted_replicas, self._wait_until)
        timeout_s = context.respond_within(getattr(request, "timeout_ms", api.timeout_ms) / 1000)
        try:
            response, is_repeated = await self._channel.forward(api, request, timeout_s)
        except TransportError as error:
            if error.too_large:
                return api.error_response(request, ErrorCode.INVALID_REQUEST, "the request is too large to forward")
            log.warning("no controller responded", method=api.name, error=str(error))
            return _timed_out(api, request, "no metadata controller is active, or it does not respond")
        if is_inactive(api, response):
            return _timed_out(api, request, "no metadata controller is active")
        return await reconcile(response) if is_repeated and reconcile is not None else response

    async def create_topics(
        self, topics: Sequence[m.CreatableTopic], timeout_s: float, context: RequestContext
    ) -> Sequence[m.CreatableTopicResult]:
        """Create topics for this broker. Waits up to `timeout_s` until its own metadata has those that exist."""
        request = m.CreateTopicsRequest(topics, int(timeout_s * 1000))
        response: m.CreateTopicsResponse = await self.forward(CREATE_TOPICS, request, context)
        names = [result.name for result in response.topics if result.error_code in _EXISTS]
        await self._wait_until(lambda: all(map(self._hosted_replicas.image.topic_by_name, names)), timeout_s)
        return response.topics

    async def create_internal_topic(
        self,
        name: str,
        num_partitions: int,
        replication_factor: int,
        configs: Mapping[str, object],
        timeout_s: float,
        context: RequestContext,
    ) -> bool:
        """Create a topic that only brokers write, and return whether it exists.

        The replication factor is reduced to the number of unfenced brokers.
        """
        brokers = sum(not broker.fenced for broker in self._hosted_replicas.image.brokers.values())
        entries = [m.ConfigEntry(key, str(value)) for key, value in configs.items()]
        topic = m.CreatableTopic(name, num_partitions, max(1, min(replication_factor, brokers)), configs=entries)
        (result,) = await self.create_topics([topic], timeout_s, context)
        if result.error_code not in _EXISTS:
            log.warning("topic not created", topic=name, error=result.error_message)
        return result.error_code in _EXISTS


def _timed_out(api: Api, request: Any, reason: str) -> Any:
    return api.error_response(request, ErrorCode.REQUEST_TIMED_OUT, reason)


# --- reconciliation: each function records the state before the request ----------------------------------------------


def _create_topics(request: m.CreateTopicsRequest, hosted: HostedReplicas, wait_until: WaitUntil) -> Reconcile:
    requested = {topic.name: topic for topic in request.topics}
    # Without metadata, a missing topic may exist.
    new = {name for name in requested if hosted.image.offset >= 0 and hosted.image.topic_by_name(name) is None}

    def own(result: m.CreatableTopicResult) -> m.CreatableTopicResult:
        topic = hosted.image.topic_by_name(result.name)
        if topic is None or not _is_as_requested(requested[result.name], topic, hosted.image):
            return result
        replicas = len(topic.partitions[0].replicas)
        return m.CreatableTopicResult(
            result.name, topic.topic_id, num_partitions=len(topic.partitions), replication_factor=replicas
        )

    async def reconcile(response: m.CreateTopicsResponse) -> m.CreateTopicsResponse:
        refused = {
            result.name for result in response.topics if result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
        } & new
        if not refused or request.validate_only:
            return response
        await wait_until(lambda: all(map(hosted.image.topic_by_name, refused)), SETTLE_TIMEOUT_S)
        return response._replace(
            topics=[own(result) if result.name in refused else result for result in response.topics]
        )

    return reconcile


def _is_as_requested(requested: m.CreatableTopic, topic: TopicState, image: MetadataImage) -> bool:
    if dict(image.topic_config(topic.name)) != {entry.name: entry.value for entry in requested.configs}:
        return False
    if requested.assignments:
        assigned = {each.partition_index: tuple(each.broker_ids) for each in requested.assignments}
        return assigned == {index: tuple(state.replicas) for index, state in topic.partitions.items()}
    replicas = len(topic.partitions[0].replicas)
    is_as_large = requested.num_partitions in (-1, len(topic.partitions))
    return is_as_large and requested.replication_factor in (-1, replicas)


def _delete_topics(request: m.DeleteTopicsRequest, hosted: HostedReplicas, wait_until: WaitUntil) -> Reconcile:
    known: dict[bytes | str, TopicState] = {}
    for one in request.topics:
        topic = hosted.image.topics.get(one.topic_id) if one.topic_id else hosted.image.topic_by_name(one.name or "")
        if topic is not None:
            known[one.topic_id or one.name or ""] = topic

    async def reconcile(response: m.DeleteTopicsResponse) -> m.DeleteTopicsResponse:
        responses = []
        for result in response.responses:
            topic = known.get(result.topic_id or result.name or "")
            if topic is not None and result.error_code in _UNKNOWN:
                result = result._replace(topic_id=topic.topic_id, error_code=0, error_message=None)
            responses.append(result)
        return response._replace(responses=responses)

    return reconcile


def _create_partitions(request: m.CreatePartitionsRequest, hosted: HostedReplicas, wait_until: WaitUntil) -> Reconcile:
    topics = [(topic, hosted.image.topic_by_name(topic.name)) for topic in request.topics]
    wanted = {topic.name: topic.count for topic, state in topics if state and len(state.partitions) < topic.count}

    def has_grown(name: str) -> bool:
        topic = hosted.image.topic_by_name(name)
        return topic is not None and len(topic.partitions) == wanted[name]

    async def reconcile(response: m.CreatePartitionsResponse) -> m.CreatePartitionsResponse:
        refused = {result.name for result in response.results if result.error_code == ErrorCode.INVALID_PARTITIONS}
        refused &= wanted.keys()
        if not refused or request.validate_only:
            return response
        await wait_until(lambda: all(map(has_grown, refused)), SETTLE_TIMEOUT_S)
        results: list[Any] = [
            result._replace(error_code=0, error_message=None)
            if result.name in refused and has_grown(result.name)
            else result
            for result in response.results
        ]
        return response._replace(results=results)

    return reconcile


def _alter_partition_reassignments(
    request: m.AlterPartitionReassignmentsRequest, hosted: HostedReplicas, wait_until: WaitUntil
) -> Reconcile:
    """After a cancellation that was carried out, there is no reassignment left to cancel."""
    image = hosted.image
    running = {(image.topics[topic_id].name, partition) for topic_id, partition in image.reassigning}

    def own(topic: str, result: m.ReassignablePartitionResponse) -> m.ReassignablePartitionResponse:
        is_over = result.error_code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
        if is_over and (topic, result.partition_index) in running:
            return m.ReassignablePartitionResponse(result.partition_index)
        return result

    async def reconcile(response: m.AlterPartitionReassignmentsResponse) -> m.AlterPartitionReassignmentsResponse:
        responses = [
            topic._replace(partitions=[own(topic.name, result) for result in topic.partitions])
            for topic in response.responses
        ]
        return response._replace(responses=responses)

    return reconcile


def _alter_credentials(
    request: m.AlterUserScramCredentialsRequest, hosted: HostedReplicas, wait_until: WaitUntil
) -> Reconcile:
    """Setting a credential twice is harmless, deleting one twice is an error."""
    image = hosted.image
    known = {each.name for each in request.deletions if each.mechanism in image.credentials_of(each.name)}

    async def reconcile(response: m.AlterUserScramCredentialsResponse) -> m.AlterUserScramCredentialsResponse:
        results = [
            m.AlterUserScramCredentialsResult(each.user)
            if each.user in known and each.error_code == ErrorCode.RESOURCE_NOT_FOUND
            else each
            for each in response.results
        ]
        return response._replace(results=results)

    return reconcile


def _unregister_broker(request: m.UnregisterBrokerRequest, hosted: HostedReplicas, wait_until: WaitUntil) -> Reconcile:
    was_known = request.broker_id in hosted.image.brokers

    async def reconcile(response: m.UnregisterBrokerResponse) -> m.UnregisterBrokerResponse:
        is_own = was_known and response.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
        return m.UnregisterBrokerResponse() if is_own else response

    return reconcile


_RECONCILES: Mapping[str, Callable[[Any, HostedReplicas, WaitUntil], Reconcile]] = {
    "AlterPartitionReassignments": _alter_partition_reassignments,
    "AlterUserScramCredentials": _alter_credentials,
    "CreatePartitions": _create_partitions,
    "CreateTopics": _create_topics,
    "DeleteTopics": _delete_topics,
    "UnregisterBroker": _unregister_broker,
}
