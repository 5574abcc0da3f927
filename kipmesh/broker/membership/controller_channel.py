"""Requests from a broker to the active controller.

The channel sends to the quorum leader that the broker's own replica of the metadata log reports. When that changes, it
cancels pending requests to the previous leader and repeats them: a stopped process may keep connections open without a
response. If the replica knows no leader, or the leader does not respond, the channel tries the next voter with a short
timeout.

A request may therefore be carried out twice, as with the forwarding of Apache Kafka. Registration, heartbeats,
AlterPartition and reads tolerate that. For other requests `forward` reports whether the request was repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

import structlog

from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import Api
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

log = structlog.get_logger(__name__)

RETRY_BACKOFF_S = 0.05
STREAM_ATTEMPTS = 2
"""Attempts of a streamed request at the leading voter before other voters are tried."""
SEARCH_TIMEOUT_S = 0.5
"""Timeout of an attempt at a voter that is not known to lead. The leader may use the whole timeout of the call."""
_NOT_ACTIVE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.NOT_LEADER_OR_FOLLOWER})


class Forwarded(NamedTuple):
    """A response, and whether the request was sent more than once, so that an earlier attempt may have succeeded."""

    response: Any
    is_repeated: bool


class ControllerChannel:
    """The connection of one broker to the active controller. Belongs to the event loop."""

    def __init__(self, voters: tuple[Voter, ...], pool: ConnectionPool) -> None:
        self._voters = voters
        self._pool = pool
        self._leader: Voter | None = None
        self._current = voters[0]
        # The voter of each pending attempt, by the timeout that ends it.
        self._attempts: dict[asyncio.Timeout, Voter] = {}
        self._leader_found = asyncio.Event()

    @property
    def voter(self) -> Voter:
        """The voter that receives the next request."""
        return self._current

    def leader_changed(self, leader: Voter | None) -> None:
        """Record the quorum leader that the broker's replica reports, or None while it knows none.

        A new leader ends pending attempts at other voters, so that they are repeated at the leader.
        """
        if leader == self._leader:
            return
        self._leader = leader
        now = asyncio.get_running_loop().time()
        if leader is not None:
            self._current = leader
            self._leader_found.set()
            self._leader_found = asyncio.Event()
        for scope, voter in self._attempts.items():
            if voter != leader and not scope.expired():
                # While no leader is known, a pending attempt may still succeed.
                scope.reschedule(now if leader is not None else _earlier(scope.when(), self._search_limit(now)))

    async def call(self, api: Api, request: Any, timeout_s: float, *, streaming: bool = False) -> Any:
        """Send a request that may be carried out twice, and return the response. Repeats and raises like `forward`."""
        return (await self.forward(api, request, timeout_s, streaming=streaming)).response

    async def forward(self, api: Api, request: Any, timeout_s: float, *, streaming: bool = False) -> Forwarded:
        """Send a request, repeating it for up to `timeout_s` seconds until the active controller responds.

        Returns the last response, even if no voter was the active controller, and whether the request was repeated.
        Raises TransportError if the last attempt gets no response or the request is too large. With `streaming`, the
        request is sent over a long-lived stream.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        is_repeated = False
        # A broken stream does not mean that the controller failed: try the same voter first.
        leader_attempts = STREAM_ATTEMPTS if streaming else 0
        while True:
            voter = self._leader if leader_attempts > 0 and self._leader is not None else self._current
            try:
                response = await self._attempt(voter, api, request, deadline, streaming=streaming)
            except TransportError as error:
                if error.too_large or deadline - loop.time() <= RETRY_BACKOFF_S:
                    raise
                log.debug("controller did not respond", voter=voter.id, method=api.name, error=str(error))
                leader_attempts -= 1
                if leader_attempts <= 0 or voter != self._leader:
                    self._try_next_voter(voter)
            else:
                if not is_inactive(api, response) or deadline - loop.time() <= RETRY_BACKOFF_S:
                    return Forwarded(response, is_repeated)
                if voter != self._leader:  # the quorum leader becomes active soon
                    self._try_next_voter(voter)
            # Also after NOT_CONTROLLER: a deposed controller returns it for records that it had appended.
            is_repeated = True
            await self._pause(voter)

    async def _attempt(self, voter: Voter, api: Api, request: Any, deadline: float, *, streaming: bool) -> Any:
        connection = self._pool.get(voter.address)
        now = asyncio.get_running_loop().time()
        limit = deadline if voter == self._leader else _earlier(deadline, self._search_limit(now))
        left_s = max(deadline - now, 0.001)
        try:
            async with asyncio.timeout_at(limit) as scope:
                self._attempts[scope] = voter
                try:
                    assert api.service is not None
                    if streaming:
                        return await connection.exchange(api.service.name, f"{api.rpc}Stream", request, left_s)
                    return await connection.call(api.service.name, api.rpc, request, left_s)
                finally:
                    del self._attempts[scope]
        except TimeoutError:
            raise TransportError.no_response(voter.address, api.name) from None

    def _search_limit(self, now: float) -> float | None:
        return now + SEARCH_TIMEOUT_S if len(self._voters) > 1 else None

    def _try_next_voter(self, voter: Voter) -> None:
        """Switch to the next voter. If several requests fail at the same voter, only the first one switches."""
        if voter == self._current:
            self._current = self._voters[(self._voters.index(voter) + 1) % len(self._voters)]

    async def _pause(self, tried: Voter) -> None:
        """Wait for the retry backoff, or until the leader becomes known. Does not wait if another voter leads."""
        if self._leader is not None and self._leader == self._current != tried:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_BACKOFF_S):
                await self._leader_found.wait()


async def try_call(channel: ControllerChannel, api: Api, request: Any, timeout_s: float) -> Any:
    """Return the response to a request that the caller repeats later.

    Returns None, and logs a warning, if there is no response or it has a top-level error.
    """
    try:
        response = await channel.call(api, request, timeout_s)
    except TransportError as error:
        log.warning("request to the controller failed", api=api.name, error=str(error))
        return None
    if response.error_code:
        # After STALE_BROKER_EPOCH the next heartbeat ends this process.
        log.warning("request refused by the controller", api=api.name, error=ErrorCode.of(response.error_code).name)
        return None
    return response


def _earlier(first: float | None, second: float | None) -> float | None:
    return min((when for when in (first, second) if when is not None), default=None)


def is_inactive(api: Api, response: Any) -> bool:
    """Whether a response only has errors that a voter returns when it is not the active controller."""
    codes = api.errors(response)
    return bool(codes) and not api.has_success(response) and all(code in _NOT_ACTIVE for code in codes)
