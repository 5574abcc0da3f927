"""The part of the service Admin that moves replicas and lets brokers leave, on a broker: forwarded.

Most of it is as good twice as once. What is not, a cancellation and UnregisterBroker, is answered as done when the
request was repeated, this broker knew what there was to do, and it is done (see `repeats`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    PlanBrokerDrainRequest,
    PlanBrokerDrainResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from kipmesh.node.broker.controller_channel import Forwarded
from kipmesh.node.broker.repeats import Image
from kipmesh.rpc.server import RequestContext

UNREGISTER_TIMEOUT_MS = 10_000

Forward = Callable[[str, Any, int, RequestContext], Awaitable[Forwarded | str]]
"""Method, request, timeout in ms and context -> an active controller's answer, or why there was none."""


class ReassignmentHandler:
    """Forwards; without an answer of an active controller it is REQUEST_TIMED_OUT (it may have been done)."""

    def __init__(self, forward: Forward, image: Image) -> None:
        self._forward_reassignment = forward
        self._reassignment_image = image

    async def alter_partition_reassignments(
        self, request: AlterPartitionReassignmentsRequest, context: RequestContext
    ) -> AlterPartitionReassignmentsResponse:
        """AlterPartitionReassignments (API key 45)."""
        image = self._reassignment_image()
        running = {(image.topics[topic_id].name, partition) for topic_id, partition in image.reassigning}
        answer = await self._forward_reassignment("AlterPartitionReassignments", request, request.timeout_ms, context)
        if isinstance(answer, str):
            return AlterPartitionReassignmentsResponse(error_code=ErrorCode.REQUEST_TIMED_OUT, error_message=answer)
        response: AlterPartitionReassignmentsResponse = answer.response
        return _settled(response, running) if answer.is_repeated else response

    async def list_partition_reassignments(
        self, request: ListPartitionReassignmentsRequest, context: RequestContext
    ) -> ListPartitionReassignmentsResponse:
        """ListPartitionReassignments (API key 46)."""
        answer = await self._forward_reassignment("ListPartitionReassignments", request, request.timeout_ms, context)
        if isinstance(answer, str):
            return ListPartitionReassignmentsResponse(error_code=ErrorCode.REQUEST_TIMED_OUT, error_message=answer)
        response: ListPartitionReassignmentsResponse = answer.response
        return response

    async def plan_broker_drain(
        self, request: PlanBrokerDrainRequest, context: RequestContext
    ) -> PlanBrokerDrainResponse:
        """PlanBrokerDrain, which is ours."""
        answer = await self._forward_reassignment("PlanBrokerDrain", request, request.timeout_ms, context)
        if isinstance(answer, str):
            return PlanBrokerDrainResponse(error_code=ErrorCode.REQUEST_TIMED_OUT, error_message=answer)
        response: PlanBrokerDrainResponse = answer.response
        return response

    async def unregister_broker(
        self, request: UnregisterBrokerRequest, context: RequestContext
    ) -> UnregisterBrokerResponse:
        """UnregisterBroker (API key 64)."""
        was_known = request.broker_id in self._reassignment_image().brokers
        answer = await self._forward_reassignment("UnregisterBroker", request, UNREGISTER_TIMEOUT_MS, context)
        if isinstance(answer, str):
            return UnregisterBrokerResponse(error_code=ErrorCode.REQUEST_TIMED_OUT, error_message=answer)
        response: UnregisterBrokerResponse = answer.response
        if answer.is_repeated and was_known and response.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED:
            return UnregisterBrokerResponse()
        return response


def _settled(
    response: AlterPartitionReassignmentsResponse, running: set[tuple[str, int]]
) -> AlterPartitionReassignmentsResponse:
    """The answer to the repeated request, with its own cancellations as success."""

    def own(topic: str, result: ReassignablePartitionResponse) -> ReassignablePartitionResponse:
        is_own = (
            result.error_code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS and (topic, result.partition_index) in running
        )
        return ReassignablePartitionResponse(result.partition_index) if is_own else result

    return response._replace(
        responses=[
            ReassignableTopicResponse(topic.name, [own(topic.name, result) for result in topic.partitions])
            for topic in response.responses
        ]
    )
