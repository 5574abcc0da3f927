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
from kipmesh.spark.offsets import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    InvalidOptionError,
    Offsets,
    OtherModeError,
    TopicPartition,
    parse_assignment,
    parse_partition_numbers,
)
from kipmesh.spark.option_values import (
    canonical,
    client_settings,
    parse_bool,
    parse_bootstrap,
    parse_duration_ms,
    parse_positive,
)

_GROUP_ID: Final = "kafka.group.id"
_GROUP_ID_PREFIX: Final = "spark-kipmesh-source"
_CLIENT_ID_LENGTH_MAX: Final = 249
_MAX_TRIGGER_DELAY_MS: Final = 15 * 60_000
_POLL_TIMEOUT_MS: Final = 120_000
_STRATEGIES: Final = ("assign", "subscribe", "subscribePattern")

# What bounds the memory of a task: two fetches that wait to be decoded, and one Arrow batch.
_SCAN_CONFIG: Final[Mapping[str, str]] = {
    "max.partition.fetch.bytes": str(4 * 1024 * 1024),
    "fetch.max.bytes": str(8 * 1024 * 1024),
    "auto.offset.reset": "none",
}

READ_OPTIONS: Final = (
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
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxTasks",
    "includeRecordId",
    "pushFilters",
    "groupIdPrefix",
)
"""Those that only reads have."""
_KNOWN: Final = (*READ_OPTIONS, "includeHeaders", "kafkaConsumer.pollTimeoutMs", _GROUP_ID)
# Options that only streaming queries have.
_OF_STREAMS: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
# Options of Spark's Kafka connector that this source does not have: refused by name, with the reason.
_REFUSED: Final[Mapping[str, str]] = {
    "fetchOffset.numRetries": "what passes is tried again until kafka.default.api.timeout.ms",
    "fetchOffset.retryIntervalMs": "set kafka.retry.backoff.ms",
    "topic": "it is an option of writes",
    "batchId": "it is an option of writes",
    "writeIds": "it is an option of writes; see includeRecordId",
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
    include_record_id: bool
    push_filters: bool
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    min_partitions: int | None
    max_records_per_partition: int | None
    max_tasks: int | None
    poll_timeout_ms: int
    client_config: Mapping[str, str]


def parse_options(raw: Mapping[str, str], mode: Mode) -> SourceOptions:
    """Check the options of a query. Raises `InvalidOptionError`, which names the option."""
    given = canonical(raw, _KNOWN, _REFUSED)
    topics, pattern, assignment = _parse_strategy(given)
    starting, ending = _parse_bounds(given, mode)
    least, most = parse_positive(given, "minOffsetsPerTrigger"), parse_positive(given, "maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise InvalidOptionError("minOffsetsPerTrigger", f"is {least}, and maxOffsetsPerTrigger only {most}")
    min_partitions, max_records, max_tasks = _parse_tasks(given)
    return SourceOptions(
        bootstrap=parse_bootstrap(given),
        topics=topics,
        pattern=pattern,
        assignment=assignment,
        starting=starting,
        ending=ending,
        later_than_any_is_latest=_parse_timestamp_strategy(given),
        fail_on_data_loss=parse_bool(given, "failOnDataLoss", default=True),
        include_headers=parse_bool(given, "includeHeaders", default=False),
        include_record_id=parse_bool(given, "includeRecordId", default=False),
        push_filters=parse_bool(given, "pushFilters", default=False),
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_ms=parse_duration_ms(given, "maxTriggerDelay", default_ms=_MAX_TRIGGER_DELAY_MS),
        min_partitions=min_partitions,
        max_records_per_partition=max_records,
        max_tasks=max_tasks,
        poll_timeout_ms=parse_positive(given, "kafkaConsumer.pollTimeoutMs") or _POLL_TIMEOUT_MS,
        client_config=client_settings(
            given, ConsumerConfig, {**_SCAN_CONFIG, "client.id": _parse_client_id(given)}, but=(_GROUP_ID,)
        ),
    )


def _parse_tasks(given: Mapping[str, str]) -> tuple[int | None, int | None, int | None]:
    """How a query is cut into tasks: minPartitions, maxRecordsPerPartition, maxTasks."""
    least, longest = parse_positive(given, "minPartitions"), parse_positive(given, "maxRecordsPerPartition")
    most = parse_positive(given, "maxTasks")
    if most is not None and longest is not None:
        raise InvalidOptionError("maxTasks", "cannot go with maxRecordsPerPartition: a task would be longer than that")
    if most is not None and least is not None and least > most:
        raise InvalidOptionError("minPartitions", f"is {least}, and maxTasks only {most}")
    return least, longest, most


def _parse_client_id(given: Mapping[str, str]) -> str:
    """By what name brokers know the readers. No group is joined, so the group's id and its prefix are names only."""
    name = _GROUP_ID if _GROUP_ID in given else "groupIdPrefix"
    value = given.get(name, _GROUP_ID_PREFIX)
    if not 0 < len(value) <= _CLIENT_ID_LENGTH_MAX:
        raise InvalidOptionError(name, f"wants 1 to {_CLIENT_ID_LENGTH_MAX} characters")
    return value


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
                raise OtherModeError(name, "belongs to batch queries; a streaming query has no end")
        return starting, Bound(BoundKind.LATEST, "endingOffsets")
    for name in _OF_STREAMS:
        if name in given:
            raise OtherModeError(name, "belongs to streaming queries")
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
