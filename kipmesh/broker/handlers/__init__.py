"""A broker's handlers: one coroutine per API, named as the API, in a module per subject.

`make_handlers` collects them from every module of this package. A coroutine takes the broker's parts, the request and
the context. An API whose versions differ in nothing but their fields needs none: a part of the broker has the
coroutine, or the request is forwarded (`Role.FORWARDED`).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from kipmesh.broker.parts import BrokerParts
from kipmesh.messages.table import APIS, Role
from kipmesh.transport.pipeline import Handler, Handlers, coroutines_in

_FUNCTIONS = coroutines_in(sys.modules[__name__])
"""By name; collected at import, so that serving loads no further modules."""


def make_handlers(broker: BrokerParts) -> Handlers:
    """Return the handler of every API that a broker responds to."""
    handlers: dict[Any, Handler] = {}
    responders = broker.groups, broker.offsets, broker.producer_ids, broker.fetch
    for api in APIS:
        if api.role in (Role.BROKER, Role.FORWARDED):
            responder = next((part for part in responders if hasattr(part, api.method)), None)
            if api.method in _FUNCTIONS:
                handlers[api] = partial(_FUNCTIONS[api.method], broker)
            elif responder is not None:
                handlers[api] = getattr(responder, api.method)
            elif api.role is Role.FORWARDED:
                handlers[api] = partial(broker.forwarder.forward, api)
            else:
                raise LookupError(f"no handler for {api.name} in {__name__}")
    return handlers
