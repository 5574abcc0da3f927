"""Dynamic configuration of brokers: the few keys that hold without a restart, for one broker or (name "") for all.

They are in the metadata log as Kafka's ConfigRecords of type 4. What a broker's own file says is not known here, so
only keys that were set are described.
"""

from __future__ import annotations

from collections.abc import Mapping

from kipmesh import messages as m
from kipmesh.core.config.resources import FOLLOWER_THROTTLED_RATE, NO_THROTTLE, AlterOperation, ConfigSource
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata.image import BROKER_RESOURCE, MetadataImage
from kipmesh.core.metadata.records import ConfigRecord, Record

DYNAMIC_KEYS: Mapping[str, str] = {
    FOLLOWER_THROTTLED_RATE: "Bytes a second that replicas which a reassignment adds to this broker fetch at most."
}
"""Key -> documentation. Each value is a whole number from 1 on."""


def broker_alterations(image: MetadataImage, resource: m.AlterConfigsResource) -> list[Record]:
    """The records that set or remove keys; raises KafkaError."""
    name = _name(image, resource.resource_name)
    records: list[Record] = []
    altered = set()
    for config in resource.configs:
        if config.name in altered:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"configuration key {config.name!r} is altered twice")
        altered.add(config.name)
        if config.name not in DYNAMIC_KEYS:
            raise InvalidConfigError(f"configuration key {config.name!r} of a broker cannot be changed while it runs")
        match config.config_operation:
            case AlterOperation.SET:
                value: str | None = _checked(config.name, config.value)
            case AlterOperation.DELETE:
                value = None
            case AlterOperation.APPEND | AlterOperation.SUBTRACT:
                raise InvalidConfigError(f"configuration key {config.name!r} is not a list")
            case _:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"no configuration operation {config.config_operation}")
        if value != image.broker_config(name).get(config.name):
            records.append(ConfigRecord(BROKER_RESOURCE, name, config.name, value))
    return records


def _checked(key: str, value: str | None) -> str:
    if value is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"configuration key {key!r} has no value")
    is_number = value.isascii() and value.isdecimal() and len(value) <= len(str(NO_THROTTLE))
    if not is_number or not 1 <= int(value) <= NO_THROTTLE:
        raise InvalidConfigError(f"configuration key {key!r}: {value[:30]!r} is not a number between 1 and 2^63 - 1")
    return str(int(value))


def _name(image: MetadataImage, name: str) -> str:
    """The resource's name as it is written down; a broker that is not registered has no configuration to change."""
    if name == "":
        return name
    if not (name.isascii() and name.isdecimal() and len(name) <= len(str(2**31)) and int(name) in image.brokers):
        raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"broker {name[:30]!r} is not registered")
    return str(int(name))


def described_broker(
    image: MetadataImage, resource: m.DescribeConfigsResource, request: m.DescribeConfigsRequest
) -> m.DescribeConfigsResult:
    """The keys that are set for the broker, or for all of them."""
    name = _name(image, resource.resource_name)
    common, own = image.broker_config(""), image.broker_config(name)
    entries = [
        m.DescribeConfigsResourceResult(
            key,
            own.get(key, common.get(key)),
            config_source=ConfigSource.DYNAMIC_BROKER if name and key in own else ConfigSource.DYNAMIC_DEFAULT_BROKER,
            documentation=documentation if request.include_documentation else None,
        )
        for key, documentation in DYNAMIC_KEYS.items()
        if (key in own or key in common) and key in (resource.configuration_keys or DYNAMIC_KEYS)
    ]
    return m.DescribeConfigsResult(
        resource_type=resource.resource_type, resource_name=resource.resource_name, configs=tuple(entries)
    )
