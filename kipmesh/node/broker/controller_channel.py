"""Calls from a broker to the active controller, whichever voter that is."""

from __future__ import annotations

import asyncio
from typing import Any

from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode
from kipmesh.rpc.client import Connection, ConnectionPool, TransportError

RETRY_BACKOFF_S = 0.1


class ControllerChannel:
    """Remembers who answered last and goes on to the next voter when one is silent or not active."""

    def __init__(self, voters: tuple[Voter, ...], pool: ConnectionPool) -> None:
        self._voters = voters
        self._pool = pool
        self._current = 0

    @property
    def voter(self) -> Voter:
        """Whom the next call goes to."""
        return self._voters[self._current % len(self._voters)]

    def connection(self) -> Connection:
        """The connection to that voter."""
        return self._pool.get(self.voter.address)

    def try_next(self) -> None:
        """The current one failed."""
        self._current += 1

    async def call(self, service: str, method: str, request: Any, timeout_s: float) -> Any:
        """One call, retried at the next voter until `timeout_s` is over; raises TransportError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            connection = self.connection()
            left_s = max(deadline - loop.time(), 0.001)
            try:
                response = await connection.call(service, method, request, left_s)
            except TransportError:
                self.try_next()
                if deadline - loop.time() <= RETRY_BACKOFF_S:
                    raise
            else:
                inactive = getattr(response, "error_code", 0) == ErrorCode.NOT_CONTROLLER
                if not inactive or deadline - loop.time() <= RETRY_BACKOFF_S:
                    return response
                self.try_next()
            await asyncio.sleep(RETRY_BACKOFF_S)
