"""IncrementalAlterConfigs and DescribeConfigs of topics and brokers. Other resource types return INVALID_REQUEST.

The metadata topic's configuration is fixed: its `cleanup.policy` is `snapshot`, and no key can be set (630-07).

Brokers have a few dynamic keys, for one broker or (name "") for all, stored as ConfigRecords of type 4 as in Kafka. The
controller does not know a broker's own configuration file, so only keys that were set are described.
"""

from __future__ import annotations

from collections.abc import Mapping

from kipmesh import messages as m
from kipmesh.core.config import TopicConfig
from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE, NO_THROTTLE, AlterOperation, ConfigSource, dotted
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata.decision import UNCLEAN_LEADER_ELECTION, ControllerState, Decision, error_text, find_topic
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.records import ConfigRecord, Record
from kipmesh.core.metadata.states import BROKER_RESOURCE, CLUSTER_METADATA_TOPIC, TOPIC_RESOURCE, TopicState

MIN_INSYNC_REPLICAS = "min.insync.replicas"
TEXT_LENGTH_MAX = 32_767
"""Maximum characters of a configuration value, the limit of Kafka's older string format."""
METADATA_TOPIC_ENTRIES = [
    m.DescribeConfigsResourceResult(
        "cleanup.policy",
        "snapshot",
        read_only=True,
        config_source=ConfigSource.DEFAULT,
        documentation="Old segments are replaced by snapshots of the metadata.",
    )
]
"""Configuration of `__cluster_metadata`."""
DYNAMIC_KEYS: Mapping[str, str] = {
    FOLLOWER_THROTTLED_RATE: "Maximum fetch rate (bytes per second) of replicas that a reassignment adds to the broker."
}
"""Dynamic broker key -> documentation. Values are positive integers."""


def alter_configs(
    controller: ControllerState, request: m.IncrementalAlterConfigsRequest
) -> Decision[m.IncrementalAlterConfigsResponse]:
    """Decide IncrementalAlterConfigs: set or remove keys. For each resource, all changes are made or none. With
    `validate_only`, write no records.

    Error codes per resource: INVALID_CONFIG, INVALID_REQUEST, UNKNOWN_TOPIC_OR_PARTITION, BROKER_ID_NOT_REGISTERED,
    POLICY_VIOLATION (the metadata topic).
    """
    records: list[Record] = []
    responses = []
    seen: set[tuple[int, str]] = set()
    for resource in request.resources:
        code, message = ErrorCode.NONE, None
        name = (resource.resource_type, resource.resource_name)
        try:
            if name in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has resource {name[1][:30]!r} more than once")
            seen.add(name)
            changes = _alterations(controller.image, resource)
            if not request.validate_only:
                records += changes
        except KafkaError as error:
            code, message = error.code, error_text(error.message)
        responses.append(m.AlterConfigsResourceResponse(code, message, *name))
    return Decision(records, m.IncrementalAlterConfigsResponse(responses=tuple(responses)))


def _alterations(image: MetadataImage, resource: m.AlterConfigsResource) -> list[Record]:
    """Return the records that set or remove the resource's keys, without those that change nothing. Raises KafkaError
    with the codes of `alter_configs`."""
    is_broker = resource.resource_type == BROKER_RESOURCE
    name = _broker_name(image, resource.resource_name) if is_broker else _topic(image, resource).name
    before = image.broker_config(name) if is_broker else image.topic_config(name)
    altered: dict[str, str | None] = {}
    known = TopicConfig.keys()
    for config in resource.configs:
        if config.name in altered:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"configuration key {config.name!r} is altered more than once")
        if is_broker and config.name not in DYNAMIC_KEYS:
            raise InvalidConfigError(f"broker key {config.name!r} cannot be changed at runtime; restart the broker")
        match config.config_operation:
            case AlterOperation.SET:
                if config.value is None:
                    raise KafkaError(ErrorCode.INVALID_REQUEST, f"configuration key {config.name!r} has no value")
                altered[config.name] = (_rate if is_broker else checked_value)(config.name, config.value)
            case AlterOperation.DELETE:
                if not is_broker and config.name not in known:
                    raise InvalidConfigError(f"unknown configuration key {config.name!r}")
                altered[config.name] = None
            case AlterOperation.APPEND | AlterOperation.SUBTRACT:
                raise InvalidConfigError(f"configuration key {config.name!r} is not a list; set or delete it")
            case _:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"operation must be 0 to 3, got {config.config_operation}")
    if not is_broker:
        TopicConfig.parse({key: value for key, value in {**before, **altered}.items() if value is not None})
    return [
        ConfigRecord(resource.resource_type, name, key, value)
        for key, value in altered.items()
        if value != before.get(key)
    ]


