"""Calls to the coordinator of one group, whichever broker that is.

The coordinator is found by asking any broker, and looked for again when it does not answer or says that it is not
(or not yet) the one. Invariant: `call` gives an answer whose error, if any, does not come from having asked the wrong
broker, or raises a KafkaError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from kipmesh.client.cluster import Cluster
from kipmesh.client.types import Node
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import FindCoordinatorRequest, FindCoordinatorResponse
from kipmesh.rpc.client import TransportError

ELSEWHERE = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)


def error_codes(answer: Any) -> Iterator[int]:
    """All errors in an answer: its own, those of its topics, groups and partitions."""
    code = getattr(answer, "error_code", 0)
    if code:
        yield code
    for field in ("coordinators", "topics", "groups", "partitions", "results"):
        for part in getattr(answer, field, ()):
            yield from error_codes(part)


class GroupChannel:
    """One client's way to the coordinator of `group_id`."""

    def __init__(self, cluster: Cluster, group_id: str) -> None:
        self._cluster = cluster
        self._group_id = group_id
        self.coordinator: Node | None = None
        """The broker that was found last; None while it is to be looked for."""

    def forget(self) -> None:
        """Look for the coordinator before the next call."""
        self.coordinator = None

    async def once(self, method: str, request: Any, timeout_s: float) -> Any:
        """Ask once, within `timeout_s`; raises KafkaError when there is no answer."""
        deadline = time.monotonic() + timeout_s
        node = self.coordinator or await self._find(timeout_s)
        try:
            left = max(deadline - time.monotonic(), 0.001)
            answer = await self._cluster.pool.get(node.address).call("Groups", method, request, left)
        except TransportError as error:
            self.forget()
            code = ErrorCode.REQUEST_TIMED_OUT if error.timed_out else ErrorCode.NETWORK_EXCEPTION
            raise KafkaError(code, str(error)) from None
        if not ELSEWHERE.isdisjoint(error_codes(answer)):
            self.forget()
        return answer

    async def call(self, method: str, request: Any, timeout_s: float, *, answer_within_s: float | None = None) -> Any:
        """Ask until the coordinator has answered, for `timeout_s`; one answer may take `answer_within_s`."""
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                answer = await self.once(method, request, min(left, answer_within_s or left))
            except KafkaError as error:
                if not error.retriable:
                    raise
                failure = error
            else:
                code = next((code for code in error_codes(answer) if code in ELSEWHERE), None)
                if code is None:
                    return answer
                failure = KafkaError(code, f"{method} of group {self._group_id!r}")
            attempts += 1
            delay = self._cluster.backoff.delay_s(attempts)
            if time.monotonic() + delay >= deadline:
                raise failure
            await asyncio.sleep(delay)

    async def _find(self, timeout_s: float) -> Node:
        def retry(response: FindCoordinatorResponse) -> ErrorCode | None:
            code = response.coordinators[0].error_code if response.coordinators else ErrorCode.COORDINATOR_NOT_AVAILABLE
            return ErrorCode.of(code) if ErrorCode.of(code).retriable else None

        request = FindCoordinatorRequest(coordinator_keys=[self._group_id])
        response = await self._cluster.call_any("Groups", "FindCoordinator", request, timeout_s, retry)
        found = response.coordinators[0]
        if found.error_code:
            raise KafkaError(found.error_code, found.error_message or "")
        self.coordinator = Node(found.node_id, found.host, found.port)
        return self.coordinator
