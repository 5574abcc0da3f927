"""Leader election of the metadata quorum: transition table, Vote, BeginQuorumEpoch, EndQuorumEpoch.

States of a voter: unattached (epoch known, leader unknown), voted, candidate, leader, resigned, follower. An observer
is unattached or a follower. `transition` is the only way to change state, and it allows only the rows of `TRANSITIONS`.

A voter grants one vote per epoch, to a candidate whose last (epoch, end offset) is at least its own (630-13). A new
leader sends BeginQuorumEpoch to voters that do not fetch. A resigning leader sends EndQuorumEpoch with its preferred
successors; the first becomes a candidate immediately.

Errors: FENCED_LEADER_EPOCH (older epoch), INCONSISTENT_VOTER_SET (sender or receiver is not a voter), INVALID_REQUEST
(impossible offsets, or a second leader of the epoch). Invariants: the epoch never decreases; a (state, cause) pair has
at most one row. `jitter` is a random number in [0, 1) from the driver.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.control_records import LeaderChange
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import types, wire
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.leadership import Leadership
from kipmesh.core.raft.types import ElectionState, QuorumError, RaftConfig, State

_STALE = (ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.NOT_LEADER_OR_FOLLOWER)

_BACKOFF_BASE_MS = 50
_BACKOFF_DOUBLINGS_MAX = 20
_EPOCHS_BEFORE_DOUBLING = 2
_TIMEOUT_DOUBLINGS_MAX = 3


# -- the transition table


class Cause(Enum):
    """Reason for a state transition; the value is the label in the diagram."""

    HIGHER_EPOCH = "higher epoch, leader unknown"
    LEADER_FOUND = "leader found"
    VOTE_GRANTED = "vote granted"
    ELECTION_TIMEOUT = "election timeout"
    FETCH_TIMEOUT = "fetch timeout"
    BACKOFF_OVER = "backoff over"
    MAJORITY = "votes of a majority"
    RESIGNS = "resign request, quorum lost, or append failed"


class Epoch(Enum):
    """Allowed relation of the epoch after a transition to the epoch before it; NEXT is exactly one higher."""

    SAME = "same"
    SAME_OR_HIGHER = "same or higher"
    HIGHER = "higher"
    NEXT = "next"


class Transition(NamedTuple):
    """One row of the transition table: an allowed change from `source` to `target` for `cause`."""

    source: State
    cause: Cause
    target: State
    epoch: Epoch


_U, _V, _C, _L, _R, _F, _OU, _OF = State  # in declaration order

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
    """The transition table does not allow a state change: a bug, or consensus is broken."""


def next_state(source: State, cause: Cause, epoch: int, new_epoch: int) -> State:
    """Return the target state of a transition from `epoch` to `new_epoch`.

    Raises IllegalTransitionError if the table has no row for this state, cause and change of epoch.
    """
    row = _BY_SOURCE.get((source, cause))
    if row is None:
        raise IllegalTransitionError(f"no transition from state {source.value!r} for cause {cause.value!r}")
    allowed = {
        Epoch.SAME: new_epoch == epoch,
        Epoch.SAME_OR_HIGHER: new_epoch >= epoch,
        Epoch.HIGHER: new_epoch > epoch,
        Epoch.NEXT: new_epoch == epoch + 1,
    }
    if not allowed[row.epoch]:
        raise IllegalTransitionError(
            f"transition from state {source.value!r} for cause {cause.value!r} requires epoch {row.epoch.value!r}, "
            f"got {epoch} to {new_epoch}"
        )
    return row.target


def diagram(*, observers: bool) -> str:
    """Return the transitions of voters, or of observers, as a Mermaid state diagram."""
    rows = [row for row in TRANSITIONS if row.source.is_observer == observers]
    lines = ["stateDiagram-v2", f"[*] --> {_node(rows[0].source)}"]
    for source, cause, target, epoch in rows:
        lines += [f"{_node(source)} --> {_node(target)}: {cause.value} ({epoch.value} epoch)"]
    return "\n    ".join(lines) + "\n"


def _node(state: State) -> str:
    return state.value.replace("-", "_")


# -- timeouts


def election_timeout_ms(config: RaftConfig, epochs_failed: int, jitter: float) -> int:
    """Return the time until a voter without a leader becomes a candidate: the election timeout times (1 + `jitter`).

    The timeout is `config.election_timeout_ms`. Starting with the third, each consecutive epoch without a leader
    (`epochs_failed`) doubles it, up to 8 times the configured value: votes must become durable, and disks may be slow.
    """
    doublings = min(max(epochs_failed - _EPOCHS_BEFORE_DOUBLING, 0), _TIMEOUT_DOUBLINGS_MAX)
    timeout_ms = config.election_timeout_ms << doublings
    return timeout_ms + int(jitter * timeout_ms)


def election_backoff_ms(config: RaftConfig, elections_lost: int, jitter: float) -> int:
    """Return the random backoff of a candidate before its next election: `jitter` times a bound.

    The bound is 100 ms after the first lost election and doubles with each further one. The result is at most
    `config.election_backoff_max_ms`.
    """
    doublings = min(max(elections_lost, 1), _BACKOFF_DOUBLINGS_MAX)
    return min(int(_BACKOFF_BASE_MS * (jitter * (1 << doublings))), config.election_backoff_max_ms)


def successor_backoff_ms(config: RaftConfig, position: int, successors: int) -> int:
    """Return the time until a follower of a resigned leader becomes a candidate.

    `position` is the follower's index in the list of preferred successors, whose length is `successors`. The first
    successor waits 0 ms, and the time doubles for each one after the second. A follower that is not in the list
    (`position >= successors`) waits `config.election_backoff_max_ms`, or 0 ms if the list is empty.
    """
    if position == 0:
        return 0
    if position >= successors:
        return config.election_backoff_max_ms
    return min(config.election_backoff_max_ms, (config.election_backoff_max_ms >> (successors - 1)) << (position - 1))


# -- state changes


def transition(context: RaftContext, cause: Cause, epoch: int, *, leader_id: int = -1, voted_id: int = -1) -> None:
    """Change state and election as `TRANSITIONS` says, and emit `StateChanged`. A new leader also appends LeaderChange.

    `leader_id` and `voted_id` are -1 for none. Raises IllegalTransitionError if the table does not allow the change.
    """
    before = context.state
    context.state = next_state(before, cause, context.epoch, epoch)
    if epoch > context.epoch and context.has_voter_activity:
        context.epochs_failed, context.has_voter_activity = context.epochs_failed + 1, False
    context.election = ElectionState(epoch, leader_id, voted_id)
    previous_deadline_ms = context.deadline_ms if before in (State.UNATTACHED, State.VOTED, State.FOLLOWER) else None
    enter_state(context)
    if cause is Cause.HIGHER_EPOCH and previous_deadline_ms is not None and context.deadline_ms is not None:
        # A candidate with a short log that starts elections repeatedly must not postpone the elections of others.
        context.deadline_ms = min(context.deadline_ms, previous_deadline_ms)
    context.emit(types.StateChanged(context.state, epoch, context.advertised_election.leader_id))
    if context.leadership is not None:
        config = context.config
        change = LeaderChange(config.node_id, config.voters, context.leadership.granting_voters)
        context.emit(types.AppendLeaderChange(epoch, change))


def enter_state(context: RaftContext) -> None:
    """Reset the fields and the deadline that belong to the current state, and forget all requests in flight.

    Creates the `Leadership` of a leader. Waiting fetches of a former leader get NOT_LEADER_OR_FOLLOWER.
    """
    leadership, context.leadership = context.leadership, None
    context.fetching_snapshot = None
    context.leader_high_watermark = -1
    context.leader_log_start = -1
    context.peers.clear()
    if leadership is not None:
        for wait in leadership.waiting.values():
            refused = wire.fetch_error(context.advertised_election, ErrorCode.NOT_LEADER_OR_FOLLOWER)
            context.emit(types.Respond(wait.request_id, refused))
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
    """Start an election in the next epoch with this node's own vote."""
    transition(context, cause, context.epoch + 1, voted_id=context.config.node_id)


