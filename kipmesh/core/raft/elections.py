"""Elections: who votes for whom, who learns of which leader, and what a voter without a leader does.

Votes go to candidates whose last (epoch, end offset), of log or snapshot, is not older than ours (630-13), one an
epoch. A leader tells voters that do not fetch of its epoch (BeginQuorumEpoch); one that resigns names its successors
(EndQuorumEpoch), and the first of them stands at once. Errors are Kafka's: FENCED_LEADER_EPOCH for an old epoch,
INCONSISTENT_VOTER_SET for who is no voter, INCONSISTENT_CLUSTER_ID for another cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import timing, wire
from kipmesh.core.raft.transitions import Cause, State
from kipmesh.core.raft.types import Answer, QuorumError

if TYPE_CHECKING:
    from kipmesh.core.raft.machine import Machine

_STALE = (ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.NOT_LEADER_OR_FOLLOWER)


# -- learning who leads


def learn(machine: Machine, epoch: int, leader_id: int) -> None:
    """Somebody says that `leader_id` (-1 unknown) leads `epoch`."""
    if epoch < machine.epoch:
        return
    if leader_id not in machine.config.voters or (leader_id == machine.config.node_id and epoch > machine.epoch):
        leader_id = -1  # nobody can lead without a vote, and we would know if we did
    if epoch > machine.epoch:
        cause = Cause.LEADER_FOUND if leader_id >= 0 else Cause.HIGHER_EPOCH
        machine.become(cause, epoch, leader_id=leader_id)
    elif leader_id >= 0 and leader_id != machine.config.node_id:
        known = machine.election.leader_id
        if known < 0:
            machine.become(Cause.LEADER_FOUND, epoch, leader_id=leader_id)
        elif known != leader_id:
            raise QuorumError(f"epoch {epoch} has two leaders: {known} and {leader_id}")


def is_settled(machine: Machine, node_id: int, error: ErrorCode, epoch: int, leader_id: int) -> bool:
    """Take from a response what all kinds have in common; gives whether there is nothing else in it for us."""
    before = (machine.state, machine.election)
    if (epoch, leader_id) == machine.silent_leader and node_id != leader_id:
        leader_id = -1  # somebody who has not noticed yet
    if epoch < machine.epoch or error is ErrorCode.UNKNOWN_LEADER_EPOCH:
        machine.retry_later(node_id)
        return True
    if epoch > machine.epoch or error in _STALE:
        learn(machine, epoch, leader_id)
        if before == (machine.state, machine.election):
            machine.retry_later(node_id)
        return True
    learn(machine, epoch, leader_id)
    if error is not ErrorCode.NONE:
        machine.retry_later(node_id)
        return True
    return False


def error_of(code: int) -> ErrorCode:
    """A code as we know it; a newer peer's number is an unknown error."""
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR


# -- requests of voters


def _refusal(machine: Machine, sender_id: int, epoch: int) -> ErrorCode:
    if epoch < machine.epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if not machine.config.is_voter or sender_id not in machine.config.voters or sender_id == machine.config.node_id:
        return ErrorCode.INCONSISTENT_VOTER_SET
    return ErrorCode.NONE


def may_grant(machine: Machine, candidate_id: int, last: tuple[int, int]) -> bool:
    """Whether the candidate of our epoch gets our vote; `last` is its (epoch, end offset)."""
    if machine.state is State.VOTED:
        return machine.election.voted_id == candidate_id
    return machine.state is State.UNATTACHED and last >= machine.last_offset_and_epoch


def on_vote(machine: Machine, request_id: int, request: m.VoteRequest) -> None:
    """A candidate asks for our vote."""
    if request.cluster_id not in (None, machine.config.cluster_id):
        machine.emit(Answer(request_id, m.VoteResponse(ErrorCode.INCONSISTENT_CLUSTER_ID)))
        return
    asked = wire.only_vote(request)
    if asked is None:
        machine.emit(Answer(request_id, m.VoteResponse(ErrorCode.INVALID_REQUEST)))
        return
    error, granted = _refusal(machine, asked.candidate_id, asked.candidate_epoch), False
    if asked.last_offset < 0 or not 0 <= asked.last_offset_epoch < asked.candidate_epoch:
        error = ErrorCode.INVALID_REQUEST
    if error is ErrorCode.NONE:
        learn(machine, asked.candidate_epoch, -1)
        granted = may_grant(machine, asked.candidate_id, (asked.last_offset_epoch, asked.last_offset))
        if granted and machine.state is State.UNATTACHED:
            machine.become(Cause.VOTE_GRANTED, asked.candidate_epoch, voted_id=asked.candidate_id)
    machine.emit(Answer(request_id, wire.vote_response(machine.told_election, error, granted=granted)))


def on_begin(machine: Machine, request_id: int, request: m.BeginQuorumEpochRequest) -> None:
    """A new leader says so."""
    asked, error = _epoch_asked(machine, request)
    if asked is None:
        machine.emit(Answer(request_id, m.BeginQuorumEpochResponse(error)))
        return
    if error is ErrorCode.NONE:
        learn(machine, asked.leader_epoch, asked.leader_id)
    machine.emit(Answer(request_id, wire.epoch_response(m.BeginQuorumEpochResponse, machine.told_election, error)))


