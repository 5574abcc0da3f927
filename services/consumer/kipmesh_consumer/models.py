"""What the API responds with: bodies for the OpenAPI document, and errors with Kafka's code, name and message."""

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
    """A topic."""

    name: str
    topic_id: str = Field(description="Base 64, URL-safe, as Kafka prints it")
    partitions: list[int]


class Topics(BaseModel):
    """All topics."""

    topics: list[Topic]


class PartitionLag(BaseModel):
    """How far this service is behind in a partition."""

    topic: str
    partition: int
    position: int = Field(description="Offset after the furthest record that this service delivered")
    end_offset: int = Field(description="High watermark: the offset after the last record that can be read")
    lag: int = Field(description="end_offset - position")


class StreamLag(BaseModel):
    """How far one open stream is behind in a partition."""

    stream_id: int
    topic: str
    partition: int
    position: int
    end_offset: int
    lag: int


class Lag(BaseModel):
    """Lag of the service and of its open streams."""

    partitions: list[PartitionLag]
    streams: list[StreamLag]


class ErrorDetail(BaseModel):
    """Kafka's code and name of an error, and what happened."""

    code: int
    name: str
    message: str


class Error(BaseModel):
    """An error."""

    error: ErrorDetail


def status_of(error: KafkaError) -> int:
    """The HTTP status of a Kafka error: 503 where trying again may help, 500 otherwise."""
    return _STATUS.get(error.code, 503 if error.retriable else 500)


def error_object(error: KafkaError) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"code": int(error.code), "name": error.code.name, "message": error.message}}
