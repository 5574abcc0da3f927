"""Response bodies of the HTTP API, and the mapping of Kafka errors to responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from kipmesh.core.errors import ErrorCode, KafkaError

_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: 404,
    ErrorCode.UNKNOWN_TOPIC_ID: 404,
    ErrorCode.OFFSET_OUT_OF_RANGE: 416,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_TOPIC_EXCEPTION: 400,
    ErrorCode.REQUEST_TIMED_OUT: 504,
}


class Topic(BaseModel):
    """A topic: its name, id and partition numbers."""

    name: str
    topic_id: str = Field(description="URL-safe Base64, as printed by Kafka")
    partitions: list[int]


class Topics(BaseModel):
    """All topics of the cluster, sorted by name."""

    topics: list[Topic]


class PartitionLag(BaseModel):
    """Lag of this service in a partition, over all its streams, in offsets."""

    topic: str
    partition: int
    position: int = Field(description="Highest offset after a record that this service delivered")
    end_offset: int = Field(description="High watermark: the offset after the last consumable record")
    lag: int = Field(description="end_offset - position")


class StreamLag(BaseModel):
    """Lag of an open stream in a partition, in offsets."""

    stream_id: int
    topic: str
    partition: int
    position: int
    end_offset: int
    lag: int


class Lag(BaseModel):
    """Lag of this service and of its open streams."""

    partitions: list[PartitionLag]
    streams: list[StreamLag]


class ErrorDetail(BaseModel):
    """Kafka's error code and name, and a message."""

    code: int
    name: str
    message: str


class Error(BaseModel):
    """Body of an error response."""

    error: ErrorDetail


def status_of(error: KafkaError) -> int:
    """Return the HTTP status of a Kafka error: 400, 404, 416 or 504, else 503 if it is retriable, else 500."""
    return _STATUS.get(error.code, 503 if error.retriable else 500)


def error_object(error: KafkaError) -> dict[str, Any]:
    """Return the JSON body of an error response."""
    return {"error": {"code": int(error.code), "name": error.code.name, "message": error.message}}
