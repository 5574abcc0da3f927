"""A broker's handlers: one coroutine per API, named as the API, in a module per subject.

`make_handlers` collects them from every module of this package. A module states what an API does, in which versions,
and what is not supported. An API that the controller decides (`Role.FORWARDED`) needs a handler only if the broker has
work of its own. A coroutine takes the broker's parts, the request and the context.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from kipmesh.messages.table import APIS, Role
from kipmesh.node.broker.parts import BrokerParts
from kipmesh.transport.pipeline import Handler, Handlers


def _functions() -> Iterator[tuple[str, Any]]:
    for info in pkgutil.iter_modules(__path__):
        yield from vars(import_module(f"{__name__}.{info.name}")).items()


def make_handlers(broker: BrokerParts) -> Handlers:
    """Return the handler of every API that a broker responds to."""
    functions = dict(_functions())
    handlers: dict[Any, Handler] = {}
    for api in APIS:
        if api.role in (Role.BROKER, Role.FORWARDED):
            function = functions.get(api.method)
            if function is not None:
                handlers[api] = partial(function, broker)
            elif api.role is Role.FORWARDED:
                handlers[api] = partial(broker.forwarder.forward, api)
            else:
                raise LookupError(f"no handler for {api.name} in {__name__}")
    return handlers
