"""gRPC server of a node: the APIs of a pipeline that have a gRPC service, health checks and reflection.

A method `<Name>Stream` handles its requests one after the other. When a stream ends, its running request is cancelled
before `stream_ended` is called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any, NamedTuple

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kipmesh.core.context import RequestContext as RequestContext
from kipmesh.messages.kafka import MalformedError
from kipmesh.messages.proto import encode
from kipmesh.messages.table import METHODS, PROTO_PACKAGE, SERVICES, Method
from kipmesh.transport.grpc.descriptors import descriptor_pool
from kipmesh.transport.grpc.tls import Guard, ServerTls
from kipmesh.transport.pipeline import CloseConnection, Pipeline

log = structlog.get_logger(__name__)

CLIENT_ID_KEY = "kipmesh-client-id"
DEFAULT_MESSAGE_BYTES_MAX = 100 << 20
CONCURRENT_CALLS_MAX = 20_000


class PortInUseError(Exception):
    """Raised by `Server.start` if its address cannot be bound: in use, not local, or not permitted."""


def _context(context: grpc.aio.ServicerContext[Any, Any], listener: str) -> RequestContext:
    client_id = ""
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_ID_KEY:
            client_id = value if isinstance(value, str) else value.decode(errors="replace")
    return RequestContext(client_id, context.peer(), 0, context.time_remaining(), listener)


async def _decode(method: Method, data: bytes, context: grpc.aio.ServicerContext[Any, Any], *, is_limited: bool) -> Any:
    """Return the request. Aborts the call with RESOURCE_EXHAUSTED if too large, INVALID_ARGUMENT if malformed."""
    limit = method.api.request_bytes_max if is_limited else None
    if limit is not None and len(data) > limit:
        text = f"{method.name} request must have at most {limit} bytes, got {len(data)}"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    try:
        return method.decode_request(data)
    except MalformedError as error:
        log.info("malformed request", method=method.name, peer=context.peer(), error=str(error))
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"malformed {method.name} request")


class _Call(NamedTuple):
    """One method of one server. It decodes messages itself, because grpc responds to malformed ones with UNKNOWN."""

    method: Method
    pipeline: Pipeline
    guard: Guard | None
    listener: str

    async def respond(
        self, data: bytes, request_context: RequestContext, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        """Return the encoded response to an encoded request.

        Aborts the call with RESOURCE_EXHAUSTED or INVALID_ARGUMENT (`_decode`), PERMISSION_DENIED (guard), or ABORTED
        for CloseConnection.
        """
        started_s = perf_counter()
        api = self.method.api
        request = await _decode(self.method, data, context, is_limited=self.pipeline.limits_requests)
        if self.guard is not None:
            await self.guard(request, context)
        try:
            response = await self.pipeline.handle(api, request, request_context)
        except CloseConnection as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        encoded = encode(response)
        self.pipeline.finished(api, request_context, request, response, (len(data), len(encoded)), started_s)
        return encoded


def _unary(call: _Call) -> Any:
    async def respond(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return await call.respond(data, _context(context, call.listener), context)

    return grpc.unary_unary_rpc_method_handler(respond)


def _stream(call: _Call) -> Any:
    ended = call.pipeline.stream_ended.get(call.method.api)

    async def respond(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        request_context = _context(context, call.listener)._replace(stream=next(call.pipeline.stream_numbers))
        if ended is not None:
            context.add_done_callback(lambda _context: ended(request_context))
        async for data in requests:
            yield await call.respond(data, request_context, context)

    return grpc.stream_stream_rpc_method_handler(respond)


class Server:
    """Serves the APIs of one pipeline on one address.

    Args:
        message_bytes_max: maximum size of a received message.
        listener: name of the listener in request contexts, "" for `inter.broker.listener.name`.
        tls: encrypts connections and refuses requests that only nodes may send; None for plaintext.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        message_bytes_max: int = DEFAULT_MESSAGE_BYTES_MAX,
        listener: str = "",
        tls: ServerTls | None = None,
    ) -> None:
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
        for service in SERVICES:
            methods = [method for method in METHODS[service.name].values() if method.api in pipeline.handlers]
            if methods:
                calls = [_Call(each, pipeline, tls.guard(each.api) if tls else None, listener) for each in methods]
                full_name = f"{PROTO_PACKAGE}.{service.name}"
                handlers = {
                    call.method.name: _stream(call) if call.method.streaming else _unary(call) for call in calls
                }
                generic = grpc.method_handlers_generic_handler(full_name, handlers)
                self._server.add_generic_rpc_handlers((generic,))
                names.append(full_name)
        reflection.enable_server_reflection(names, self._server, descriptor_pool())

    async def start(self, host: str, port: int) -> int:
        """Bind, serve and return the bound port; `port` 0 chooses a free one. Raises PortInUseError if that fails."""
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
        """Set the status that the gRPC health service reports for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, and cancel calls that still run after `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
