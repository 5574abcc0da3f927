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
from typing import Any, NamedTuple

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
"""Waits until a condition on the published metadata holds, at most a timeout in seconds. Returns whether it holds."""


class Reconciliation(NamedTuple):
    """Turns errors of a repeated request into success where the metadata shows the request's own change."""

    results: str
    """Field of the response with the results, or empty for the response itself."""
    fix: Callable[[Any], Any]
    """Maps a result to itself, or to a success if the metadata shows the request's own change."""
    is_visible: Callable[[Any], bool] = lambda _result: True
    """Whether this broker's metadata has the change behind a result."""


_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
_EXISTS = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)


class Forwarder:
    """Sends requests of one broker to the active controller.

    Raises LookupError if the table of APIs and this module disagree about which APIs are reconciled.
    """

    def __init__(self, channel: ControllerChannel, hosted_replicas: HostedReplicas, wait_until: WaitUntil) -> None:
        if differing := {api.name for api in APIS if api.reconciles} ^ _RECONCILIATIONS.keys():
            raise LookupError(
                f"the table of APIs and forwarder.py differ in the APIs to reconcile: {', '.join(sorted(differing))}"
            )
        self._channel = channel
        self._hosted_replicas = hosted_replicas
        self._wait_until = wait_until

    async def forward(self, api: Api, request: Any, context: RequestContext) -> Any:
        """Send a request to the active controller and return its response.

        If the request was repeated, errors that its own earlier attempt may have caused become successes. Returns the
        API's error response with INVALID_REQUEST if the request is too large, and with REQUEST_TIMED_OUT if no active
        controller responded in time.
        """
        reconciliation = _RECONCILIATIONS[api.name](request, self._hosted_replicas) if api.reconciles else None
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
        if reconciliation is None or not is_repeated:
            return response
        field, fix, is_visible = reconciliation
        if not field:
            return fix(response)
        results = getattr(response, field)
        await self._wait_until(lambda: all(map(is_visible, results)), SETTLE_TIMEOUT_S)
        return response._replace(**{field: [fix(result) for result in results]})

    async def create_topics(
        self, topics: Sequence[m.CreatableTopic], timeout_s: float, context: RequestContext
    ) -> Sequence[m.CreatableTopicResult]:
        """Create topics for this broker and return the result of each, with its error code.

        Then waits up to `timeout_s` seconds until this broker's metadata has the topics that were created or existed.
        """
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
        """Create a topic for the brokers' own use. Returns True if it was created or existed, else False.

        The replication factor is reduced to the number of unfenced brokers, but not below 1.
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


def _create_topics(request: m.CreateTopicsRequest, hosted: HostedReplicas) -> Reconciliation:
    requested = {topic.name: topic for topic in request.topics}
    # Without metadata, a missing topic may exist.
    is_known = hosted.image.offset < 0 or request.validate_only
    new = {name for name in requested if not is_known and hosted.image.topic_by_name(name) is None}

    def is_own(result: m.CreatableTopicResult) -> bool:
        return result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS and result.name in new

    def fix(result: m.CreatableTopicResult) -> m.CreatableTopicResult:
        topic = hosted.image.topic_by_name(result.name) if is_own(result) else None
        if topic is None or not _is_as_requested(requested[result.name], topic, hosted.image):
            return result
        replicas = len(topic.partitions[0].replicas)
        return m.CreatableTopicResult(
            result.name, topic.topic_id, num_partitions=len(topic.partitions), replication_factor=replicas
        )

    return Reconciliation(
        "topics", fix, lambda result: not is_own(result) or hosted.image.topic_by_name(result.name) is not None
    )


def _is_as_requested(requested: m.CreatableTopic, topic: TopicState, image: MetadataImage) -> bool:
    if dict(image.topic_config(topic.name)) != {entry.name: entry.value for entry in requested.configs}:
        return False
    if requested.assignments:
        assigned = {each.partition_index: tuple(each.broker_ids) for each in requested.assignments}
        return assigned == {index: tuple(state.replicas) for index, state in topic.partitions.items()}
    replicas = len(topic.partitions[0].replicas)
    is_as_large = requested.num_partitions in (-1, len(topic.partitions))
    return is_as_large and requested.replication_factor in (-1, replicas)


def _delete_topics(request: m.DeleteTopicsRequest, hosted: HostedReplicas) -> Reconciliation:
    known: dict[bytes | str, TopicState] = {}
    for one in request.topics:
        topic = hosted.image.topics.get(one.topic_id) if one.topic_id else hosted.image.topic_by_name(one.name or "")
        if topic is not None:
            known[one.topic_id or one.name or ""] = topic

    def fix(result: m.DeletableTopicResult) -> m.DeletableTopicResult:
        topic = known.get(result.topic_id or result.name or "")
        if topic is None or result.error_code not in _UNKNOWN:
            return result
        return result._replace(topic_id=topic.topic_id, error_code=0, error_message=None)

    return Reconciliation("responses", fix)


def _create_partitions(request: m.CreatePartitionsRequest, hosted: HostedReplicas) -> Reconciliation:
    counts = {} if request.validate_only else {topic.name: topic.count for topic in request.topics}
    states = {name: hosted.image.topic_by_name(name) for name in counts}
    grown = {name for name, state in states.items() if state is not None and len(state.partitions) < counts[name]}

    def is_own(result: m.CreatePartitionsTopicResult) -> bool:
        return result.error_code == ErrorCode.INVALID_PARTITIONS and result.name in grown

    def has_grown(result: m.CreatePartitionsTopicResult) -> bool:
        topic = hosted.image.topic_by_name(result.name)
        return topic is not None and len(topic.partitions) == counts[result.name]

    def fix(result: m.CreatePartitionsTopicResult) -> m.CreatePartitionsTopicResult:
        is_success = is_own(result) and has_grown(result)
        return result._replace(error_code=0, error_message=None) if is_success else result

    return Reconciliation("results", fix, lambda result: not is_own(result) or has_grown(result))


def _alter_partition_reassignments(
    request: m.AlterPartitionReassignmentsRequest, hosted: HostedReplicas
) -> Reconciliation:
    """Turn NO_REASSIGNMENT_IN_PROGRESS into a success where a reassignment ran when the request arrived.

    The earlier attempt must have cancelled it.
    """
    image = hosted.image
    running = {(image.topics[topic_id].name, partition) for topic_id, partition in image.reassigning}

    def fix(topic: m.ReassignableTopicResponse) -> m.ReassignableTopicResponse:
        partitions = [
            m.ReassignablePartitionResponse(result.partition_index)
            if result.error_code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
            and (topic.name, result.partition_index) in running
            else result
            for result in topic.partitions
        ]
        return topic._replace(partitions=partitions)

    return Reconciliation("responses", fix)


def _alter_credentials(request: m.AlterUserScramCredentialsRequest, hosted: HostedReplicas) -> Reconciliation:
    """Turn RESOURCE_NOT_FOUND into a success where the credential to delete existed when the request arrived.

    Setting a credential twice is harmless.
    """
    image = hosted.image
    known = {each.name for each in request.deletions if each.mechanism in image.credentials_of(each.name)}

    def fix(result: m.AlterUserScramCredentialsResult) -> m.AlterUserScramCredentialsResult:
        is_own = result.user in known and result.error_code == ErrorCode.RESOURCE_NOT_FOUND
        return m.AlterUserScramCredentialsResult(result.user) if is_own else result

    return Reconciliation("results", fix)


def _unregister_broker(request: m.UnregisterBrokerRequest, hosted: HostedReplicas) -> Reconciliation:
    was_known = request.broker_id in hosted.image.brokers

    def fix(response: m.UnregisterBrokerResponse) -> m.UnregisterBrokerResponse:
        is_own = was_known and response.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
        return m.UnregisterBrokerResponse() if is_own else response

    return Reconciliation("", fix)


_RECONCILIATIONS: Mapping[str, Callable[[Any, HostedReplicas], Reconciliation]] = {
    "AlterPartitionReassignments": _alter_partition_reassignments,
    "AlterUserScramCredentials": _alter_credentials,
    "CreatePartitions": _create_partitions,
    "CreateTopics": _create_topics,
    "DeleteTopics": _delete_topics,
    "UnregisterBroker": _unregister_broker,
}
