"""A gRPC server for nodes: Kafka-like messages in and out, health, reflection, explicit limits.

A node offers each service of `services.proto` as an object with one coroutine a method, named in snake case
(`Fetch` -> `fetch(request, context)`). A method that the object lacks answers UNIMPLEMENTED. `FetchStream` calls
`fetch` for one request after the other, in order. An object with `stream_ended(context)` is told when a stream is over,
by its client or with the connection; what ran for it has been cancelled by then. An observer of a method is called with
each exchange and its bytes, once the handler has returned and before anything else runs; it must be quick.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kipmesh.core.context import RequestContext as RequestContext
from kipmesh.rpc.codec import METHODS, Method, Value
from kipmesh.rpc.tls import ServerTls

log = structlog.get_logger(__name__)

CLIENT_ID_KEY = "kipmesh-client-id"
DEFAULT_MESSAGE_BYTES_MAX = 100 << 20
CONCURRENT_CALLS_MAX = 20_000


Handler = Callable[[Value, RequestContext], Awaitable[Value]]
StreamEnded = Callable[[RequestContext], None]
Observer = Callable[[RequestContext, Value, Value, int, int], None]
"""Who asked, the request, the response, and the bytes of the two messages."""
Observers = Mapping[tuple[str, str], Observer]
"""By service and method."""
Guard = Callable[[Value, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]
"""Ends a call that its caller may not make, before the handler sees it."""
Timer = Callable[[Value, float], None]
"""Is told a request that was answered and how many seconds that took."""
Timers = Callable[[str, str], Timer]
"""By service and method."""

_stream_numbers = itertools.count(1)


class PortInUseError(Exception):
    """The listener's address cannot be bound."""


def _context(context: grpc.aio.ServicerContext[Any, Any], listener: str) -> RequestContext:
    client_id = ""
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_ID_KEY:
            client_id = value if isinstance(value, str) else value.decode(errors="replace")
    return RequestContext(client_id, context.peer(), 0, context.time_remaining(), listener)


async def _decode(method: Method, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Value:
    """The request; bytes that are none end the call with INVALID_ARGUMENT, and no more than that."""
    try:
        return method.request.decode(data)
    except DecodeError as error:
        log.info("request not understood", method=method.name, peer=context.peer(), error=str(error))
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {method.name} request")


# Messages are translated here and not by grpc: it logs a failure as its own, and answers UNKNOWN.


class _Call(NamedTuple):
    """One method of one server: who answers it, who looks on, and who may ask."""

    method: Method
    handler: Handler
    observe: Observer | None
    guard: Guard | None
    timer: Timer | None
    listener: str

    async def answer(self, data: bytes, who: RequestContext, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """The response to one request, both as messages."""
        begun_s = time.perf_counter()
        request = await _decode(self.method, data, context)
        if self.guard is not None:
            await self.guard(request, context)
        response = await self.handler(request, who)
        encoded = self.method.response.encode(response)
        if self.observe is not None:
            self.observe(who, request, response, len(data), len(encoded))
        if self.timer is not None:
            self.timer(request, time.perf_counter() - begun_s)
        return encoded


def _unary(call: _Call) -> Any:
    async def answer(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return await call.answer(data, _context(context, call.listener), context)

    return grpc.unary_unary_rpc_method_handler(answer)


def _stream(call: _Call, ended: StreamEnded | None) -> Any:
    async def answer(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        who = _context(context, call.listener)._replace(stream=next(_stream_numbers))
        if ended is not None:
            context.add_done_callback(lambda _context: ended(who))
        async for data in requests:
            yield await call.answer(data, who, context)

    return grpc.stream_stream_rpc_method_handler(answer)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _guard(tls: ServerTls | None, service: str, method: str) -> Guard | None:
    if tls is None or not tls.guards(service, method):
        return None
    return functools.partial(tls.check, service, method)


def _handlers(
    service: str,
    target: object,
    observers: Observers,
    listener: str,
    tls: ServerTls | None,
    timers: Timers | None,
) -> Any:
    handlers = {}
    full_name = ""
    for method in METHODS[service].values():
        full_name = method.path.split("/")[1]
        name = _snake(method.name.removesuffix("Stream"))
        handler: Handler | None = getattr(target, name, None)
        if handler is not None:
            observe = observers.get((service, method.name))
            timer = None if timers is None else timers(service, method.name)
            call = _Call(method, handler, observe, _guard(tls, service, method.name), timer, listener)
            ended: StreamEnded | None = getattr(target, "stream_ended", None)
            handlers[method.name] = _stream(call, ended) if method.streaming else _unary(call)
    return grpc.method_handlers_generic_handler(full_name, handlers), full_name


class Server:
    """Serves `services` (service name of services.proto -> object with its handlers) on one address.

    With `tls` nothing is served in plaintext, and calls for nodes are refused to others.
    """

    def __init__(
        self,
        services: Mapping[str, object],
        message_bytes_max: int = DEFAULT_MESSAGE_BYTES_MAX,
        observers: Observers | None = None,
        listener: str = "",
        tls: ServerTls | None = None,
        timers: Timers | None = None,
    ) -> None:
        """`listener` is its name, which handlers find in the context; empty for the brokers' own."""
        self._tls = tls
        options = [
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        for service, target in services.items():
            generic, full_name = _handlers(service, target, observers or {}, listener, tls, timers)
            self._server.add_generic_rpc_handlers((generic,))
            names.append(full_name)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; returns the bound port (the given one, or a free one for 0). Raises PortInUseError."""
        try:
            if self._tls is None or not self._tls.encrypts:
                bound: int = self._server.add_insecure_port(f"{host}:{port}")
            else:
                bound = self._server.add_secure_port(f"{host}:{port}", self._tls.credentials())
        except RuntimeError as error:
            raise PortInUseError(f"cannot listen on {host}:{port}: {error}") from None
        if not bound:
            raise PortInUseError(f"cannot listen on {host}:{port}")
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What the standard health service answers for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and give running ones `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
