"""The options of the source: the names and meanings of Spark's Kafka connector, checked before anything is read.

Invariants: option names are case-insensitive; every option is either used, refused because its value is malformed, or
refused by name because the source does not know it. No option is ignored. This module imports neither pyspark nor the
client, so that its rules can be tested by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.spark.offsets import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    InvalidOptionError,
    Offsets,
    TopicPartition,
    parse_assignment,
    parse_partition_numbers,
)

_CLIENT_PREFIX: Final = "kafka."
_BOOTSTRAP: Final = "kafka.bootstrap.servers"
_STRATEGIES: Final = ("assign", "subscribe", "subscribePattern")

# What bounds the memory of a task: two fetches that wait to be decoded, and one Arrow batch.
_SCAN_CONFIG: Final[Mapping[str, str]] = {
    "max.partition.fetch.bytes": str(4 * 1024 * 1024),
    "fetch.max.bytes": str(8 * 1024 * 1024),
    "auto.offset.reset": "none",
}

_KNOWN: Final = (
    *_STRATEGIES,
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
)
# Options of Spark's Kafka connector that this source does not have: refused by name, with the reason.
_REFUSED: Final[Mapping[str, str]] = {
    "minOffsetsPerTrigger": "Spark's Python streaming sources cannot wait for more data; use a longer trigger interval",
    "maxTriggerDelay": "it belongs to minOffsetsPerTrigger, which this source does not have",
    "groupIdPrefix": "the source reads by offsets and has no consumer group",
    "kafka.group.id": "the source reads by offsets and has no consumer group",
    "kafkaConsumer.pollTimeoutMs": "set kafka.request.timeout.ms",
    "fetchOffset.numRetries": "set kafka.request.timeout.ms",
    "fetchOffset.retryIntervalMs": "set kafka.retry.backoff.ms",
    "topic": "it is an option of writes, and this source only reads",
    "includeTimestamp": "the timestamp is always a column",
    "kafka.auto.offset.reset": "set startingOffsets",
    "kafka.key.deserializer": "keys are always binary",
    "kafka.value.deserializer": "values are always binary",
    "kafka.enable.auto.commit": "the source commits nothing: offsets are in the checkpoint",
    "kafka.interceptor.classes": "there are no interceptors",
}


class Mode(Enum):
    """How the source is used; some options exist in one mode only."""

    BATCH = "batch"
    STREAM = "streaming"


class BoundKind(Enum):
    """What a starting or ending point is given by."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSETS = "offsets"
    TIMESTAMP = "timestamp"
    TIMESTAMPS = "timestamps"


@dataclass(frozen=True, slots=True)
class Bound:
    """A starting or an ending point.

    `positions` holds an offset (OFFSETS; -2 earliest, -1 latest) or a time in ms (TIMESTAMPS) for each partition;
    `timestamp_ms` is TIMESTAMP's. `option` is the name by which errors speak of it.
    """

    kind: BoundKind
    option: str
    positions: Offsets = field(default_factory=dict)
    timestamp_ms: int = -1


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Checked options. Exactly one of `topics`, `pattern` and `assignment` is not empty."""

    bootstrap: str
    topics: tuple[str, ...]
    pattern: str
    assignment: tuple[TopicPartition, ...]
    starting: Bound
    ending: Bound
    later_than_any_is_latest: bool
    fail_on_data_loss: bool
    include_headers: bool
    max_offsets_per_trigger: int | None
    min_partitions: int | None
    max_records_per_partition: int | None
    client_config: Mapping[str, str]


def parse_options(raw: Mapping[str, str], mode: Mode) -> SourceOptions:
    """Check the options of a query. Raises `InvalidOptionError`, which names the option."""
    given = _canonical(raw)
    topics, pattern, assignment = _parse_strategy(given)
    starting, ending = _parse_bounds(given, mode)
    return SourceOptions(
        bootstrap=_parse_bootstrap(given),
        topics=topics,
        pattern=pattern,
        assignment=assignment,
        starting=starting,
        ending=ending,
        later_than_any_is_latest=_parse_timestamp_strategy(given),
        fail_on_data_loss=_parse_bool(given, "failOnDataLoss", default=True),
        include_headers=_parse_bool(given, "includeHeaders", default=False),
        max_offsets_per_trigger=_parse_positive(given, "maxOffsetsPerTrigger"),
        min_partitions=_parse_positive(given, "minPartitions"),
        max_records_per_partition=_parse_positive(given, "maxRecordsPerPartition"),
        client_config=_parse_client_config(given),
    )


def _canonical(raw: Mapping[str, str]) -> dict[str, str]:
    """Names in their documented spelling, which errors then use; an unknown name is refused."""
    spelling = {name.lower(): name for name in (*_KNOWN, *_REFUSED)}
    given: dict[str, str] = {}
    for name, value in raw.items():
        canonical = spelling.get(name.lower(), name)
        if canonical in _REFUSED:
            raise InvalidOptionError(canonical, f"is not supported by kipmesh: {_REFUSED[canonical]}")
        if canonical not in _KNOWN:
            canonical = name.lower()
            if not canonical.startswith(_CLIENT_PREFIX):
                raise InvalidOptionError(name, f"is unknown; known are {', '.join(_KNOWN)} and {_CLIENT_PREFIX}*")
        given[canonical] = str(value).strip()
    return given


def _parse_bootstrap(given: Mapping[str, str]) -> str:
    servers = given.get(_BOOTSTRAP, "")
    if not servers:
        raise InvalidOptionError(_BOOTSTRAP, "must be given, as host:port,host:port")
    for server in servers.split(","):
        host, colon, port = server.strip().rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidOptionError(_BOOTSTRAP, f"wants host:port,host:port and not {server.strip()!r}")
    return servers


def _parse_client_config(given: Mapping[str, str]) -> dict[str, str]:
    """The consumer's settings: the kafka.* options without the prefix, over what suits a scan of a whole topic."""
    config = dict(_SCAN_CONFIG)
    for name, value in given.items():
        if name.startswith(_CLIENT_PREFIX) and name != _BOOTSTRAP:
            config[name.removeprefix(_CLIENT_PREFIX)] = value
    try:
        ConsumerConfig.parse(config)
    except InvalidConfigError as error:
        named = re.search(r"key '([^']+)'", str(error))
        key = named.group(1) if named else ""
        raise InvalidOptionError(f"{_CLIENT_PREFIX}{key}", f"is refused by the client: {error}") from None
    return config


