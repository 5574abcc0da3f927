"""Vote, BeginQuorumEpoch and EndQuorumEpoch: responses, and the state persisted before them."""

from __future__ import annotations

import pytest

from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import ElectionState, QuorumError, State, elections, replication, wire
from kipmesh.core.raft.types import PersistElection, RequestFailed, Respond, StateChanged
from kipmesh.messages import (
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
    SnapshotId,
    VotePartitionResponse,
    VoteRequest,
    VoteResponse,
)
from tests.unit.core.raft.raft_support import MemoryLog, Node, peer, voted


def vote(node: Node, candidate: int, epoch: int, last: tuple[int, int] = (0, 0)) -> tuple[ErrorCode, bool, int]:
    response = node.request(wire.vote_request(peer(candidate), epoch, *last))
    assert isinstance(response, VoteResponse)
    result = wire.only_response_partition(response)
    assert isinstance(result, VotePartitionResponse)
    return ErrorCode(result.error_code), result.vote_granted, result.leader_epoch


def test_voter_grants_one_vote_per_epoch_across_restarts() -> None:
    node = Node()
    assert vote(node, 2, 5) == (ErrorCode.NONE, True, 5)
    assert vote(node, 3, 5) == (ErrorCode.NONE, False, 5)
    assert vote(node, 2, 5) == (ErrorCode.NONE, True, 5), "a repeated request gets the same vote"
    restarted = Node(election=node.disk)
    assert restarted.machine.state is State.VOTED
    assert vote(restarted, 3, 5) == (ErrorCode.NONE, False, 5)
    assert vote(restarted, 3, 6) == (ErrorCode.NONE, True, 6)


def test_vote_is_persisted_before_response() -> None:
    node = Node()
    vote(node, 2, 5)
    kinds = [type(effect) for effect in node.effects]
    assert kinds.index(PersistElection) < kinds.index(StateChanged) < kinds.index(Respond)
    persisted = [effect.election for effect in node.effects if isinstance(effect, PersistElection)]
    assert persisted[-1] == ElectionState(5, voted_id=2)


@pytest.mark.parametrize(
    ("last", "granted"),
    [((2, 3), True), ((2, 4), True), ((3, 0), True), ((2, 2), False), ((1, 9), False)],
)
def test_vote_requires_candidate_log_at_least_as_new(last: tuple[int, int], granted: bool) -> None:
    node = Node(log=MemoryLog(1, 1, 2))
    assert vote(node, 2, 5, last)[1] is granted


@pytest.mark.parametrize(("last", "granted"), [((4, 7), True), ((4, 6), False), ((3, 9), False)])
def test_vote_compares_candidate_with_snapshot_newer_than_log(last: tuple[int, int], granted: bool) -> None:
    """630-13: voters compare the later of log end and latest snapshot."""
    node = Node(log=MemoryLog(1, 1, 2), snapshot=SnapshotId(7, 4))
    assert node.machine.last_offset_and_epoch == (4, 7)
    assert vote(node, 2, 5, last)[1] is granted


def test_voter_with_leader_grants_no_vote_in_that_epoch() -> None:
    node = Node(election=ElectionState(5, leader_id=3))
    assert vote(node, 2, 5) == (ErrorCode.NONE, False, 5)
    assert vote(node, 2, 4) == (ErrorCode.FENCED_LEADER_EPOCH, False, 5)
    assert node.machine.state is State.FOLLOWER


@pytest.mark.parametrize(
    ("candidate", "epoch", "last", "error"),
    [
        (7, 5, (0, 0), ErrorCode.INCONSISTENT_VOTER_SET),
        (1, 5, (0, 0), ErrorCode.INCONSISTENT_VOTER_SET),
        (2, 5, (5, 3), ErrorCode.INVALID_REQUEST),
        (2, 5, (-1, 3), ErrorCode.INVALID_REQUEST),
        (2, 5, (1, -1), ErrorCode.INVALID_REQUEST),
    ],
)
def test_invalid_vote_requests_are_refused(candidate: int, epoch: int, last: tuple[int, int], error: ErrorCode) -> None:
    node = Node()
    assert vote(node, candidate, epoch, last) == (error, False, 0)
    assert node.machine.epoch == 0, "invalid requests do not change the epoch"


