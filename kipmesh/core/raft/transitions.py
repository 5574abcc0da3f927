"""The states of a replica of the metadata quorum and every way between them, as a table.

A voter is unattached (knows an epoch, no leader), voted, candidate, leader, resigned or follower; an observer is only
ever unattached or follower. `next_state` is the machine's only way from state to state, so what is not in `TRANSITIONS`
cannot happen, and `diagram` makes the picture in docs/raft.md of the same rows.

Invariants: a (state, cause) pair has one row; the epoch never goes back ("same", "same or higher", "higher", "next").
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class State(Enum):
    """What a replica is to its quorum; the value is the name in metrics and documents."""

    UNATTACHED = "unattached"
    VOTED = "voted"
    CANDIDATE = "candidate"
    LEADER = "leader"
    RESIGNED = "resigned"
    FOLLOWER = "follower"
    OBSERVER_UNATTACHED = "observer-unattached"
    OBSERVER_FOLLOWER = "observer-follower"

    @property
    def is_observer(self) -> bool:
        """Whether a replica without a vote is in this state."""
        return self in (State.OBSERVER_UNATTACHED, State.OBSERVER_FOLLOWER)

    @property
    def follows(self) -> bool:
        """Whether it fetches from a leader that it knows."""
        return self in (State.FOLLOWER, State.OBSERVER_FOLLOWER)


class Cause(Enum):
    """Why a state changes; the value is the text on the diagram's arrows."""

    HIGHER_EPOCH = "higher epoch, leader unknown"
    LEADER_FOUND = "leader found"
    VOTE_GRANTED = "grants its vote"
    ELECTION_TIMEOUT = "election timeout"
    FETCH_TIMEOUT = "fetch timeout"
    BACKOFF_OVER = "backoff over"
    MAJORITY = "votes of a majority"
    RESIGNS = "told to resign, no quorum, or cannot append"


class Epoch(Enum):
    """What a transition does with the epoch."""

    SAME = "same"
    SAME_OR_HIGHER = "same or higher"
    HIGHER = "higher"
    NEXT = "next"


class Transition(NamedTuple):
    """One row."""

    source: State
    cause: Cause
    target: State
    epoch: Epoch


_U, _V, _C, _L, _R, _F = (
    State.UNATTACHED,
    State.VOTED,
    State.CANDIDATE,
    State.LEADER,
    State.RESIGNED,
    State.FOLLOWER,
)
_OU, _OF = State.OBSERVER_UNATTACHED, State.OBSERVER_FOLLOWER

TRANSITIONS: tuple[Transition, ...] = (
    Transition(_U, Cause.HIGHER_EPOCH, _U, Epoch.HIGHER),
    Transition(_U, Cause.LEADER_FOUND, _F, Epoch.SAME_OR_HIGHER),
    Transition(_U, Cause.VOTE_GRANTED, _V, Epoch.SAME),
    Transition(_U, Cause.ELECTION_TIMEOUT, _C, Epoch.NEXT),
    Transition(_V, Cause.HIGHER_EPOCH, _U, Epoch.HIGHER),
    Transition(_V, Cause.LEADER_FOUND, _F, Epoch.SAME_OR_HIGHER),
    Transition(_V, Cause.ELECTION_TIMEOUT, _C, Epoch.NEXT),
    Transition(_C, Cause.HIGHER_EPOCH, _U, Epoch.HIGHER),
    Transition(_C, Cause.LEADER_FOUND, _F, Epoch.SAME_OR_HIGHER),
    Transition(_C, Cause.BACKOFF_OVER, _C, Epoch.NEXT),
    Transition(_C, Cause.MAJORITY, _L, Epoch.SAME),
    Transition(_L, Cause.HIGHER_EPOCH, _U, Epoch.HIGHER),
    Transition(_L, Cause.LEADER_FOUND, _F, Epoch.HIGHER),
    Transition(_L, Cause.RESIGNS, _R, Epoch.SAME),
    Transition(_R, Cause.HIGHER_EPOCH, _U, Epoch.HIGHER),
    Transition(_R, Cause.LEADER_FOUND, _F, Epoch.HIGHER),
    Transition(_R, Cause.ELECTION_TIMEOUT, _C, Epoch.NEXT),
    Transition(_F, Cause.HIGHER_EPOCH, _U, Epoch.HIGHER),
    Transition(_F, Cause.LEADER_FOUND, _F, Epoch.HIGHER),
    Transition(_F, Cause.FETCH_TIMEOUT, _C, Epoch.NEXT),
    Transition(_OU, Cause.HIGHER_EPOCH, _OU, Epoch.HIGHER),
    Transition(_OU, Cause.LEADER_FOUND, _OF, Epoch.SAME_OR_HIGHER),
    Transition(_OF, Cause.HIGHER_EPOCH, _OU, Epoch.HIGHER),
    Transition(_OF, Cause.LEADER_FOUND, _OF, Epoch.HIGHER),
    Transition(_OF, Cause.FETCH_TIMEOUT, _OU, Epoch.SAME),
)

_BY_SOURCE = {(row.source, row.cause): row for row in TRANSITIONS}


class IllegalTransitionError(Exception):
    """A state change that the table does not have: a defect of ours, or a quorum that is not one."""


def next_state(source: State, cause: Cause, epoch: int, new_epoch: int) -> State:
    """The state that `cause` leads to; IllegalTransitionError when the table has no such row for these epochs."""
    row = _BY_SOURCE.get((source, cause))
    if row is None:
        raise IllegalTransitionError(f"{source.value}: {cause.value} leads nowhere")
    allowed = {
        Epoch.SAME: new_epoch == epoch,
        Epoch.SAME_OR_HIGHER: new_epoch >= epoch,
        Epoch.HIGHER: new_epoch > epoch,
        Epoch.NEXT: new_epoch == epoch + 1,
    }
    if not allowed[row.epoch]:
        raise IllegalTransitionError(f"{source.value}: {cause.value} from epoch {epoch} to {new_epoch}")
    return row.target


def diagram(*, observers: bool) -> str:
    """The table's rows of voters, or of observers, as a Mermaid state diagram."""
    rows = [row for row in TRANSITIONS if row.source.is_observer == observers]
    lines = ["stateDiagram-v2", f"[*] --> {_node(rows[0].source)}"]
    for source, cause, target, epoch in rows:
        lines += [f"{_node(source)} --> {_node(target)}: {cause.value} ({epoch.value} epoch)"]
    return "\n    ".join(lines) + "\n"


def _node(state: State) -> str:
    return state.value.replace("-", "_")
