"""IncrementalAlterConfigs and DescribeConfigs of topics; of brokers there is a little in `broker_configs`.

The controller has no configuration of anything else: such requests are answered with INVALID_REQUEST. The metadata
topic's is fixed: its `cleanup.policy` reads `snapshot`, and nothing of it can be set (630-07).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.core.config import TopicConfig
from kipmesh.core.config.resources import AlterOperation, ConfigSource
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata.broker_configs import broker_alterations, described_broker
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import (
    BROKER_RESOURCE,
    CLUSTER_METADATA_TOPIC,
    TOPIC_RESOURCE,
    MetadataImage,
    TopicState,
)
from kipmesh.core.metadata.records import ConfigRecord, Record
from kipmesh.core.metadata.request_limits import config_value_fault, refusal

MIN_INSYNC_REPLICAS = "min.insync.replicas"
UNCLEAN_LEADER_ELECTION = "unclean.leader.election.enable"
METADATA_TOPIC_CONFIG: Mapping[str, tuple[str, str]] = {
    "cleanup.policy": ("snapshot", "What happens to old segments: a snapshot of the metadata takes their place.")
}
"""Key -> value and documentation."""


def unclean_election_allowed(image: MetadataImage, topic_name: str, *, default: bool) -> bool:
    """The topic's `unclean.leader.election.enable`, by default the controller's own."""
    value = image.topic_config(topic_name).get(UNCLEAN_LEADER_ELECTION)
    return default if value is None else value.lower() in _TRUE


_TRUE = frozenset({"true", "1", "on", "t", "y", "yes"})  # what TopicConfig reads as true


def alter_configs(
    image: MetadataImage, request: m.IncrementalAlterConfigsRequest
) -> Decision[m.IncrementalAlterConfigsResponse]:
    """Set or remove single keys; a resource's alterations hold together."""
    records: list[Record] = []
    responses = []
    seen: set[tuple[int, str]] = set()
    for resource in request.resources:
        code, message = ErrorCode.NONE, None
        name = (resource.resource_type, resource.resource_name)
        try:
            if name in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "the request has the resource more than once")
            seen.add(name)
            is_broker = resource.resource_type == BROKER_RESOURCE
            changes = broker_alterations(image, resource) if is_broker else _alterations(image, resource)
            if not request.validate_only:
                records += changes
        except KafkaError as error:
            code, message = error.code, refusal(error.message)
        responses.append(m.AlterConfigsResourceResponse(code, message, *name))
    return Decision(records, m.IncrementalAlterConfigsResponse(responses=tuple(responses)))


def _topic(image: MetadataImage, resource_type: int, name: str) -> TopicState:
    if resource_type != TOPIC_RESOURCE:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST, f"the controller has no configuration of resource type {resource_type}"
        )
    if name == CLUSTER_METADATA_TOPIC:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"the configuration of topic {name!r} is fixed")
    topic = image.topic_by_name(name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name!r}")
    return topic


def _alterations(image: MetadataImage, resource: m.AlterConfigsResource) -> list[Record]:
    topic = _topic(image, resource.resource_type, resource.resource_name)
    before = image.topic_config(topic.name)
    after = dict(before)
    altered: dict[str, None] = {}
    known = TopicConfig.keys()
    for config in resource.configs:
        if config.name in altered:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"configuration key {config.name!r} is altered twice")
        altered[config.name] = None
        match config.config_operation:
            case AlterOperation.SET:
                if config.value is None:
                    raise KafkaError(ErrorCode.INVALID_REQUEST, f"configuration key {config.name!r} has no value")
                fault = config_value_fault(config.value)
                if fault is not None:
                    raise InvalidConfigError(f"configuration key {config.name!r}: {fault}")
                after[config.name] = config.value
            case AlterOperation.DELETE:
                if config.name not in known:
                    raise InvalidConfigError(f"unknown configuration key {config.name!r}")
                after.pop(config.name, None)
            case AlterOperation.APPEND | AlterOperation.SUBTRACT:
                raise InvalidConfigError(f"configuration key {config.name!r} is not a list")
            case _:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"no configuration operation {config.config_operation}")
    TopicConfig.parse(after)
    return [
        ConfigRecord(TOPIC_RESOURCE, topic.name, name, after.get(name))
        for name in altered
        if after.get(name) != before.get(name)
    ]


class TopicDefaultValues(NamedTuple):
    """Topic defaults that a node's own configuration may set."""

    values: Mapping[str, Any]
    """Where they differ from TopicConfig's own."""
    static: Collection[str]
    """Those of them that the node's file or environment names."""


def describe_configs(
    image: MetadataImage, request: m.DescribeConfigsRequest, node_defaults: TopicDefaultValues
) -> m.DescribeConfigsResponse:
    """Values, and where they are from."""
    return m.DescribeConfigsResponse(
        results=tuple([_described(image, resource, node_defaults, request) for resource in request.resources])
    )


def _described(
    image: MetadataImage,
    resource: m.DescribeConfigsResource,
    node_defaults: TopicDefaultValues,
    request: m.DescribeConfigsRequest,
) -> m.DescribeConfigsResult:
    if (resource.resource_type, resource.resource_name) == (TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC):
        return _described_metadata_topic(resource, request)
    try:
        if resource.resource_type == BROKER_RESOURCE:
            return described_broker(image, resource, request)
        topic = _topic(image, resource.resource_type, resource.resource_name)
    except KafkaError as error:
        return m.DescribeConfigsResult(
            error.code, refusal(error.message), resource.resource_type, resource.resource_name
        )
    own = image.topic_config(topic.name)
    defaults = TopicConfig.parse(node_defaults.values).as_dict()
    # The default asks for no more in-sync replicas than the topic has replicas.
    replicas = min((len(state.replicas) for state in topic.partitions.values()), default=1)
    defaults[MIN_INSYNC_REPLICAS] = min(defaults[MIN_INSYNC_REPLICAS], replicas)
    wanted = resource.configuration_keys or tuple(defaults)
    entries = []
    for (name, value), field in zip(defaults.items(), TopicConfig.model_fields.values(), strict=True):
        if name not in wanted:
            continue
        if name in own:
            source = ConfigSource.TOPIC
        else:
            source = ConfigSource.STATIC_BROKER if name in node_defaults.static else ConfigSource.DEFAULT
        entries.append(
            m.DescribeConfigsResourceResult(
                name,
                own[name] if name in own else _as_text(value),
                config_source=source,
                documentation=field.description if request.include_documentation else None,
            )
        )
    return m.DescribeConfigsResult(
        resource_type=resource.resource_type, resource_name=resource.resource_name, configs=tuple(entries)
    )


def _described_metadata_topic(
    resource: m.DescribeConfigsResource, request: m.DescribeConfigsRequest
) -> m.DescribeConfigsResult:
    entries = [
        m.DescribeConfigsResourceResult(
            name,
            value,
            read_only=True,
            config_source=ConfigSource.DEFAULT,
            documentation=documentation if request.include_documentation else None,
        )
        for name, (value, documentation) in METADATA_TOPIC_CONFIG.items()
        if name in (resource.configuration_keys or METADATA_TOPIC_CONFIG)
    ]
    return m.DescribeConfigsResult(
        resource_type=resource.resource_type, resource_name=resource.resource_name, configs=tuple(entries)
    )


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