def test_requests_of_other_clusters_or_partitions_are_refused() -> None:
    node = Node()
    foreign = wire.vote_request(peer(2), 5, 0, 0)._replace(cluster_id="other")
    assert node.request(foreign) == VoteResponse(ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert node.request(foreign._replace(cluster_id=None)) != VoteResponse(ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert node.request(VoteRequest("test")) == VoteResponse(ErrorCode.INVALID_REQUEST)
    for request in (
        wire.epoch_request(BeginQuorumEpochRequest, peer(2), 9),
        wire.epoch_request(EndQuorumEpochRequest, peer(2), 9),
    ):
        response = node.request(request._replace(cluster_id="other"))
        assert isinstance(response, BeginQuorumEpochResponse | EndQuorumEpochResponse)
        assert response.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert node.machine.epoch == 5


def test_observer_refuses_vote_requests() -> None:
    assert vote(Node(9), 2, 5)[:2] == (ErrorCode.INCONSISTENT_VOTER_SET, False)


def test_second_leader_in_same_epoch_is_fatal() -> None:
    leader = Node().elect()
    response = wire.epoch_response(
        BeginQuorumEpochResponse, ElectionState(leader.machine.epoch, 3), ErrorCode.INVALID_REQUEST
    )
    with pytest.raises(QuorumError, match="two leaders: 1 and 3"):
        leader.respond_to_last(response)


@pytest.mark.parametrize(
    "request_",
    [
        wire.epoch_request(BeginQuorumEpochRequest, peer(2), 5),
        wire.epoch_request(EndQuorumEpochRequest, peer(2), 5),
    ],
)
def test_quorum_epoch_request_for_epoch_of_other_leader_is_refused(
    request_: BeginQuorumEpochRequest | EndQuorumEpochRequest,
) -> None:
    node = Node(election=ElectionState(5, leader_id=3))
    response = node.request(request_)
    assert isinstance(response, BeginQuorumEpochResponse | EndQuorumEpochResponse)
    assert response == wire.epoch_response(type(response), ElectionState(5, leader_id=3), ErrorCode.INVALID_REQUEST)
    assert node.machine.election == ElectionState(5, leader_id=3)


def test_single_voter_becomes_leader_and_commits_immediately() -> None:
    node = Node(voters=(1,))
    assert node.machine.state is State.LEADER
    assert (node.machine.epoch, node.machine.high_watermark) == (1, 1)
    restarted = Node(voters=(1,), election=node.disk, log=node.log)
    assert (restarted.machine.epoch, restarted.machine.high_watermark) == (2, 2)


def test_restarted_leader_resigns_its_epoch() -> None:
    node = Node(election=ElectionState(5, leader_id=1))
    assert node.machine.state is State.RESIGNED
    assert {type(sent.request) for sent in node.sent} == {EndQuorumEpochRequest}
    node.respond_to_last(voted(5))
    assert node.machine.state is State.RESIGNED
    node.elect()
    assert node.machine.epoch == 6


def test_first_successor_becomes_candidate_before_others() -> None:
    for own, state in ((1, State.CANDIDATE), (3, State.FOLLOWER)):
        node = Node(own, election=ElectionState(5, leader_id=2))
        node.request(wire.epoch_request(EndQuorumEpochRequest, peer(2), 5, (1, 3)))
        assert node.machine.state is state
        node.advance(500)
        assert node.machine.state is State.CANDIDATE
    config = peer(1)
    assert [elections.successor_backoff_ms(config, at, 4) for at in range(5)] == [0, 125, 250, 500, 1000]


def test_rejected_candidate_backs_off_exponentially() -> None:
    config = peer(1)
    waits = [elections.election_backoff_ms(config, lost, 0.99) for lost in range(1, 8)]
    assert waits == sorted(waits)
    assert waits[-1] == config.election_backoff_max_ms
    node = Node(jitter=0.5)
    node.advance(2000)
    for other in (2, 3):
        node.respond_to_last(voted(1, granted=False), to=other)
    assert node.machine.is_backing_off
    assert node.machine.epoch == 1
    node.advance(50)
    assert node.machine.epoch == 2


def test_failed_vote_request_is_retried() -> None:
    node = Node()
    node.advance(1100)
    first = [sent for sent in node.sent if sent.node_id == 2]
    node.step(RequestFailed(first[-1].request_id))
    node.advance(node.config.retry_backoff_ms)
    again = [sent for sent in node.sent if sent.node_id == 2]
    assert len(again) == len(first) + 1
    node.respond_to_last(voted(1), to=3)
    assert node.machine.state is State.LEADER


def test_election_and_fetch_timeouts_are_in_range() -> None:
    config = peer(1)
    for jitter in (0.0, 0.3, 0.999):
        assert 1000 <= elections.election_timeout_ms(config, 0, jitter) < 2000
        follower = Node(election=ElectionState(1, 2), jitter=jitter).machine
        assert follower.deadline_ms is not None
        assert 2000 <= follower.deadline_ms < 2500
        assert config.check_quorum_timeout_ms > follower.deadline_ms


def test_election_timeout_grows_while_epochs_fail() -> None:
    """The quorum elects a leader even if it takes a whole election timeout to persist a vote."""
    node = Node(jitter=0.0)
    waits = []
    for epoch in range(1, 8):
        assert vote(node, 2 + epoch % 2, epoch)[1]
        assert node.machine.deadline_ms is not None
        waits.append(node.machine.deadline_ms - node.now_ms)
    assert waits == [1000, 1000, 2000, 4000, 8000, 8000, 8000]
    node.request(wire.epoch_request(BeginQuorumEpochRequest, peer(2), 7))
    assert node.machine.state is State.FOLLOWER
    vote(node, 3, 8)
    assert (node.machine.epochs_failed, node.machine.state) == (1, State.VOTED)


def test_isolated_voter_keeps_election_timeout() -> None:
    node = Node(jitter=0.0)
    while node.machine.epoch < 20:
        assert node.machine.deadline_ms is not None
        node.advance(node.machine.deadline_ms - node.now_ms)
        for sent in node.sent:
            node.step(RequestFailed(sent.request_id))
        node.sent.clear()
    assert node.machine.epochs_failed == 0


def test_epoch_of_log_survives_lost_quorum_state() -> None:
    node = Node(log=MemoryLog(1, 4))
    assert (node.machine.epoch, node.machine.state) == (4, State.UNATTACHED)


def test_observer_tries_all_voters() -> None:
    node = Node(9)
    for _ in range(3):
        node.step(RequestFailed(node.sent[-1].request_id))
        node.advance(node.config.retry_backoff_ms)
    assert {sent.node_id for sent in node.sent} == {1, 2, 3}
    assert all(isinstance(sent.request, FetchRequest) for sent in node.sent)


def test_observer_tries_next_voter_while_one_is_silent() -> None:
    """A stopped process keeps its connections but does not respond."""
    node = Node(9)
    node.advance(replication.probe_ms(node.config) - 1)
    assert len(node.sent) == 1
    node.advance(1)
    assert len(node.sent) == 2
    node.step(RequestFailed(node.sent[-1].request_id))
    node.advance(replication.probe_ms(node.config))
    assert {sent.node_id for sent in node.sent} == {1, 2, 3}
    for _ in range(20):
        due_ms = node.machine.next_deadline_ms() or 0
        assert due_ms > node.now_ms, "the observer does not poll in a loop"
        node.advance(due_ms - node.now_ms)
    silent = [sent for sent in node.sent if sent.node_id == node.sent[0].node_id]
    assert len(silent) <= 1 + node.now_ms // node.config.request_timeout_ms


def test_observer_trusts_only_abandoned_leader_about_its_leadership() -> None:
    """Other voters may still name the failed leader. Following it again would cost another fetch timeout."""

    def response_of(leader_id: int, epoch: int, error: ErrorCode = ErrorCode.NOT_LEADER_OR_FOLLOWER) -> FetchResponse:
        return wire.fetch_response(PartitionData(0, error, current_leader=LeaderIdAndEpoch(leader_id, epoch)))

    def wait_for_request_to(voter: int) -> None:
        """Advance the clock until the last request went to this voter."""
        while node.sent[-1].node_id != voter:
            node.advance(node.config.retry_backoff_ms)

    def followed() -> int:
        return node.machine.election.leader_id if node.machine.state is State.OBSERVER_FOLLOWER else -1

    node = Node(9)
    node.respond_to_last(response_of(1, 5))
    assert followed() == 1
    node.advance(3000)
    for voter in (2, 3):
        wait_for_request_to(voter)
        node.respond_to_last(response_of(1, 5))
        assert followed() == -1, "other voters are not trusted about the abandoned leader"
    wait_for_request_to(1)
    node.respond_to_last(response_of(1, 5, ErrorCode.NONE))
    assert followed() == 1, "the leader itself is trusted"
    node.advance(3000)
    wait_for_request_to(2)
    node.respond_to_last(response_of(3, 6))
    assert followed() == 3, "a newer epoch is trusted"


def test_observer_searches_new_leader_when_leader_resigned() -> None:
    """The leader lost its quorum but is reachable by observers."""
    node = Node(9)
    node.respond_to_last(follow := wire.fetch_response(PartitionData(0, current_leader=LeaderIdAndEpoch(1, 5))))
    assert (node.machine.state, node.sent[-1].node_id) == (State.OBSERVER_FOLLOWER, 1)
    resigned = PartitionData(0, ErrorCode.NOT_LEADER_OR_FOLLOWER, current_leader=LeaderIdAndEpoch(-1, 5))
    node.respond_to_last(wire.fetch_response(resigned))
    assert (node.machine.state, node.machine.election.leader_id) == (State.OBSERVER_UNATTACHED, -1)
    assert node.sent[-1].node_id in (2, 3)
    before = len(node.sent)
    node.respond_to_last(follow)
    assert node.machine.state is State.OBSERVER_UNATTACHED, "other voters are not trusted about the abandoned leader"
    assert len(node.sent) <= before + 1, "the observer does not poll in a loop"


def test_refused_vote_request_keeps_fetch_timeout() -> None:
    """A follower keeps its fetch timeout when it refuses its vote, as in Apache Kafka."""
    node = Node(log=MemoryLog(1, 4), election=ElectionState(4, leader_id=2))
    due_ms = node.machine.deadline_ms
    assert due_ms is not None
    node.advance(due_ms - node.now_ms - 100)
    assert node.machine.state is State.FOLLOWER
    assert vote(node, 3, 5, (1, 4)) == (ErrorCode.NONE, False, 5)
    assert (node.machine.state, node.machine.deadline_ms) == (State.UNATTACHED, due_ms)
    node.advance(100)
    assert (node.machine.state, node.machine.epoch) == (State.CANDIDATE, 6)


def test_granted_vote_restarts_election_timeout() -> None:
    node = Node(log=MemoryLog(1, 4), election=ElectionState(4, leader_id=2))
    assert node.machine.deadline_ms is not None
    node.advance(node.machine.deadline_ms - node.now_ms - 1)
    assert vote(node, 3, 5, (4, 9)) == (ErrorCode.NONE, True, 5)
    node.advance(900)
    assert node.machine.state is State.VOTED
