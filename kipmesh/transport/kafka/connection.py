"""One connection: frames in, responses out, in the order of the requests.

The life of a request: its frame is complete -> its header says which API and version -> its body becomes a value -> the
API's handler answers -> the response is written. The next request of the connection begins when this one is answered,
as in Apache Kafka; only requests of an API that `is_pipelined` (Produce) begin while others of it wait, and still are
answered in order. So a fetch that waits holds up what its client sent after it, and nobody else.

- Reading stops while `max.in.flight.requests.per.connection` wait, and while `queued.max.request.bytes` are in flight.
  No further request begins while more than `queued.max.response.bytes.per.connection` wait for the socket.
- What is malformed, of an unknown API or of a version that is not supported ends this connection, with a line in the
  log and a count; nothing else. ApiVersions in an unknown version is answered in version 0 (KIP-511).
- A client that is gone is not answered, and what waited for it is cancelled; but what it sent to be written is: with
  acks=0 it had no reason to stay.
- Who announces a request and does not send it, or takes responses byte by byte, may do so until others wait for the
  memory that this holds: then it has `connections.max.stall.ms` for the whole of it. So has who sent large requests
  behind one that waits; they are carried out if they write, as those of a client that is gone.
- With TLS a connection counts from its first byte on, not from the end of the handshake.
- Invariant: every byte taken from `RequestMemory` is given back when its request is answered or the connection ends.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, cast

import structlog

from kipmesh import messages as m
from kipmesh.core.context import RequestContext
from kipmesh.messages.kafka import MalformedError
from kipmesh.messages.table import API_VERSIONS, SASL_AUTHENTICATE, Api
from kipmesh.transport.kafka.framing import (
    FIRST_BYTES,
    HEADER_BYTES_MIN,
    Framer,
    Header,
    RefusedError,
    encode_bare,
    read_header,
)
from kipmesh.transport.kafka.handshake import ALLOWED_KEYS, AUTHENTICATE_S, SaslState, Session
from kipmesh.transport.kafka.limits import Shared
from kipmesh.transport.pipeline import NO_RESPONSE, CloseConnection

log = structlog.get_logger(__name__)

_BARE_HEADER = Header(SASL_AUTHENTICATE.key or 0, 0, 0, "", 0)
"""For messages of SASL without a header."""
ANONYMOUS = RequestContext("", "").principal


class Request(NamedTuple):
    """A request that was decoded."""

    api: Api
    header: Header
    value: Any
    context: RequestContext
    size: int
    began: float
    is_bare: bool = False
    """A message of SASL without a header; so is its response."""


@dataclass(eq=False)
class Listener:
    """One listener of a broker, with its connections."""

    shared: Shared
    name: str
    loop: asyncio.AbstractEventLoop
    ssl_context: ssl.SSLContext | None
    has_sasl: bool
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests under way, also of connections that are lost."""
    is_stopped: bool = False

    def admit(self, connection: Connection) -> bool:
        """Whether there may be one more."""
        limit = self.shared.counts.add(connection.ip)
        if limit:
            self.shared.metrics.refused(limit)
            log.warning("connection refused", limit=limit, ip=connection.ip, listener=self.name)
            return False
        self.connections.add(connection)
        self.shared.metrics.opened(self.name)
        return True

    def gone(self, connection: Connection) -> None:
        """It is lost."""
        self.connections.discard(connection)
        self.shared.counts.remove(connection.ip)
        self.shared.metrics.closed(self.name)


