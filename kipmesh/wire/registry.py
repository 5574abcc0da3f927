"""Every API that the listener speaks. ApiVersions is made from this list."""

from __future__ import annotations

from kipmesh.wire.api import Api
from kipmesh.wire.apis import api_versions, metadata

_MODULES = (metadata,)


def make_registry() -> dict[int, Api]:
    """The APIs by their keys."""
    apis = [module.API for module in _MODULES]
    registry = {api.key: api for api in (*apis, api_versions.make(apis))}
    if len(registry) != len(apis) + 1:
        raise ValueError("two APIs have the same key")
    return registry
