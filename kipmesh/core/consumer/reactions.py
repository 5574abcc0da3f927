"""What a consumer does about each error of a partition, by who answered: a table (392-04, 392-08, 392-14).

A follower that cannot serve is left for the leader, without waiting; what the leader cannot do is tried again after
`retry.backoff.ms`, with new metadata where that may be the cause. `OFFSET_OUT_OF_RANGE` has no row: `reader` decides.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode


class Leave(Enum):
    """When an error makes a consumer leave the follower that answered."""

    NO = "no"
    AT_ONCE = "at once"
    WHEN_STUCK = "when it has left the ISR, or keeps answering so"


class Reaction(NamedTuple):
    """What to do about an error."""

    leave: Leave = Leave.NO
    back_off: bool = True
    refresh: bool = False
    raises: bool = False
    """Whether the user is told at once."""


_SESSION = Reaction(back_off=False)
"""The session's client side has seen to it already (227-19)."""

_FOLLOWER = {
    ErrorCode.OFFSET_NOT_AVAILABLE: Reaction(Leave.WHEN_STUCK, refresh=True),
    # The request's epoch is older than the follower's, or newer: one of us is late, and the replica is fine.
    ErrorCode.FENCED_LEADER_EPOCH: Reaction(refresh=True),
    ErrorCode.UNKNOWN_LEADER_EPOCH: Reaction(Leave.WHEN_STUCK, refresh=True),
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: Reaction(raises=True),
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: Reaction(),
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND: _SESSION,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH: _SESSION,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR: _SESSION,
}

_LEADER = {
    ErrorCode.OFFSET_NOT_AVAILABLE: Reaction(refresh=True),
    ErrorCode.UNKNOWN_LEADER_EPOCH: Reaction(refresh=True),
    ErrorCode.CORRUPT_MESSAGE: Reaction(raises=True),
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND: _SESSION,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH: _SESSION,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR: _SESSION,
}

_LEAVE = Reaction(Leave.AT_ONCE, back_off=False)
_LEAVE_AND_REFRESH = Reaction(Leave.AT_ONCE, back_off=False, refresh=True)


def reaction_to(code: ErrorCode, *, from_leader: bool) -> Reaction:
    """The table's row: by code, or by its kind. A transport failure is NETWORK_EXCEPTION.

    NOT_LEADER_OR_FOLLOWER of a follower is left at once, too: a broker without follower fetching says so (392-17).
    """
    if from_leader:
        row = _LEADER.get(code)
        return row or Reaction(refresh=code.refreshes_metadata, raises=not code.retriable)
    row = _FOLLOWER.get(code)
    return row or (_LEAVE_AND_REFRESH if code.refreshes_metadata else _LEAVE)
