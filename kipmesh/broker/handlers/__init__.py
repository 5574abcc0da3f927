"""The handlers of a broker: one coroutine per API, named after the API, in one module per subject.

`make_handlers` collects them from every module of this package. A coroutine receives the broker's parts, the request
and the context. An API whose versions differ only in fields needs none: one of the broker's parts has the coroutine, or
the request is forwarded to the controller (`Role.FORWARDED`).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from kipmesh.broker.parts import BrokerParts
from kipmesh.messages.table import APIS, Role
from kipmesh.transport.pipeline import Handler, Handlers, coroutines_in

_FUNCTIONS = coroutines_in(sys.modules[__name__])
"""Coroutines by name, collected at import so that the first request imports no modules."""


def make_handlers(broker: BrokerParts) -> Handlers:
    """Return the handler of each API that a broker serves. Raises LookupError if an API has none."""
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
                raise LookupError(f"no handler for {api.name} in {__name__}, add a coroutine {api.method}")
    return handlers
