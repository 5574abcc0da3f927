"""Requests that all parts of `AdminClient` share: to any broker, and to single brokers.

Every request retries what can be retried within `default.api.timeout.ms` and raises `KafkaError` otherwise. A retry
after a lost response may find its own work: `create_topics` then raises TOPIC_ALREADY_EXISTS, as in Kafka.
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
"""The parts of a response that have an error code, each with what to say where the error has no text."""


def whole(response: Any) -> list[tuple[str, Any]]:
    """The response has one error code, its own."""
    return [(type(response).__name__.removesuffix("Response"), response)]


class AdminRequests:
    """The requests of one admin client."""

    _cluster: Cluster
    _timeout_s: float

    @property
    def _request_timeout_ms(self) -> int:
        return int(min(self._timeout_s * 1000, self._cluster.request_timeout_ms))

    async def _call(self, request: Any, results: Results = whole) -> Any:
        """The response of any broker; raises KafkaError for the first result that has an error."""
        said: str | None = None

        def retry(response: Any) -> ErrorCode | None:
            nonlocal said
            found = [result for _, result in results(response)]
            failed = [result for result in found if result.error_code]
            said = next(filter(None, (getattr(result, "error_message", None) for result in failed)), said)
            codes = [KafkaError(result.error_code).code for result in failed]
            # What a second attempt cannot have changed for all of them is not asked again.
            again = [code for code in codes if code.retriable and code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
            return again[0] if again and len(again) == len(found) else None

        try:
            response = await self._cluster.call_any(request, self._timeout_s, retry)
        except KafkaError as error:
            if said is None:
                raise
            raise KafkaError(error.code, said) from None  # what a broker said tells more than how the last try ended
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
        """The brokers, as one of them sees them now."""
        response = await self._fetch_metadata(m.MetadataRequest())
        brokers = sorted(Node(each.node_id, each.host, each.port, each.rack) for each in response.brokers)
        return ClusterDescription(response.cluster_id, response.controller_id, brokers)

    async def _call_brokers(self, request: Any, nodes: Iterable[Node], timeout_s: float) -> dict[int, Any]:
        """Ask each of these brokers once: by its id its response, or the KafkaError why there is none."""

        async def ask(node: Node) -> Any:
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

        asked = list(nodes)
        answers = await asyncio.gather(*map(ask, asked))
        return {node.node_id: answer for node, answer in zip(asked, answers, strict=True)}

    async def _nodes(self, broker_id: int | None) -> list[Node]:
        """All brokers, or that one; raises KafkaError(BROKER_NOT_AVAILABLE) if there is none."""
        found = [node for node in (await self.describe_cluster()).brokers if broker_id in (None, node.node_id)]
        if not found:
            what = "no broker" if broker_id is None else f"no broker {broker_id}"
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"there is {what}")
        return found


def failure_of(result: Any, text: str) -> KafkaError | None:
    """The error of a part of a response, with `text` where it has none; None for a success."""
    if not result.error_code:
        return None
    return KafkaError(result.error_code, getattr(result, "error_message", None) or text)
