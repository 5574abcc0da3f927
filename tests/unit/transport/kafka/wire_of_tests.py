"""A listener with APIs that tests answer by hand, and a client that sends bytes.

Annotations are not postponed here: declarations of messages read their types from them.
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
"""Long enough that no slow machine meets them; tests that are about time say `look_after`."""
IDLE_S, STALL_S = LIMITS.idle_ms_max / 1000, LIMITS.stall_ms_max / 1000
ECHO, WRITE = 1000, 1001


class TextRequest(Message):
    """What both APIs take."""

    text: str = field()
    data: Records = field()


class TextResponse(Message):
    """What both APIs give."""

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
"""Its requests are handled one after the other."""
WRITE_API = _api(WRITE, "Write", is_pipelined=True)
"""Its requests overlap."""


class Hand:
    """Answers the two APIs: at once, or when the test says so for texts that begin with `wait`."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []

    async def answer(self, request: TextRequest, context: RequestContext) -> TextResponse | None:
        """Echo, with who asked."""
        self.begun.append(request.text)
        if request.text.startswith("wait"):
            try:
                await self.gates.setdefault(request.text, asyncio.Event()).wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.text)
                raise
        if request.text == "fail":
            raise RuntimeError("on purpose")
        if request.text == "hang up":
            raise CloseConnection("acks-0", "on purpose")
        if request.text == "none":
            return NO_RESPONSE
        return TextResponse(f"{request.text}/{context.client_id}/{context.listener}", request.data)

    def release(self, text: str) -> None:
        """Let one go on."""
        self.gates.setdefault(text, asyncio.Event()).set()

    def handlers(self, sasl: Sasl | None) -> dict[Api, Handler]:
        """The handlers of both APIs, of ApiVersions, and with SASL those of SASL."""
        mine: dict[Api, Handler] = {ECHO_API: self.answer, WRITE_API: self.answer}
        connection = connection_handlers((*mine, API_VERSIONS), sasl)
        if sasl is None:
            return {**mine, API_VERSIONS: connection[API_VERSIONS]}
        return {**mine, **connection}


def frame(key: int, correlation_id: int, text: str, version: int = 1, data: bytes = b"") -> bytes:
    """A request of one of the two APIs, of a client with the id `me`; version 1."""
    client_id = "me"
    body = struct.pack(">h", len(text.encode())) + text.encode() + struct.pack(">i", len(data)) + data
    header = struct.pack(">hhih", key, version, correlation_id, len(client_id)) + client_id.encode()
    return struct.pack(">i", len(header) + len(body)) + header + body


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *frames: bytes) -> None:
        """Send bytes."""
        self.writer.write(b"".join(frames))

    async def response(self) -> tuple[int, bytes]:
        """Correlation id and the rest of the next response."""
        size = struct.unpack(">i", await self.reader.readexactly(4))[0]
        data = await self.reader.readexactly(size)
        return struct.unpack(">i", data[:4])[0], data[4:]

    async def text(self) -> tuple[int, str]:
        """The same of one of the two APIs."""
        correlation_id, data = await self.response()
        size = struct.unpack(">h", data[:2])[0]
        return correlation_id, data[2 : 2 + size].decode()

    async def is_closed(self) -> bool:
        """Whether the listener closes the connection, with nothing more to be read."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        """Leave."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class Time:
    """The listener's: it passes, and tests make it pass."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        """In seconds."""
        return time.monotonic() + self.passed


@dataclass(frozen=True)
class Wire:
    """A listener and how to reach it."""

    server: WireServer
    registry: CollectorRegistry
    """The metrics of connections and of requests."""
    time: Time
    hand: Hand
    connect: Callable[[], Any]
    connect_plain: Callable[[], Any]
    """Without TLS, whatever the listener wants."""

    def count(self, metric: str, /, **labels: str) -> float:
        """The value of a metric, 0 where there is none."""
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
        """Those that the listener has."""
        return [connection for shared, _server in self.server._listeners for connection in shared.connections]

    def look_after(self, seconds: float) -> None:
        """So much time passes for the listener, which looks after its connections then."""
        self.time.passed += seconds
        self.server.check()

    async def goes_for_being(self, reason: str) -> None:
        """Until somebody was sent away: what is still on its way in the kernel moves first, and that is no rest."""

        def is_gone() -> bool:
            self.look_after(STALL_S * 1.1)
            return self.count("kipmesh_wire_connections_ended_total", reason=reason) == 1

        await until(is_gone)


@asynccontextmanager
async def listening(limits: Limits = LIMITS, *, looks: bool = False, **options: Any) -> AsyncIterator[Wire]:
    """A listener for a while; nothing of it may be left afterwards. It looks after its connections when it is told to.

    With `looks` it does so by itself, with `sasl` clients have to show who they are.
    """
    hand = Hand()
    sasl: Sasl | None = options.get("sasl")
    clock, registry, requests = Time(), CollectorRegistry(), RequestMetrics()
    server = WireServer(Pipeline(hand.handlers(sasl), metrics=requests), limits, clock=clock.now)
    registry.register(requests)
    registry.register(server.metrics)
    port = await server.listen("KAFKA", "127.0.0.1", 0, options.get("server_ssl"), has_sasl=sasl is not None)
    if not looks and server._checking is not None:
        server._checking.cancel()
    clients: list[Client] = []

    async def connect(context: ssl.SSLContext | None) -> Client:
        opened = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        clients.append(Client(*opened))
        return clients[-1]

    try:
        yield Wire(server, registry, clock, hand, partial(connect, options.get("client_ssl")), partial(connect, None))
    finally:
        for client in clients:
            await client.close()
        await server.stop()
        await asyncio.sleep(0)
        assert server.memory.bytes_used == 0
        assert server.unsent.bytes_used == 0
        assert server.counts.total == 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks do."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what changes has no event
            await asyncio.sleep(0.002)
