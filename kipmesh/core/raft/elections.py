"""Leader election of the metadata quorum: the transition table, votes, BeginQuorumEpoch, EndQuorumEpoch.

A voter is unattached (knows an epoch, no leader), voted, candidate, leader, resigned or follower; an observer is only
unattached or follower. `transition` is the only way from state to state, so a change that `TRANSITIONS` lacks cannot
happen. `diagram` draws the table for docs/raft.md.

A voter grants one vote per epoch, to a candidate whose last (epoch, end offset), of log or snapshot, is at least its
own (630-13). A new leader sends BeginQuorumEpoch to voters that do not fetch. A resigning leader sends EndQuorumEpoch
with its preferred successors; the first becomes a candidate immediately.

Errors: FENCED_LEADER_EPOCH (older epoch), INCONSISTENT_VOTER_SET (not a voter). Invariants: a (state, cause) pair has
one row; the epoch never goes back. `jitter` is a random number in [0, 1) that the driver draws.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.control_records import LeaderChange
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import wire
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.leadership import Leadership
from kipmesh.core.raft.types import (
    AppendLeaderChange,
    ElectionState,
    QuorumError,
    RaftConfig,
    Respond,
    State,
    StateChanged,
)

_STALE = (ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.NOT_LEADER_OR_FOLLOWER)

_BACKOFF_BASE_MS = 50
_BACKOFF_DOUBLINGS_MAX = 20
_IMPATIENT_EPOCHS = 2
_PATIENCE_DOUBLINGS_MAX = 3


# -- the transition table


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


# -- timeouts


def election_timeout_ms(config: RaftConfig, epochs_failed: int, jitter: float) -> int:
    """Time until a voter without a leader becomes a candidate: once to twice the configured time.

    After some epochs in a row that led to no leader it doubles with each: votes have to become durable on disks that
    may be slower than the configured time allows for.
    """
    doublings = min(max(epochs_failed - _IMPATIENT_EPOCHS, 0), _PATIENCE_DOUBLINGS_MAX)
    timeout_ms = config.election_timeout_ms << doublings
    return timeout_ms + int(jitter * timeout_ms)


def election_backoff_ms(config: RaftConfig, elections_lost: int, jitter: float) -> int:
    """Time until a candidate that lost starts the next election: doubles with each loss, at random, up to a limit."""
    doublings = min(max(elections_lost, 1), _BACKOFF_DOUBLINGS_MAX)
    return min(int(_BACKOFF_BASE_MS * (jitter * (1 << doublings))), config.election_backoff_max_ms)


def successor_backoff_ms(config: RaftConfig, position: int, successors: int) -> int:
    """Time until a follower of a resigned leader becomes a candidate: 0 for the first, then twice as long for each."""
    if position == 0:
        return 0
    if position >= successors:
        return config.election_backoff_max_ms
    return min(config.election_backoff_max_ms, (config.election_backoff_max_ms >> (successors - 1)) << (position - 1))


# -- changes of state


def transition(context: RaftContext, cause: Cause, epoch: int, *, leader_id: int = -1, voted_id: int = -1) -> None:
    """Change the state as the table says; IllegalTransitionError if it has no such row."""
    before = context.state
    context.state = next_state(before, cause, context.epoch, epoch)
    if epoch > context.epoch and context.heard_voter:
        context.epochs_failed, context.heard_voter = context.epochs_failed + 1, False
    context.election = ElectionState(epoch, leader_id, voted_id)
    keeps_ms = context.deadline_ms if before in (State.UNATTACHED, State.VOTED, State.FOLLOWER) else None
    enter_state(context)
    if cause is Cause.HIGHER_EPOCH and keeps_ms is not None and context.deadline_ms is not None:
        # A candidate with a short log, perhaps again and again, must not keep the others from becoming candidates.
        context.deadline_ms = min(context.deadline_ms, keeps_ms)
    context.emit(StateChanged(context.state, epoch, context.told_election.leader_id))
    if context.leadership is not None:
        config = context.config
        change = LeaderChange(config.node_id, config.voters, context.leadership.granting_voters)
        context.emit(AppendLeaderChange(epoch, change))


def enter_state(context: RaftContext) -> None:
    """Reset what every state begins with. Refuse the fetches that waited for a leader that leads no more."""
    leadership, context.leadership = context.leadership, None
    context.fetching_snapshot = None
    context.leader_high_watermark = -1
    context.leader_log_start = -1
    context.peers.clear()
    if leadership is not None:
        for wait in leadership.waiting.values():
            refused = wire.fetch_error(context.told_election, ErrorCode.NOT_LEADER_OR_FOLLOWER)
            context.emit(Respond(wait.request_id, refused))
    config = context.config
    match context.state:
        case State.FOLLOWER | State.OBSERVER_FOLLOWER:
            context.elections_lost = context.epochs_failed = 0
            context.restart_fetch_timeout()
        case State.OBSERVER_UNATTACHED:
            context.deadline_ms = None
        case State.LEADER:
            context.elections_lost = context.epochs_failed = 0
            context.deadline_ms = None
            context.leadership = Leadership(config, context.log.log_end_offset, context.granted, context.now_ms)
        case _:
            is_alone = config.voters == (config.node_id,)
            wait_ms = 0 if is_alone else election_timeout_ms(config, context.epochs_failed, context.jitter)
            context.deadline_ms = context.now_ms + wait_ms
            context.is_backing_off = False
            context.granted, context.rejected = {config.node_id}, set()


def become_candidate(context: RaftContext, cause: Cause) -> None:
    """Become a candidate of the next epoch with this node's own vote."""
    transition(context, cause, context.epoch + 1, voted_id=context.config.node_id)


