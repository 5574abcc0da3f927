"""Request handlers of a controller: one coroutine per API, named after the API, in one module per subject.

A coroutine takes the controller's parts, the request and the context. `make_handlers` collects the coroutines of all
modules of this package. An API without a coroutine is one decision: the method of `MetadataController` with its name.
"""

from __future__ import annotations

import sys
from functools import partial
from operator import methodcaller
from typing import Any

from kipmesh.controller.decision_queue import ControllerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.messages.table import APIS, BROKER_HEARTBEAT, QUORUM, Api, Role
from kipmesh.transport.metrics import RequestMetrics
from kipmesh.transport.pipeline import Handler, Pipeline, coroutines_in, pipeline_of

_FUNCTIONS = coroutines_in(sys.modules[__name__])
"""Coroutines by name; collected at import, so that the first request does not have to load modules."""


def make_handlers(controller: ControllerParts) -> dict[Api, Handler]:
    """Return API -> handler for all APIs that the active controller serves, except those of the quorum.

    Raises LookupError if an API has neither a coroutine nor a method of `MetadataController`.
    """
    handlers: dict[Api, Handler] = {}
    for api in APIS:
        if api.role in (Role.CONTROLLER, Role.FORWARDED) and api.service is not QUORUM:
            function = _FUNCTIONS.get(api.method)
            if function is None and not hasattr(MetadataController, api.method):
                raise LookupError(f"{api.name} has no handler: define {api.method} in {__name__}")
            handlers[api] = partial(function or partial(_decide, api), controller)
    return handlers


def controller_pipeline(
    controller: ControllerParts, quorum: object | None = None, metrics: RequestMetrics | None = None
) -> Pipeline:
    """Return the request pipeline of a controller.

    Args: quorum: object with the handlers of the gRPC service Quorum, None to serve none; metrics: counts requests.
    """
    handlers = make_handlers(controller)
    if quorum is not None:
        handlers |= pipeline_of({QUORUM.name: quorum}).handlers
    return Pipeline(
        handlers,
        stream_ended={BROKER_HEARTBEAT: controller.stream_ended},
        metrics=metrics,
        limits_requests=False,
    )


async def _decide(api: Api, controller: ControllerParts, request: Any, context: RequestContext) -> Any:
    return await controller.do(api.name, methodcaller(api.method, request))
