"""Requests to any broker and to single brokers, shared by all parts of `AdminClient`.

Retriable errors are retried within `default.api.timeout.ms`. A retry after a lost response may find the change already
made: `create_topics` then raises TOPIC_ALREADY_EXISTS, as in Kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from kipmesh import messages as m
from kipmesh.client.calls import call, transport_failure
from kipmesh.client.cluster import Cluster
from kipmesh.client.types import ClusterDescription, Node
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError

Results = Callable[[Any], Iterable[tuple[str, Any]]]
"""Returns the parts of a response that have an error code, each with the message for an error without one."""


def single_result(response: Any) -> list[tuple[str, Any]]:
    """Return `[(error message, response)]` for a response that has one error code for all its parts."""
    return [(f"{type(response).__name__.removesuffix('Response')} failed", response)]


class AdminRequests:
    """Base class of the parts of `AdminClient`: sends requests and converts their errors."""

    _cluster: Cluster
    _timeout_s: float

    @property
    def _request_timeout_ms(self) -> int:
        return int(min(self._timeout_s * 1000, self._cluster.request_timeout_ms))

    async def _call(self, request: Any, results: Results = single_result) -> Any:
        """Send a request to any broker and return the response. Raises KafkaError for the first failed result.

        Retries within `default.api.timeout.ms` while all results have retriable errors, except
        UNKNOWN_TOPIC_OR_PARTITION.
        """
        message: str | None = None

        def retry(response: Any) -> ErrorCode | None:
            nonlocal message
            parts = [result for _, result in results(response)]
            failed = [result for result in parts if result.error_code]
            message = next(filter(None, (getattr(result, "error_message", None) for result in failed)), message)
            codes = [KafkaError(result.error_code).code for result in failed]
            # Retry only if all results failed: the others have been applied.
            retriable = [code for code in codes if code.retriable and code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
            return retriable[0] if retriable and len(retriable) == len(parts) else None

        try:
            response = await self._cluster.call_any(request, self._timeout_s, retry)
        except KafkaError as error:
            if message is None:
                raise
            raise KafkaError(error.code, message) from None  # a broker's message is more specific
        for name, result in results(response):
            failure = failure_of(result, name)
            if failure is not None:
                raise failure
        return response

    async def _fetch_metadata(self, request: m.MetadataRequest, timeout_s: float | None = None) -> m.MetadataResponse:
        def retry(response: m.MetadataResponse) -> ErrorCode | None:
            return None if response.brokers else ErrorCode.BROKER_NOT_AVAILABLE

        response: m.MetadataResponse = await self._cluster.call_any(request, timeout_s or self._timeout_s, retry)
        return response

    async def describe_cluster(self) -> ClusterDescription:
        """Return the brokers, sorted by id, and the controller, as currently known to one broker. Raises KafkaError."""
        response = await self._fetch_metadata(m.MetadataRequest())
        brokers = sorted(Node(each.node_id, each.host, each.port, each.rack) for each in response.brokers)
        return ClusterDescription(response.cluster_id, response.controller_id, brokers)

    async def _call_brokers(self, request: Any, nodes: Iterable[Node], timeout_s: float) -> dict[int, Any]:
        """Send a request to each broker without retries. Returns the response or a KafkaError by broker id."""

        async def call_broker(node: Node) -> Any:
            try:
                response = await call(self._cluster.pool, node.address, request, timeout_s)
            except TransportError as error:
                code = ErrorCode.UNSUPPORTED_VERSION if error.unimplemented else transport_failure(error).code
                failure = KafkaError(code, f"broker {node.node_id}: {error}")
                failure.__cause__ = error
                return failure
            if response.error_code:
                text = getattr(response, "error_message", None) or "no reason given"
                return KafkaError(response.error_code, f"broker {node.node_id}: {text}")
            return response

        called = list(nodes)
        responses = await asyncio.gather(*map(call_broker, called))
        return {node.node_id: response for node, response in zip(called, responses, strict=True)}

    async def _nodes(self, broker_id: int | None) -> list[Node]:
        """Return the broker with that id, or all brokers for None.

        Raises KafkaError(BROKER_NOT_AVAILABLE) if there is none.
        """
        found = [node for node in (await self.describe_cluster()).brokers if broker_id in (None, node.node_id)]
        if not found:
            text = "the cluster has no brokers" if broker_id is None else f"broker {broker_id} is not in the cluster"
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, text)
        return found


def failure_of(result: Any, text: str) -> KafkaError | None:
    """Return (do not raise) the error of a result, with `text` if it has no message; None on success."""
    if not result.error_code:
        return None
    return KafkaError(result.error_code, getattr(result, "error_message", None) or text)
