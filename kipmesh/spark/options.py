"""Options of reads and writes: names and meanings of Spark's Kafka connector, validated before any IO.

Option names are case-insensitive. Every option is used or rejected, none is ignored. Errors are `InvalidOptionError`
and name the option. Columns of a write are checked here, too, by name and Spark type name. This module imports neither
pyspark nor the client, so its rules can be tested separately.
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

# Units of a duration in Spark; the default is ms.
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

# Memory of a task is limited to two fetches that wait for decoding, and one Arrow batch.
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
"""Options that only reads have."""
_KNOWN: Final = (*READ_OPTIONS, "includeHeaders", "kafkaConsumer.pollTimeoutMs", _GROUP_ID)
# Options that only streaming queries have.
_OF_STREAMS: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
# Options of Spark's Kafka connector that this source does not support, with the reason.
_REFUSED: Final[Mapping[str, str]] = {
    "fetchOffset.numRetries": "retriable errors are retried until kafka.default.api.timeout.ms",
    "fetchOffset.retryIntervalMs": "set kafka.retry.backoff.ms",
    "topic": "it is an option of writes",
    "batchId": "it is an option of writes",
    "writeIds": "it is an option of writes; set includeRecordId",
    "includeTimestamp": "the timestamp is always a column",
    "kafka.auto.offset.reset": "set startingOffsets",
    "kafka.key.deserializer": "keys are always binary",
    "kafka.value.deserializer": "values are always binary",
    "kafka.enable.auto.commit": "the checkpoint stores the offsets, the source commits none",
    "kafka.interceptor.classes": "interceptors are not supported",
}

_WRITE_KNOWN: Final = ("topic", "includeHeaders", "writeIds", "batchId", "checkpointLocation")
# Options of reads, and of Spark's Kafka connector, that writes do not support.
_WRITE_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(READ_OPTIONS, "it is an option of reads"),
    "path": "set the option topic",
    "kafka.key.serializer": "keys are binary or strings in UTF-8",
    "kafka.value.serializer": "values are binary or strings in UTF-8",
    "kafka.partitioner.class": "set the column partition, or kafka.partitioner.ignore.keys",
    "kafka.transactional.id": "transactions are not supported",
    "kafka.interceptor.classes": "interceptors are not supported",
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
    """Return the options with names in their documented spelling and with stripped values.

    `known`: names of valid options, besides `kafka.*`. `refused`: a dict of unsupported option to reason. Raises
    InvalidOptionError for unsupported and unknown options.
    """
    known = tuple(known)
    spelling = {name.lower(): name for name in (*known, *refused)}
    options: dict[str, str] = {}
    for name, value in raw.items():
        spelled = spelling.get(name.lower(), name)
        if spelled in refused:
            raise InvalidOptionError(spelled, f"is not supported by kipmesh: {refused[spelled]}")
        if spelled not in known:
            spelled = name.lower()
            if not spelled.startswith(CLIENT_PREFIX):
                raise InvalidOptionError(name, f"is unknown; use one of {', '.join(known)} or {CLIENT_PREFIX}*")
        options[spelled] = str(value).strip()
    return options


def parse_bootstrap(options: Mapping[str, str]) -> str:
    """Return the option `kafka.bootstrap.servers`. Raises InvalidOptionError if it is missing or malformed."""
    servers = options.get(BOOTSTRAP, "")
    if not servers:
        raise InvalidOptionError(BOOTSTRAP, "is required, as host:port,host:port")
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        if not (host and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidOptionError(BOOTSTRAP, f"must be host:port,host:port, got {server.strip()!r}")
    return servers


def client_settings(
    options: Mapping[str, str], kind: type[Config], defaults: Mapping[str, str], *, but: Collection[str] = ()
) -> dict[str, str]:
    """Return the client configuration: the `kafka.*` options without their prefix, which override `defaults`.

    `kind`: configuration class that validates the result. `but`: options to leave out. Raises InvalidOptionError.
    """
    config = dict(defaults)
    for name, value in options.items():
        if name.startswith(CLIENT_PREFIX) and name != BOOTSTRAP and name not in but:
            config[name.removeprefix(CLIENT_PREFIX)] = value
    try:
        kind.parse(config)
    except InvalidConfigError as error:
        key = error.key or "*"  # "*": the error names several keys
        raise InvalidOptionError(f"{CLIENT_PREFIX}{key}", f"is invalid: {error}") from None
    return config


def parse_bool(
    options: Mapping[str, str], name: str, *, default: bool, words: tuple[str, str] = ("false", "true")
) -> bool:
    """Return an option that is one of the two `words` (false, true) as a bool. Ignores case.

    Raises InvalidOptionError.
    """
    value = options.get(name, words[default]).lower()
    if value not in words:
        raise InvalidOptionError(name, f"must be {words[1]} or {words[0]}, got {value!r}")
    return value == words[1]


def parse_positive(options: Mapping[str, str], name: str) -> int | None:
    """Return an option that is a positive integer, or None if it is not set. Raises InvalidOptionError."""
    if name not in options:
        return None
    value = options[name]
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise InvalidOptionError(name, f"must be a positive integer, got {value!r}")
    return int(value)


def parse_duration_ms(options: Mapping[str, str], name: str, *, default_ms: int) -> int:
    """Return a duration option (500ms, 30s, 15m, 1h or a number of ms) in ms. Raises InvalidOptionError."""
    if name not in options:
        return default_ms
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", options[name].lower())
    if found is None or found.group(2) not in _UNITS_MS:
        raise InvalidOptionError(name, f"must be a duration such as 500ms, 30s, 15m or 1h, got {options[name]!r}")
    return int(int(found.group(1)) * _UNITS_MS[found.group(2)])


class Mode(Enum):
    """Batch or streaming query. Some options exist in only one mode."""

    BATCH = "batch"
    STREAM = "streaming"


class BoundKind(Enum):
    """How an option specifies the start or end of a query: by keyword, offsets, one timestamp or several timestamps."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSETS = "offsets"
    TIMESTAMP = "timestamp"
    TIMESTAMPS = "timestamps"


