"""Sends quorum requests to voters, each in its own task, so that a slow peer does not delay other requests.

Fetches to a peer share a stream, which halves the latency of a unary call. A new fetch cancels an abandoned one
together with its stream, because the peer may hold the old fetch for its whole maximum wait.

Repeated failures of a peer are reported with a delay of up to `FAILURE_PAUSE_MAX_S`, so that it is retried less often.

Invariant: a request ends in exactly one of `ResponseReceived` and `RequestFailed`, or in neither after `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from kipmesh import messages as m
from kipmesh.core.config import Voter
from kipmesh.core.errors import KafkaError
from kipmesh.core.raft.types import Request, RequestFailed, Response, ResponseReceived, Send
from kipmesh.node import BackgroundTasks
from kipmesh.transport.grpc.client import ConnectionPool, FetchStream, TransportError

log = structlog.get_logger(__name__)

SERVICE = "Quorum"
METHODS: Mapping[type[Any], str] = {
    m.VoteRequest: "Vote",
    m.BeginQuorumEpochRequest: "BeginQuorumEpoch",
    m.EndQuorumEpochRequest: "EndQuorumEpoch",
}
FAILURE_PAUSE_S = 0.005
FAILURE_PAUSE_MAX_S = 0.1


class _Peer:
    """The connection to one voter."""

    def __init__(self, address: str, pool: ConnectionPool) -> None:
        self.address = address
        self.failures = 0
        self._pool = pool
        self._stream: FetchStream | None = None
        self._is_fetching = False

    async def send(self, request: Request, timeout_s: float) -> Response:
        """Send a request and return its response. Raises TransportError, or KafkaError if it cannot be encoded."""
        if isinstance(request, m.FetchRequest):
            return await self._fetch(request, timeout_s)
        connection = self._pool.get(self.address)
        response: Response = await connection.call(SERVICE, METHODS[type(request)], request, timeout_s)
        return response

    async def _fetch(self, request: m.FetchRequest, timeout_s: float) -> Response:
        if self._is_fetching:
            self.drop_stream()
        stream = self._stream
        if stream is None:
            stream = self._stream = self._pool.get(self.address).fetch_stream(SERVICE)
        self._is_fetching = True
        try:
            response: Response = await stream.exchange(request, timeout_s)
        except BaseException:
            stream.cancel()
            if self._stream is stream:
                self._stream, self._is_fetching = None, False
            raise
        if self._stream is stream:
            self._is_fetching = False
        return response

    def drop_stream(self) -> None:
        """Cancel the fetch stream, if any; a fetch in flight fails."""
        if self._stream is not None:
            self._stream.cancel()
        self._stream, self._is_fetching = None, False


class Transport:
    """Sends the requests of one quorum replica to the voters, each in its own task.

    `post` receives a `ResponseReceived` or `RequestFailed` for each request. `on_defect` is called with an unexpected
    error.
    """

    def __init__(
        self,
        voters: tuple[Voter, ...],
        pool: ConnectionPool,
        post: Callable[[ResponseReceived | RequestFailed], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._peers = {voter.id: _Peer(voter.address, pool) for voter in voters}
        self._post = post
        self._tasks = BackgroundTasks(on_defect)

    def send(self, effect: Send) -> None:
        """Send a request to the voter `effect.node_id` in a new task. `post` receives the result."""
        self._tasks.spawn(self._exchange(effect, self._peers[effect.node_id]))

    async def _exchange(self, effect: Send, peer: _Peer) -> None:
        try:
            response = await peer.send(effect.request, effect.timeout_ms / 1000)
        except (TransportError, KafkaError) as error:
            log.debug("quorum request failed", voter=effect.node_id, error=str(error))
            peer.failures += 1
            if peer.failures > 1:
                await asyncio.sleep(min(FAILURE_PAUSE_S * (1 << min(peer.failures, 10)), FAILURE_PAUSE_MAX_S))
            self._post(RequestFailed(effect.request_id))
        else:
            peer.failures = 0
            self._post(ResponseReceived(effect.request_id, response))

    async def close(self) -> None:
        """Cancel all requests without reporting their results. Idempotent."""
        for peer in self._peers.values():
            peer.drop_stream()
        await self._tasks.cancel()
