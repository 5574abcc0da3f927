"""The options of reads and writes: the names and meanings of Spark's Kafka connector, checked before anything is done.

Invariants: option names are case-insensitive; every option is either used, refused because its value is malformed, or
refused by name because the source does not know it. No option is ignored. Every error (`InvalidOptionError`) names the
option. The columns of a write are checked here, too, by their names and Spark's names of types. This module imports
neither pyspark nor the client, so that its rules can be tested by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kipmesh.core.config import ConsumerConfig, ProducerConfig
from kipmesh.core.config.base import Config
from kipmesh.core.errors import InvalidConfigError
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

CLIENT_PREFIX: Final = "kafka."
BOOTSTRAP: Final = "kafka.bootstrap.servers"

# Spark's own units of a time with a unit; without one it is ms.
_UNITS_MS: Final[Mapping[str, float]] = {
    "us": 0.001,
    "ms": 1,
    "": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}

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

_WRITE_KNOWN: Final = ("topic", "includeHeaders", "writeIds", "batchId", "checkpointLocation")
# Options of Spark's Kafka connector or of its reads that writes do not have.
_WRITE_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(READ_OPTIONS, "it is an option of reads"),
    "path": "set the option topic",
    "kafka.key.serializer": "keys are binary or strings in UTF-8",
    "kafka.value.serializer": "values are binary or strings in UTF-8",
    "kafka.partitioner.class": "set the column partition, or kafka.partitioner.ignore.keys",
    "kafka.transactional.id": "there are no transactions",
    "kafka.interceptor.classes": "there are no interceptors",
}
_PRODUCER_CONFIG: Final[Mapping[str, str]] = {"client.id": "spark-kipmesh-sink", "linger.ms": "20"}
_BATCH_ID_LENGTH_MAX: Final = 200

_TEXT: Final = ("string", "binary")
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "topic": ("string",),
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}


def canonical(raw: Mapping[str, str], known: Iterable[str], refused: Mapping[str, str]) -> dict[str, str]:
    """Names in their documented spelling, which errors then use; refused and unknown ones raise."""
    known = tuple(known)
    spelling = {name.lower(): name for name in (*known, *refused)}
    given: dict[str, str] = {}
    for name, value in raw.items():
        spelled = spelling.get(name.lower(), name)
        if spelled in refused:
            raise InvalidOptionError(spelled, f"is not supported by kipmesh: {refused[spelled]}")
        if spelled not in known:
            spelled = name.lower()
            if not spelled.startswith(CLIENT_PREFIX):
                raise InvalidOptionError(name, f"is unknown; known are {', '.join(known)} and {CLIENT_PREFIX}*")
        given[spelled] = str(value).strip()
    return given


def parse_bootstrap(given: Mapping[str, str]) -> str:
    """`kafka.bootstrap.servers`, which must be there: host:port,host:port."""
    servers = given.get(BOOTSTRAP, "")
    if not servers:
        raise InvalidOptionError(BOOTSTRAP, "must be given, as host:port,host:port")
    for server in servers.split(","):
        host, colon, port = server.strip().rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidOptionError(BOOTSTRAP, f"wants host:port,host:port and not {server.strip()!r}")
    return servers


def client_settings(
    given: Mapping[str, str], kind: type[Config], defaults: Mapping[str, str], *, but: Collection[str] = ()
) -> dict[str, str]:
    """The client's settings: the kafka.* options without the prefix, over `defaults`; checked as `kind` has them."""
    config = dict(defaults)
    for name, value in given.items():
        if name.startswith(CLIENT_PREFIX) and name != BOOTSTRAP and name not in but:
            config[name.removeprefix(CLIENT_PREFIX)] = value
    try:
        kind.parse(config)
    except InvalidConfigError as error:
        named = re.search(r"key '([^']+)'", str(error))
        key = named.group(1) if named else "*"  # of several keys: the text names them
        raise InvalidOptionError(f"{CLIENT_PREFIX}{key}", f"is refused by the client: {error}") from None
    return config


