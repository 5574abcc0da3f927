"""What goes into the coordinator and comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.records import Record


class Instant(NamedTuple):
    """A moment by both clocks: records are stamped by the wall's, time is measured by one that never goes back."""

    wall_ms: int
    monotonic_ms: int


class Client(NamedTuple):
    """Who asks. The last two are what the version of its request knows; the mesh's own calls know both."""

    client_id: str
    host: str
    requires_member_id: bool = True
    """It comes back with the id that it is given (KIP-394)."""
    skips_assignment: bool = True
    """As the leader it can be told that there is nothing to assign (KIP-814)."""


class Settings(NamedTuple):
    """The broker's configuration, by Kafka's names and defaults."""

    group_min_session_timeout_ms: int = 6000
    group_max_session_timeout_ms: int = 1_800_000
    group_initial_rebalance_delay_ms: int = 3000
    group_max_size: int = 2**31 - 1
    offset_metadata_max_bytes: int = 4096
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000
    new_member_join_timeout_ms: int = 300_000
    """How long a new member's JoinGroup waits, which cannot send heartbeats yet."""
    pending_join_timeout_ms: int = 60_000
    """How long an id that was given to a new member is kept, if its session is not shorter. It comes back at once, or
    never; a session may be of half an hour, and every request makes another id."""


class Write(NamedTuple):
    """Records to append as one batch, after those of the writes before; `id` counts up."""

    id: int
    group_id: str
    records: Sequence[Record]


class Answer(NamedTuple):
    """The response to the request of that number."""

    request_id: int
    response: Any


class Decision(NamedTuple):
    """What a step asks for: writes in their order, each of which is to be reported, and answers to give at once.

    An answer that depends on a write comes out of the step that reports the write.
    """

    writes: Sequence[Write] = ()
    answers: Sequence[Answer] = ()


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
    """What a member is told when the append of its group's records ended with `code`."""
    return _WRITE_ERRORS.get(code, code)
