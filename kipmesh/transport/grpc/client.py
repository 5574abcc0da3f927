"""Calls to other nodes: a connection an address, unary calls, and streams of one request at a time.

With TLS, a connection moves to a new channel when the certificates changed: calls and streams that begin from then on
use it, those under way end on the one before. Every failure of the transport is a `TransportError`; errors that a peer
answers with are in the messages. A request that cannot be said (text that is no Unicode, a number out of range) raises
KafkaError(INVALID_REQUEST) unsent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Self

import grpc

from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.kafka import MalformedError
from kipmesh.messages.proto import encode
from kipmesh.messages.table import METHODS, Method
from kipmesh.transport.grpc.server import CLIENT_ID_KEY, DEFAULT_MESSAGE_BYTES_MAX
from kipmesh.transport.grpc.tls import channel_credentials, meaning_of
from kipmesh.transport.tls.files import TlsFiles, TlsPaths

_OPTIONS = [
    ("grpc.max_receive_message_length", DEFAULT_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", DEFAULT_MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # A container or pod that comes back has another address: its name is asked for again as soon.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # How long opening one may take. Where it takes longer on a busy machine, nobody is ever connected; and while a node
    # is cut off, a new attempt is seldom sooner successful than the one under way.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each connection object is a connection of its own: nodes in one process do not share sockets.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


Meter = Callable[[int, int], None]
"""Is told the bytes of messages that were sent and received."""


class TransportError(Exception):
    """A call that got no answer: refused, broken, timed out or not understood. The request may have been done."""

    def __init__(self, address: str, method: str, code: grpc.StatusCode, details: str, meaning: str = "") -> None:
        said = f" ({meaning})" if meaning else ""
        super().__init__(f"{method} to {address} failed: {code.name}: {details}{said}")
        self.address = address
        self.meaning = meaning
        """What the user may have to change, empty where that is not known."""
        self.code = code

    @classmethod
    def no_response(cls, address: str, method: str) -> TransportError:
        """For a caller that gave up by itself."""
        return cls(address, method, grpc.StatusCode.CANCELLED, "no answer, and somebody else may have one")

    @property
    def timed_out(self) -> bool:
        """Whether the caller's own time limit ended the call."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def unimplemented(self) -> bool:
        """Whether the server does not have that call."""
        return self.code is grpc.StatusCode.UNIMPLEMENTED

    @property
    def denied(self) -> bool:
        """Whether the server does not let this side call that: its certificate is not a node's."""
        return self.code is grpc.StatusCode.PERMISSION_DENIED

    @property
    def too_large(self) -> bool:
        """Whether a message is larger than one of the two sides takes: it will not get smaller."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def _transport_error(address: str, method: str, error: grpc.RpcError, *, has_tls: bool = False) -> TransportError:
    details = error.details() or ""
    return TransportError(address, method, error.code(), details, meaning_of(details, has_tls=has_tls))


def _encode(method: Method, request: Any) -> bytes:
    try:
        return encode(request)
    except (TypeError, ValueError, AttributeError) as error:  # text that is no Unicode, a number out of range
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{method.name} cannot say that: {error}") from None


def _decode(address: str, method: Method, data: bytes) -> Any:
    try:
        return method.decode_response(data)
    except MalformedError as error:
        text = f"the answer cannot be decoded: {error}"
        raise TransportError(address, method.name, grpc.StatusCode.INTERNAL, text) from None


class _Channel:
    """One HTTP/2 connection, and who uses it; one that was replaced is closed when nobody does any more."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self.generation = 0
        self.users = 0
        self.calls: dict[tuple[str, str], Any] = {}
        self._closing: asyncio.Task[None] | None = None
        self._is_retired = False
        if tls is None:
            self._grpc = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            material = tls.current
            self.generation = material.generation
            self._grpc = grpc.aio.secure_channel(address, channel_credentials(material), options=_OPTIONS)

    def callable(self, service: str, name: str) -> Any:
        call = self.calls.get((service, name))
        if call is None:
            method = METHODS[service][name]
            make = self._grpc.stream_stream if method.streaming else self._grpc.unary_unary
            call = self.calls[service, name] = make(method.path)
        return call

    def release(self) -> None:
        self.users -= 1
        self._close_if_unused()

    def retire(self) -> None:
        self._is_retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and not self.users and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._grpc.close())

    async def close(self) -> None:
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)
        else:
            await self._grpc.close()


