"""Fetch by leader and follower, appends, high watermark, truncation and snapshot requests."""

from __future__ import annotations

import pytest

from kipmesh.core.control_records import LeaderChange, decode_leader_change, encode_leader_change
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import ElectionState, QuorumError, State, wire
from kipmesh.core.raft.types import (
    AppendRequested,
    Committed,
    DriverError,
    FetchSnapshot,
    Flush,
    LogChanged,
    Persisted,
    RefuseAppend,
    SnapshotChanged,
    SnapshotFetchFailed,
    SnapshotFetchProgress,
    SnapshotServed,
    TimerFired,
    TruncateLog,
)
from kipmesh.messages import (
    BeginQuorumEpochRequest,
    DescribeQuorumRequest,
    DescribeQuorumTopic,
    EpochEndOffset,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
    SnapshotId,
)
from tests.unit.core.raft.raft_support import MemoryLog, Node, batch, peer


def leader(log: MemoryLog | None = None, snapshot: SnapshotId | None = None) -> Node:
    """Return the leader of epoch 5, or of the epoch after the log's latest."""
    return Node(election=ElectionState(4), log=log, snapshot=snapshot).elect()


def fetch(node: Node, replica: int, offset: int, last_epoch: int, epoch: int | None = None) -> PartitionData | None:
    config = peer(replica)
    response = node.request(
        wire.fetch_request(config, node.machine.epoch if epoch is None else epoch, offset, last_epoch, 0)
    )
    if response is None:
        return None
    assert isinstance(response, FetchResponse)
    data = wire.only_response_partition(response)
    assert isinstance(data, PartitionData)
    return data


def follower(log: MemoryLog | None = None, node_id: int = 1, snapshot: SnapshotId | None = None) -> Node:
    return Node(node_id, election=ElectionState(5, leader_id=2), log=log, snapshot=snapshot)


def respond(node: Node, **fields: object) -> None:
    data = PartitionData(0, current_leader=LeaderIdAndEpoch(2, 5))._replace(**fields)
    node.respond_to_last(wire.fetch_response(data))


def records(*epochs: int, start: int = 0) -> bytes:
    log = MemoryLog(start=start)
    for epoch in epochs:
        log.append(batch(), epoch)
    return log.read(start, log.log_end_offset)


# -- the leader


def test_leader_change_is_first_record_of_epoch() -> None:
    node = leader(MemoryLog(1, 2))
    assert node.log.summary() == "0..3 0:e1 1:e2 2:e5"
    change = LeaderChange(1, (1, 2, 3), (1, 3))
    assert decode_leader_change(*encode_leader_change(change)) == change


def test_high_watermark_needs_majority_in_current_epoch() -> None:
    node = leader(MemoryLog(1, 2))
    assert fetch(node, 2, 2, 2) is not None, "records"
    assert node.machine.high_watermark == -1, "an older epoch's record on a majority is not committed"
    fetch(node, 2, 3, 5)
    assert node.machine.high_watermark == 3
    assert Committed(3) in node.effects


def test_observer_fetch_does_not_advance_high_watermark() -> None:
    node = leader()
    fetch(node, 9, 1, 5)
    assert node.machine.high_watermark == -1


def test_leader_commits_only_its_flushed_records() -> None:
    node = leader()
    node.flushes = False
    node.step(AppendRequested(1, batch(), 5))
    fetch(node, 2, 2, 5)
    assert node.machine.high_watermark == 1
    node.step(Persisted(2))
    assert node.machine.high_watermark == 2


def test_fetch_waits_for_records_or_high_watermark_advance() -> None:
    node = leader()
    assert fetch(node, 2, 1, 5) is not None, "response with the high watermark that this fetch advanced"
    assert fetch(node, 2, 1, 5) is None
    node.step(AppendRequested(7, batch(), 5))
    waited = wire.only_response_partition(list(node.responses.values())[-1])
    assert isinstance(waited, PartitionData)
    assert waited.records == node.log.read(1, 2)
    assert fetch(node, 3, 2, 5) is not None, "response with a high watermark that the replica has not received"
    assert fetch(node, 3, 2, 5) is None
    count = len(node.responses)
    node.advance(node.config.fetch_max_wait_ms)
    assert len(node.responses) == count + 1, "response at the deadline"


@pytest.mark.parametrize(
    ("epoch", "error"),
    [(4, ErrorCode.FENCED_LEADER_EPOCH), (6, ErrorCode.UNKNOWN_LEADER_EPOCH), (5, ErrorCode.NOT_LEADER_OR_FOLLOWER)],
)
def test_fetch_with_wrong_epoch_or_to_follower_is_refused(epoch: int, error: ErrorCode) -> None:
    node = leader() if epoch != 5 else follower()
    data = fetch(node, 3, 0, 0, epoch)
    assert data is not None
    assert data.error_code == error
    assert data.current_leader == LeaderIdAndEpoch(1 if epoch != 5 else 2, 5)


