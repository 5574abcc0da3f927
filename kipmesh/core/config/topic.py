"""Topic configuration: Kafka's topic-level keys, and the broker-level keys of their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from kipmesh.core.config.base import Config, MinusOneOrMore, NotNegative, NotNegativeInt32, Positive, PositiveInt32
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
    """Configuration of a topic, with Kafka's defaults."""

    cleanup_policy: CleanupPolicy = "delete"
    """Cleanup of old segments: `delete` by size and time, `compact` to the last record of each key, or both."""
    compression_type: Literal["producer"] = "producer"
    """Always `producer`: batches keep the producer's compression."""
    delete_retention_ms: NotNegative = 86_400_000
    """Time in ms that a compacted topic keeps a tombstone after the first compaction of it."""
    flush_messages: Positive = MAX_INT64
    """Records between fsyncs of a partition's log."""
    flush_ms: Annotated[int, Field(ge=0, le=MAX_INT64)] = MAX_INT64
    """Maximum time in ms before a record is synced to disk."""
    index_interval_bytes: NotNegativeInt32 = 4096
    """Log bytes between entries of the offset index."""
    max_compaction_lag_ms: Positive = MAX_INT64
    """Maximum age in ms of an uncompacted record, regardless of `min.cleanable.dirty.ratio`."""
    max_message_bytes: Annotated[int, Field(ge=0, le=MAX_INT32)] = 1048588
    """Maximum bytes of a record batch."""
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    """Source of record timestamps: the producer (CreateTime) or the broker (LogAppendTime)."""
    message_timestamp_after_max_ms: NotNegative = 3_600_000
    """Maximum ms by which a record's timestamp may be in the future."""
    message_timestamp_before_max_ms: NotNegative = MAX_INT64
    """Maximum ms by which a record's timestamp may be in the past."""
    min_cleanable_dirty_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Uncompacted share of the log's bytes at which it is compacted."""
    min_compaction_lag_ms: NotNegative = 0
    """Minimum age in ms of a record before it is compacted."""
    min_insync_replicas: PositiveInt32 = 1
    """Minimum in-sync replicas for writes with acks=all, limited to the number of replicas."""
    retention_bytes: MinusOneOrMore = -1
    """Maximum bytes that a partition keeps; -1 for no limit."""
    retention_ms: MinusOneOrMore = 604_800_000
    """Time in ms that a segment is kept; -1 for no limit."""
    segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Maximum bytes of a segment."""
    segment_index_bytes: Annotated[int, Field(ge=4, le=MAX_INT32)] = 10 << 20
    """Maximum bytes of a segment's index."""
    segment_ms: Positive = 604_800_000
    """Maximum age in ms of the active segment."""
    file_delete_delay_ms: NotNegative = 60_000
    """Time in ms between the deletion of a segment and the removal of its files."""
    unclean_leader_election_enable: bool = False
    """Whether a replica outside the ISR may become leader as a last resort, which may lose records."""

    @model_validator(mode="after")
    def _check_lags(self) -> Self:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise ValueError(
                f"min.compaction.lag.ms ({self.min_compaction_lag_ms}) must not exceed max.compaction.lag.ms "
                f"({self.max_compaction_lag_ms})"
            )
        return self

    def with_stored(self, stored: Mapping[str, Any]) -> Self:
        """Return a topic's configuration: the stored values, with this configuration as defaults. Raises
        InvalidConfigError for an unknown key or an invalid value.

        Old metadata logs may contain numbers outside today's limits. These are clamped, so that a broker with such a
        topic still starts. New values outside the limits are refused by `parse`.
        """
        return self.parse(self.as_dict() | {key: _within_limits(key, value) for key, value in stored.items()})

    @property
    def is_compacted(self) -> bool:
        """Whether the log is compacted to the last record of each key: `cleanup.policy` contains `compact`."""
        return "compact" in self.cleanup_policy

    @property
    def is_deleted(self) -> bool:
        """Whether old segments are deleted by time and size: `cleanup.policy` contains `delete`."""
        return "delete" in self.cleanup_policy

    @property
    def roll_ms(self) -> int:
        """Maximum age in ms of the active segment. In a compacted log `max.compaction.lag.ms` limits it, because the
        active segment cannot be compacted."""
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
"""Topic key -> broker key that has its default."""
