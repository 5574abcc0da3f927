"""Vote, BeginQuorumEpoch and EndQuorumEpoch: who gets what answer, and what is on disk before it."""

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
    response = node.ask(wire.vote_request(peer(candidate), epoch, *last))
    assert isinstance(response, VoteResponse)
    answer = wire.only_response_partition(response)
    assert isinstance(answer, VotePartitionResponse)
    return ErrorCode(answer.error_code), answer.vote_granted, answer.leader_epoch


def test_one_vote_an_epoch_also_after_a_restart() -> None:
    node = Node()
    assert vote(node, 2, 5) == (ErrorCode.NONE, True, 5)
    assert vote(node, 3, 5) == (ErrorCode.NONE, False, 5)
    assert vote(node, 2, 5) == (ErrorCode.NONE, True, 5), "the same vote again"
    restarted = Node(election=node.disk)
    assert restarted.machine.state is State.VOTED
    assert vote(restarted, 3, 5) == (ErrorCode.NONE, False, 5)
    assert vote(restarted, 3, 6) == (ErrorCode.NONE, True, 6)


def test_a_vote_is_on_disk_before_anything_tells_of_it() -> None:
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
def test_votes_go_to_logs_that_are_not_older(last: tuple[int, int], granted: bool) -> None:
    node = Node(log=MemoryLog(1, 1, 2))
    assert vote(node, 2, 5, last)[1] is granted


@pytest.mark.parametrize(("last", "granted"), [((4, 7), True), ((4, 6), False), ((3, 9), False)])
def test_the_snapshot_counts_where_it_is_later_than_the_log(last: tuple[int, int], granted: bool) -> None:
    """630-13."""
    node = Node(log=MemoryLog(1, 1, 2), snapshot=SnapshotId(7, 4))
    assert node.machine.last_offset_and_epoch == (4, 7)
    assert vote(node, 2, 5, last)[1] is granted


def test_who_has_a_leader_votes_for_nobody_in_that_epoch() -> None:
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
def test_votes_that_cannot_be(candidate: int, epoch: int, last: tuple[int, int], error: ErrorCode) -> None:
    node = Node()
    assert vote(node, candidate, epoch, last) == (error, False, 0)
    assert node.machine.epoch == 0, "nothing is learned from it"


