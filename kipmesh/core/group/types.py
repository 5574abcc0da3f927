"""Inputs and results of the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.records import Record


class Instant(NamedTuple):
    """A moment on both clocks. `wall_ms` stamps records; `monotonic_ms` measures time."""

    wall_ms: int
    monotonic_ms: int


class Client(NamedTuple):
    """The sender of a JoinGroup request. The flags follow from the request's version; gRPC clients have both set."""

    client_id: str
    host: str
    requires_member_id: bool = True
    """Whether a new member must join again with the member id that it receives (KIP-394)."""
    skips_assignment: bool = True
    """Whether the response can tell the leader to skip the assignment (KIP-814)."""


class Settings(NamedTuple):
    """The broker's group configuration, with Kafka's names and defaults."""

    group_min_session_timeout_ms: int = 6000
    group_max_session_timeout_ms: int = 1_800_000
    group_initial_rebalance_delay_ms: int = 3000
    group_max_size: int = 2**31 - 1
    offset_metadata_max_bytes: int = 4096
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000
    new_member_join_timeout_ms: int = 300_000
    """Maximum time that a new member's JoinGroup waits. Such a member cannot send heartbeats yet."""
    pending_join_timeout_ms: int = 60_000
    """Maximum time that the id of a pending member is kept, if its session timeout is not shorter. Sessions may last
    half an hour, and every first JoinGroup creates another id."""


class Write(NamedTuple):
    """Records to append as one batch, after earlier writes. Each write has a higher `id` than the one before."""

    id: int
    group_id: str
    records: Sequence[Record]


class Completion(NamedTuple):
    """The response to send for a request."""

    request_id: int
    response: Any


class Decision(NamedTuple):
    """Result of an event: writes to append in order and report, and responses to send immediately.

    A response that depends on a write is in the result of the event that reports the write.
    """

    writes: Sequence[Write] = ()
    completions: Sequence[Completion] = ()


_WRITE_ERRORS = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.INVALID_FETCH_SIZE: ErrorCode.UNKNOWN_SERVER_ERROR,
}


def write_error(code: ErrorCode) -> ErrorCode:
    """Return the error code for members after an append failed with `code`: COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR,
    UNKNOWN_SERVER_ERROR, or `code` if it has no mapping."""
    return _WRITE_ERRORS.get(code, code)
