"""Requests of the metadata quorum to its voters, each in a task of its own, so that a slow peer delays nobody.

Fetches to a peer share a stream, which is half the latency of a unary call. A fetch that nobody waits for any more
is dropped with its stream when the next one goes out: it may lie with the peer for its whole time.

A peer that refuses again and again is asked less often: its failures are told late, up to `FAILURE_PAUSE_MAX_S`. What
the machine does after that is its own business.

Invariant: a request ends in exactly one of `on_response` and `on_failure`, or in neither after `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from kipmesh import messages as m
from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft.types import Request, Response, Send
from kipmesh.rpc.client import ConnectionPool, FetchStream, TransportError

log = structlog.get_logger(__name__)

SERVICE = "Quorum"
METHODS: Mapping[type[Any], str] = {
    m.VoteRequest: "Vote",
    m.BeginQuorumEpochRequest: "BeginQuorumEpoch",
    m.EndQuorumEpochRequest: "EndQuorumEpoch",
}
FAILURE_PAUSE_S = 0.005
FAILURE_PAUSE_MAX_S = 0.1


def refusal(request: Request) -> Response:
    """What a node answers that takes no part in the quorum any more, or not yet."""
    match request:
        case m.FetchRequest():
            return m.FetchResponse(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
        case m.VoteRequest():
            return m.VoteResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE)
        case m.BeginQuorumEpochRequest():
            return m.BeginQuorumEpochResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE)
        case m.EndQuorumEpochRequest():
            return m.EndQuorumEpochResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE)


class _Peer:
    """One voter, as it is reached."""

    def __init__(self, address: str, pool: ConnectionPool) -> None:
        self.address = address
        self.failures = 0
        self._pool = pool
        self._stream: FetchStream | None = None
        self._is_fetching = False

    async def ask(self, request: Request, timeout_s: float) -> Response:
        """One exchange; TransportError, KafkaError for what cannot be said."""
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
        """The fetch that is under way fails."""
        if self._stream is not None:
            self._stream.cancel()
        self._stream, self._is_fetching = None, False


class Transport:
    """See the module."""

    def __init__(
        self,
        voters: tuple[Voter, ...],
        pool: ConnectionPool,
        on_response: Callable[[int, Response], None],
        on_failure: Callable[[int], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        """`on_failure(request_id)`: there will be no response. `on_defect`: an error that is no failure of a peer."""
        self._peers = {voter.id: _Peer(voter.address, pool) for voter in voters}
        self._on_response = on_response
        self._on_failure = on_failure
        self._on_defect = on_defect
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, effect: Send) -> None:
        """Ask a voter."""
        self._spawn(self._exchange(effect, self._peers[effect.node_id]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_defect(error)

    async def _exchange(self, effect: Send, peer: _Peer) -> None:
        try:
            response = await peer.ask(effect.request, effect.timeout_ms / 1000)
        except (TransportError, KafkaError) as error:
            log.debug("quorum request failed", voter=effect.node_id, error=str(error))
            peer.failures += 1
            if peer.failures > 1:
                await asyncio.sleep(min(FAILURE_PAUSE_S * (1 << min(peer.failures, 10)), FAILURE_PAUSE_MAX_S))
            self._on_failure(effect.request_id)
        else:
            peer.failures = 0
            self._on_response(effect.request_id, response)

    async def close(self) -> None:
        """Drop what is under way; nothing is told of it. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for peer in self._peers.values():
            peer.drop_stream()
        await asyncio.gather(*tasks, return_exceptions=True)
