"""The Admin service on a broker: forwarded to the active controller, so that clients need to know brokers only.

While no controller is active, requests wait for the next one within their own time; `repeats` says what becomes of
those that a controller took and did not answer.
"""

from __future__ import annotations

from typing import Any

import structlog

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    AlterConfigsResourceResponse,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    ElectLeadersRequest,
    ElectLeadersResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from kipmesh.node.broker.controller_channel import ControllerChannel, Forwarded, is_inactive
from kipmesh.node.broker.credentials import CredentialHandler
from kipmesh.node.broker.reassignments import ReassignmentHandler
from kipmesh.node.broker.repeats import Creation, Deletion, Growth, Image, Until
from kipmesh.node.broker.static_configs import each_once, with_static
from kipmesh.rpc.client import TransportError
from kipmesh.rpc.server import RequestContext

log = structlog.get_logger(__name__)

DESCRIBE_TIMEOUT_MS = 10_000


NOBODY_ACTIVE = "no metadata controller is active"


class AdminHandler(ReassignmentHandler, CredentialHandler):
    """Forwards; without an answer of an active controller each item gets REQUEST_TIMED_OUT (it may have been done)."""

    def __init__(self, config: BrokerConfig, channel: ControllerChannel, image: Image, until: Until) -> None:
        ReassignmentHandler.__init__(self, self._forward, image)
        CredentialHandler.__init__(self, self._forward, image)
        self._config = config
        self._channel = channel
        self._image = image
        self._until = until

    async def _forward(self, method: str, request: Any, timeout_ms: int, context: RequestContext) -> Forwarded | str:
        """An active controller's answer, or why there was none."""
        timeout_s = context.answer_within(timeout_ms / 1000)
        try:
            forwarded = await self._channel.forward("Admin", method, request, timeout_s)
        except TransportError as error:
            log.warning("no controller answered", method=method, error=str(error))
            return f"{NOBODY_ACTIVE}, or it does not answer"
        if is_inactive(forwarded.response):  # nobody was active until the time was over
            return NOBODY_ACTIVE
        return forwarded

    async def create_topics(self, request: CreateTopicsRequest, context: RequestContext) -> CreateTopicsResponse:
        """CreateTopics (API key 19)."""
        creation = Creation(request, self._image, self._until)
        answer = await self._forward("CreateTopics", request, request.timeout_ms, context)
        if isinstance(answer, str):
            code = ErrorCode.REQUEST_TIMED_OUT
            return CreateTopicsResponse(
                topics=[
                    CreatableTopicResult(topic.name, error_code=code, error_message=answer) for topic in request.topics
                ]
            )
        response: CreateTopicsResponse = answer.response
        return await creation.settle(response) if answer.is_repeated else response

    async def delete_topics(self, request: DeleteTopicsRequest, context: RequestContext) -> DeleteTopicsResponse:
        """DeleteTopics (API key 20)."""
        deletion = Deletion(request, self._image)
        answer = await self._forward("DeleteTopics", request, request.timeout_ms, context)
        if isinstance(answer, str):
            code = ErrorCode.REQUEST_TIMED_OUT
            return DeleteTopicsResponse(
                responses=[DeletableTopicResult(topic.name, topic.topic_id, code, answer) for topic in request.topics]
            )
        response: DeleteTopicsResponse = answer.response
        return deletion.settle(response) if answer.is_repeated else response

    async def create_partitions(
        self, request: CreatePartitionsRequest, context: RequestContext
    ) -> CreatePartitionsResponse:
        """CreatePartitions (API key 37)."""
        growth = Growth(request, self._image, self._until)
        answer = await self._forward("CreatePartitions", request, request.timeout_ms, context)
        if isinstance(answer, str):
            code = ErrorCode.REQUEST_TIMED_OUT
            return CreatePartitionsResponse(
                results=[CreatePartitionsTopicResult(topic.name, code, answer) for topic in request.topics]
            )
        response: CreatePartitionsResponse = answer.response
        return await growth.settle(response) if answer.is_repeated else response

    async def describe_configs(
        self, request: DescribeConfigsRequest, context: RequestContext
    ) -> DescribeConfigsResponse:
        """DescribeConfigs (API key 32), with this broker's own values where it is asked for them."""
        request = each_once(request)
        answer = await self._forward("DescribeConfigs", request, DESCRIBE_TIMEOUT_MS, context)
        if isinstance(answer, str):
            code = ErrorCode.REQUEST_TIMED_OUT
            return DescribeConfigsResponse(
                results=[
                    DescribeConfigsResult(code, answer, r.resource_type, r.resource_name) for r in request.resources
                ]
            )
        response: DescribeConfigsResponse = answer.response
        return with_static(response, request, self._config)

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, context: RequestContext
    ) -> IncrementalAlterConfigsResponse:
        """IncrementalAlterConfigs (API key 44): single keys set or removed, so that twice is as good as once."""
        answer = await self._forward("IncrementalAlterConfigs", request, DESCRIBE_TIMEOUT_MS, context)
        if isinstance(answer, str):
            code = ErrorCode.REQUEST_TIMED_OUT
            return IncrementalAlterConfigsResponse(
                responses=[
                    AlterConfigsResourceResponse(code, answer, r.resource_type, r.resource_name)
                    for r in request.resources
                ]
            )
        response: IncrementalAlterConfigsResponse = answer.response
        return response

    async def elect_leaders(self, request: ElectLeadersRequest, context: RequestContext) -> ElectLeadersResponse:
        """ElectLeaders (API key 43): what is done already needs no election, so that twice is as good as once."""
        answer = await self._forward("ElectLeaders", request, request.timeout_ms, context)
        if isinstance(answer, str):
            return ElectLeadersResponse(error_code=ErrorCode.REQUEST_TIMED_OUT)
        response: ElectLeadersResponse = answer.response
        return response