def _parse_strategy(given: Mapping[str, str]) -> tuple[tuple[str, ...], str, tuple[TopicPartition, ...]]:
    chosen = [name for name in _STRATEGIES if name in given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none"
        raise InvalidOptionError("subscribe", f"or assign or subscribePattern must be given, one of them ({found} is)")
    name, value = chosen[0], given[chosen[0]]
    if not value:
        raise InvalidOptionError(name, "must not be empty")
    if name == "assign":
        return (), "", parse_assignment(name, value)
    if name == "subscribe":
        topics = tuple(dict.fromkeys(topic.strip() for topic in value.split(",")))
        if not all(topics):
            raise InvalidOptionError(name, f"wants topics separated by commas and not {value!r}")
        return topics, "", ()
    try:
        re.compile(value)
    except re.error as error:
        raise InvalidOptionError(name, f"is not a regular expression: {error}") from None
    return (), value, ()


def _parse_bounds(given: Mapping[str, str], mode: Mode) -> tuple[Bound, Bound]:
    starting = _parse_bound(given, "starting", "latest" if mode is Mode.STREAM else "earliest")
    if mode is Mode.STREAM:
        for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
            if name in given:
                raise InvalidOptionError(name, "belongs to batch queries; a streaming query has no end")
        return starting, Bound(BoundKind.LATEST, "endingOffsets")
    if "maxOffsetsPerTrigger" in given:
        raise InvalidOptionError("maxOffsetsPerTrigger", "belongs to streaming queries")
    if starting.kind is BoundKind.LATEST or LATEST_OFFSET in _offsets_of(starting):
        raise InvalidOptionError(starting.option, "cannot be latest (-1) in a batch query")
    ending = _parse_bound(given, "ending", "latest")
    if ending.kind is BoundKind.EARLIEST or EARLIEST_OFFSET in _offsets_of(ending):
        raise InvalidOptionError(ending.option, "cannot be earliest (-2): nothing would be read")
    return starting, ending


def _offsets_of(bound: Bound) -> frozenset[int]:
    return frozenset(bound.positions.values()) if bound.kind is BoundKind.OFFSETS else frozenset()


def _parse_bound(given: Mapping[str, str], side: str, default: str) -> Bound:
    """Of several options for one side the connector takes the timestamp, then the timestamps, then the offsets."""
    timestamp, timestamps, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    if timestamp in given:
        return Bound(BoundKind.TIMESTAMP, timestamp, timestamp_ms=_parse_time(timestamp, given[timestamp]))
    if timestamps in given:
        positions = parse_partition_numbers(timestamps, given[timestamps], least=0)
        return Bound(BoundKind.TIMESTAMPS, timestamps, positions)
    match given.get(offsets, default).lower():
        case "earliest":
            return Bound(BoundKind.EARLIEST, offsets)
        case "latest":
            return Bound(BoundKind.LATEST, offsets)
        case _:
            positions = parse_partition_numbers(offsets, given[offsets], least=EARLIEST_OFFSET)
            return Bound(BoundKind.OFFSETS, offsets, positions)


def _parse_time(name: str, value: str) -> int:
    if not value.isdigit():
        raise InvalidOptionError(name, f"wants milliseconds since 1970 and not {value!r}")
    return int(value)


def _parse_timestamp_strategy(given: Mapping[str, str]) -> bool:
    name = "startingOffsetsByTimestampStrategy"
    match given.get(name, "error").lower():
        case "error":
            return False
        case "latest":
            return True
        case value:
            raise InvalidOptionError(name, f"wants error or latest and not {value!r}")


def _parse_bool(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    match given.get(name, str(default)).lower():
        case "true":
            return True
        case "false":
            return False
        case value:
            raise InvalidOptionError(name, f"wants true or false and not {value!r}")


def _parse_positive(given: Mapping[str, str], name: str) -> int | None:
    return _positive(name, given[name]) if name in given else None


def _positive(name: str, value: str) -> int:
    if not value.isdigit() or int(value) == 0:
        raise InvalidOptionError(name, f"wants a positive whole number and not {value!r}")
    return int(value)