def resign(context: RaftContext) -> None:
    """Resign leadership, with the other voters as preferred successors, longest log first. Ignored unless this node is
    the leader."""
    if context.leadership is None:
        return
    context.successors = context.leadership.successors()
    transition(context, Cause.RESIGNS, context.epoch, leader_id=context.config.node_id)
    context.unacknowledged = set(context.successors)


def abandon_leader(context: RaftContext) -> None:
    """Make an observer leave its leader and search for another one, within the same epoch."""
    context.abandoned_leader = (context.epoch, context.election.leader_id)
    transition(context, Cause.FETCH_TIMEOUT, context.epoch)


# -- observed epochs and leaders


def observe_leader(context: RaftContext, epoch: int, leader_id: int) -> None:
    """Record that `leader_id` (-1: unknown) leads `epoch`. Ignored if `epoch` is older than the current one.

    A leader that is not a voter counts as unknown, as does this node itself in a newer epoch. Raises QuorumError if
    another leader of `epoch` is already known.
    """
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
    """Observe the epoch and leader in a response (`observe_leader`).

    Returns False if the response has no error and is of the current epoch: the caller must process its content.
    Otherwise returns True, and backs off from `node_id` unless the response revealed a newer epoch or leader.
    Raises QuorumError if the epoch has two leaders.
    """
    error = ErrorCode.of(code)
    before = (context.state, context.election)
    if (epoch, leader_id) == context.abandoned_leader and node_id != leader_id:
        leader_id = -1  # the peer still believes in a leader that this observer gave up
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
    """Whether this node votes for a candidate of its current epoch whose last (epoch, end offset) is `last`.

    True for the candidate that already has its vote, or if this node is unattached and `last` is at least its own.
    """
    if context.state is State.VOTED:
        return context.election.voted_id == candidate_id
    return context.state is State.UNATTACHED and last >= context.last_offset_and_epoch


