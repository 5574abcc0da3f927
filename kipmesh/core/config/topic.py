"""Configuration of a topic: Kafka's topic-level keys, and the broker-level keys that are their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from kipmesh.core.config.base import (
    Config,
    MinusOneOrMore,
    NotNegative,
    NotNegativeInt32,
    Positive,
    PositiveInt32,
)
from kipmesh.messages.schema import MAX_INT32, MAX_INT64


def _without_spaces(value: object) -> object:
    return value.replace(" ", "") if isinstance(value, str) else value


CleanupPolicy = Annotated[
    Literal["delete", "compact", "compact,delete", "delete,compact"], BeforeValidator(_without_spaces)
]


_NUMBER = TypeAdapter(int)


def _within_limits(key: str, value: Any) -> Any:
    limits = TopicConfig.limits().get(key)
    if limits is None:
        return value
    try:
        return min(max(_NUMBER.validate_python(value), limits[0]), limits[1])
    except ValidationError:
        return value


class TopicConfig(Config):
    """A topic's configuration, with Kafka's defaults."""

    cleanup_policy: CleanupPolicy = "delete"
    """What happens to old segments: `delete` by size and time, `compact` to each key's last record, or both."""
    compression_type: Literal["producer"] = "producer"
    """Batches are kept as the producer compressed them."""
    delete_retention_ms: NotNegative = 86_400_000
    """Time in ms that a compacted topic keeps a tombstone, from the first compaction that met it on."""
    flush_messages: Positive = MAX_INT64
    """Records between two fsyncs of a partition's log."""
    flush_ms: Annotated[int, Field(ge=0, le=MAX_INT64)] = MAX_INT64
    """Longest time in ms that a record stays unsynced."""
    index_interval_bytes: NotNegativeInt32 = 4096
    """Log bytes between two entries of the offset index."""
    max_compaction_lag_ms: Positive = MAX_INT64
    """Age in ms of a record by which it is compacted, whatever `min.cleanable.dirty.ratio` says."""
    max_message_bytes: Annotated[int, Field(ge=0, le=MAX_INT32)] = 1048588
    """Largest record batch in bytes that the topic takes."""
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    """Whose clock a record's timestamp is from."""
    message_timestamp_after_max_ms: NotNegative = 3_600_000
    """How far in the future a record's timestamp may be, in ms."""
    message_timestamp_before_max_ms: NotNegative = MAX_INT64
    """How far in the past a record's timestamp may be, in ms."""
    min_cleanable_dirty_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Part of the log, by bytes, that is not compacted yet, above which it is compacted."""
    min_compaction_lag_ms: NotNegative = 0
    """Age in ms below which a record is not compacted."""
    min_insync_replicas: PositiveInt32 = 1
    """In-sync replicas without which a write with acks=all is refused; more than there are replicas count as all."""
    retention_bytes: MinusOneOrMore = -1
    """Bytes that a partition keeps; -1 for no limit."""
    retention_ms: MinusOneOrMore = 604_800_000
    """Age in ms that a segment is kept; -1 for ever."""
    segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Bytes of a segment before the next begins."""
    segment_index_bytes: Annotated[int, Field(ge=4, le=MAX_INT32)] = 10 << 20
    """Largest index of a segment in bytes."""
    segment_ms: Positive = 604_800_000
    """Age in ms of a segment before the next begins."""
    file_delete_delay_ms: NotNegative = 60_000
    """Time in ms between taking a file out of use and removing it."""
    unclean_leader_election_enable: bool = False
    """Whether a replica outside the ISR may lead as a last resort (records may be lost)."""

    @model_validator(mode="after")
    def _check_lags(self) -> Self:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise ValueError("min.compaction.lag.ms is above max.compaction.lag.ms")
        return self

    def with_stored(self, stored: Mapping[str, Any]) -> Self:
        """A topic's, with these as its defaults; raises InvalidConfigError.

        Numbers were of any size once, and metadata logs may have such ones: what is beyond its key's limits counts as
        the nearest of them, so that a broker with the topic still loads. Who sets one now is refused (`parse`).
        """
        return self.parse(self.as_dict() | {key: _within_limits(key, value) for key, value in stored.items()})

    @property
    def is_compacted(self) -> bool:
        """Whether each key's last record is kept, and earlier ones are not."""
        return "compact" in self.cleanup_policy

    @property
    def is_deleted(self) -> bool:
        """Whether segments go by time and size."""
        return "delete" in self.cleanup_policy

    @property
    def roll_ms(self) -> int:
        """Age in ms of a segment before the next begins: only closed ones are compacted."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.is_compacted else self.segment_ms


BROKER_DEFAULTS = {
    "cleanup.policy": "log.cleanup.policy",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "index.interval.bytes": "log.index.interval.bytes",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.type": "log.message.timestamp.type",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "min.insync.replicas": "min.insync.replicas",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "log.retention.ms",
    "segment.bytes": "log.segment.bytes",
    "segment.index.bytes": "log.index.size.max.bytes",
    "segment.ms": "log.roll.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
}
"""Topic key -> the broker's key whose value is the topic's default."""
