"""What the API answers with, for the OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