def on_vote(context: RaftContext, request_id: int, vote: m.VotePartition) -> None:
    """Handle a Vote request: observe its epoch, grant or deny the vote, and respond. An error changes nothing."""
    error, granted = _check_sender(context, vote.candidate_id, vote.candidate_epoch), False
    if vote.last_offset < 0 or not 0 <= vote.last_offset_epoch < vote.candidate_epoch:
        error = ErrorCode.INVALID_REQUEST
    if error is ErrorCode.NONE:
        observe_leader(context, vote.candidate_epoch, -1)
        granted = may_grant(context, vote.candidate_id, (vote.last_offset_epoch, vote.last_offset))
        if granted and context.state is State.UNATTACHED:
            transition(context, Cause.VOTE_GRANTED, vote.candidate_epoch, voted_id=vote.candidate_id)
    context.emit(types.Respond(request_id, wire.vote_response(context.advertised_election, error, granted=granted)))


def on_quorum_epoch(context: RaftContext, request_id: int, partition: m.QuorumEpochPartition, *, is_end: bool) -> None:
    """Handle BeginQuorumEpoch or, if `is_end`, EndQuorumEpoch: observe the sender as leader, and respond.

    After EndQuorumEpoch, a follower of the sender becomes a candidate in `successor_backoff_ms`.

    A sender other than the known leader of the current epoch gets INVALID_REQUEST, and its request changes nothing,
    because it may be forged. If the sender really leads the epoch, the response makes it raise QuorumError
    (`observe_leader`).
    """
    error = _check_sender(context, partition.leader_id, partition.leader_epoch)
    has_another_leader = context.election.leader_id not in (-1, partition.leader_id)
    if error is ErrorCode.NONE and partition.leader_epoch == context.epoch and has_another_leader:
        error = ErrorCode.INVALID_REQUEST
    if error is ErrorCode.NONE:
        observe_leader(context, partition.leader_epoch, partition.leader_id)
        if is_end and context.state is State.FOLLOWER and context.election.leader_id == partition.leader_id:
            successors, own_id = list(partition.preferred_successors), context.config.node_id
            position = successors.index(own_id) if own_id in successors else len(successors)
            wait_ms = successor_backoff_ms(context.config, position, len(successors))
            context.deadline_ms = context.now_ms + wait_ms
    kind = m.EndQuorumEpochResponse if is_end else m.BeginQuorumEpochResponse
    context.emit(types.Respond(request_id, wire.epoch_response(kind, context.advertised_election, error)))


# -- responses


def on_vote_response(context: RaftContext, node_id: int, vote: m.VotePartitionResponse) -> None:
    """Count a granted or denied vote of `node_id`. A candidate backs off if a majority has become impossible."""
    if handle_common_response(context, node_id, vote.error_code, vote.leader_epoch, vote.leader_id):
        return
    if context.state is not State.CANDIDATE:
        return
    (context.granted if vote.vote_granted else context.rejected).add(node_id)
    others = len(context.config.voters) - len(context.rejected)
    if others < context.config.majority and not context.is_backing_off:
        _back_off(context)


def on_quorum_epoch_response(context: RaftContext, node_id: int, partition: m.QuorumEpochPartitionResponse) -> None:
    """Record that voter `node_id` acknowledged BeginQuorumEpoch or EndQuorumEpoch, unless the response has an error."""
    if handle_common_response(context, node_id, partition.error_code, partition.leader_epoch, partition.leader_id):
        return
    if context.leadership is not None:
        context.leadership.unnotified_voters.discard(node_id)
    context.unacknowledged.discard(node_id)


# -- polling


def poll_voter(context: RaftContext) -> None:
    """Perform the due actions of a voter without a leader.

    A candidate requests votes, becomes leader with a majority, or backs off at its deadline. In other states, the voter
    starts an election at the deadline; before it, a resigned leader sends EndQuorumEpoch.
    """
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
    """Count the current election as lost, and set the deadline for the next one: `election_backoff_ms`, at least 1."""
    context.elections_lost += 1
    context.is_backing_off = True
    backoff_ms = election_backoff_ms(context.config, context.elections_lost, context.jitter)
    context.deadline_ms = context.now_ms + max(1, backoff_ms)