def test_another_cluster_and_another_partition() -> None:
    node = Node()
    foreign = wire.vote_request(peer(2), 5, 0, 0)._replace(cluster_id="other")
    assert node.ask(foreign) == VoteResponse(ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert node.ask(foreign._replace(cluster_id=None)) != VoteResponse(ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert node.ask(VoteRequest("test")) == VoteResponse(ErrorCode.INVALID_REQUEST)
    for request in (
        wire.epoch_request(BeginQuorumEpochRequest, peer(2), 9),
        wire.epoch_request(EndQuorumEpochRequest, peer(2), 9),
    ):
        told = node.ask(request._replace(cluster_id="other"))
        assert isinstance(told, BeginQuorumEpochResponse | EndQuorumEpochResponse)
        assert told.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert node.machine.epoch == 5


def test_an_observer_has_no_vote() -> None:
    assert vote(Node(9), 2, 5)[:2] == (ErrorCode.INCONSISTENT_VOTER_SET, False)


def test_two_leaders_of_an_epoch_end_the_one_that_hears_it_from_a_voter() -> None:
    leader = Node().elect()
    told = wire.epoch_response(
        BeginQuorumEpochResponse, ElectionState(leader.machine.epoch, 3), ErrorCode.INVALID_REQUEST
    )
    with pytest.raises(QuorumError, match="two leaders: 1 and 3"):
        leader.answer_last(told)


@pytest.mark.parametrize(
    "request_",
    [
        wire.epoch_request(BeginQuorumEpochRequest, peer(2), 5),
        wire.epoch_request(EndQuorumEpochRequest, peer(2), 5),
    ],
)
def test_a_request_that_claims_an_epoch_of_another_leader_is_refused(
    request_: BeginQuorumEpochRequest | EndQuorumEpochRequest,
) -> None:
    node = Node(election=ElectionState(5, leader_id=3))
    told = node.ask(request_)
    assert isinstance(told, BeginQuorumEpochResponse | EndQuorumEpochResponse)
    assert told == wire.epoch_response(type(told), ElectionState(5, leader_id=3), ErrorCode.INVALID_REQUEST)
    assert node.machine.election == ElectionState(5, leader_id=3)


def test_a_single_voter_leads_at_once_and_commits_by_itself() -> None:
    node = Node(voters=(1,))
    assert node.machine.state is State.LEADER
    assert (node.machine.epoch, node.machine.high_watermark) == (1, 1)
    again = Node(voters=(1,), election=node.disk, log=node.log)
    assert (again.machine.epoch, again.machine.high_watermark) == (2, 2)


def test_a_restarted_leader_leads_that_epoch_never_again() -> None:
    node = Node(election=ElectionState(5, leader_id=1))
    assert node.machine.state is State.RESIGNED
    assert {type(sent.request) for sent in node.sent} == {EndQuorumEpochRequest}
    node.answer_last(voted(5))
    assert node.machine.state is State.RESIGNED
    node.elect()
    assert node.machine.epoch == 6


def test_the_first_successor_stands_at_once_and_others_later() -> None:
    for own, state in ((1, State.CANDIDATE), (3, State.FOLLOWER)):
        node = Node(own, election=ElectionState(5, leader_id=2))
        node.ask(wire.epoch_request(EndQuorumEpochRequest, peer(2), 5, (1, 3)))
        assert node.machine.state is state
        node.advance(500)
        assert node.machine.state is State.CANDIDATE
    config = peer(1)
    assert [elections.successor_backoff_ms(config, at, 4) for at in range(5)] == [0, 125, 250, 500, 1000]


def test_a_rejected_candidate_waits_longer_each_time() -> None:
    config = peer(1)
    waits = [elections.election_backoff_ms(config, lost, 0.99) for lost in range(1, 8)]
    assert waits == sorted(waits)
    assert waits[-1] == config.election_backoff_max_ms
    node = Node(jitter=0.5)
    node.advance(2000)
    for other in (2, 3):
        node.answer_last(voted(1, granted=False), to=other)
    assert node.machine.is_backing_off
    assert node.machine.epoch == 1
    node.advance(50)
    assert node.machine.epoch == 2


def test_a_vote_request_that_fails_is_sent_again() -> None:
    node = Node()
    node.advance(1100)
    first = [sent for sent in node.sent if sent.node_id == 2]
    node.step(RequestFailed(first[-1].request_id))
    node.advance(node.config.retry_backoff_ms)
    again = [sent for sent in node.sent if sent.node_id == 2]
    assert len(again) == len(first) + 1
    node.answer_last(voted(1), to=3)
    assert node.machine.state is State.LEADER


def test_timeouts_lie_where_they_should() -> None:
    config = peer(1)
    for jitter in (0.0, 0.3, 0.999):
        assert 1000 <= elections.election_timeout_ms(config, 0, jitter) < 2000
        follower = Node(election=ElectionState(1, 2), jitter=jitter).machine
        assert follower.deadline_ms is not None
        assert 2000 <= follower.deadline_ms < 2500
        assert config.check_quorum_timeout_ms > follower.deadline_ms


def test_epochs_that_fail_among_slow_voters_get_longer_until_a_leader_is_known() -> None:
    """Disks that need as long for a vote as an election may last must not keep the quorum from ever having a leader."""
    node = Node(jitter=0.0)
    waits = []
    for epoch in range(1, 8):
        assert vote(node, 2 + epoch % 2, epoch)[1]
        assert node.machine.deadline_ms is not None
        waits.append(node.machine.deadline_ms - node.now_ms)
    assert waits == [1000, 1000, 2000, 4000, 8000, 8000, 8000]
    node.ask(wire.epoch_request(BeginQuorumEpochRequest, peer(2), 7))
    assert node.machine.state is State.FOLLOWER
    vote(node, 3, 8)
    assert (node.machine.epochs_failed, node.machine.state) == (1, State.VOTED)


def test_who_is_alone_does_not_wait_ever_longer() -> None:
    node = Node(jitter=0.0)
    while node.machine.epoch < 20:
        assert node.machine.deadline_ms is not None
        node.advance(node.machine.deadline_ms - node.now_ms)
        for sent in node.sent:
            node.step(RequestFailed(sent.request_id))
        node.sent.clear()
    assert node.machine.epochs_failed == 0


def test_a_lost_quorum_state_does_not_take_the_epoch_of_the_log_back() -> None:
    node = Node(log=MemoryLog(1, 4))
    assert (node.machine.epoch, node.machine.state) == (4, State.UNATTACHED)


def test_an_observer_asks_one_voter_after_the_other() -> None:
    node = Node(9)
    for _ in range(3):
        node.step(RequestFailed(node.sent[-1].request_id))
        node.advance(node.config.retry_backoff_ms)
    assert {sent.node_id for sent in node.sent} == {1, 2, 3}
    assert all(isinstance(sent.request, FetchRequest) for sent in node.sent)


def test_an_observer_that_looks_for_a_leader_does_not_wait_for_a_silent_voter() -> None:
    """A stopped process keeps its connections and answers nothing."""
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
        assert due_ms > node.now_ms, "it does not spin"
        node.advance(due_ms - node.now_ms)
    silent = [sent for sent in node.sent if sent.node_id == node.sent[0].node_id]
    assert len(silent) <= 1 + node.now_ms // node.config.request_timeout_ms


def test_an_observer_believes_nobody_else_that_the_leader_it_gave_up_still_leads() -> None:
    """Voters notice at other times; following a dead leader for another fetch timeout would double the gap."""

    def says(leader_id: int, epoch: int, error: ErrorCode = ErrorCode.NOT_LEADER_OR_FOLLOWER) -> FetchResponse:
        return wire.fetch_response(PartitionData(0, error, current_leader=LeaderIdAndEpoch(leader_id, epoch)))

    def ask(voter: int) -> None:
        """Until the voter is the one that was asked last; the others stay silent."""
        while node.sent[-1].node_id != voter:
            node.advance(node.config.retry_backoff_ms)

    def followed() -> int:
        return node.machine.election.leader_id if node.machine.state is State.OBSERVER_FOLLOWER else -1

    node = Node(9)
    node.answer_last(says(1, 5))
    assert followed() == 1
    node.advance(3000)
    for voter in (2, 3):
        ask(voter)
        node.answer_last(says(1, 5))
        assert followed() == -1, "hearsay"
    ask(1)
    node.answer_last(says(1, 5, ErrorCode.NONE))
    assert followed() == 1, "its own word"
    node.advance(3000)
    ask(2)
    node.answer_last(says(3, 6))
    assert followed() == 3, "the next leader"


def test_an_observer_whose_leader_says_that_it_leads_no_more_looks_for_another_at_once() -> None:
    """A leader that lost its quorum, and that observers still reach."""
    node = Node(9)
    node.answer_last(follow := wire.fetch_response(PartitionData(0, current_leader=LeaderIdAndEpoch(1, 5))))
    assert (node.machine.state, node.sent[-1].node_id) == (State.OBSERVER_FOLLOWER, 1)
    resigned = PartitionData(0, ErrorCode.NOT_LEADER_OR_FOLLOWER, current_leader=LeaderIdAndEpoch(-1, 5))
    node.answer_last(wire.fetch_response(resigned))
    assert (node.machine.state, node.machine.election.leader_id) == (State.OBSERVER_UNATTACHED, -1)
    assert node.sent[-1].node_id in (2, 3)
    before = len(node.sent)
    node.answer_last(follow)
    assert node.machine.state is State.OBSERVER_UNATTACHED, "hearsay"
    assert len(node.sent) <= before + 1, "it does not spin"


def test_a_candidate_with_a_short_log_does_not_put_off_who_would_have_stood_soon() -> None:
    """The fetch timeout of a follower goes on when it refuses its vote, as Kafka's does."""
    node = Node(log=MemoryLog(1, 4), election=ElectionState(4, leader_id=2))
    due_ms = node.machine.deadline_ms
    assert due_ms is not None
    node.advance(due_ms - node.now_ms - 100)
    assert node.machine.state is State.FOLLOWER
    assert vote(node, 3, 5, (1, 4)) == (ErrorCode.NONE, False, 5)
    assert (node.machine.state, node.machine.deadline_ms) == (State.UNATTACHED, due_ms)
    node.advance(100)
    assert (node.machine.state, node.machine.epoch) == (State.CANDIDATE, 6)


def test_who_grants_its_vote_waits_a_whole_election_timeout() -> None:
    node = Node(log=MemoryLog(1, 4), election=ElectionState(4, leader_id=2))
    assert node.machine.deadline_ms is not None
    node.advance(node.machine.deadline_ms - node.now_ms - 1)
    assert vote(node, 3, 5, (4, 9)) == (ErrorCode.NONE, True, 5)
    node.advance(900)
    assert node.machine.state is State.VOTED
