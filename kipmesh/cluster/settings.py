"""Which of the user's configuration keys goes to which nodes of a local cluster.

A key must be known to at least one of the services, goes to all that know it, and must not be one that the local
cluster sets itself. Values are checked before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from kipmesh.cluster.layout import ClusterState, NodeInfo, Role, properties
from kipmesh.core.config import BrokerConfig, Config, ControllerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node import settings

OURS = frozenset(
    {
        "advertised.listeners",
        "bootstrap.servers",
        "broker.rack",
        "client.rack",
        "cluster.id",
        "controller.quorum.voters",
        "http.listener",
        "inter.broker.listener.name",
        "listeners",
        "log.dirs",
        "metadata.log.dir",
        "node.id",
    }
)


def config_type(role: Role) -> type[Config]:
    """The configuration of a role's service."""
    match role:
        case Role.CONTROLLER:
            return ControllerConfig
        case Role.CONSUMER:
            return ConsumerServiceConfig
        case _:
            return BrokerConfig


def _keys(role: Role) -> frozenset[str]:
    return frozenset(config_type(role).keys())


def check_keys(config: Mapping[str, str]) -> None:
    """Raise InvalidConfigError for a key that no service knows or that is not the user's to set."""
    known = {key for role in Role for key in _keys(role)}
    for key in config:
        if key in OURS:
            raise InvalidConfigError(f"configuration key {key!r} is set by the local cluster itself")
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            raise InvalidConfigError(
                f"unknown configuration key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
            )


def for_role(config: Mapping[str, str], role: Role) -> dict[str, str]:
    """The part of the user's configuration that a role's service knows."""
    known = _keys(role)
    return {key: value for key, value in config.items() if key in known}


def parsed(state: ClusterState, node: NodeInfo, over: Mapping[str, str] | None = None) -> Config:
    """A node's whole configuration, with `over` over all else, checked; raises InvalidConfigError."""
    values = properties(state, node, for_role(state.config, node.role)) | dict(over or {})
    return config_type(node.role).parse(values)


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The keys that `KIPMESH_CONFIG_*` variables set, of whichever service; raises InvalidConfigError."""
    return settings.from_environment(environment, frozenset[str]().union(*(_keys(role) for role in Role)))
