"""The listeners of one broker for Kafka's protocol: they bind, accept, look after their connections, and stop.

Limits are the broker's, whichever listener a connection came by.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import structlog

from kipmesh.messages.kafka import ITEMS_MAX
from kipmesh.messages.schema import NEVER
from kipmesh.transport.pipeline import Pipeline
from kipmesh.wire.connection import Connection
from kipmesh.wire.framing import STAGING_BYTES
from kipmesh.wire.limits import ConnectionCounts, RequestMemory, ResponseMemory
from kipmesh.wire.metrics import WireMetrics

log = structlog.get_logger(__name__)

LOOK_INTERVAL_S_MAX = 5.0


class AddressError(Exception):
    """A listener's address cannot be bound."""


class Limits(NamedTuple):
    """The broker's, as it is configured; docs/wire.md says what each is."""

    request_bytes_max: int
    queued_bytes_max: int
    connections_max: int
    connections_per_ip_max: int
    idle_ms_max: int
    other_request_bytes_max: int = 16 << 20
    items_max: int = ITEMS_MAX
    pending_max: int = 16
    unsent_bytes_max: int = 256 << 20
    unsent_bytes_per_connection_max: int = 256 << 10
    stall_ms_max: int = 30_000
    handshake_ms_max: int = 10_000
    sasl_request_bytes_max: int = 64 << 10
    backlog: int = 1024


class Shared:
    """What the connections of one listener share with it."""

    def __init__(
        self, server: WireServer, listener: str, ssl_context: ssl.SSLContext | None, *, has_sasl: bool
    ) -> None:
        self.has_sasl = has_sasl
        self.ssl_context = ssl_context
        self.limits = server.limits
        self.loop = asyncio.get_running_loop()
        self.clock = server.clock
        self.listener = listener
        self.staging = server.staging
        self.memory = server.memory
        self.unsent = server.unsent
        self.pipeline = server.pipeline
        self.handle = server.pipeline.handle
        self.apis = server.apis
        self.metrics = server.metrics
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        """Requests under way, also of connections that are lost."""
        self.is_stopped = False
        self._server = server

    def is_flexible(self, key: int, version: int) -> bool:
        """Whether the request's header has tagged fields."""
        api = self.apis.get(key)
        return api is not None and api.flexible_since <= version <= api.versions.last

    def request_bytes_max(self, key: int) -> int:
        """Largest request of an API."""
        limit, other = self.limits.request_bytes_max, self.limits.other_request_bytes_max
        api = self.apis.get(key)
        if api is not None and api.has_records:
            return limit
        return min(limit, other, other if api is None or api.request_bytes_max is None else api.request_bytes_max)

    @property
    def is_short(self) -> bool:
        """Whether connections wait for memory that others hold."""
        return bool(self.memory.waiting) or self.unsent.is_short

    def admit(self, connection: Connection) -> bool:
        """Whether there may be one more."""
        limit = self._server.counts.add(connection.ip)
        if limit:
            self.metrics.refused(limit)
            log.warning("connection refused", limit=limit, ip=connection.ip, listener=self.listener)
            return False
        self.connections.add(connection)
        self.metrics.opened(self.listener)
        return True

    def gone(self, connection: Connection) -> None:
        """It is lost."""
        self.connections.discard(connection)
        self._server.counts.remove(connection.ip)
        self.metrics.closed(self.listener)


class WireServer:
    """All listeners of one broker; it belongs to the event loop."""

    def __init__(
        self,
        pipeline: Pipeline,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.apis = {api.key: api for api in pipeline.handlers if api.key is not None and api.versions != NEVER}
        self.limits = limits
        self.clock = clock
        self.staging = bytearray(STAGING_BYTES)
        self.memory = RequestMemory(limits.queued_bytes_max)
        self.unsent = ResponseMemory(limits.unsent_bytes_max)
        self.counts = ConnectionCounts(limits.connections_max, limits.connections_per_ip_max)
        self.metrics = WireMetrics(lambda: self.memory.bytes_used, lambda: self.unsent.bytes_used)
        self._listeners: list[tuple[Shared, asyncio.Server]] = []
        self._looking: asyncio.Task[None] | None = None
        self._idle_s = limits.idle_ms_max / 1000
        self._stall_s = min(limits.stall_ms_max / 1000, self._idle_s)

    async def listen(
        self, name: str, host: str, port: int, ssl_context: ssl.SSLContext | None = None, *, has_sasl: bool = False
    ) -> int:
        """Bind and serve; returns the bound port (the given one, or a free one for 0). Raises AddressError."""
        shared = Shared(self, name, ssl_context, has_sasl=has_sasl)
        try:
            server = await shared.loop.create_server(
                lambda: Connection(shared), host or None, port, backlog=self.limits.backlog
            )
        except OSError as error:
            raise AddressError(f"cannot listen on {host}:{port} ({name}): {error.strerror or error}") from None
        self._listeners.append((shared, server))
        self.metrics.listens(name)
        if self._looking is None:
            self._looking = shared.loop.create_task(self._look(), name="wire-idle")
        bound: int = server.sockets[0].getsockname()[1]
        log.info("listening", listener=name, host=host, port=bound)
        return bound

    def look(self) -> None:
        """End connections that are idle, that stalled, or that do not read."""
        now = self.clock()
        for shared, _server in self._listeners:
            for connection in list(shared.connections):
                connection.look(now, self._idle_s, self._stall_s)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_INTERVAL_S_MAX, self._stall_s / 4))
            self.look()

    async def stop(self) -> None:
        """Accept nothing more and end every connection; idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
            self._looking = None
        listeners, self._listeners = self._listeners, []
        for shared, server in listeners:
            shared.is_stopped = True
            server.close()
            tasks = [task for connection in list(shared.connections) for task in connection.abort()]
            tasks += shared.tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()