class Connection:
    """Calls to one address over one HTTP/2 connection, opened at the first call and reopened when it breaks."""

    def __init__(self, address: str, client_id: str, tls: TlsFiles | None = None) -> None:
        self.address = address
        self._tls = tls
        self._channel = _Channel(address, tls)
        self._retired: list[_Channel] = []
        self._metadata = ((CLIENT_ID_KEY, client_id),)
        self._idle_streams: dict[tuple[str, str], list[FetchStream]] = {}

    def _current(self) -> _Channel:
        """The channel for what begins now."""
        tls, channel = self._tls, self._channel
        if tls is not None and tls.current.generation != channel.generation:
            self._retired = [one for one in self._retired if one.users]
            self._retired.append(channel)
            self._channel = _Channel(self.address, tls)
            channel.retire()
        return self._channel

    async def call(
        self,
        service: str,
        method: str,
        request: Any,
        timeout_s: float,
        wait_for_ready: bool = False,
        meter: Meter | None = None,
    ) -> Any:
        """One unary call; raises TransportError. `wait_for_ready` waits for a connection within the time limit."""
        known = METHODS[service][method]
        data = _encode(known, request)
        if meter is not None:
            meter(len(data), 0)
        channel = self._current()
        channel.users += 1
        try:
            answer = await channel.callable(service, method)(
                data, timeout=timeout_s, metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise _transport_error(self.address, method, error, has_tls=self._tls is not None) from None
        finally:
            channel.release()
        if meter is not None:
            meter(0, len(answer))
        return _decode(self.address, known, answer)

    async def fetch(self, request: Any, timeout_s: float) -> Any:
        """One Fetch of the Broker service over a stream that is kept for the next: half a unary call's latency."""
        return await self.exchange("Broker", "FetchStream", request, timeout_s)

    async def exchange(self, service: str, method: str, request: Any, timeout_s: float) -> Any:
        """One request of a stream that is kept for the next one; one that failed is dropped. Raises TransportError."""
        idle = self._idle_streams.setdefault((service, method), [])
        channel = self._current()
        stream = idle.pop() if idle and idle[-1].channel is channel else self._open(service, method)
        try:
            response = await stream.exchange(request, timeout_s)
        except BaseException:
            stream.cancel()
            raise
        if stream.channel is self._channel:
            # Streams of a channel before end only now: whoever watches for one that breaks has heard of this one.
            while idle and idle[-1].channel is not stream.channel:
                idle.pop().cancel()
            idle.append(stream)  # never more than were in use at a time
        else:
            stream.cancel()
        return response

    def fetch_stream(self, service: str) -> FetchStream:
        """Open a stream of Fetch requests and responses."""
        return self._open(service, "FetchStream")

    def _open(self, service: str, method: str) -> FetchStream:
        channel = self._current()
        call = channel.callable(service, method)(metadata=self._metadata)
        return FetchStream(self.address, METHODS[service][method], call, channel, has_tls=self._tls is not None)

    async def close(self) -> None:
        """Close; running calls fail."""
        for streams in self._idle_streams.values():
            for stream in streams:
                stream.cancel()
        self._idle_streams.clear()
        retired, self._retired = self._retired, []
        for channel in (*retired, self._channel):
            await channel.close()


class FetchStream:
    """One request at a time over a bidirectional stream; a broken one raises TransportError and is then useless."""

    def __init__(self, address: str, method: Method, call: Any, channel: _Channel, *, has_tls: bool) -> None:
        self.channel = channel
        channel.users += 1
        self._has_tls = has_tls
        self._address = address
        self._method = method
        self._name = method.name
        self._call = call
        self._dropped = False
        self._limit: asyncio.Timeout | None = None  # of the exchange that runs

    async def exchange(self, request: Any, timeout_s: float) -> Any:
        """Send one request and wait for its response."""
        data = _encode(self._method, request)
        try:
            async with asyncio.timeout(timeout_s) as self._limit:
                await self._call.write(data)
                answer = await self._call.read()
        except TimeoutError:
            if self._dropped:
                raise TransportError(self._address, self._name, grpc.StatusCode.CANCELLED, "dropped") from None
            self.cancel()
            raise TransportError(self._address, self._name, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer") from None
        except grpc.aio.AioRpcError as error:
            raise _transport_error(self._address, self._name, error, has_tls=self._has_tls) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._dropped and not (task and task.cancelling()):
                raise TransportError(self._address, self._name, grpc.StatusCode.CANCELLED, "dropped") from None
            raise
        except asyncio.InvalidStateError as error:
            raise TransportError(self._address, self._name, grpc.StatusCode.UNAVAILABLE, str(error)) from None
        finally:
            self._limit = None
        if answer is grpc.aio.EOF:
            raise TransportError(self._address, self._name, grpc.StatusCode.UNAVAILABLE, "the stream ended")
        return _decode(self._address, self._method, answer)

    def cancel(self) -> None:
        """Drop the stream: a running exchange ends with a TransportError (CANCELLED)."""
        self._call.cancel()
        if not self._dropped and self._limit is not None and not self._limit.expired():
            # A call that is cancelled before its metadata is sent never ends a write that waits for that.
            with contextlib.suppress(RuntimeError):  # it has ended just now
                self._limit.reschedule(asyncio.get_running_loop().time())
        if not self._dropped:
            self._dropped = True
            self.channel.release()


class ConnectionPool:
    """One connection an address, for one node or client; not shared between event loops.

    `tls` is for all of them and belongs to the caller.
    """

    def __init__(self, client_id: str, tls: TlsFiles | None = None) -> None:
        self._client_id = client_id
        self._tls = tls
        self._own_tls: TlsFiles | None = None
        self._connections: dict[str, Connection] = {}

    @classmethod
    def of(cls, client_id: str, config: ClientSslConfig) -> Self:
        """As a client's configuration says; raises InvalidConfigError when its certificates cannot be used."""
        pool = cls(client_id)
        if config.security_protocol == "SSL":
            pool._tls = pool._own_tls = TlsFiles(TlsPaths.of(config))
        return pool

    def get(self, address: str) -> Connection:
        """The connection to `address` (host:port)."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(address, self._client_id, self._tls)
        return connection

    async def close(self) -> None:
        """Close every connection."""
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            await connection.close()
        if self._own_tls is not None:
            self._own_tls.close()
