"""Distributes the user's configuration keys to the nodes of a local cluster.

A key goes to every service that knows it. A key that no service knows, or that the cluster sets (`RESERVED`), is an
error. Values are checked before a node is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from kipmesh.cluster.layout import ClusterState, NodeInfo, Role, properties
from kipmesh.core.config import BrokerConfig, Config, ControllerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node import settings

RESERVED = frozenset(
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
    """Return the configuration class of a role's service. Leaders and followers share the class for brokers."""
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
    """Raise InvalidConfigError for a key that no service knows or that the local cluster sets."""
    known = {key for role in Role for key in _keys(role)}
    for key in config:
        if key in RESERVED:
            raise InvalidConfigError(f"configuration key {key!r} is set by the local cluster: remove it")
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            raise InvalidConfigError(
                f"unknown configuration key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
            )


def for_role(config: Mapping[str, str], role: Role) -> dict[str, str]:
    """Return the entries of `config` whose keys the role's service knows."""
    known = _keys(role)
    return {key: value for key, value in config.items() if key in known}


def parsed(state: ClusterState, node: NodeInfo, over: Mapping[str, str] | None = None) -> Config:
    """Return a node's parsed configuration; values in `over` take precedence.

    Raises InvalidConfigError for an invalid value or an unknown key in `over`.
    """
    values = properties(state, node, for_role(state.config, node.role)) | dict(over or {})
    return config_type(node.role).parse(values)


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in `KIPMESH_CONFIG_*` variables, by dotted key.

    Raises InvalidConfigError for a key that no service knows.
    """
    return settings.from_environment(environment, frozenset[str]().union(*(_keys(role) for role in Role)))
