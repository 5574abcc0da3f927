"""Replication with snapshots when epochs and offsets disagree (630-06, 630-08, 630-12)."""

from __future__ import annotations

import pytest

from kipmesh.core.raft import ElectionState, wire
from kipmesh.core.raft.types import Event, FetchSnapshot, QuorumError, SnapshotChanged
from kipmesh.messages import (
    EpochEndOffset,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
    SnapshotId,
)
from tests.unit.core.raft.raft_support import MemoryLog, Node, peer


def fetched(node: Node, offset: int, last_epoch: int) -> PartitionData:
    response = node.request(wire.fetch_request(peer(2), node.machine.epoch, offset, last_epoch, 0))
    assert isinstance(response, FetchResponse)
    data = wire.only_response_partition(response)
    assert isinstance(data, PartitionData)
    return data


def follower(log: MemoryLog, snapshot: SnapshotId | None = None) -> Node:
    return Node(1, election=ElectionState(6, leader_id=2), log=log, snapshot=snapshot)


def offered(node: Node, snapshot_id: SnapshotId) -> None:
    data = PartitionData(0, current_leader=LeaderIdAndEpoch(2, 6), snapshot_id=snapshot_id)
    node.respond_to_last(wire.fetch_response(data))


def test_epoch_between_snapshot_and_log_diverges_at_snapshot() -> None:
    """Like Kafka's `endOffsetForEpoch`. The log alone would return an epoch that it never contained."""
    log = MemoryLog(start=20)
    node = Node(election=ElectionState(5), log=log, snapshot=SnapshotId(20, 4)).elect()
    assert node.log.summary() == "20..21 20:e6"
    assert fetched(node, 30, 5).diverging_epoch == EpochEndOffset(4, 20)
    assert fetched(node, 20, 5).snapshot_id == SnapshotId(20, 4)
    assert fetched(node, 20, 4).records is not None


def test_follower_truncates_epoch_unknown_to_leader() -> None:
    log = MemoryLog(*[4] * 10, *[5] * 20)
    node = follower(log)
    data = PartitionData(0, current_leader=LeaderIdAndEpoch(2, 6), diverging_epoch=EpochEndOffset(4, 20))
    node.respond_to_last(wire.fetch_response(data))
    assert node.log.log_end_offset == 10


def test_late_snapshot_event_does_not_replace_newer_snapshot() -> None:
    node = follower(MemoryLog(*[4] * 30))
    latest = SnapshotId(20, 4)
    node.step(SnapshotChanged(latest, SnapshotId(10, 4)))
    late: list[Event] = [SnapshotChanged(SnapshotId(10, 4)), SnapshotChanged(SnapshotId(15, 4), SnapshotId(5, 1))]
    for event in late:
        node.step(event)
        assert (node.machine.latest_snapshot, node.machine.earliest_snapshot) == (latest, SnapshotId(10, 4))


def test_snapshot_below_high_watermark_is_fatal() -> None:
    node = follower(MemoryLog(*[4] * 30), SnapshotId(25, 4))
    with pytest.raises(QuorumError, match="below the high watermark 25"):
        offered(node, SnapshotId(20, 5))


def test_snapshot_above_high_watermark_is_fetched() -> None:
    node = follower(MemoryLog(*[4] * 30), SnapshotId(25, 4))
    offered(node, SnapshotId(40, 5))
    assert node.effects[-1] == FetchSnapshot(SnapshotId(40, 5), 2, 6)
