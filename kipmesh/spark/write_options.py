"""The options of writes: the names and meanings of Spark's Kafka connector, checked before anything is written.

Invariants as in `kipmesh.spark.options`: names are case-insensitive, and no option is ignored. The columns of a write
are checked here, too, by their names and Spark's names of types, so that this module needs no pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kipmesh.core.config import ProducerConfig
from kipmesh.spark.offsets import InvalidOptionError
from kipmesh.spark.option_values import canonical, client_settings, parse_bool, parse_bootstrap
from kipmesh.spark.options import READ_OPTIONS, Mode

_KNOWN: Final = ("topic", "includeHeaders", "writeIds", "batchId", "checkpointLocation")
# Options of Spark's Kafka connector or of its reads that writes do not have.
_REFUSED: Final[Mapping[str, str]] = {
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
    given = canonical(raw, _KNOWN, _REFUSED)
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
