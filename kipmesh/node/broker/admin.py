"""The Admin service on a broker: forwarded to the active controller, so that clients need to know brokers only."""

from __future__ import annotations

from typing import Any

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
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from kipmesh.node.broker.controller_channel import ControllerChannel
from kipmesh.rpc.client import TransportError
from kipmesh.rpc.server import RequestContext

DESCRIBE_TIMEOUT_MS = 10_000


class AdminHandler:
    """Forwards; where the controller does not answer, each item gets REQUEST_TIMED_OUT (it may have been done)."""

    def __init__(self, channel: ControllerChannel) -> None:
        self._channel = channel

    async def _forward(self, method: str, request: Any, timeout_ms: int) -> Any | None:
        try:
            return await self._channel.call("Admin", method, request, timeout_ms / 1000)
        except TransportError:
            return None

    async def create_topics(self, request: CreateTopicsRequest, context: RequestContext) -> CreateTopicsResponse:
        """CreateTopics (API key 19)."""
        answer: CreateTopicsResponse | None = await self._forward("CreateTopics", request, request.timeout_ms)
        code = ErrorCode.REQUEST_TIMED_OUT
        return answer or CreateTopicsResponse(
            topics=[CreatableTopicResult(topic.name, error_code=code) for topic in request.topics]
        )

    async def delete_topics(self, request: DeleteTopicsRequest, context: RequestContext) -> DeleteTopicsResponse:
        """DeleteTopics (API key 20)."""
        answer: DeleteTopicsResponse | None = await self._forward("DeleteTopics", request, request.timeout_ms)
        code = ErrorCode.REQUEST_TIMED_OUT
        return answer or DeleteTopicsResponse(
            responses=[DeletableTopicResult(topic.name, topic.topic_id, code) for topic in request.topics]
        )

    async def create_partitions(
        self, request: CreatePartitionsRequest, context: RequestContext
    ) -> CreatePartitionsResponse:
        """CreatePartitions (API key 37)."""
        answer: CreatePartitionsResponse | None = await self._forward("CreatePartitions", request, request.timeout_ms)
        code = ErrorCode.REQUEST_TIMED_OUT
        return answer or CreatePartitionsResponse(
            results=[CreatePartitionsTopicResult(topic.name, code) for topic in request.topics]
        )

    async def describe_configs(
        self, request: DescribeConfigsRequest, context: RequestContext
    ) -> DescribeConfigsResponse:
        """DescribeConfigs (API key 32)."""
        answer: DescribeConfigsResponse | None = await self._forward("DescribeConfigs", request, DESCRIBE_TIMEOUT_MS)
        code = ErrorCode.REQUEST_TIMED_OUT
        return answer or DescribeConfigsResponse(
            results=[DescribeConfigsResult(code, None, r.resource_type, r.resource_name) for r in request.resources]
        )

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, context: RequestContext
    ) -> IncrementalAlterConfigsResponse:
        """IncrementalAlterConfigs (API key 44)."""
        answer: IncrementalAlterConfigsResponse | None = await self._forward(
            "IncrementalAlterConfigs", request, DESCRIBE_TIMEOUT_MS
        )
        code = ErrorCode.REQUEST_TIMED_OUT
        return answer or IncrementalAlterConfigsResponse(
            responses=[
                AlterConfigsResourceResponse(code, None, r.resource_type, r.resource_name) for r in request.resources
            ]
        )