@dataclass(frozen=True, slots=True)
class Bound:
    """Start or end of a query.

    `positions` has an offset (OFFSETS; -2 earliest, -1 latest) or a timestamp in ms (TIMESTAMPS) for each partition.
    `timestamp_ms` is one timestamp for all (TIMESTAMP). `option` is the option's name, for error messages.
    """

    kind: BoundKind
    option: str
    positions: Offsets = field(default_factory=dict)
    timestamp_ms: int = -1

    def has_offset(self, offset: int) -> bool:
        """Whether the bound gives this offset (also -2, -1) to a partition."""
        return self.kind is BoundKind.OFFSETS and offset in self.positions.values()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Validated options of a read. Exactly one of `topics`, `pattern` and `assignment` is not empty."""

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
    """Validate the options of a read. Raises InvalidOptionError; OtherModeError for an option of the other mode."""
    options = canonical(raw, _KNOWN, _REFUSED)
    topics, pattern, assignment = _parse_strategy(options)
    starting, ending = _parse_bounds(options, mode)
    least, most = parse_positive(options, "minOffsetsPerTrigger"), parse_positive(options, "maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise InvalidOptionError("minOffsetsPerTrigger", f"must not exceed maxOffsetsPerTrigger {most}, got {least}")
    min_partitions, max_records, max_tasks = _parse_tasks(options)
    return SourceOptions(
        bootstrap=parse_bootstrap(options),
        topics=topics,
        pattern=pattern,
        assignment=assignment,
        starting=starting,
        ending=ending,
        later_than_any_is_latest=parse_bool(
            options, "startingOffsetsByTimestampStrategy", default=False, words=("error", "latest")
        ),
        fail_on_data_loss=parse_bool(options, "failOnDataLoss", default=True),
        include_headers=parse_bool(options, "includeHeaders", default=False),
        include_record_id=parse_bool(options, "includeRecordId", default=False),
        push_filters=parse_bool(options, "pushFilters", default=False),
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_ms=parse_duration_ms(options, "maxTriggerDelay", default_ms=_MAX_TRIGGER_DELAY_MS),
        min_partitions=min_partitions,
        max_records_per_partition=max_records,
        max_tasks=max_tasks,
        poll_timeout_ms=parse_positive(options, "kafkaConsumer.pollTimeoutMs") or _POLL_TIMEOUT_MS,
        client_config=client_settings(
            options, ConsumerConfig, {**_SCAN_CONFIG, "client.id": _parse_client_id(options)}, but=(_GROUP_ID,)
        ),
    )


def _parse_tasks(options: Mapping[str, str]) -> tuple[int | None, int | None, int | None]:
    """Return minPartitions, maxRecordsPerPartition and maxTasks; None if not set. Raises InvalidOptionError."""
    least, longest = parse_positive(options, "minPartitions"), parse_positive(options, "maxRecordsPerPartition")
    most = parse_positive(options, "maxTasks")
    if most is not None and longest is not None:
        raise InvalidOptionError("maxTasks", "excludes maxRecordsPerPartition, which may need more tasks")
    if most is not None and least is not None and least > most:
        raise InvalidOptionError("minPartitions", f"must not exceed maxTasks {most}, got {least}")
    return least, longest, most


def _parse_client_id(options: Mapping[str, str]) -> str:
    """Return the client id of the readers. They join no group, so the group id or its prefix serves as the name."""
    name = _GROUP_ID if _GROUP_ID in options else "groupIdPrefix"
    value = options.get(name, _GROUP_ID_PREFIX)
    _check_length(name, value, _CLIENT_ID_LENGTH_MAX)
    return value


def _check_length(name: str, value: str, length_max: int) -> None:
    if not 0 < len(value) <= length_max:
        raise InvalidOptionError(name, f"must have 1 to {length_max} characters, got {len(value)}")


def _parse_strategy(options: Mapping[str, str]) -> tuple[tuple[str, ...], str, tuple[TopicPartition, ...]]:
    chosen = [name for name in _STRATEGIES if name in options]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none"
        raise InvalidOptionError("subscribe", f"or assign or subscribePattern is required, exactly one, got {found}")
    name, value = chosen[0], options[chosen[0]]
    if not value:
        raise InvalidOptionError(name, "must not be empty")
    if name == "assign":
        return (), "", parse_assignment(name, value)
    if name == "subscribe":
        topics = tuple(dict.fromkeys(topic.strip() for topic in value.split(",")))
        if not all(topics):
            raise InvalidOptionError(name, f"must be topics separated by commas, got {value!r}")
        return topics, "", ()
    try:
        re.compile(value)
    except re.error as error:
        raise InvalidOptionError(name, f"must be a regular expression: {error}") from None
    return (), value, ()


def _parse_bounds(options: Mapping[str, str], mode: Mode) -> tuple[Bound, Bound]:
    starting = _parse_bound(options, "starting", "latest" if mode is Mode.STREAM else "earliest")
    if mode is Mode.STREAM:
        for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
            if name in options:
                raise OtherModeError(name, "belongs to batch queries, a streaming query has no end")
        return starting, Bound(BoundKind.LATEST, "endingOffsets")
    for name in _OF_STREAMS:
        if name in options:
            raise OtherModeError(name, "belongs to streaming queries")
    if starting.kind is BoundKind.LATEST or starting.has_offset(LATEST_OFFSET):
        raise InvalidOptionError(starting.option, "must not be latest (-1) in a batch query")
    ending = _parse_bound(options, "ending", "latest")
    if ending.kind is BoundKind.EARLIEST or ending.has_offset(EARLIEST_OFFSET):
        raise InvalidOptionError(ending.option, "must not be earliest (-2), the query would read no records")
    return starting, ending


def _parse_bound(options: Mapping[str, str], side: str, default: str) -> Bound:
    """Parse the bound of a `side` (starting, ending). Precedence: one timestamp, timestamps by partition, offsets."""
    timestamp, timestamps, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    if timestamp in options:
        if not options[timestamp].isdigit():
            raise InvalidOptionError(timestamp, f"must be milliseconds since 1970, got {options[timestamp]!r}")
        return Bound(BoundKind.TIMESTAMP, timestamp, timestamp_ms=int(options[timestamp]))
    if timestamps in options:
        positions = parse_partition_numbers(timestamps, options[timestamps], least=0)
        return Bound(BoundKind.TIMESTAMPS, timestamps, positions)
    match options.get(offsets, default).lower():
        case "earliest":
            return Bound(BoundKind.EARLIEST, offsets)
        case "latest":
            return Bound(BoundKind.LATEST, offsets)
        case _:
            positions = parse_partition_numbers(offsets, options[offsets], least=EARLIEST_OFFSET)
            return Bound(BoundKind.OFFSETS, offsets, positions)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Validated options of a write. Without `topic`, each row names its topic. Only batch writes have a `batch_id`."""

    bootstrap: str
    topic: str | None
    include_headers: bool
    write_ids: bool
    batch_id: str | None
    client_config: Mapping[str, str]


