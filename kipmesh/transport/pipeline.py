"""Request pipeline behind both front ends: fault injection, handlers, error responses, metrics, observers.

A front end reads and decodes a frame within its limits. A handler is a coroutine from request and context to response.
A KafkaError from a handler becomes the API's error response. NO_RESPONSE sends nothing. CloseConnection closes the
connection of a Kafka client, or aborts the call of a gRPC client.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from inspect import iscoroutinefunction
from pkgutil import iter_modules
from time import perf_counter
from types import ModuleType
from typing import Any, Protocol

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import KafkaError
from kipmesh.messages.schema import NEVER
from kipmesh.messages.table import METHODS, Api
from kipmesh.transport.metrics import RequestMetrics

Handler = Callable[[Any, RequestContext], Awaitable[Any]]
Handlers = Mapping[Api, Handler]
Observer = Callable[[RequestContext, Any, Any, int, int], None]
"""Receives context, request, response, and the sizes of request and response in bytes."""
StreamEnded = Callable[[RequestContext], None]

NO_RESPONSE = None
"""Returned by a handler if the client expects no response (acks=0)."""


class CloseConnection(Exception):  # noqa: N818 - not an error of the request
    """Raised by a handler to close the connection without a response.

    `reason` is the label of the metric `kipmesh_wire_connections_ended_total`; the message is logged.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Interceptor(Protocol):
    """Injects faults into requests (`kipmesh.transport.faults`)."""

    def set_api_names(self, names: frozenset[str]) -> None:
        """Receive the names of the APIs that have handlers."""

    async def handle(self, api: Api, request: Any, context: RequestContext, handler: Handler) -> Any:
        """Return the response to a request, with or without calling `handler`. May raise CloseConnection."""


class Pipeline:
    """The handlers of one node for one front end, and the steps before and after them."""

    def __init__(
        self,
        handlers: Handlers,
        *,
        stream_ended: Mapping[Api, StreamEnded] | None = None,
        observers: Mapping[str, Observer] | None = None,
        metrics: RequestMetrics | None = None,
        faults: Interceptor | None = None,
        limits_requests: bool = True,
    ) -> None:
        """Create the pipeline.

        Args:
            handlers: the handler of each API that the node serves.
            stream_ended: called after a gRPC stream of the API has ended and its running request was cancelled.
            observers: by API name; called after each request that was responded to.
            metrics: counts requests.
            faults: injects faults; None if disabled.
            limits_requests: whether the request limits of the API table apply (LIM-01). A controller does not apply
                them: brokers have limited the requests already, and a forwarded request may be larger.
        """
        self.limits_requests = limits_requests
        self.handlers = handlers
        self.stream_ended = stream_ended or {}
        self._observers = observers or {}
        self._metrics = metrics
        self._faults = faults
        self.stream_numbers = itertools.count(1)
        """Numbers of gRPC streams, unique among all servers of the pipeline."""
        if faults is not None:
            faults.set_api_names(frozenset(api.name for api in handlers if api.versions != NEVER))

    async def handle(self, api: Api, request: Any, context: RequestContext) -> Any:
        """Return the response to one request, or NO_RESPONSE. A KafkaError of the handler becomes an error response.

        Raises CloseConnection if the handler or a fault does, or if the response has no field for the error.
        """
        handler = self.handlers[api]
        try:
            if self._faults is not None:
                return await self._faults.handle(api, request, context, handler)
            return await handler(request, context)
        except KafkaError as error:
            response = api.error_response(request, error.code, error.message, context.version)
            if response is None:
                raise CloseConnection("failed", f"{api.name}: {error}") from None
            return response

    def finished(
        self,
        api: Api,
        context: RequestContext,
        request: Any,
        response: Any,
        sizes: tuple[int, int],
        started_s: float,
    ) -> None:
        """Count a completed request, and call the observer of its API.

        The observer is not called for APIs that only nodes send, and for NO_RESPONSE. `sizes`: bytes of (request,
        response); `started_s`: `perf_counter` at the arrival of the request.
        """
        if self._metrics is not None:
            self._metrics.finished(api, context, request, response, sizes, perf_counter() - started_s)
        observe = self._observers.get(api.name)
        if observe is not None and response is not NO_RESPONSE and not api.is_for_nodes:
            observe(context, request, response, *sizes)


def coroutines_in(package: ModuleType) -> dict[str, Any]:
    """Import all modules of a package and return the coroutine functions that they define, by name."""
    modules = [import_module(f"{package.__name__}.{info.name}") for info in iter_modules(package.__path__)]
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if iscoroutinefunction(function) and function.__module__ == module.__name__
    }


def pipeline_of(services: Mapping[str, object], **options: Any) -> Pipeline:
    """Return a pipeline whose handlers are the coroutines of `services`, named after the APIs (`create_topics`).

    `services` maps gRPC service names to objects. An API without a coroutine has no handler. If an object has a method
    `stream_ended(context)`, it is called for the streams of that service. `options` are passed to Pipeline.
    """
    handlers: dict[Api, Handler] = {}
    ended: dict[Api, StreamEnded] = {}
    for service, target in services.items():
        for method in METHODS[service].values():
            handler: Handler | None = getattr(target, method.api.method, None)
            if handler is not None:
                handlers[method.api] = handler
                if method.streaming and hasattr(target, "stream_ended"):
                    ended[method.api] = target.stream_ended
    return Pipeline(handlers, stream_ended=ended, **options)
