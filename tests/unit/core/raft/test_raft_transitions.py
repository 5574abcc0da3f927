"""All transitions of the table occur, and no others."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import TRANSITIONS, Cause, ElectionState, IllegalTransitionError, State, wire
from kipmesh.core.raft.elections import Epoch, Transition, diagram, next_state
from kipmesh.core.raft.types import ResignRequested
from kipmesh.messages import (
    BeginQuorumEpochRequest,
    EndQuorumEpochRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
    QuorumEpochPartition,
)
from tests.unit.core.raft.raft_support import Node, peer, voted

ROOT = Path(__file__).resolve().parents[4]


def reach(state: State) -> Node:
    """Return a node in this state."""
    match state:
        case State.UNATTACHED:
            return Node(election=ElectionState(3))
        case State.VOTED:
            return Node(election=ElectionState(3, voted_id=2))
        case State.FOLLOWER:
            return Node(election=ElectionState(3, leader_id=2))
        case State.RESIGNED:
            return Node(election=ElectionState(3, leader_id=1))
        case State.CANDIDATE:
            node = Node(election=ElectionState(3))
            node.advance(2000)
            return node
        case State.LEADER:
            return Node(election=ElectionState(3)).elect()
        case State.OBSERVER_UNATTACHED:
            return Node(9, election=ElectionState(3))
        case State.OBSERVER_FOLLOWER:
            return Node(9, election=ElectionState(3, leader_id=2))


def cause(node: Node, row: Transition) -> None:
    """Trigger the transition of a table row."""
    epoch = node.machine.epoch + (row.epoch is Epoch.HIGHER)
    match row.cause:
        case Cause.HIGHER_EPOCH if row.source.is_observer:
            if not node.machine.state.follows:
                node.advance(1)
            leader = ElectionState(epoch)
            node.respond_to_last(fetched(leader, ErrorCode.FENCED_LEADER_EPOCH))
        case Cause.HIGHER_EPOCH:
            node.request(wire.vote_request(peer(3), epoch, 0, 0)._replace(cluster_id=None))
        case Cause.LEADER_FOUND if row.source.is_observer:
            leader = ElectionState(epoch, 3)
            node.respond_to_last(fetched(leader, ErrorCode.NOT_LEADER_OR_FOLLOWER))
        case Cause.LEADER_FOUND:
            node.request(wire.epoch_request(BeginQuorumEpochRequest, peer(3), epoch))
        case Cause.VOTE_GRANTED:
            node.request(wire.vote_request(peer(2), epoch, 0, 0))
        case Cause.ELECTION_TIMEOUT | Cause.FETCH_TIMEOUT:
            node.advance(2500)
        case Cause.BACKOFF_OVER:
            for other in (2, 3):
                node.respond_to_last(voted(epoch, granted=False), to=other)
            node.advance(1000)
        case Cause.MAJORITY:
            node.respond_to_last(voted(epoch))
        case Cause.RESIGNS:
            node.step(ResignRequested())


def fetched(election: ElectionState, error: ErrorCode) -> FetchResponse:
    leader = LeaderIdAndEpoch(election.leader_id, election.epoch)
    return wire.fetch_response(PartitionData(0, error, current_leader=leader))


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source.value}: {row.cause.value}")
def test_transition_table_rows_occur(row: Transition) -> None:
    node = reach(row.source)
    assert node.machine.state is row.source
    before = node.machine.epoch
    cause(node, row)
    machine = node.machine
    if row.cause is Cause.HIGHER_EPOCH and not row.source.is_observer:
        # Unless this node was leader, its log is empty like the candidate's and it also grants its vote.
        assert machine.state in (row.target, State.VOTED)
    else:
        assert machine.state is row.target
    assert machine.epoch >= before + (row.epoch in (Epoch.HIGHER, Epoch.NEXT))
    assert node.disk == machine.election, "the election state is on disk"


def test_transitions_outside_table_are_illegal() -> None:
    known = {(row.source, row.cause) for row in TRANSITIONS}
    assert len(known) == len(TRANSITIONS), "one row per state and cause"
    for source, trigger in itertools.product(State, Cause):
        if (source, trigger) not in known:
            with pytest.raises(IllegalTransitionError):
                next_state(source, trigger, 3, 4)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source.value}: {row.cause.value}")
def test_transition_epochs_follow_table(row: Transition) -> None:
    allowed = {Epoch.SAME: {3}, Epoch.NEXT: {4}, Epoch.HIGHER: {4, 5}, Epoch.SAME_OR_HIGHER: {3, 4, 5}}[row.epoch]
    for epoch in (2, 3, 4, 5):
        if epoch in allowed:
            assert next_state(row.source, row.cause, 3, epoch) is row.target
        else:
            with pytest.raises(IllegalTransitionError):
                next_state(row.source, row.cause, 3, epoch)


def test_observers_never_become_voters() -> None:
    assert all(row.source.is_observer == row.target.is_observer for row in TRANSITIONS)


def test_diagram_contains_all_transitions() -> None:
    both = diagram(observers=False) + diagram(observers=True)
    assert both.count(" --> ") == len(TRANSITIONS) + 2


def test_raft_document_matches_transition_table() -> None:
    ran = subprocess.run(
        [sys.executable, "tools/gen_raft_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr


def test_resigning_leader_sends_preferred_successors() -> None:
    node = reach(State.LEADER)
    node.advance(100)
    node.step(ResignRequested())
    ends = [sent for sent in node.sent if isinstance(sent.request, EndQuorumEpochRequest)]
    assert {sent.node_id for sent in ends} == {2, 3}
    requested = wire.only_partition(ends[0].request)
    assert isinstance(requested, QuorumEpochPartition)
    assert set(requested.preferred_successors) == {2, 3}
