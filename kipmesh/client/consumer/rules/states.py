"""The tables of a partition's reader: its states and every transition, and the reaction to each error of a fetch.

`next_state` is the reader's only way from state to state, so what is not in `TRANSITIONS` cannot happen (392-08), and
`diagram` draws docs/closest_replica.md from the same rows. `reaction_to` is what the reader does about an error, by
the replica that returned it (392-04, 392-08, 392-14): a follower that cannot serve is left for the leader at once; a
request that the leader cannot serve is retried after `retry.backoff.ms`, with new metadata where that may be the
cause. `OFFSET_OUT_OF_RANGE` has no row: the reader decides.

Invariant: only `RESETTING` and, without `auto.offset.reset`, `HALTED` may have no position.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode


class State(Enum):
    """What a partition does."""

    RESETTING = "resetting"
    """Its position is asked of the leader: ListOffsets by `auto.offset.reset`, or as the user said."""
    FETCHING = "fetching"
    VALIDATING = "validating"
    """Asks the leader whether what it has read is in the log: OffsetsForLeaderEpoch."""
    CONFIRMING = "confirming"
    """A follower did not have the offset; asks the leader: ListOffsets."""
    DRAINING = "draining"
    """The leader does not have the offset; what was fetched before it is still to be read."""
    HALTED = "halted"
    """Only the user can say how to go on: `auto.offset.reset` is none."""


class Cause(Enum):
    """Why a state changes; the value is the text on the diagram's arrows."""

    FOUND = "offset found"
    LEADER_CHANGED = "new leader epoch"
    DOUBTED = "out of range or diverged, epoch known"
    NOT_THERE = "not on the follower"
    VALID = "all in the log"
    TRUNCATED = "truncated"
    TRUNCATED_FATALLY = "truncated, no policy"
    LOST = "no common epoch"
    LEADER_HAS_IT = "leader has it"
    CONFIRMED = "not on the leader"
    DRAINED = "all was read"
    NO_POLICY = "no policy"
    SOUGHT = "seek"
    SOUGHT_WITH_EPOCH = "seek, epoch known"
    RESET = "reset by the user"


class Transition(NamedTuple):
    """One row."""

    source: State
    cause: Cause
    target: State


_R, _F, _V, _C, _D, _H = (
    State.RESETTING,
    State.FETCHING,
    State.VALIDATING,
    State.CONFIRMING,
    State.DRAINING,
    State.HALTED,
)

TRANSITIONS: tuple[Transition, ...] = (
    Transition(_R, Cause.FOUND, _F),
    Transition(_R, Cause.NO_POLICY, _H),
    Transition(_F, Cause.LEADER_CHANGED, _V),
    Transition(_F, Cause.DOUBTED, _V),
    Transition(_F, Cause.NOT_THERE, _C),
    Transition(_F, Cause.CONFIRMED, _D),
    Transition(_V, Cause.LEADER_CHANGED, _V),
    Transition(_V, Cause.VALID, _F),
    Transition(_V, Cause.NOT_THERE, _C),
    Transition(_V, Cause.TRUNCATED, _F),
    Transition(_V, Cause.TRUNCATED_FATALLY, _H),
    Transition(_V, Cause.LOST, _R),
    Transition(_C, Cause.LEADER_HAS_IT, _F),
    Transition(_C, Cause.CONFIRMED, _D),
    Transition(_C, Cause.LEADER_CHANGED, _V),
    Transition(_D, Cause.DRAINED, _R),
    Transition(_D, Cause.NO_POLICY, _H),
    Transition(_D, Cause.LEADER_CHANGED, _V),
)

FROM_ANYWHERE: dict[Cause, State] = {Cause.SOUGHT: _F, Cause.SOUGHT_WITH_EPOCH: _V, Cause.RESET: _R}
"""What the user may do in every state."""

_TARGETS = {(row.source, row.cause): row.target for row in TRANSITIONS}


class IllegalTransitionError(Exception):
    """A state change that the table does not have: a defect of ours."""


def next_state(source: State, cause: Cause) -> State:
    """The state that `cause` leads to; IllegalTransitionError when the table has no such row."""
    target = FROM_ANYWHERE.get(cause) or _TARGETS.get((source, cause))
    if target is None:
        raise IllegalTransitionError(f"{source.value}: {cause.value} leads nowhere")
    return target


def diagram() -> str:
    """The table as a Mermaid state diagram; what the user may do everywhere is drawn once, from `halted`."""
    lines = ["stateDiagram-v2", f"[*] --> {_R.value}"]
    lines += [f"{source.value} --> {target.value}: {cause.value}" for source, cause, target in TRANSITIONS]
    lines += [f"{_H.value} --> {target.value}: {cause.value}" for cause, target in FROM_ANYWHERE.items()]
    return "\n    ".join(lines) + "\n"


# --- reactions to errors ----------------------------------------------------------------------------------------------


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
