"""The service Quorum of a voter: what peers, observers and tools ask, answered by the driver.

The machine checks cluster ids, epochs and who asks. Here are the limits that a request from anywhere must keep: how
long a fetch waits and how much one DescribeQuorum may name.
"""

from __future__ import annotations

from collections.abc import Callable

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft.types import Response
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.rpc.server import RequestContext

FETCH_MAX_WAIT_MS = 60_000
DESCRIBED_PARTITIONS_MAX = 100
"""Partitions of one DescribeQuorum; there is only one that has a quorum."""


class QuorumService:
    """Serves one driver. Waiting fetches are answered when the driver stops."""

    def __init__(self, driver: QuorumDriver, served: Callable[[m.FetchSnapshotResponse], None] | None = None) -> None:
        """`served` is told each answer to FetchSnapshot."""
        self._driver = driver
        self._served = served

    async def vote(self, request: m.VoteRequest, context: RequestContext) -> Response:
        """Vote (API key 52)."""
        return await self._driver.request(request)

    async def begin_quorum_epoch(self, request: m.BeginQuorumEpochRequest, context: RequestContext) -> Response:
        """BeginQuorumEpoch (API key 53)."""
        return await self._driver.request(request)

    async def end_quorum_epoch(self, request: m.EndQuorumEpochRequest, context: RequestContext) -> Response:
        """EndQuorumEpoch (API key 54)."""
        return await self._driver.request(request)

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> Response:
        """Fetch (API key 1) of `__cluster_metadata-0`, by replicas and by consumers."""
        return await self._driver.request(request._replace(max_wait_ms=min(request.max_wait_ms, FETCH_MAX_WAIT_MS)))

    async def fetch_snapshot(self, request: m.FetchSnapshotRequest, context: RequestContext) -> m.FetchSnapshotResponse:
        """FetchSnapshot (API key 59)."""
        response = await self._driver.fetch_snapshot(request)
        if self._served is not None:
            self._served(response)
        return response

    async def describe_quorum(
        self, request: m.DescribeQuorumRequest, context: RequestContext
    ) -> m.DescribeQuorumResponse:
        """DescribeQuorum (API key 55); without topics it describes the metadata partition."""
        if sum(max(1, len(topic.partition_indexes)) for topic in request.topics) > DESCRIBED_PARTITIONS_MAX:
            return m.DescribeQuorumResponse(error_code=ErrorCode.INVALID_REQUEST)
        return self._driver.describe(request)