def resign(context: RaftContext) -> None:
    """Stop leading and name the successors; no effect on other replicas than the leader."""
    if context.leadership is None:
        return
    context.successors = context.leadership.successors()
    transition(context, Cause.RESIGNS, context.epoch, leader_id=context.config.node_id)
    context.unacknowledged = set(context.successors)


def give_up_leader(context: RaftContext) -> None:
    """Let an observer search for another leader."""
    context.silent_leader = (context.epoch, context.election.leader_id)
    transition(context, Cause.FETCH_TIMEOUT, context.epoch)


# -- observing who leads


def observe_leader(context: RaftContext, epoch: int, leader_id: int) -> None:
    """Record that `leader_id` (-1: unknown) leads `epoch`. Ignored if `epoch` is older than the current one."""
    if epoch < context.epoch:
        return
    own_id = context.config.node_id
    if leader_id not in context.config.voters or (leader_id == own_id and epoch > context.epoch):
        leader_id = -1  # only a voter can lead, and this node would know if it did
    if epoch > context.epoch:
        cause = Cause.LEADER_FOUND if leader_id >= 0 else Cause.HIGHER_EPOCH
        transition(context, cause, epoch, leader_id=leader_id)
    elif leader_id not in (-1, own_id):
        known = context.election.leader_id
        if known < 0:
            transition(context, Cause.LEADER_FOUND, epoch, leader_id=leader_id)
        elif known != leader_id:
            raise QuorumError(f"epoch {epoch} has two leaders: {known} and {leader_id}")


def handle_common_response(context: RaftContext, node_id: int, code: int, epoch: int, leader_id: int) -> bool:
    """Observe the epoch, the leader and the error of a response; return whether that was all that it says."""
    error = ErrorCode.of(code)
    before = (context.state, context.election)
    if (epoch, leader_id) == context.silent_leader and node_id != leader_id:
        leader_id = -1  # the peer has not noticed yet
    if epoch < context.epoch or error is ErrorCode.UNKNOWN_LEADER_EPOCH:
        context.retry_later(node_id)
        return True
    is_stale = epoch > context.epoch or error in _STALE
    observe_leader(context, epoch, leader_id)
    if error is ErrorCode.NONE and not is_stale:
        return False
    if not is_stale or before == (context.state, context.election):
        context.retry_later(node_id)
    return True


# -- requests of voters


def _check_sender(context: RaftContext, sender_id: int, epoch: int) -> ErrorCode:
    config = context.config
    if epoch < context.epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if not config.is_voter or sender_id not in context.other_voters:
        return ErrorCode.INCONSISTENT_VOTER_SET
    return ErrorCode.NONE


def may_grant(context: RaftContext, candidate_id: int, last: tuple[int, int]) -> bool:
    """Whether this node votes for a candidate of its epoch; `last` is the candidate's (epoch, end offset)."""
    if context.state is State.VOTED:
        return context.election.voted_id == candidate_id
    return context.state is State.UNATTACHED and last >= context.last_offset_and_epoch


