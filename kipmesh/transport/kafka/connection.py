"""One connection of a Kafka client: receives frames, handles requests, writes responses in request order.

- Requests are handled one after the other, as in Apache Kafka. Only those of a pipelined API (Produce) overlap.
- Reading stops at `max.in.flight.requests.per.connection` and `queued.max.request.bytes`. No request starts while more
  than `queued.max.response.bytes.per.connection` are unsent. An invalid request is counted and ends the connection.
- A disconnect cancels pending requests, but executes received Produce requests, because of acks=0.
- A client that sends, reads or queues requests slowly is closed after `connections.max.stall.ms` if others need memory.
- Invariant: memory reserved in `RequestMemory` is released when its request completes or the connection ends.
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
from kipmesh.transport.kafka.limits import SharedState
from kipmesh.transport.pipeline import NO_RESPONSE, CloseConnection

log = structlog.get_logger(__name__)

_BARE_HEADER = Header(SASL_AUTHENTICATE.key or 0, 0, 0, "", 0)
"""Placeholder for the missing header of a bare SASL message."""
ANONYMOUS = RequestContext("", "").principal


class Request(NamedTuple):
    """A decoded request."""

    api: Api
    header: Header
    value: Any
    context: RequestContext
    size: int
    started_s: float
    """`perf_counter` at its arrival."""
    is_bare: bool = False
    """Whether request and response are SASL messages without headers."""


@dataclass(eq=False)
class Listener:
    """One Kafka listener of a broker and its connections."""

    shared: SharedState
    name: str
    loop: asyncio.AbstractEventLoop
    ssl_context: ssl.SSLContext | None
    has_sasl: bool
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Running requests, including those of closed connections."""
    is_stopped: bool = False

    def admit(self, connection: Connection) -> bool:
        """Add a connection and return True, or return False if the number of connections is at a limit."""
        limit = self.shared.counts.add(connection.ip)
        if limit:
            self.shared.metrics.refused[limit] += 1
            log.warning("connection refused", limit=limit, ip=connection.ip, listener=self.name)
            return False
        self.connections.add(connection)
        self.shared.metrics.opened(self.name)
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has closed."""
        self.connections.discard(connection)
        self.shared.counts.remove(connection.ip)
        self.shared.metrics.closed(self.name)


class Connection(asyncio.BufferedProtocol):
    """The protocol of one accepted connection. `session` has the state of its authentication."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._shared = shared = listener.shared
        self._handle = shared.pipeline.handle
        self._limits = shared.limits
        # A bare SASL message may be short, and may arrive before the response to the handshake was sent.
        size_min = 0 if listener.has_sasl else HEADER_BYTES_MIN
        self._framer = Framer(shared.staging, self._reserve, self._extend, size_min)
        self._transport: asyncio.Transport | None = None
        self._socket: asyncio.Transport | None = None
        """The TCP transport: `_transport` itself, or the one below TLS."""
        self._frames: deque[bytes | bytearray] = deque()
        self._responses: deque[tuple[asyncio.Task[Any], Request]] = deque()
        self._pending = 0
        """Number of requests that are being received, queued or handled."""
        self._waits_for_memory = False
        self._frame_arrived: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None
        self._peer = self.ip = ""
        self._is_lost = False
        self.session = Session(shared.metrics.software, sasl=SaslState() if listener.has_sasl else None)
        self._opened_at = self._frame_started_at = self.active_at = shared.clock()
        self._head_since = self._opened_at
        """Time since which the first of `_frames` is waiting."""
        self._unsent = 0
        self._unsent_since: float | None = None
        """Time since which the client has not read all its responses."""

    # --- asyncio.BufferedProtocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve the connection if the limits allow it, with TLS after the handshake."""
        self._socket = raw = cast("asyncio.Transport", transport)
        address = raw.get_extra_info("peername") or ("", 0)
        self.ip = address[0]
        self._peer = f"ipv6:[{self.ip}]:{address[1]}" if ":" in self.ip else f"ipv4:{self.ip}:{address[1]}"
        if not self._listener.admit(self):
            self._is_lost = True
            raw.abort()
        elif self._listener.ssl_context is None:
            self._start_serving(raw)
        else:
            handshake = self._handshake(raw, self._listener.ssl_context)
            self._task = self._listener.loop.create_task(handshake, name="wire-tls")

    async def _handshake(self, raw: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Perform the TLS handshake. The client's first request may arrive before `start_tls` returns."""
        transport: asyncio.Transport | None = None
        try:
            transport = await self._listener.loop.start_tls(
                raw, self, context, server_side=True, ssl_handshake_timeout=self._limits.handshake_ms_max / 1000
            )
        except OSError as error:
            self._shared.metrics.ended["handshake"] += 1
            log.info("tls handshake failed", error=str(error), peer=self._peer, listener=self._listener.name)
        finally:
            if transport is None:
                self.connection_lost(None)
        if transport is not None and not self._is_lost:
            self._start_serving(transport)

    def _start_serving(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(self._limits.unsent_bytes_per_connection_max)
        self._task = self._listener.loop.create_task(self._serve(), name="wire-connection")
        self._pause_or_resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._framer.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` received bytes."""
        self.active_at = self._shared.clock()
        try:
            self._queue(self._framer.received(nbytes))
        except RefusedError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        """Stop starting requests, because the client is not reading its responses."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Continue after the client has read its responses."""
        self._writable.set()
        self._note_unsent()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release memory and counts of the connection, and cancel its task."""
        if self._is_lost:
            return
        self._is_lost = True
        self._listener.remove(self)
        self._shared.unsent.bytes_used -= self._unsent
        self._unsent = 0
        if self._waits_for_memory:
            self._shared.memory.cancel_wait(self._memory_released)
        if self._framer.is_within_frame:
            self._release(self._framer.granted)
        if self._task is not None and self._task is not asyncio.current_task(self._listener.loop):
            self._task.cancel()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _reserve(self, size: int, key: int, wanted: int) -> bool:
        limit = self._shared.request_bytes_max(key)
        if self._is_unauthenticated:
            limit = min(limit, self._limits.sasl_request_bytes_max)
        if size > limit:
            raise RefusedError("size", f"request must have at most {limit} bytes, got {size}")
        if self._pending >= self._limits.pending_max:
            return False
        if not self._shared.memory.reserve(wanted):
            self._waits_for_memory = True
            return False
        self._pending += 1
        self._frame_started_at = self._shared.clock()
        return True

    def _extend(self, step: int, rest: int) -> int:
        reserved = self._shared.memory.extend(step, rest)
        self._waits_for_memory = not reserved
        return reserved

    def _queue(self, frames: list[bytes | bytearray]) -> None:
        if frames:
            if not self._frames:
                self._head_since = self._shared.clock()
            self._frames.extend(frames)
            if self._frame_arrived is not None and not self._frame_arrived.done():
                self._frame_arrived.set_result(None)
        if self._framer.is_full and self._waits_for_memory:
            self._shared.memory.wait(self._memory_released, is_within_frame=self._framer.is_within_frame)
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self._transport is None:  # before the end of the TLS handshake, when little data can arrive
            return
        if self._framer.is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _resume_framing(self) -> None:
        try:
            self._queue(self._framer.resume())
        except RefusedError as error:
            self._refuse(error)

    def _refuse(self, error: RefusedError) -> None:
        """Close the connection after an invalid frame. Complete Produce requests before it are still executed."""
        self._execute_remaining_writes()
        self.end(error.reason, str(error))

    def _memory_released(self) -> None:
        """Continue reading. The client's time limits restart, because it did not cause the wait."""
        self._waits_for_memory = False
        self.active_at = self._frame_started_at = self._shared.clock()
        self._resume_framing()

    def _release(self, size: int) -> None:
        """Release the memory of a request that was completed or dropped."""
        self._pending -= 1
        self._shared.memory.release(size)
        if self._framer.is_full and not self._waits_for_memory and not self._is_lost:
            self._resume_framing()

    # --- responding ---------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                if not self._frames:
                    self._frame_arrived = self._listener.loop.create_future()
                    await self._frame_arrived
                if not self._writable.is_set():
                    await self._writable.wait()
                self._head_since = self._shared.clock()
                await self._handle_frame(self._frames.popleft())
        except asyncio.CancelledError:
            if not self._is_lost:
                raise
        finally:
            self._execute_remaining_writes()

    def _execute_remaining_writes(self) -> None:
        """Start the received Produce requests of a closed connection, and drop its other requests."""
        while self._frames:
            frame = self._frames.popleft()
            request = None if self._listener.is_stopped else self._decode(frame)
            if request is not None and request.api.is_pipelined:
                self._start_pipelined(request)
            else:
                self._release(len(frame))

    async def _handle_frame(self, frame: bytes | bytearray) -> None:
        """Handle one request; a pipelined one is only started, so that the next request may overlap."""
        request = self._decode(frame)
        if request is None:
            self._release(len(frame))
            return
        if request.api.is_pipelined:
            self._start_pipelined(request)
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
            self._release(request.size)

    def _start_pipelined(self, request: Request) -> None:
        handle = self._handle(request.api, request.value, request.context)
        task = self._listener.loop.create_task(cast("Any", handle), name="wire-request")
        self._responses.append((task, request))
        self._listener.tasks.add(task)
        task.add_done_callback(self._listener.tasks.discard)
        task.add_done_callback(self._write_responses)

    def _write_responses(self, _task: asyncio.Task[Any]) -> None:
        """Write the responses at the head of the queue that are complete."""
        while self._responses and self._responses[0][0].done():
            task, request = self._responses.popleft()
            try:
                if not task.cancelled():
                    self._respond(request, task.result())
            except Exception as error:
                self._failed(request, error)
            finally:
                self._release(request.size)

    def _decode(self, frame: bytes | bytearray) -> Request | None:
        """Return the request of a frame, or None if it is invalid and the connection was closed."""
        shared, started_s = self._shared, perf_counter()
        sasl = self.session.sasl
        if sasl is not None and sasl.takes_tokens:
            value = m.SaslAuthenticateRequest(bytes(frame))
            context = self._context(_BARE_HEADER)
            return Request(SASL_AUTHENTICATE, _BARE_HEADER, value, context, len(frame), started_s, is_bare=True)
        view = memoryview(frame)
        try:
            header = read_header(view, shared.is_flexible)
            api = shared.apis.get(header.key)
            if api is None:
                self._reject("api", f"unknown API key {header.key}")
                return None
            if self._is_unauthenticated and header.key not in ALLOWED_KEYS:
                self._reject("unauthenticated", f"{api.name} before authentication")
                return None
            version = header.version
            if version not in api.versions:
                if api is not API_VERSIONS:
                    first, last = api.versions
                    self._reject("version", f"{api.name} version must be between {first} and {last}, got {version}")
                    return None
                # KIP-511: the response has version 0, whatever the body is.
                header = header._replace(version=0)
                return Request(api, header, None, self._context(header), len(frame), started_s)
            value = api.decode(view, header.body, version, self._limits.items_max)
        except MalformedError as error:
            self._reject("malformed", str(error))
            return None
        return Request(api, header, value, self._context(header), len(frame), started_s)

    @property
    def _is_unauthenticated(self) -> bool:
        """Whether the client must still authenticate."""
        sasl = self.session.sasl
        return sasl is not None and sasl.user is None

    def _reject(self, reason: str, text: str) -> None:
        """Close the connection because of a request, and drop the requests after it."""
        frames, self._frames = self._frames, deque()
        for frame in frames:
            self._release(len(frame))
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
            self._reject("authentication", f"{api.name}: authentication failed")
        self.active_at = shared.clock()
        sizes = (request.size, size)
        shared.pipeline.finished(api, request.context, request.value, response, sizes, request.started_s)

    def _note_unsent(self) -> bool:
        """Update the number of unsent response bytes. Returns whether it has changed."""
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

    # --- closing ------------------------------------------------------------------------------------------------------

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
        """Close the connection after sending the completed responses. Ignored if it is already closing.

        `reason` is one of `metrics.ENDED`.
        """
        transport = self._transport or self._socket
        if transport is None or transport.is_closing():
            return
        self._shared.metrics.ended[reason] += 1
        log.info("connection closed", reason=reason, detail=text, peer=self._peer, listener=self._listener.name)
        transport.close()

    def check(self, now: float, idle_s: float, stall_s: float) -> None:
        """Close the connection if it is idle or stalled, does not read responses, or holds memory that others need.

        `now` is a time of the shared clock; the limits are in seconds.
        """
        if self._transport is None:
            return
        if self._note_unsent():
            self.active_at = now
        idle_for_s = now - self.active_at
        if self._is_unauthenticated and now - self._opened_at > min(AUTHENTICATE_S, stall_s):
            self.end("unauthenticated", f"not authenticated within {now - self._opened_at:.0f} s")
        elif self._unsent_since is not None:
            unsent_for_s = now - self._unsent_since
            if idle_for_s > stall_s:
                self._end_slow(f"client read no response bytes for {idle_for_s:.0f} s")
            elif unsent_for_s > stall_s and self._shared.is_short:
                self._end_slow(f"client has not drained its responses for {unsent_for_s:.0f} s")
        elif now - self._head_since > stall_s and self._blocks_others:
            self.end("held", f"requests queued for {now - self._head_since:.0f} s hold memory that others need")
        elif self._framer.is_within_frame and not self._framer.is_full:
            receiving_for_s = now - self._frame_started_at
            if idle_for_s > stall_s:
                self.end("stalled", f"no bytes for {idle_for_s:.0f} s within a request")
            elif receiving_for_s > stall_s and self._shared.is_short:
                self.end("stalled", f"request incomplete after {receiving_for_s:.0f} s, and others need memory")
        elif not self._pending and idle_for_s > idle_s:
            self.end("idle", f"idle for {idle_for_s:.0f} s")

    @property
    def _blocks_others(self) -> bool:
        """Whether other connections wait for memory while queued requests of this one hold more than FIRST_BYTES."""
        return bool(self._shared.memory.waiting) and sum(map(len, self._frames)) > FIRST_BYTES

    def _end_slow(self, text: str) -> None:
        self.end("slow", text)
        if self._socket is not None:
            self._socket.abort()

    def abort(self) -> list[asyncio.Task[Any]]:
        """Close the connection without sending pending responses; return the tasks that the caller must cancel."""
        if self._socket is not None:
            self._socket.abort()
        return [] if self._task is None else [self._task]
