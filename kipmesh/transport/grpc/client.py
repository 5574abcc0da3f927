"""gRPC calls to other nodes: one connection per address, unary calls, and streams with one request at a time.

When TLS certificates change, a connection opens a new channel for new calls and streams; running ones end on the old
channel. Every failure of the transport is a TransportError; error codes of the peer are in the response. A request that
cannot be encoded (invalid Unicode, a number out of range) is not sent and raises KafkaError INVALID_REQUEST.
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
from kipmesh.transport.grpc.tls import channel_credentials, hint_for
from kipmesh.transport.tls.files import TlsFiles, TlsPaths

_OPTIONS = [
    ("grpc.max_receive_message_length", DEFAULT_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", DEFAULT_MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # A restarted container or pod has a new address, so its name must be resolved again soon.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # Time limit of one connection attempt. A shorter one would never succeed on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Connection objects do not share sockets, so that nodes in one process have separate connections.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


Meter = Callable[[int, int], None]
"""Called with the numbers of bytes sent and received."""


class TransportError(Exception):
    """Raised if a call is refused, breaks, times out or gets an invalid response. The request may have been executed.

    `hint` is a suggestion for the user, or "".
    """

    def __init__(self, address: str, method: str, code: grpc.StatusCode, details: str, hint: str = "") -> None:
        suffix = f" ({hint})" if hint else ""
        super().__init__(f"{method} to {address} failed: {code.name}: {details}{suffix}")
        self.address = address
        self.hint = hint
        self.code = code

    @classmethod
    def no_response(cls, address: str, method: str) -> TransportError:
        """Return the error of a call that its caller has abandoned, because another node may respond."""
        return cls(address, method, grpc.StatusCode.CANCELLED, "no response yet, trying another node")

    @property
    def timed_out(self) -> bool:
        """Whether the call exceeded its time limit (DEADLINE_EXCEEDED)."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def unimplemented(self) -> bool:
        """Whether the server does not implement the method (UNIMPLEMENTED)."""
        return self.code is grpc.StatusCode.UNIMPLEMENTED

    @property
    def denied(self) -> bool:
        """Whether the server refused the call because this side's certificate is not a node's."""
        return self.code is grpc.StatusCode.PERMISSION_DENIED

    @property
    def too_large(self) -> bool:
        """Whether request or response exceeds a size limit, so that a retry would fail too."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def _transport_error(address: str, method: str, error: grpc.RpcError, *, has_tls: bool = False) -> TransportError:
    details = error.details() or ""
    return TransportError(address, method, error.code(), details, hint_for(details, has_tls=has_tls))


def _encode(method: Method, request: Any) -> bytes:
    try:
        return encode(request)
    except (TypeError, ValueError, AttributeError) as error:  # invalid Unicode, a number out of range
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{method.name} request cannot be encoded: {error}") from None


def _decode(address: str, method: Method, data: bytes) -> Any:
    try:
        return method.decode_response(data)
    except MalformedError as error:
        text = f"response cannot be decoded: {error}"
        raise TransportError(address, method.name, grpc.StatusCode.INTERNAL, text) from None


class _Channel:
    """One HTTP/2 connection with a count of its users. A retired channel is closed when it has no more users."""

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
    """Makes calls to one address over one HTTP/2 connection, opened by the first call and reopened when it breaks."""

    def __init__(self, address: str, client_id: str, tls: TlsFiles | None = None) -> None:
        self.address = address
        self._tls = tls
        self._channel = _Channel(address, tls)
        self._retired: list[_Channel] = []
        self._metadata = ((CLIENT_ID_KEY, client_id),)
        self._idle_streams: dict[tuple[str, str], list[FetchStream]] = {}

    def _current(self) -> _Channel:
        """Return the channel for new calls, which is a new one if the certificates have changed."""
        tls, channel = self._tls, self._channel
        if tls is not None and tls.current.generation != channel.generation:
            self._retired = [*(each for each in self._retired if each.users), channel]
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
        """Make a unary call and return the response.

        Args:
            timeout_s: time limit.
            wait_for_ready: whether to wait for a connection within the time limit instead of failing immediately.
            meter: called with the sizes in bytes of request and response.

        Raises TransportError, or KafkaError INVALID_REQUEST if the request cannot be encoded.
        """
        declared = METHODS[service][method]
        data = _encode(declared, request)
        if meter is not None:
            meter(len(data), 0)
        channel = self._current()
        channel.users += 1
        try:
            response = await channel.callable(service, method)(
                data, timeout=timeout_s, metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise _transport_error(self.address, method, error, has_tls=self._tls is not None) from None
        finally:
            channel.release()
        if meter is not None:
            meter(0, len(response))
        return _decode(self.address, declared, response)

    async def fetch(self, request: Any, timeout_s: float) -> Any:
        """Send a Fetch over a stream of the service Broker and return the response. Raises the errors of `exchange`."""
        return await self.exchange("Broker", "FetchStream", request, timeout_s)

    async def exchange(self, service: str, method: str, request: Any, timeout_s: float) -> Any:
        """Send a request over an idle stream, or a new one, and return the response.

        Streams are kept for later requests, because they have half the latency of unary calls. A failed stream is
        dropped. Raises TransportError (DEADLINE_EXCEEDED after `timeout_s`), or KafkaError INVALID_REQUEST if the
        request cannot be encoded.
        """
        idle = self._idle_streams.setdefault((service, method), [])
        channel = self._current()
        stream = idle.pop() if idle and idle[-1].channel is channel else self._open(service, method)
        try:
            response = await stream.exchange(request, timeout_s)
        except BaseException:
            stream.cancel()
            raise
        if stream.channel is self._channel:
            # Streams of older channels are closed only now, after the new stream has proved that the peer is alive.
            while idle and idle[-1].channel is not stream.channel:
                idle.pop().cancel()
            idle.append(stream)  # bounded by the number of concurrent requests
        else:
            stream.cancel()
        return response

    def fetch_stream(self, service: str) -> FetchStream:
        """Open a stream of Fetch requests and responses. The caller must close it with `cancel`."""
        return self._open(service, "FetchStream")

    def _open(self, service: str, method: str) -> FetchStream:
        channel = self._current()
        call = channel.callable(service, method)(metadata=self._metadata)
        return FetchStream(self.address, METHODS[service][method], call, channel, has_tls=self._tls is not None)

    async def close(self) -> None:
        """Close the connection. Running calls and exchanges raise asyncio.CancelledError."""
        for streams in self._idle_streams.values():
            for stream in streams:
                stream.cancel()
        self._idle_streams.clear()
        retired, self._retired = self._retired, []
        for channel in (*retired, self._channel):
            await channel.close()


class FetchStream:
    """A bidirectional stream with one request at a time. After a TransportError it cannot be used again."""

    def __init__(self, address: str, method: Method, call: Any, channel: _Channel, *, has_tls: bool) -> None:
        self.channel = channel
        channel.users += 1
        self._has_tls = has_tls
        self._address = address
        self._method = method
        self._name = method.name
        self._call = call
        self._dropped = False
        self._limit: asyncio.Timeout | None = None
        """Time limit of the running exchange."""

    async def exchange(self, request: Any, timeout_s: float) -> Any:
        """Send one request and return its response.

        Raises TransportError (DEADLINE_EXCEEDED after `timeout_s`, CANCELLED after `cancel`), or KafkaError
        INVALID_REQUEST if the request cannot be encoded.
        """
        data = _encode(self._method, request)
        try:
            async with asyncio.timeout(timeout_s) as self._limit:
                await self._call.write(data)
                response = await self._call.read()
        except TimeoutError:
            if self._dropped:
                raise TransportError(self._address, self._name, grpc.StatusCode.CANCELLED, "dropped") from None
            self.cancel()
            raise TransportError(self._address, self._name, grpc.StatusCode.DEADLINE_EXCEEDED, "no response") from None
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
        if response is grpc.aio.EOF:
            raise TransportError(self._address, self._name, grpc.StatusCode.UNAVAILABLE, "stream closed by the server")
        return _decode(self._address, self._method, response)

    def cancel(self) -> None:
        """Close the stream; a running exchange fails with TransportError (CANCELLED). Idempotent."""
        self._call.cancel()
        if not self._dropped and self._limit is not None and not self._limit.expired():
            # grpc never completes a pending write of a call that is cancelled before its metadata is sent.
            with contextlib.suppress(RuntimeError):  # the exchange has just ended
                self._limit.reschedule(asyncio.get_running_loop().time())
        if not self._dropped:
            self._dropped = True
            self.channel.release()


class ConnectionPool:
    """The connections of one node or client, one per address, within one event loop.

    `client_id` is sent with each request. The caller closes `tls`; None means plaintext.
    """

    def __init__(self, client_id: str, tls: TlsFiles | None = None) -> None:
        self._client_id = client_id
        self._tls = tls
        self._own_tls: TlsFiles | None = None
        self._connections: dict[str, Connection] = {}

    @classmethod
    def of(cls, client_id: str, config: ClientSslConfig) -> Self:
        """Return a pool for a client's configuration. Raises InvalidConfigError if its certificates are unusable."""
        pool = cls(client_id)
        if config.security_protocol == "SSL":
            pool._tls = pool._own_tls = TlsFiles(TlsPaths.of(config))
        return pool

    def get(self, address: str) -> Connection:
        """Return the connection to `address` (host:port), creating it on the first call."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(address, self._client_id, self._tls)
        return connection

    async def close(self) -> None:
        """Close all connections, and the TLS files of a pool created by `of`."""
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            await connection.close()
        if self._own_tls is not None:
            self._own_tls.close()
