"""Every row of the transition table, and nothing but them."""

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
    """A node of that state in some epoch."""
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
    """Let happen what the row is about."""
    epoch = node.machine.epoch + (row.epoch is Epoch.HIGHER)
    match row.cause:
        case Cause.HIGHER_EPOCH if row.source.is_observer:
            if not node.machine.state.follows:
                node.advance(1)
            leader = ElectionState(epoch)
            node.answer_last(fetched(leader, ErrorCode.FENCED_LEADER_EPOCH))
        case Cause.HIGHER_EPOCH:
            node.ask(wire.vote_request(peer(3), epoch, 0, 0)._replace(cluster_id=None))
        case Cause.LEADER_FOUND if row.source.is_observer:
            leader = ElectionState(epoch, 3)
            node.answer_last(fetched(leader, ErrorCode.NOT_LEADER_OR_FOLLOWER))
        case Cause.LEADER_FOUND:
            node.ask(wire.epoch_request(BeginQuorumEpochRequest, peer(3), epoch))
        case Cause.VOTE_GRANTED:
            node.ask(wire.vote_request(peer(2), epoch, 0, 0))
        case Cause.ELECTION_TIMEOUT | Cause.FETCH_TIMEOUT:
            node.advance(2500)
        case Cause.BACKOFF_OVER:
            for other in (2, 3):
                node.answer_last(voted(epoch, granted=False), to=other)
            node.advance(1000)
        case Cause.MAJORITY:
            node.answer_last(voted(epoch))
        case Cause.RESIGNS:
            node.step(ResignRequested())


def fetched(election: ElectionState, error: ErrorCode) -> FetchResponse:
    leader = LeaderIdAndEpoch(election.leader_id, election.epoch)
    return wire.fetch_response(PartitionData(0, error, current_leader=leader))


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source.value}: {row.cause.value}")
def test_each_row_happens(row: Transition) -> None:
    node = reach(row.source)
    assert node.machine.state is row.source
    before = node.machine.epoch
    cause(node, row)
    machine = node.machine
    if row.cause is Cause.HIGHER_EPOCH and not row.source.is_observer:
        # The empty log of the candidate is as good as ours unless we led: then we voted at once.
        assert machine.state in (row.target, State.VOTED)
    else:
        assert machine.state is row.target
    assert machine.epoch >= before + (row.epoch in (Epoch.HIGHER, Epoch.NEXT))
    assert node.disk == machine.election, "what is known is on disk"


def test_what_is_not_in_the_table_cannot_happen() -> None:
    known = {(row.source, row.cause) for row in TRANSITIONS}
    assert len(known) == len(TRANSITIONS), "one row for each state and cause"
    for source, why in itertools.product(State, Cause):
        if (source, why) not in known:
            with pytest.raises(IllegalTransitionError):
                next_state(source, why, 3, 4)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source.value}: {row.cause.value}")
def test_epochs_move_as_the_table_says(row: Transition) -> None:
    allowed = {Epoch.SAME: {3}, Epoch.NEXT: {4}, Epoch.HIGHER: {4, 5}, Epoch.SAME_OR_HIGHER: {3, 4, 5}}[row.epoch]
    for epoch in (2, 3, 4, 5):
        if epoch in allowed:
            assert next_state(row.source, row.cause, 3, epoch) is row.target
        else:
            with pytest.raises(IllegalTransitionError):
                next_state(row.source, row.cause, 3, epoch)


def test_observers_never_become_voters() -> None:
    assert all(row.source.is_observer == row.target.is_observer for row in TRANSITIONS)


def test_the_diagram_has_every_row() -> None:
    both = diagram(observers=False) + diagram(observers=True)
    assert both.count(" --> ") == len(TRANSITIONS) + 2


def test_the_document_shows_the_table() -> None:
    ran = subprocess.run(
        [sys.executable, "tools/gen_raft_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr


def test_a_resigning_leader_names_its_successors() -> None:
    node = reach(State.LEADER)
    node.advance(100)
    node.step(ResignRequested())
    ends = [one for one in node.sent if isinstance(one.request, EndQuorumEpochRequest)]
    assert {one.node_id for one in ends} == {2, 3}
    asked = wire.only_partition(ends[0].request)
    assert isinstance(asked, QuorumEpochPartition)
    assert set(asked.preferred_successors) == {2, 3}
