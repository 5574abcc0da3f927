"""A listener with two APIs whose responses tests control, and a client that sends bytes.

Annotations are not postponed here, because message declarations read their types at runtime.
"""

import asyncio
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from kipmesh.core.context import RequestContext
from kipmesh.messages.schema import Message, Records, field, parse_versions
from kipmesh.messages.table import API_VERSIONS, Api
from kipmesh.transport.kafka.connection import Connection
from kipmesh.transport.kafka.handshake import Sasl, connection_handlers
from kipmesh.transport.kafka.limits import Limits
from kipmesh.transport.kafka.listener import WireServer
from kipmesh.transport.metrics import RequestMetrics
from kipmesh.transport.pipeline import NO_RESPONSE, CloseConnection, Handler, Pipeline

LIMITS = Limits(1 << 20, 1 << 20, 100, 100, 600_000, stall_ms_max=300_000, handshake_ms_max=300_000)
"""Limits that a slow machine does not reach. Tests of timeouts call `Wire.advance_and_check`."""
IDLE_S, STALL_S = LIMITS.idle_ms_max / 1000, LIMITS.stall_ms_max / 1000
ECHO, WRITE = 1000, 1001


class TextRequest(Message):
    """The request of both APIs."""

    text: str = field()
    data: Records = field()


class TextResponse(Message):
    """The response of both APIs."""

    text: str = field()
    data: Records = field()


def _api(key: int, name: str, *, is_pipelined: bool) -> Api:
    return Api(
        key,
        name,
        TextRequest,
        TextResponse,
        service=None,
        versions=parse_versions("1-2"),
        flexible_since=2,
        is_pipelined=is_pipelined,
    )


ECHO_API = _api(ECHO, "Echo", is_pipelined=False)
"""An API whose requests are handled one after another."""
WRITE_API = _api(WRITE, "Write", is_pipelined=True)
"""An API whose requests overlap."""


class TextHandler:
    """Handles both APIs. Requests whose text starts with `wait` block until the test releases them."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []

    async def respond(self, request: TextRequest, context: RequestContext) -> TextResponse | None:
        """Return the text with the client id and the listener."""
        self.started.append(request.text)
        if request.text.startswith("wait"):
            try:
                await self.gates.setdefault(request.text, asyncio.Event()).wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.text)
                raise
        if request.text == "fail":
            raise RuntimeError("injected failure")
        if request.text == "hang up":
            raise CloseConnection("acks-0", "injected failure")
        if request.text == "none":
            return NO_RESPONSE
        return TextResponse(f"{request.text}/{context.client_id}/{context.listener}", request.data)

    def release(self, text: str) -> None:
        """Release a blocked request."""
        self.gates.setdefault(text, asyncio.Event()).set()

    def handlers(self, sasl: Sasl | None) -> dict[Api, Handler]:
        """Return the handlers of both APIs, of ApiVersions and, if `sasl` is set, of the SASL requests."""
        handlers: dict[Api, Handler] = {ECHO_API: self.respond, WRITE_API: self.respond}
        connection = connection_handlers((*handlers, API_VERSIONS), sasl)
        if sasl is None:
            return {**handlers, API_VERSIONS: connection[API_VERSIONS]}
        return {**handlers, **connection}


def frame(key: int, correlation_id: int, text: str, version: int = 1, data: bytes = b"") -> bytes:
    """Encode a request of one of the two APIs from the client `me`."""
    client_id = "me"
    body = struct.pack(">h", len(text.encode())) + text.encode() + struct.pack(">i", len(data)) + data
    header = struct.pack(">hhih", key, version, correlation_id, len(client_id)) + client_id.encode()
    return struct.pack(">i", len(header) + len(body)) + header + body


class Client:
    """One connection to the listener."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def response(self) -> tuple[int, bytes]:
        """Return the correlation id and the body of the next response."""
        size = struct.unpack(">i", await self.reader.readexactly(4))[0]
        data = await self.reader.readexactly(size)
        return struct.unpack(">i", data[:4])[0], data[4:]

    async def text(self) -> tuple[int, str]:
        """Return the correlation id and the text of the next response."""
        correlation_id, data = await self.response()
        size = struct.unpack(">h", data[:2])[0]
        return correlation_id, data[2 : 2 + size].decode()

    async def is_closed(self) -> bool:
        """Wait for the end of the stream; return False if more bytes arrive instead."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class ListenerClock:
    """The real clock plus the time by which tests advance it."""

    def __init__(self) -> None:
        self.advanced_s = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() + self.advanced_s


@dataclass(frozen=True)
class Wire:
    """A running listener and functions to connect to it."""

    server: WireServer
    registry: CollectorRegistry
    """Metrics of connections and requests."""
    time: ListenerClock
    handler: TextHandler
    connect: Callable[[], Any]
    connect_plain: Callable[[], Any]
    """Connects without TLS, also to a TLS listener."""

    def count(self, metric: str, /, **labels: str) -> float:
        """Return the value of a metric, or 0 if it has no sample."""
        for sample in self.samples:
            if sample.name == metric and labels.items() <= sample.labels.items():
                return sample.value
        return 0.0

    @property
    def samples(self) -> list[Sample]:
        """All samples of the metrics."""
        return [sample for family in self.registry.collect() for sample in family.samples]

    @property
    def connections(self) -> list[Connection]:
        """The open connections of the listener."""
        return [connection for shared, _server in self.server._listeners for connection in shared.connections]

    def advance_and_check(self, seconds: float) -> None:
        """Advance the clock of the listener and check its connections."""
        self.time.advanced_s += seconds
        self.server.check()

    async def wait_until_ended_as(self, reason: str) -> None:
        """Advance the clock until a connection is closed for `reason`. Bytes in kernel buffers can delay that."""

        def has_ended() -> bool:
            self.advance_and_check(STALL_S * 1.1)
            return self.count("kipmesh_wire_connections_ended_total", reason=reason) == 1

        await until(has_ended)


@asynccontextmanager
async def listening(
    limits: Limits = LIMITS, *, checks_periodically: bool = False, **options: Any
) -> AsyncIterator[Wire]:
    """Run a listener, and check at the end that it released all memory and connections.

    Connections are only checked by `Wire.advance_and_check`, or also periodically with `checks_periodically`. With
    `sasl`, clients must authenticate.
    """
    handler = TextHandler()
    sasl: Sasl | None = options.get("sasl")
    clock, registry, requests = ListenerClock(), CollectorRegistry(), RequestMetrics()
    server = WireServer(Pipeline(handler.handlers(sasl), metrics=requests), limits, clock=clock.now)
    registry.register(requests)
    registry.register(server.metrics)
    port = await server.listen("KAFKA", "127.0.0.1", 0, options.get("server_ssl"), has_sasl=sasl is not None)
    if not checks_periodically and server._checking is not None:
        server._checking.cancel()
    clients: list[Client] = []

    async def connect(context: ssl.SSLContext | None) -> Client:
        opened = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        clients.append(Client(*opened))
        return clients[-1]

    try:
        yield Wire(
            server, registry, clock, handler, partial(connect, options.get("client_ssl")), partial(connect, None)
        )
    finally:
        for client in clients:
            await client.close()
        await server.stop()
        await asyncio.sleep(0)
        assert server.memory.bytes_used == 0
        assert server.unsent.bytes_used == 0
        assert server.counts.total == 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until other tasks make the condition true."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the state has no event
            await asyncio.sleep(0.002)