def test_invalid_raft_fetches_are_refused() -> None:
    node = leader()
    request = wire.fetch_request(peer(2), 5, 0, 0, 0)
    bad_cluster = node.request(request._replace(cluster_id="other"))
    assert bad_cluster == FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert node.request(FetchRequest()) == FetchResponse(error_code=ErrorCode.INVALID_REQUEST)
    for replica, offset, last in ((1, 0, 0), (2, -1, 0), (2, 1, 6), (2, 1, -1)):
        data = fetch(node, replica, offset, last)
        assert data is not None
        assert data.error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("offset", "last_epoch", "end"),
    [(3, 2, (2, 2)), (4, 3, (2, 2)), (9, 5, (5, 3)), (2, 1, (1, 1))],
)
def test_diverging_fetch_gets_diverging_epoch(offset: int, last_epoch: int, end: tuple[int, int]) -> None:
    node = leader(MemoryLog(1, 2))
    data = fetch(node, 2, offset, last_epoch)
    assert data is not None
    assert data.diverging_epoch == EpochEndOffset(*end)
    assert node.machine.leadership is not None
    assert node.machine.leadership.voters[2].end_offset == -1, "a diverging fetch offset does not count"


@pytest.mark.parametrize(
    ("offset", "last_epoch", "snapshot"),
    [(9, 3, True), (10, 2, True), (10, 3, False), (10, 4, True), (0, 0, True), (11, 2, True), (11, 3, False)],
)
def test_fetch_below_log_start_gets_latest_snapshot_id(offset: int, last_epoch: int, snapshot: bool) -> None:
    """630-08: below the log start, or at it with another epoch than the oldest snapshot's, or of an older epoch."""
    log = MemoryLog(3, 3, 4, start=10)
    node = leader(log, SnapshotId(10, 3))
    node.step(SnapshotChanged(SnapshotId(12, 3), SnapshotId(10, 3)))
    data = fetch(node, 2, offset, last_epoch)
    assert data is not None
    assert data.snapshot_id == (SnapshotId(12, 3) if snapshot else None)
    assert bool(data.records) is not snapshot


def test_latest_snapshot_decides_after_log_start_advance() -> None:
    """630-06: until deletion of older snapshots is reported, the latest snapshot decides."""
    log = MemoryLog(3, 3, 4, start=10)
    node = leader(log, SnapshotId(12, 3))
    node.step(SnapshotChanged(SnapshotId(12, 3), SnapshotId(5, 1)))
    data = fetch(node, 2, 10, 1)
    assert data is not None
    assert data.snapshot_id == SnapshotId(12, 3), "its record 9 is of epoch 1, the leader's may not be"
    matching = fetch(node, 3, 10, 3)
    assert matching is not None
    assert matching.records


def test_leader_without_quorum_resigns() -> None:
    node = leader()
    timeout_ms = node.config.check_quorum_timeout_ms
    for _ in range(3):
        node.advance(timeout_ms - 100)
        fetch(node, 3, 1, 5)
    node.advance(timeout_ms - 100)
    node.step(SnapshotServed(2))
    node.advance(timeout_ms - 1)
    before = node.machine.state
    assert before is State.LEADER
    node.advance(1)
    assert node.machine.state is State.RESIGNED
    data = fetch(node, 3, 1, 5)
    assert data is not None
    assert (data.error_code, data.current_leader) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, LeaderIdAndEpoch(-1, 5))


def test_deposed_leader_completes_waiting_fetches_and_refuses_appends() -> None:
    node = leader()
    fetch(node, 2, 1, 5)
    assert fetch(node, 2, 1, 5) is None
    node.request(wire.epoch_request(BeginQuorumEpochRequest, peer(3), 8))
    waited = wire.only_response_partition(list(node.responses.values())[-2])
    assert isinstance(waited, PartitionData)
    assert (waited.error_code, waited.current_leader) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, LeaderIdAndEpoch(3, 8))
    assert RefuseAppend(1, ErrorCode.NOT_LEADER_OR_FOLLOWER, 3) in node.step(AppendRequested(1, batch(), 5))


def test_append_for_other_epoch_is_refused() -> None:
    node = leader()
    assert RefuseAppend(1, ErrorCode.NOT_LEADER_OR_FOLLOWER, 1) in node.step(AppendRequested(1, batch(), 4))
    assert node.log.log_end_offset == 1