class Connection(asyncio.BufferedProtocol):
    """Made for each connection that is accepted; belongs to the event loop."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._shared = shared = listener.shared
        self._handle = shared.pipeline.handle
        self._limits = shared.limits
        # A message of SASL without a header may be short, and here before the handshake that it follows is answered.
        size_min = 0 if listener.has_sasl else HEADER_BYTES_MIN
        self._framer = Framer(shared.staging, self._may_take, self._may_go_on, size_min)
        self._transport: asyncio.Transport | None = None
        self._socket: asyncio.Transport | None = None
        """The transport itself, or the one below TLS."""
        self._frames: deque[bytes | bytearray] = deque()
        self._responses: deque[tuple[asyncio.Task[Any], Request]] = deque()
        self._pending = 0
        self._waits_for_room = False
        self._news: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None
        self._peer = self.ip = ""
        self._is_lost = False
        self.session = Session(shared.metrics.software, sasl=SaslState() if listener.has_sasl else None)
        self._opened_at = self._taken_at = self.active_at = shared.clock()
        self._begun_at = self._opened_at
        """When the first of `_frames` came to be the first."""
        self._unsent = 0
        self._unsent_since: float | None = None
        """Since when a response waits for the client."""

    # --- what the transport calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve it, unless there are too many; with TLS once it is secured."""
        self._socket = raw = cast("asyncio.Transport", transport)
        address = raw.get_extra_info("peername") or ("", 0)
        self.ip = address[0]
        self._peer = f"ipv6:[{self.ip}]:{address[1]}" if ":" in self.ip else f"ipv4:{self.ip}:{address[1]}"
        if not self._listener.admit(self):
            self._is_lost = True
            raw.abort()
        elif self._listener.ssl_context is None:
            self._begin_serving(raw)
        else:
            self._task = self._listener.loop.create_task(self._secure(raw, self._listener.ssl_context), name="wire-tls")

    async def _secure(self, raw: asyncio.Transport, context: ssl.SSLContext) -> None:
        """The handshake. What the client sends at its end may come before this goes on."""
        transport: asyncio.Transport | None = None
        try:
            transport = await self._listener.loop.start_tls(
                raw, self, context, server_side=True, ssl_handshake_timeout=self._limits.handshake_ms_max / 1000
            )
        except OSError as error:
            self._shared.metrics.ended("handshake")
            log.info("no TLS handshake", error=str(error), peer=self._peer, listener=self._listener.name)
        finally:
            if transport is None:
                self.connection_lost(None)
        if transport is not None and not self._is_lost:
            self._begin_serving(transport)

    def _begin_serving(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(self._limits.unsent_bytes_per_connection_max)
        self._task = self._listener.loop.create_task(self._serve(), name="wire-connection")
        self._pause_or_resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._framer.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came."""
        self.active_at = self._shared.clock()
        try:
            self._queue(self._framer.received(nbytes))
        except RefusedError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        """The client does not read what is sent to it."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It does again."""
        self._writable.set()
        self._note_unsent()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nobody is there any more."""
        if self._is_lost:
            return
        self._is_lost = True
        self._listener.gone(self)
        self._shared.unsent.bytes_used -= self._unsent
        self._unsent = 0
        if self._waits_for_room:
            self._shared.memory.forget(self._on_room)
        if self._framer.is_within_frame:
            self._give_back(self._framer.granted)
        if self._task is not None and self._task is not asyncio.current_task(self._listener.loop):
            self._task.cancel()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _may_take(self, size: int, key: int, wanted: int) -> bool:
        """See Framer."""
        limit = self._shared.request_bytes_max(key)
        if self._is_unknown:
            limit = min(limit, self._limits.sasl_request_bytes_max)
        if size > limit:
            raise RefusedError("size", f"a request of {size} bytes, the limit is {limit}")
        if self._pending >= self._limits.pending_max:
            return False
        if not self._shared.memory.take(wanted):
            self._waits_for_room = True
            return False
        self._pending += 1
        self._taken_at = self._shared.clock()
        return True

    def _may_go_on(self, step: int, rest: int) -> int:
        """See Framer."""
        more = self._shared.memory.go_on(step, rest)
        self._waits_for_room = not more
        return more

    def _queue(self, frames: list[bytes | bytearray]) -> None:
        if frames:
            if not self._frames:
                self._begun_at = self._shared.clock()
            self._frames.extend(frames)
            if self._news is not None and not self._news.done():
                self._news.set_result(None)
        if self._framer.is_full and self._waits_for_room:
            self._shared.memory.wait(self._on_room, is_within_frame=self._framer.is_within_frame)
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self._transport is None:  # the handshake is not done yet; little comes before that
            return
        if self._framer.is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _go_on_reading(self) -> None:
        try:
            self._queue(self._framer.resume())
        except RefusedError as error:
            self._refuse(error)

    def _refuse(self, error: RefusedError) -> None:
        """What came is no frame; whole requests that came before it are still carried out, if they write."""
        self._carry_out_rest()
        self.end(error.reason, str(error))

    def _on_room(self) -> None:
        """Memory was given back. The time that it took was not the client's."""
        self._waits_for_room = False
        self.active_at = self._taken_at = self._shared.clock()
        self._go_on_reading()

    def _give_back(self, size: int) -> None:
        """A request is answered, or never will be."""
        self._pending -= 1
        self._shared.memory.give_back(size)
        if self._framer.is_full and not self._waits_for_room and not self._is_lost:
            self._go_on_reading()

    # --- answering ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                if not self._frames:
                    self._news = self._listener.loop.create_future()
                    await self._news
                if not self._writable.is_set():
                    await self._writable.wait()
                self._begun_at = self._shared.clock()
                await self._begin(self._frames.popleft())
        except asyncio.CancelledError:
            if not self._is_lost:
                raise
        finally:
            self._carry_out_rest()

    def _carry_out_rest(self) -> None:
        """What a client that is gone sent to be written, if it was not begun."""
        while self._frames:
            frame = self._frames.popleft()
            request = None if self._listener.is_stopped else self._decode(frame)
            if request is not None and request.api.is_pipelined:
                self._pipeline(request)
            else:
                self._give_back(len(frame))

    async def _begin(self, frame: bytes | bytearray) -> None:
        """Answer one request, or let it wait if the next may begin meanwhile."""
        request = self._decode(frame)
        if request is None:
            self._give_back(len(frame))
            return
        if request.api.is_pipelined:
            self._pipeline(request)
            return
        try:
            if self._responses:
                await asyncio.wait([task for task, _ in self._responses])
                if self._transport is None or self._transport.is_closing():
                    return
                left = self._shared.unsent.left
                request = request._replace(context=request.context._replace(response_bytes_max=left))
            self._respond(request, await self._handle(request.api, request.value, request.context))
        except Exception as error:
            self._failed(request, error)
        finally:
            self._give_back(request.size)

    def _pipeline(self, request: Request) -> None:
        handle = self._handle(request.api, request.value, request.context)
        task = self._listener.loop.create_task(cast("Any", handle), name="wire-request")
        self._responses.append((task, request))
        self._listener.tasks.add(task)
        task.add_done_callback(self._listener.tasks.discard)
        task.add_done_callback(self._write_responses)

    def _write_responses(self, _task: asyncio.Task[Any]) -> None:
        """Write the answers whose turn it is."""
        while self._responses and self._responses[0][0].done():
            task, request = self._responses.popleft()
            try:
                if not task.cancelled():
                    self._respond(request, task.result())
            except Exception as error:
                self._failed(request, error)
            finally:
                self._give_back(request.size)

    def _decode(self, frame: bytes | bytearray) -> Request | None:
        """The request; None when there is none, and then the connection ends or it is answered already."""
        shared, began = self._shared, perf_counter()
        sasl = self.session.sasl
        if sasl is not None and sasl.takes_tokens:
            value = m.SaslAuthenticateRequest(bytes(frame))
            context = self._context(_BARE_HEADER)
            return Request(SASL_AUTHENTICATE, _BARE_HEADER, value, context, len(frame), began, is_bare=True)
        view = memoryview(frame)
        try:
            header = read_header(view, shared.is_flexible)
            api = shared.apis.get(header.key)
            if api is None:
                self._reject("api", f"there is no API with key {header.key}")
                return None
            if self._is_unknown and header.key not in ALLOWED_KEYS:
                self._reject("unauthenticated", f"{api.name} before the client has authenticated")
                return None
            version = header.version
            if version not in api.versions:
                if api is not API_VERSIONS:
                    first, last = api.versions
                    self._reject("version", f"{api.name} in version {version}, {first} to {last} are supported")
                    return None
                # KIP-511: answered in version 0, whatever the body is.
                header = header._replace(version=0)
                return Request(api, header, None, self._context(header), len(frame), began)
            value = api.decode(view, header.body, version, self._limits.items_max)
        except MalformedError as error:
            self._reject("malformed", str(error))
            return None
        return Request(api, header, value, self._context(header), len(frame), began)

    @property
    def _is_unknown(self) -> bool:
        """Whether the client still has to show who it is."""
        sasl = self.session.sasl
        return sasl is not None and sasl.user is None

    def _reject(self, reason: str, text: str) -> None:
        """A request that ends the connection; what came after it is given up."""
        frames, self._frames = self._frames, deque()
        for frame in frames:
            self._give_back(len(frame))
        self.end(reason, text)

    def _context(self, header: Header) -> RequestContext:
        sasl = self.session.sasl
        return RequestContext(
            header.client_id,
            self._peer,
            0,
            None,
            self._listener.name,
            header.version,
            ANONYMOUS if sasl is None or sasl.user is None else f"User:{sasl.user}",
            self.session,
            self._shared.unsent.left,
        )

    def _respond(self, request: Request, response: Any) -> None:
        shared, api, header = self._shared, request.api, request.header
        size = 0
        if response is not NO_RESPONSE:
            if request.is_bare:
                out = encode_bare(response)
            else:
                out = api.encode(header.correlation_id, header.version, response)
            size = len(out) + sum(map(len, out.parts))
            if self._transport is not None and not self._is_lost and not self._transport.is_closing():
                if out.parts:
                    self._transport.writelines([*out.parts, out])
                else:
                    self._transport.write(out)
                if size > self._limits.unsent_bytes_per_connection_max or self._unsent:
                    self._note_unsent()
        if self.session.sasl is not None and self.session.sasl.has_failed:
            self._reject("authentication", f"{api.name}: the client has not shown who it is")
        self.active_at = shared.clock()
        sizes = (request.size, size)
        shared.pipeline.finished(api, request.context, request.value, response, sizes, request.began)

    def _note_unsent(self) -> bool:
        """Count the bytes of responses that the client did not take; whether they are others than before."""
        if self._is_lost or self._socket is None or self._transport is None:
            return False
        unsent = self._socket.get_write_buffer_size()
        if self._transport is not self._socket:
            unsent += self._transport.get_write_buffer_size()
        if unsent == self._unsent:
            return False
        self._shared.unsent.bytes_used += unsent - self._unsent
        self._unsent = unsent
        if not unsent:
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = self._shared.clock()
        return True

    # --- ending -------------------------------------------------------------------------------------------------------

    def _failed(self, request: Request, error: Exception) -> None:
        if isinstance(error, CloseConnection):
            self._reject(error.reason, str(error))
            return
        log.error(
            "request failed",
            api=request.api.name,
            version=request.header.version,
            client_id=request.header.client_id,
            peer=self._peer,
            error=str(error),
            exc_info=error,
        )
        self._reject("failed", f"{request.api.name}: {type(error).__name__}")

    def end(self, reason: str, text: str) -> None:
        """Close the connection because of what came by it, or did not; what was answered is still sent."""
        transport = self._transport or self._socket
        if transport is None or transport.is_closing():
            return
        self._shared.metrics.ended(reason)
        log.info("connection closed", reason=reason, what=text, peer=self._peer, listener=self._listener.name)
        transport.close()

    def check(self, now: float, idle_s: float, stall_s: float) -> None:
        """End it if it was idle for too long, stalled within a request, holds memory up, or does not take responses."""
        if self._transport is None:
            return
        if self._note_unsent():
            self.active_at = now
        quiet_s = now - self.active_at
        if self._is_unknown and now - self._opened_at > min(AUTHENTICATE_S, stall_s):
            self.end("unauthenticated", "the client has not shown who it is in time")
        elif self._unsent_since is not None:
            if quiet_s > stall_s:
                self._end_slow(f"the client took no byte of its responses for {quiet_s:.0f} s")
            elif now - self._unsent_since > stall_s and self._shared.is_short:
                self._end_slow(f"the client is at its responses since {now - self._unsent_since:.0f} s")
        elif now - self._begun_at > stall_s and self._holds_up_others:
            self.end(
                "held", f"requests wait behind another one since {now - self._begun_at:.0f} s, and others for memory"
            )
        elif self._framer.is_within_frame and not self._framer.is_full:
            if quiet_s > stall_s:
                self.end("stalled", f"nothing came for {quiet_s:.0f} s in the middle of a request")
            elif now - self._taken_at > stall_s and self._shared.is_short:
                self.end("stalled", f"a request is on its way since {now - self._taken_at:.0f} s, and others wait")
        elif not self._pending and quiet_s > idle_s:
            self.end("idle", f"nothing came for {quiet_s:.0f} s")

    @property
    def _holds_up_others(self) -> bool:
        """Whether others wait for memory, and requests that cannot begin hold more of it than a length alone may."""
        return bool(self._shared.memory.waiting) and sum(map(len, self._frames)) > FIRST_BYTES

    def _end_slow(self, text: str) -> None:
        self.end("slow", text)
        if self._socket is not None:
            self._socket.abort()

    def abort(self) -> list[asyncio.Task[Any]]:
        """The listener stops: end at once. Gives what is to be cancelled."""
        if self._socket is not None:
            self._socket.abort()
        return [] if self._task is None else [self._task]
