"""Calls from a broker to the active controller, whichever voter that is.

The channel goes where the broker's own replica of the metadata quorum says that the leader is, at once when that
changes: calls under way to the one before are given up and repeated, for a stopped process keeps its connections open
and answers nothing. Where the replica knows no better, or what it names does not answer, the channel goes on to the
next voter; an attempt there has little time, so that one that is silent costs little.

So a request may be done twice, as in Apache Kafka, whose forwarding repeats what a broken connection left open.
Registration, heartbeats, AlterPartition and questions may be; for the others `forward` says whether it was repeated.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import structlog

from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import Api
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

log = structlog.get_logger(__name__)

RETRY_BACKOFF_S = 0.05
STREAM_ATTEMPTS = 2
"""How often a request of a stream is tried at the voter that leads before others are asked."""
SEARCH_TIMEOUT_S = 0.5
"""How long a voter may be silent that is not known to lead; one that leads has the call's whole time."""
_NOT_ACTIVE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.NOT_LEADER_OR_FOLLOWER})


class Forwarded(NamedTuple):
    """An answer, and whether the request was sent before without one: then it may have been done already."""

    response: Any
    is_repeated: bool


class ControllerChannel:
    """One broker's way to the active controller; it belongs to the event loop."""

    def __init__(self, voters: tuple[Voter, ...], pool: ConnectionPool) -> None:
        self._voters = voters
        self._pool = pool
        self._leader: Voter | None = None
        self._current = voters[0]
        # Where each attempt under way goes, and what ends it.
        self._attempts: dict[asyncio.Timeout, Voter] = {}
        self._moved = asyncio.Event()

    @property
    def voter(self) -> Voter:
        """Whom the next call goes to."""
        return self._current

    def leader_changed(self, leader: Voter | None) -> None:
        """What the broker's replica of the quorum knows now; None when it looks for a leader."""
        if leader == self._leader:
            return
        self._leader = leader
        now = asyncio.get_running_loop().time()
        if leader is not None:
            self._current = leader
            self._moved.set()
            self._moved = asyncio.Event()
        for scope, voter in self._attempts.items():
            if voter != leader and not scope.expired():
                # Without a leader there is nobody better to ask: the answer may still come.
                scope.reschedule(now if leader is not None else _earlier(scope.when(), self._search_limit(now)))

    async def call(self, api: Api, request: Any, timeout_s: float, *, streaming: bool = False) -> Any:
        """One call that may be done twice, repeated until `timeout_s` is over; raises TransportError."""
        return (await self.forward(api, request, timeout_s, streaming=streaming)).response

    async def forward(self, api: Api, request: Any, timeout_s: float, *, streaming: bool = False) -> Forwarded:
        """The same for a call whose sender must know whether it was repeated.

        The last answer is given even if it is that nobody is active; TransportError when there was none in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        is_repeated = False
        # A stream stays where it is while it can: that it breaks says little of the controller at its other end.
        loyalty = STREAM_ATTEMPTS if streaming else 0
        while True:
            voter = self._leader if loyalty > 0 and self._leader is not None else self._current
            try:
                response = await self._attempt(voter, api, request, deadline, streaming=streaming)
            except TransportError as error:
                if error.too_large or deadline - loop.time() <= RETRY_BACKOFF_S:
                    raise
                log.debug("no answer of a controller", voter=voter.id, method=api.name, error=str(error))
                loyalty -= 1
                if loyalty <= 0 or voter != self._leader:
                    self._failed(voter)
            else:
                if not is_inactive(api, response):
                    return Forwarded(response, is_repeated)
                if deadline - loop.time() <= RETRY_BACKOFF_S:
                    return Forwarded(response, is_repeated)
                if voter != self._leader:  # who leads will be active in a moment
                    self._failed(voter)
            # Also after NOT_CONTROLLER: who is deposed says so of what it had appended, too.
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

    def _failed(self, voter: Voter) -> None:
        """Go on to the next one; of many calls that failed there, only the first moves."""
        if voter == self._current:
            self._current = self._voters[(self._voters.index(voter) + 1) % len(self._voters)]

    async def _pause(self, tried: Voter) -> None:
        """A moment, cut short when the leader becomes known."""
        if self._leader is not None and self._leader == self._current != tried:
            return
        try:
            async with asyncio.timeout(RETRY_BACKOFF_S):
                await self._moved.wait()
        except TimeoutError:
            pass


async def try_call(channel: ControllerChannel, api: Api, request: Any, timeout_s: float) -> Any:
    """The response to a call that the caller repeats after a pause; None, with a warning, for an error of the whole."""
    try:
        response = await channel.call(api, request, timeout_s)
    except TransportError as error:
        log.warning(f"{api.name} failed", error=str(error))
        return None
    if response.error_code:
        # A stale broker epoch is for the next heartbeat to find out, which ends this process.
        log.warning(f"{api.name} refused", error=ErrorCode.of(response.error_code).name)
        return None
    return response


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((when for when in (one, other) if when is not None), default=None)


def is_inactive(api: Api, response: Any) -> bool:
    """Whether the response states nothing but that this voter is not the active controller."""
    codes = api.errors(response)
    return bool(codes) and not api.has_success(response) and all(code in _NOT_ACTIVE for code in codes)