def test_describe_quorum_reports_replica_progress() -> None:
    node = leader()
    node.now_ms += 100
    fetch(node, 2, 1, 5)
    fetch(node, 9, 0, 0)
    described = node.machine.describe(DescribeQuorumRequest(), node.now_ms + 50, 1_000_000)
    part = described.topics[0].partitions[0]
    assert (part.error_code, part.leader_id, part.leader_epoch, part.high_watermark) == (0, 1, 5, 1)
    assert [(replica.replica_id, replica.log_end_offset) for replica in part.current_voters] == [
        (1, 1),
        (2, 1),
        (3, -1),
    ]
    assert part.current_voters[1].last_caught_up_timestamp == 1_000_000 - 50
    assert part.current_voters[2].last_fetch_timestamp == -1
    assert [(replica.replica_id, replica.last_caught_up_timestamp) for replica in part.observers] == [(9, -1)]
    other = node.machine.describe(DescribeQuorumRequest((DescribeQuorumTopic("t", (0,)),)), node.now_ms, 0)
    assert other.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    refused = follower().machine.describe(DescribeQuorumRequest(), 0, 0).topics[0].partitions[0]
    assert (refused.error_code, refused.leader_id) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 2)


# -- the follower


def test_voter_fetches_after_flush_and_observer_immediately() -> None:
    for node_id, waits in ((1, True), (9, False)):
        node = follower(node_id=node_id)
        node.flushes = False
        before = len(node.sent)
        respond(node, records=records(5), high_watermark=1)
        assert node.machine.high_watermark == 1
        assert (Flush() in node.effects) is waits
        assert (len(node.sent) == before) is waits
        if waits:
            node.step(Persisted(1))
        requested = wire.only_partition(node.sent[-1].request)
        assert isinstance(requested, FetchPartition)
        assert (len(node.sent), requested.fetch_offset, requested.last_fetched_epoch) == (before + 1, 1, 5)


def test_diverging_log_is_truncated_but_not_below_high_watermark() -> None:
    node = follower(MemoryLog(1, 2, 3, 3))
    respond(node, diverging_epoch=EpochEndOffset(2, 2))
    assert TruncateLog(2) in node.effects
    assert node.log.log_end_offset == 2
    respond(node, high_watermark=2)
    with pytest.raises(QuorumError, match="below the high watermark 2"):
        respond(node, diverging_epoch=EpochEndOffset(1, 1))


def test_stale_and_duplicate_responses_are_ignored() -> None:
    node = follower()
    stale = wire.fetch_response(PartitionData(0, current_leader=LeaderIdAndEpoch(2, 4), records=records(4)))
    node.respond_to_last(stale)
    assert node.log.log_end_offset == 0
    node.advance(20)
    respond(node, records=records(5))
    sent, end = len(node.sent), node.log.log_end_offset
    assert end == 1
    node.machine.peers.clear()
    respond(node, records=records(5, start=1))
    assert (len(node.sent), node.log.log_end_offset) == (sent + 1, end), (
        "the response matches no request, so the follower fetches again"
    )


def test_follower_becomes_candidate_only_after_fetch_timeout() -> None:
    node = follower()
    for _ in range(5):
        node.advance(1900)
        respond(node, high_watermark=0)
    assert node.machine.state is State.FOLLOWER
    node.advance(2600)
    assert (node.machine.state, node.machine.epoch) == (State.CANDIDATE, 6)


def test_follower_fetches_log_after_snapshot() -> None:
    node = follower(MemoryLog(1))
    wanted = SnapshotId(40, 4)
    respond(node, snapshot_id=wanted)
    assert node.effects[-1] == FetchSnapshot(wanted, 2, 5)
    sent = len(node.sent)
    for _ in range(4):
        node.advance(1500)
        node.step(SnapshotFetchProgress())
    assert (len(node.sent), node.machine.state) == (sent, State.FOLLOWER), (
        "no Fetch and no election during the transfer"
    )
    node.log.replace(wanted)
    node.step(SnapshotChanged(wanted))
    assert node.machine.high_watermark == 40
    requested = wire.only_partition(node.sent[-1].request)
    assert isinstance(requested, FetchPartition)
    assert (requested.fetch_offset, requested.last_fetched_epoch) == (40, 4)


def test_follower_observes_log_start_of_its_leader() -> None:
    """630-05: the log start is unknown (-1) until a leader reports it."""
    node = follower(MemoryLog(1))
    assert node.machine.leader_log_start == -1
    respond(node, log_start_offset=7)
    assert node.machine.leader_log_start == 7
    node.advance(2600)
    assert node.machine.leader_log_start == -1


def test_failed_snapshot_fetch_is_followed_by_fetch() -> None:
    node = follower()
    respond(node, snapshot_id=SnapshotId(40, 4))
    sent = len(node.sent)
    node.step(SnapshotFetchFailed())
    node.advance(node.config.retry_backoff_ms)
    assert len(node.sent) == sent + 1


# -- the driver


def test_contract_violation_raises_driver_error() -> None:
    node = leader()
    with pytest.raises(DriverError):
        node.machine.step(LogChanged(), node.now_ms, 0)
    node.machine.step(AppendRequested(1, batch(), 5), node.now_ms, 0)
    with pytest.raises(DriverError):
        node.machine.step(TimerFired(), node.now_ms, 0)