def on_vote(context: RaftContext, request_id: int, asked: m.VotePartition) -> None:
    """Handle a Vote request."""
    error, granted = _check_sender(context, asked.candidate_id, asked.candidate_epoch), False
    if asked.last_offset < 0 or not 0 <= asked.last_offset_epoch < asked.candidate_epoch:
        error = ErrorCode.INVALID_REQUEST
    if error is ErrorCode.NONE:
        observe_leader(context, asked.candidate_epoch, -1)
        granted = may_grant(context, asked.candidate_id, (asked.last_offset_epoch, asked.last_offset))
        if granted and context.state is State.UNATTACHED:
            transition(context, Cause.VOTE_GRANTED, asked.candidate_epoch, voted_id=asked.candidate_id)
    context.emit(Respond(request_id, wire.vote_response(context.told_election, error, granted=granted)))


def on_quorum_epoch(context: RaftContext, request_id: int, asked: m.QuorumEpochPartition, *, ends: bool) -> None:
    """Handle BeginQuorumEpoch, or EndQuorumEpoch if the epoch `ends`.

    A request that names another leader of the current epoch than the known one is refused and not believed, because it
    may come from anywhere. If its sender leads all the same, then the response stops it (`observe_leader`).
    """
    error = _check_sender(context, asked.leader_id, asked.leader_epoch)
    has_another_leader = context.election.leader_id not in (-1, asked.leader_id)
    if error is ErrorCode.NONE and asked.leader_epoch == context.epoch and has_another_leader:
        error = ErrorCode.INVALID_REQUEST
    if error is ErrorCode.NONE:
        observe_leader(context, asked.leader_epoch, asked.leader_id)
        if ends and context.state is State.FOLLOWER and context.election.leader_id == asked.leader_id:
            successors, own_id = list(asked.preferred_successors), context.config.node_id
            position = successors.index(own_id) if own_id in successors else len(successors)
            wait_ms = successor_backoff_ms(context.config, position, len(successors))
            context.deadline_ms = context.now_ms + wait_ms
    kind = m.EndQuorumEpochResponse if ends else m.BeginQuorumEpochResponse
    context.emit(Respond(request_id, wire.epoch_response(kind, context.told_election, error)))


# -- responses


def on_vote_response(context: RaftContext, node_id: int, vote: m.VotePartitionResponse) -> None:
    """Count a vote, or observe another epoch."""
    if handle_common_response(context, node_id, vote.error_code, vote.leader_epoch, vote.leader_id):
        return
    if context.state is not State.CANDIDATE:
        return
    (context.granted if vote.vote_granted else context.rejected).add(node_id)
    others = len(context.config.voters) - len(context.rejected)
    if others < context.config.majority and not context.is_backing_off:
        _back_off(context)


def on_quorum_epoch_response(context: RaftContext, node_id: int, told: m.QuorumEpochPartitionResponse) -> None:
    """Note that a voter knows that the epoch began or ended."""
    if handle_common_response(context, node_id, told.error_code, told.leader_epoch, told.leader_id):
        return
    if context.leadership is not None:
        context.leadership.to_tell.discard(node_id)
    context.unacknowledged.discard(node_id)


# -- what is due


def poll_voter(context: RaftContext) -> None:
    """Let a voter that neither leads nor follows wait, request votes, become a candidate, or announce its end."""
    is_due = context.deadline_ms is not None and context.now_ms >= context.deadline_ms
    if context.state is State.CANDIDATE:
        _poll_candidate(context, is_due)
    elif is_due:
        become_candidate(context, Cause.ELECTION_TIMEOUT)
    elif context.state is State.RESIGNED:
        request = wire.epoch_request(m.EndQuorumEpochRequest, context.config, context.epoch, context.successors)
        for voter in sorted(context.unacknowledged):
            if context.is_free(voter):
                context.send(voter, request)


def _poll_candidate(context: RaftContext, is_due: bool) -> None:
    if len(context.granted) >= context.config.majority:
        transition(context, Cause.MAJORITY, context.epoch, leader_id=context.config.node_id)
    elif is_due and context.is_backing_off:
        become_candidate(context, Cause.BACKOFF_OVER)
    elif is_due:
        _back_off(context)
    elif not context.is_backing_off:
        request = wire.vote_request(context.config, context.epoch, *context.last_offset_and_epoch)
        for voter in context.config.voters:
            if voter not in context.granted and voter not in context.rejected and context.is_free(voter):
                context.send(voter, request)


def _back_off(context: RaftContext) -> None:
    """Wait at random before the next election: this one cannot be won."""
    context.elections_lost += 1
    context.is_backing_off = True
    backoff_ms = election_backoff_ms(context.config, context.elections_lost, context.jitter)
    context.deadline_ms = context.now_ms + max(1, backoff_ms)