def _rate(key: str, value: str) -> str:
    is_number = value.isascii() and value.isdecimal() and len(value) <= len(str(NO_THROTTLE))
    if not is_number or not 1 <= int(value) <= NO_THROTTLE:
        raise InvalidConfigError(f"configuration key {key!r}: {value[:30]!r} must be an integer from 1 to 2^63 - 1")
    return str(int(value))


def checked_value(key: str, value: str) -> str:
    """Return `value` unchanged. Raises InvalidConfigError if it has more than TEXT_LENGTH_MAX characters or a NUL
    character."""
    if len(value) > TEXT_LENGTH_MAX or "\0" in value:
        text = f"a value must have at most {TEXT_LENGTH_MAX} characters and no NUL"
        raise InvalidConfigError(f"configuration key {key!r}: {text}")
    return value


def _topic(image: MetadataImage, resource: m.AlterConfigsResource | m.DescribeConfigsResource) -> TopicState:
    if resource.resource_type != TOPIC_RESOURCE:
        text = f"resource type {resource.resource_type} has no configuration here; use topics (2) or brokers (4)"
        raise KafkaError(ErrorCode.INVALID_REQUEST, text)
    if resource.resource_name == CLUSTER_METADATA_TOPIC:
        text = f"the configuration of topic {resource.resource_name!r} cannot be changed"
        raise KafkaError(ErrorCode.POLICY_VIOLATION, text)
    return find_topic(image, resource.resource_name)


def _broker_name(image: MetadataImage, name: str) -> str:
    """Return the broker id without leading zeros, or "" (all brokers) for "". Raises
    KafkaError(BROKER_ID_NOT_REGISTERED) if there is no such broker or `name` is not a number."""
    if name == "":
        return name
    if not (name.isascii() and name.isdecimal() and len(name) <= len(str(2**31)) and int(name) in image.brokers):
        raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"broker {name[:30]!r} is not registered")
    return str(int(name))


def describe_configs(
    controller: ControllerState, request: m.DescribeConfigsRequest
) -> Decision[m.DescribeConfigsResponse]:
    """Decide DescribeConfigs: return values, their sources and, on request, their documentation.

    A request without keys describes all keys of a topic, or the keys that are set for a broker. Error codes per
    resource: INVALID_REQUEST, UNKNOWN_TOPIC_OR_PARTITION, BROKER_ID_NOT_REGISTERED.
    """
    results = []
    for resource in request.resources:
        name = (resource.resource_type, resource.resource_name)
        try:
            if name == (TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC):
                entries = METADATA_TOPIC_ENTRIES
            elif resource.resource_type == BROKER_RESOURCE:
                entries = _entries_of_broker(controller.image, _broker_name(controller.image, resource.resource_name))
            else:
                entries = _entries_of_topic(controller, _topic(controller.image, resource))
        except KafkaError as error:
            results.append(m.DescribeConfigsResult(error.code, error_text(error.message), *name))
            continue
        if resource.configuration_keys:
            entries = [entry for entry in entries if entry.name in resource.configuration_keys]
        if not request.include_documentation:
            entries = [entry._replace(documentation=None) for entry in entries]
        results.append(m.DescribeConfigsResult(ErrorCode.NONE, None, *name, configs=tuple(entries)))
    return Decision((), m.DescribeConfigsResponse(results=tuple(results)))


def _entries_of_broker(image: MetadataImage, name: str) -> list[m.DescribeConfigsResourceResult]:
    """Return the dynamic keys that are set for the broker or for all brokers, with the broker's own value first."""
    common, own = image.broker_config(""), image.broker_config(name)
    return [
        m.DescribeConfigsResourceResult(
            key,
            own.get(key, common.get(key)),
            config_source=ConfigSource.DYNAMIC_BROKER if name and key in own else ConfigSource.DYNAMIC_DEFAULT_BROKER,
            documentation=documentation,
        )
        for key, documentation in DYNAMIC_KEYS.items()
        if key in own or key in common
    ]


def _entries_of_topic(controller: ControllerState, topic: TopicState) -> list[m.DescribeConfigsResourceResult]:
    own, config = controller.image.topic_config(topic.name), controller.config
    # The default of min.insync.replicas is at most the topic's replication factor.
    replicas = min((len(state.replicas) for state in topic.partitions.values()), default=1)
    defaults = TopicConfig().as_dict() | {
        MIN_INSYNC_REPLICAS: min(config.min_insync_replicas, replicas),
        UNCLEAN_LEADER_ELECTION: config.unclean_leader_election_enable,
    }
    static = {dotted(name) for name in config.model_fields_set}
    entries = []
    for (key, value), field in zip(defaults.items(), TopicConfig.model_fields.values(), strict=True):
        source = ConfigSource.STATIC_BROKER if key in static else ConfigSource.DEFAULT
        if key in own:
            value, source = own[key], ConfigSource.TOPIC
        text = str(value).lower() if isinstance(value, bool) else str(value)
        entries.append(
            m.DescribeConfigsResourceResult(key, text, config_source=source, documentation=field.description)
        )
    return entries