def _check_acknowledged(options: Mapping[str, str]) -> None:
    """Raise InvalidOptionError for settings that would allow lost or duplicate rows: acks, enable.idempotence."""
    acks = options.get("kafka.acks", "all")
    if acks not in ("all", "-1"):
        raise InvalidOptionError(
            "kafka.acks", f"must be all or -1, got {acks!r}: a task waits for all in-sync replicas"
        )
    if not parse_bool(options, "kafka.enable.idempotence", default=True):
        raise InvalidOptionError("kafka.enable.idempotence", "must be true: a task writes each of its rows once")


def parse_write_options(raw: Mapping[str, str], mode: Mode) -> WriteOptions:
    """Validate the options of a write. Raises InvalidOptionError.

    The result always enables the idempotent producer with acks=all.
    """
    options = canonical(raw, _WRITE_KNOWN, _WRITE_REFUSED)
    topic, batch_id = options.get("topic"), options.get("batchId")
    if topic == "":
        raise InvalidOptionError("topic", "must not be empty")
    write_ids = parse_bool(options, "writeIds", default=True)
    if batch_id is not None:
        if mode is Mode.STREAM:
            raise InvalidOptionError("batchId", "belongs to batch writes, Spark numbers the batches of a stream")
        _check_length("batchId", batch_id, _BATCH_ID_LENGTH_MAX)
        if not write_ids:
            raise InvalidOptionError("batchId", "requires writeIds=true, got false")
    _check_acknowledged(options)
    client_config = client_settings(options, ProducerConfig, _PRODUCER_CONFIG)
    if not ProducerConfig.parse(client_config).enable_idempotence:  # two other keys disable it implicitly
        name = "retries" if client_config.get("retries") == "0" else "max.in.flight.requests.per.connection"
        raise InvalidOptionError(
            f"kafka.{name}", "must not disable the idempotent producer, which is required for writing"
        )
    return WriteOptions(
        bootstrap=parse_bootstrap(options),
        topic=topic,
        include_headers=parse_bool(options, "includeHeaders", default=True),
        write_ids=write_ids,
        batch_id=batch_id,
        client_config=client_config,
    )


def check_columns(columns: Mapping[str, str], options: WriteOptions) -> None:
    """Check that rows with these columns (name to Spark type name) can be written. Other columns are ignored.

    Raises InvalidOptionError without an option or a column `topic`, ValueError if the column `value` is missing
    or a column has the wrong type.
    """
    if "value" not in columns:
        optional = ", ".join(name for name in _COLUMNS if name != "value")
        raise ValueError(f"the column value is missing; optional columns are {optional}")
    if options.topic is None and "topic" not in columns:
        raise InvalidOptionError("topic", "is required, because the rows have no column topic")
    for name, kinds in _COLUMNS.items():
        kind = columns.get(name)
        if kind is not None and kind not in kinds:
            raise ValueError(f"the column {name} must be {' or '.join(kinds)}, got {kind}")
