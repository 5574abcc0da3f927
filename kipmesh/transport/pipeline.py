"""The path of a request behind both front ends: fault injection, the handler, errors, metrics, observers.

A front end has read the frame within its limits and decoded it. A handler is one coroutine from request and context to
response. A KafkaError that it raises becomes the API's error response; NO_RESPONSE sends nothing; CloseConnection ends
the connection of a Kafka client, or the call of a gRPC client.
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
"""Receives context, request, response, and the bytes of the two."""
StreamEnded = Callable[[RequestContext], None]

NO_RESPONSE = None
"""Returned by a handler whose request gets no response."""


class CloseConnection(Exception):  # noqa: N818 - nothing is wrong with the request
    """Raised by a handler to end the connection without a response."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Interceptor(Protocol):
    """Faults for tests (`kipmesh.transport.faults`)."""

    def knows(self, names: frozenset[str]) -> None:
        """Receive the names of the APIs that have handlers."""

    async def handle(self, api: Api, request: Any, context: RequestContext, handler: Handler) -> Any:
        """Respond to a request in place of the handler, or with it."""


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
        """Make the pipeline.

        Args:
            handlers: the handler of each API that the node responds to.
            stream_ended: called when a gRPC stream of the API ended; its request was cancelled by then.
            observers: by the name of an API; called for each exchange before anything else runs.
            metrics: counts requests.
            faults: faults for tests; None if they are not enabled.
            limits_requests: whether the limits of the table apply (LIM-01). A controller receives what a broker has
                already limited, in a form that may be larger.
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
            faults.knows(frozenset(api.name for api in handlers if api.versions != NEVER))

    async def handle(self, api: Api, request: Any, context: RequestContext) -> Any:
        """Return the response to one request, or NO_RESPONSE. Raises CloseConnection."""
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
        began_s: float,
    ) -> None:
        """Count an exchange. `sizes` are the bytes of request and response, `began_s` is of `perf_counter`."""
        if self._metrics is not None:
            self._metrics.finished(api, context, request, response, sizes, perf_counter() - began_s)
        observe = self._observers.get(api.name)
        if observe is not None and response is not NO_RESPONSE and not api.is_for_nodes:
            observe(context, request, response, *sizes)


def coroutines_in(package: ModuleType) -> dict[str, Any]:
    """Return the coroutine functions that the modules of a package define, by name."""
    modules = [import_module(f"{package.__name__}.{info.name}") for info in iter_modules(package.__path__)]
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if iscoroutinefunction(function) and function.__module__ == module.__name__
    }


def pipeline_of(services: Mapping[str, object], **options: Any) -> Pipeline:
    """Return a pipeline of objects by gRPC service, whose coroutines are named as the APIs (`create_topics`).

    A coroutine that an object lacks is an API without a handler. `stream_ended(context)` of an object is called for
    its streams. `options` are those of Pipeline.
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
