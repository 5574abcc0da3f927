"""The states of a partition that a consumer reads, and every way between them, as a table (392-08).

`next_state` is the reader's only way from state to state, so what is not in `TRANSITIONS` cannot happen, and `diagram`
makes the picture in docs/closest_replica.md of the same rows.

Invariant: only `RESETTING` and, without `auto.offset.reset`, `HALTED` may have no position.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


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
