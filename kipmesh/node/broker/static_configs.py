"""What DescribeConfigs tells of a broker beyond what was set while it runs: its own file's values, and the defaults.

Only the broker itself knows them, so clients ask the broker that they ask about, as with Apache Kafka; another one
tells what the controllers have.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kipmesh import messages as m
from kipmesh.core.config import BrokerConfig
from kipmesh.core.config.base import dotted
from kipmesh.core.config.resources import ConfigSource, ResourceType


def each_once(request: m.DescribeConfigsRequest) -> m.DescribeConfigsRequest:
    """The same with each resource once, with all keys that it was asked for: clients look answers up by resource.

    A broker has more than a hundred keys, so answers for each of many repeats would be far larger than the request.
    """
    asked: dict[tuple[int, str], dict[str, None] | None] = {}  # None: all keys
    for each in request.resources:
        of = each.resource_type, each.resource_name
        keys = asked.setdefault(of, {})
        if not each.configuration_keys:
            asked[of] = None
        elif keys is not None:
            keys.update(dict.fromkeys(each.configuration_keys))
    if len(asked) == len(request.resources):
        return request
    return request._replace(
        resources=[m.DescribeConfigsResource(kind, name, tuple(keys or ())) for (kind, name), keys in asked.items()]
    )


def with_static(
    response: m.DescribeConfigsResponse, request: m.DescribeConfigsRequest, config: BrokerConfig
) -> m.DescribeConfigsResponse:
    """The controllers' answer with the values of this broker, which are read-only, where it is asked for.

    The request names each resource once.
    """
    mine = ResourceType.BROKER, str(config.node_id)
    wanted = {(each.resource_type, each.resource_name): each.configuration_keys for each in request.resources}
    if mine not in wanted:
        return response
    known = static_configs(config, wanted[mine], has_documentation=request.include_documentation)
    results = [
        _joined(one, known) if (one.resource_type, one.resource_name) == mine and not one.error_code else one
        for one in response.results
    ]
    return response._replace(results=results)


def static_configs(
    config: BrokerConfig, keys: Collection[str] = (), *, has_documentation: bool = False
) -> list[m.DescribeConfigsResourceResult]:
    """Those of `keys`, all if there are none, in the order of their names."""
    found = []
    for name, field in type(config).model_fields.items():
        key = dotted(name)
        if keys and key not in keys:
            continue
        source = ConfigSource.STATIC_BROKER if name in config.model_fields_set else ConfigSource.DEFAULT
        text = " ".join((field.description or "").split()) if has_documentation else None
        found.append(
            m.DescribeConfigsResourceResult(key, _text(getattr(config, name)), True, source, documentation=text)
        )
    return sorted(found)


def _joined(one: m.DescribeConfigsResult, known: list[m.DescribeConfigsResourceResult]) -> m.DescribeConfigsResult:
    dynamic = {each.name for each in one.configs}
    return one._replace(configs=[*one.configs, *(each for each in known if each.name not in dynamic)])


def _text(value: Any) -> str | None:
    """As a file of configuration has it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
