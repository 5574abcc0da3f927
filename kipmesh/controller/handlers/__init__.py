"""A controller's handlers: one coroutine per API, named as the API, in a module per subject.

`make_handlers` collects them from every module of this package. An API without a coroutine here is one decision of
`MetadataController`: its method of the same name. A coroutine takes the controller's parts, the request, the context.
"""

from __future__ import annotations

import sys
from functools import partial
from operator import methodcaller
from typing import Any

from kipmesh.controller.owner import ControllerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.messages.table import APIS, BROKER_HEARTBEAT, QUORUM, Api, Role
from kipmesh.transport.metrics import RequestMetrics
from kipmesh.transport.pipeline import Handler, Pipeline, coroutines_in, pipeline_of

_FUNCTIONS = coroutines_in(sys.modules[__name__])
"""By name; collected at import, so that serving loads no further modules."""


def make_handlers(controller: ControllerParts) -> dict[Api, Handler]:
    """Return the handler of every API that the active controller decides."""
    handlers: dict[Api, Handler] = {}
    for api in APIS:
        if api.role in (Role.CONTROLLER, Role.FORWARDED) and api.service is not QUORUM:
            function = _FUNCTIONS.get(api.method)
            if function is None and not hasattr(MetadataController, api.method):
                raise LookupError(f"no handler for {api.name} in {__name__}")
            handlers[api] = partial(function or partial(_decide, api), controller)
    return handlers


def controller_pipeline(
    controller: ControllerParts, quorum: object | None = None, metrics: RequestMetrics | None = None
) -> Pipeline:
    """Return the pipeline of a controller. `quorum` has the handlers of the service Quorum."""
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
