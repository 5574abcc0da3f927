"""Every API that the listener speaks. ApiVersions is made from this list."""

from __future__ import annotations

from kipmesh.wire.api import Api
from kipmesh.wire.apis import (
    api_versions,
    describe_cluster,
    describe_topic_partitions,
    fetch,
    find_coordinator,
    init_producer_id,
    list_offsets,
    metadata,
    offset_for_leader_epoch,
    produce,
)

_MODULES = (
    produce,
    fetch,
    list_offsets,
    metadata,
    find_coordinator,
    init_producer_id,
    offset_for_leader_epoch,
    describe_cluster,
    describe_topic_partitions,
)


def make_registry() -> dict[int, Api]:
    """The APIs by their keys."""
    apis = [module.API for module in _MODULES]
    registry = {api.key: api for api in (*apis, api_versions.make(apis))}
    if len(registry) != len(apis) + 1:
        raise ValueError("two APIs have the same key")
    return registry
