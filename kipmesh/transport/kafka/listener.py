"""The Kafka listeners of one broker: bind, accept, close idle and stalled connections, stop.

Limits apply to the broker, across all its listeners.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from kipmesh.transport.kafka.connection import Connection, Listener
from kipmesh.transport.kafka.limits import Limits, SharedState
from kipmesh.transport.pipeline import Pipeline

log = structlog.get_logger(__name__)

CHECK_INTERVAL_S_MAX = 5.0


class AddressError(Exception):
    """Raised by `WireServer.listen` if its address cannot be bound."""


class WireServer(SharedState):
    """All Kafka listeners of one broker, within one event loop."""

    def __init__(self, pipeline: Pipeline, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(pipeline, limits, clock)
        self._listeners: list[tuple[Listener, asyncio.Server]] = []
        self._checking: asyncio.Task[None] | None = None
        self._idle_s = limits.idle_ms_max / 1000
        self._stall_s = min(limits.stall_ms_max / 1000, self._idle_s)

    async def listen(
        self, name: str, host: str, port: int, ssl_context: ssl.SSLContext | None = None, *, has_sasl: bool = False
    ) -> int:
        """Start a listener and return the bound port; `port` 0 chooses a free one. Raises AddressError on failure."""
        loop = asyncio.get_running_loop()
        listener = Listener(self, name, loop, ssl_context, has_sasl=has_sasl)
        try:
            server = await loop.create_server(
                lambda: Connection(listener), host or None, port, backlog=self.limits.backlog
            )
        except OSError as error:
            raise AddressError(f"cannot listen on {host}:{port} ({name}): {error.strerror or error}") from None
        self._listeners.append((listener, server))
        self.metrics.add_listener(name)
        if self._checking is None:
            self._checking = loop.create_task(self._check_repeatedly(), name="wire-idle")
        bound: int = server.sockets[0].getsockname()[1]
        log.info("listening", listener=name, host=host, port=bound)
        return bound

    def check(self) -> None:
        """Close connections that are idle, have stalled, or do not read their responses."""
        now = self.clock()
        for listener, _server in self._listeners:
            for connection in list(listener.connections):
                connection.check(now, self._idle_s, self._stall_s)

    async def _check_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL_S_MAX, self._stall_s / 4))
            self.check()

    async def stop(self) -> None:
        """Close all listeners and connections. Idempotent."""
        if self._checking is not None:
            self._checking.cancel()
            with suppress(asyncio.CancelledError):
                await self._checking
            self._checking = None
        listeners, self._listeners = self._listeners, []
        for listener, server in listeners:
            listener.is_stopped = True
            server.close()
            tasks = [task for connection in list(listener.connections) for task in connection.abort()]
            tasks += listener.tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()