def parse_bool(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """true or false, in any case."""
    match given.get(name, str(default)).lower():
        case "true":
            return True
        case "false":
            return False
        case value:
            raise InvalidOptionError(name, f"wants true or false and not {value!r}")


def parse_positive(given: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0, or None when it is not given."""
    if name not in given:
        return None
    value = given[name]
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise InvalidOptionError(name, f"wants a positive whole number and not {value!r}")
    return int(value)


def parse_duration_ms(given: Mapping[str, str], name: str, *, default_ms: int) -> int:
    """A time as Spark writes it, 500ms, 30s, 15m, 1h or a number of ms; at least 0."""
    if name not in given:
        return default_ms
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", given[name].lower())
    if found is None or found.group(2) not in _UNITS_MS:
        raise InvalidOptionError(name, f"wants a time such as 500ms, 30s, 15m or 1h and not {given[name]!r}")
    return int(int(found.group(1)) * _UNITS_MS[found.group(2)])


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


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Checked options. `topic` None means that each row names its topic; `batch_id` only of batch writes."""

    bootstrap: str
    topic: str | None
    include_headers: bool
    write_ids: bool
    batch_id: str | None
    client_config: Mapping[str, str]


def _check_acknowledged(given: Mapping[str, str]) -> None:
    """A task promises that its rows are in the log, each once: what gives that up is refused."""
    acks = given.get("kafka.acks", "all")
    if acks not in ("all", "-1"):
        raise InvalidOptionError("kafka.acks", f"must be all (or -1) and not {acks!r}: a task waits for all replicas")
    if not parse_bool(given, "kafka.enable.idempotence", default=True):
        raise InvalidOptionError("kafka.enable.idempotence", "must not be false: a task writes each of its rows once")


def parse_write_options(raw: Mapping[str, str], mode: Mode) -> WriteOptions:
    """Check the options of a write. Raises `InvalidOptionError`, which names the option."""
    given = canonical(raw, _WRITE_KNOWN, _WRITE_REFUSED)
    topic, batch_id = given.get("topic"), given.get("batchId")
    if topic == "":
        raise InvalidOptionError("topic", "must not be empty")
    write_ids = parse_bool(given, "writeIds", default=True)
    if batch_id is not None:
        if mode is Mode.STREAM:
            raise InvalidOptionError("batchId", "belongs to batch writes; a streaming query has its own")
        if not 0 < len(batch_id) <= _BATCH_ID_LENGTH_MAX:
            raise InvalidOptionError("batchId", f"wants 1 to {_BATCH_ID_LENGTH_MAX} characters")
        if not write_ids:
            raise InvalidOptionError("batchId", "needs writeIds, which is false")
    _check_acknowledged(given)
    client_config = client_settings(given, ProducerConfig, _PRODUCER_CONFIG)
    if not ProducerConfig.parse(client_config).enable_idempotence:  # without a word these two turn it off
        name = "retries" if client_config.get("retries") == "0" else "max.in.flight.requests.per.connection"
        raise InvalidOptionError(f"kafka.{name}", "turns off the idempotent producer, which writes need")
    return WriteOptions(
        bootstrap=parse_bootstrap(given),
        topic=topic,
        include_headers=parse_bool(given, "includeHeaders", default=True),
        write_ids=write_ids,
        batch_id=batch_id,
        client_config=client_config,
    )


def check_columns(columns: Mapping[str, str], options: WriteOptions) -> None:
    """Whether a row of these columns (name to Spark's name of its type) can be a record; others are left out.

    Raises `InvalidOptionError` for a missing topic, and ValueError, which names the column.
    """
    if "value" not in columns:
        raise ValueError(
            "the column value is missing: a record is made of value and, if there, "
            + ", ".join(name for name in _COLUMNS if name != "value")
        )
    if options.topic is None and "topic" not in columns:
        raise InvalidOptionError("topic", "must be given, or a column topic must be there")
    for name, kinds in _COLUMNS.items():
        kind = columns.get(name)
        if kind is not None and kind not in kinds:
            raise ValueError(f"the column {name} is {kind} and must be {' or '.join(kinds)}")
