"""Errors as the HTTP side shows them: a status, and a body with Kafka's code, name and message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kipmesh.core.errors import ErrorCode, KafkaError

_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: 404,
    ErrorCode.UNKNOWN_TOPIC_ID: 404,
    ErrorCode.OFFSET_OUT_OF_RANGE: 416,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_TOPIC_EXCEPTION: 400,
    ErrorCode.REQUEST_TIMED_OUT: 504,
}


def status_of(error: KafkaError) -> int:
    """The HTTP status of a Kafka error: 503 where trying again may help, 500 otherwise."""
    return _STATUS.get(error.code, 503 if error.retriable else 500)


def error_object(error: KafkaError) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"code": int(error.code), "name": error.code.name, "message": error.message}}
