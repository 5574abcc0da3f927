"""Tables of the partition reader: its states and transitions, and its reactions to fetch errors.

The reader changes state only through `next_state`, so transitions outside `TRANSITIONS` are impossible (392-08).
`diagram` draws docs/closest_replica.md from the same table. `reaction_to` maps errors to reactions by the role of the
replica (392-04, 392-08, 392-14): after most errors of a follower the reader returns to the leader; requests to the
leader are retried after `retry.backoff.ms`, with fresh metadata if stale metadata may be the cause.
`OFFSET_OUT_OF_RANGE` is not in the tables because it depends on the reader's state.

Invariant: only `RESETTING` and, without `auto.offset.reset`, `HALTED` may have no position.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode


class State(Enum):
    """State of a partition reader."""

    RESETTING = "resetting"
    """Requests the position from the leader with ListOffsets, for `auto.offset.reset` or a seek by timestamp."""
    FETCHING = "fetching"
    VALIDATING = "validating"
    """Verifies with OffsetsForLeaderEpoch that the records read so far are in the leader's log."""
    CONFIRMING = "confirming"
    """Verifies with ListOffsets that the leader has an offset that a follower reported as out of range."""
    DRAINING = "draining"
    """The leader does not have the offset. The application still has to consume the buffered records before it."""
    HALTED = "halted"
    """Waits for a seek or reset by the application, because `auto.offset.reset` is none."""


class Cause(Enum):
    """Cause of a transition. The value labels the arrow in the diagram."""

    OFFSET_FOUND = "offset found"
    LEADER_CHANGED = "new leader epoch"
    INCONSISTENT = "out of range or diverged, epoch known"
    NOT_ON_FOLLOWER = "not on the follower"
    VALID = "all in the log"
    TRUNCATED = "truncated"
    TRUNCATED_FATALLY = "truncated, no policy"
    NO_COMMON_EPOCH = "no common epoch"
    ON_LEADER = "leader has it"
    NOT_ON_LEADER = "not on the leader"
    DRAINED = "all was read"
    NO_POLICY = "no policy"
    SEEK = "seek"
    SEEK_WITH_EPOCH = "seek, epoch known"
    RESET = "reset by the user"


class Transition(NamedTuple):
    """A row of the transition table: in state `source`, `cause` leads to state `target`."""

    source: State
    cause: Cause
    target: State


_R, _F, _V, _C, _D, _H = State

TRANSITIONS: tuple[Transition, ...] = (
    Transition(_R, Cause.OFFSET_FOUND, _F),
    Transition(_R, Cause.NO_POLICY, _H),
    Transition(_F, Cause.LEADER_CHANGED, _V),
    Transition(_F, Cause.INCONSISTENT, _V),
    Transition(_F, Cause.NOT_ON_FOLLOWER, _C),
    Transition(_F, Cause.NOT_ON_LEADER, _D),
    Transition(_V, Cause.LEADER_CHANGED, _V),
    Transition(_V, Cause.VALID, _F),
    Transition(_V, Cause.NOT_ON_FOLLOWER, _C),
    Transition(_V, Cause.TRUNCATED, _F),
    Transition(_V, Cause.TRUNCATED_FATALLY, _H),
    Transition(_V, Cause.NO_COMMON_EPOCH, _R),
    Transition(_C, Cause.ON_LEADER, _F),
    Transition(_C, Cause.NOT_ON_LEADER, _D),
    Transition(_C, Cause.LEADER_CHANGED, _V),
    Transition(_D, Cause.DRAINED, _R),
    Transition(_D, Cause.NO_POLICY, _H),
    Transition(_D, Cause.LEADER_CHANGED, _V),
)

FROM_ANYWHERE: dict[Cause, State] = {Cause.SEEK: _F, Cause.SEEK_WITH_EPOCH: _V, Cause.RESET: _R}
"""Transitions that the application may cause in every state."""

_TARGETS = {(row.source, row.cause): row.target for row in TRANSITIONS}


class IllegalTransitionError(Exception):
    """The cause passed to `next_state` is not allowed in the state. Indicates a bug in the reader."""


def next_state(source: State, cause: Cause) -> State:
    """Return the state after `cause`. Raises IllegalTransitionError if the table has no such transition."""
    target = FROM_ANYWHERE.get(cause) or _TARGETS.get((source, cause))
    if target is None:
        raise IllegalTransitionError(f"no transition from {source.value!r} for cause {cause.value!r}")
    return target


def diagram() -> str:
    """Return the transitions as a Mermaid state diagram. Those of `FROM_ANYWHERE` are drawn from `halted` only."""
    lines = ["stateDiagram-v2", f"[*] --> {_R.value}"]
    lines += [f"{source.value} --> {target.value}: {cause.value}" for source, cause, target in TRANSITIONS]
    lines += [f"{_H.value} --> {target.value}: {cause.value}" for cause, target in FROM_ANYWHERE.items()]
    return "\n    ".join(lines) + "\n"


# --- reactions to errors ----------------------------------------------------------------------------------------------


class Leave(Enum):
    """When an error makes the reader return from a follower to the leader."""

    NO = "no"
    IMMEDIATELY = "immediately"
    WHEN_STUCK = "when the follower is not in the ISR or keeps returning the error"


class Reaction(NamedTuple):
    """Reaction to a fetch error.

    Says when to return to the leader, whether to wait before the next request, and whether to refresh metadata.
    """

    leave: Leave = Leave.NO
    back_off: bool = True
    refresh: bool = False
    raises: bool = False
    """Whether to raise the error in the application immediately."""


_SESSION_ERRORS = dict.fromkeys(
    (
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    ),
    Reaction(back_off=False),
)
"""Errors that the client side of the session handles (227-19)."""

_FOLLOWER = {
    ErrorCode.OFFSET_NOT_AVAILABLE: Reaction(Leave.WHEN_STUCK, refresh=True),
    # Our leader epoch is stale or the follower's is: neither means that the replica has failed.
    ErrorCode.FENCED_LEADER_EPOCH: Reaction(refresh=True),
    ErrorCode.UNKNOWN_LEADER_EPOCH: Reaction(Leave.WHEN_STUCK, refresh=True),
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: Reaction(raises=True),
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: Reaction(),
    **_SESSION_ERRORS,
}

_LEADER = {
    ErrorCode.OFFSET_NOT_AVAILABLE: Reaction(refresh=True),
    ErrorCode.UNKNOWN_LEADER_EPOCH: Reaction(refresh=True),
    ErrorCode.CORRUPT_MESSAGE: Reaction(raises=True),
    **_SESSION_ERRORS,
}

_LEAVE = Reaction(Leave.IMMEDIATELY, back_off=False)
_LEAVE_AND_REFRESH = Reaction(Leave.IMMEDIATELY, back_off=False, refresh=True)


def reaction_to(code: ErrorCode, *, from_leader: bool) -> Reaction:
    """Return the reaction to an error from the leader or, without `from_leader`, from a follower.

    The code NETWORK_EXCEPTION means a transport failure.

    After NOT_LEADER_OR_FOLLOWER from a follower, the reader returns to the leader immediately, because brokers that do
    not support follower fetching send this error (392-17).
    """
    if from_leader:
        row = _LEADER.get(code)
        return row or Reaction(refresh=code.refreshes_metadata, raises=not code.retriable)
    row = _FOLLOWER.get(code)
    return row or (_LEAVE_AND_REFRESH if code.refreshes_metadata else _LEAVE)
