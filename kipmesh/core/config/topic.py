"""Configuration of a topic: Kafka's topic-level keys, and the broker-level keys that are their defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kipmesh.core.config.base import Config, MinusOneOrMore, NotNegative, Positive
from kipmesh.core.messages.limits import MAX_INT32, MAX_INT64


class TopicConfig(Config):
    """A topic's configuration, with Kafka's defaults."""

    cleanup_policy: Literal["delete"] = "delete"
    """What happens to old segments: `delete` by size and time."""
    compression_type: Literal["producer"] = "producer"
    """Batches are kept as the producer compressed them."""
    flush_messages: Positive = MAX_INT64
    """Records between two fsyncs of a partition's log."""
    flush_ms: Annotated[int, Field(ge=0)] = MAX_INT64
    """Longest time in ms that a record stays unsynced."""
    index_interval_bytes: NotNegative = 4096
    """Log bytes between two entries of the offset index."""
    max_message_bytes: Annotated[int, Field(ge=0, le=MAX_INT32)] = 1048588
    """Largest record batch in bytes that the topic takes."""
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    """Whose clock a record's timestamp is from."""
    message_timestamp_after_max_ms: NotNegative = 3_600_000
    """How far in the future a record's timestamp may be, in ms."""
    message_timestamp_before_max_ms: NotNegative = MAX_INT64
    """How far in the past a record's timestamp may be, in ms."""
    min_insync_replicas: Positive = 1
    """In-sync replicas without which a write with acks=all is refused; more than there are replicas count as all."""
    retention_bytes: MinusOneOrMore = -1
    """Bytes that a partition keeps; -1 for no limit."""
    retention_ms: MinusOneOrMore = 604_800_000
    """Age in ms that a segment is kept; -1 for ever."""
    segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Bytes of a segment before the next begins."""
    segment_index_bytes: Annotated[int, Field(ge=4)] = 10 << 20
    """Largest index of a segment in bytes."""
    segment_ms: Positive = 604_800_000
    """Age in ms of a segment before the next begins."""
    file_delete_delay_ms: NotNegative = 60_000
    """Time in ms between taking a file out of use and removing it."""
    unclean_leader_election_enable: bool = False
    """Whether a replica outside the ISR may lead as a last resort (records may be lost)."""


BROKER_DEFAULTS = {
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "index.interval.bytes": "log.index.interval.bytes",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.type": "log.message.timestamp.type",
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