def on_end(machine: Machine, request_id: int, request: m.EndQuorumEpochRequest) -> None:
    """A leader resigned: stand as soon as our place among its successors allows."""
    asked, error = _epoch_asked(machine, request)
    if asked is None:
        machine.emit(Answer(request_id, m.EndQuorumEpochResponse(error)))
        return
    if error is ErrorCode.NONE:
        learn(machine, asked.leader_epoch, asked.leader_id)
        if machine.state is State.FOLLOWER and machine.election.leader_id == asked.leader_id:
            successors, own = list(asked.preferred_successors), machine.config.node_id
            position = successors.index(own) if own in successors else len(successors)
            wait_ms = timing.successor_backoff_ms(machine.config, position, len(successors))
            machine.deadline_ms = machine.now_ms + wait_ms
    machine.emit(Answer(request_id, wire.epoch_response(m.EndQuorumEpochResponse, machine.told_election, error)))


def _epoch_asked(
    machine: Machine, request: m.BeginQuorumEpochRequest | m.EndQuorumEpochRequest
) -> tuple[m.QuorumEpochPartition | None, ErrorCode]:
    if request.cluster_id not in (None, machine.config.cluster_id):
        return None, ErrorCode.INCONSISTENT_CLUSTER_ID
    asked = wire.only_epoch(request)
    if asked is None:
        return None, ErrorCode.INVALID_REQUEST
    error = _refusal(machine, asked.leader_id, asked.leader_epoch)
    if error is ErrorCode.NONE and asked.leader_epoch == machine.epoch and _is_of_another(machine, asked.leader_id):
        error = ErrorCode.INVALID_REQUEST
    return asked, error


def _is_of_another(machine: Machine, leader_id: int) -> bool:
    """Whether our epoch has another leader. A request may come from anywhere, so it is refused and not believed.

    Should the sender lead all the same, then it learns of the other leader from our answer, and stops (`learn`).
    """
    return machine.election.leader_id not in (-1, leader_id)


# -- responses


def on_vote_response(machine: Machine, node_id: int, response: m.VoteResponse) -> None:
    """A voter decided, or told of another epoch."""
    answer = wire.only_vote_answer(response)
    if response.error_code or answer is None:
        machine.retry_later(node_id)
        return
    if is_settled(machine, node_id, error_of(answer.error_code), answer.leader_epoch, answer.leader_id):
        return
    if machine.state is not State.CANDIDATE:
        return
    (machine.granted if answer.vote_granted else machine.rejected).add(node_id)
    others = len(machine.config.voters) - len(machine.rejected)
    if others < machine.config.majority and not machine.is_backing_off:
        _lose(machine)


def on_epoch_response(
    machine: Machine, node_id: int, response: m.BeginQuorumEpochResponse | m.EndQuorumEpochResponse
) -> None:
    """A voter knows that our epoch began or ended."""
    answer = wire.only_epoch_answer(response)
    if response.error_code or answer is None:
        machine.retry_later(node_id)
        return
    if is_settled(machine, node_id, error_of(answer.error_code), answer.leader_epoch, answer.leader_id):
        return
    if machine.leadership is not None:
        machine.leadership.to_tell.discard(node_id)
    machine.unacknowledged.discard(node_id)


# -- what is due


def poll_voter(machine: Machine) -> None:
    """A voter that neither leads nor follows: waits, stands, asks for votes, or says that it resigned."""
    is_due = machine.deadline_ms is not None and machine.now_ms >= machine.deadline_ms
    if machine.state is State.CANDIDATE:
        _poll_candidate(machine, is_due)
        return
    if is_due:
        stand(machine, Cause.ELECTION_TIMEOUT)
    elif machine.state is State.RESIGNED:
        for voter in sorted(machine.unacknowledged):
            if machine.is_free(voter):
                request = wire.epoch_request(m.EndQuorumEpochRequest, machine.config, machine.epoch, machine.successors)
                machine.send(voter, request)


def stand(machine: Machine, cause: Cause) -> None:
    """Become candidate of the next epoch, voting for oneself."""
    machine.become(cause, machine.epoch + 1, voted_id=machine.config.node_id)


def _poll_candidate(machine: Machine, is_due: bool) -> None:
    if len(machine.granted) >= machine.config.majority:
        machine.become(Cause.MAJORITY, machine.epoch, leader_id=machine.config.node_id)
    elif is_due and machine.is_backing_off:
        stand(machine, Cause.BACKOFF_OVER)
    elif is_due:
        _lose(machine)
    elif not machine.is_backing_off:
        last_epoch, end_offset = machine.last_offset_and_epoch
        for voter in machine.config.voters:
            if voter not in machine.granted and voter not in machine.rejected and machine.is_free(voter):
                machine.send(voter, wire.vote_request(machine.config, machine.epoch, last_epoch, end_offset))


def _lose(machine: Machine) -> None:
    """This election cannot be won: wait at random before the next."""
    machine.elections_lost += 1
    machine.is_backing_off = True
    backoff_ms = timing.election_backoff_ms(machine.config, machine.elections_lost, machine.jitter)
    machine.deadline_ms = machine.now_ms + max(1, backoff_ms)
