"""FetchSnapshot: byte shares, errors, and transfers between a leader and a follower."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core.errors import ErrorCode
from kipmesh.core.snapshot.transfer import (
    Ended,
    FetchState,
    Ignored,
    Part,
    ServedPartition,
    SnapshotFetch,
    WriteBytes,
    fetch_request,
    plan_fetch_snapshot,
    shares,
    steps,
)
from kipmesh.messages import (
    FetchSnapshotRequest,
    FetchSnapshotResponse,
    LeaderIdAndEpoch,
    PartitionSnapshot,
    PartitionSnapshotResponse,
    SnapshotId,
    TopicSnapshot,
)

TOPIC = "__cluster_metadata"
CLUSTER = "cluster"
ID = SnapshotId(100, 3)


def shares_oracle(max_bytes: int, remaining: list[int]) -> list[int]:
    """Oracle: deal bytes one by one, round-robin, to partitions with bytes left."""
    shares_ = [0] * len(remaining)
    left = max_bytes
    while left and shares_ != remaining:
        for index, size in enumerate(remaining):
            if left and shares_[index] < size:
                shares_[index] += 1
                left -= 1
    return shares_


@given(st.integers(0, 60), st.lists(st.integers(0, 20), max_size=6))
def test_byte_shares_match_oracle(max_bytes: int, remaining: list[int]) -> None:
    assert shares(max_bytes, remaining) == shares_oracle(max_bytes, remaining)


@given(st.integers(0, 1 << 31), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50))
def test_byte_shares_are_fair_and_use_full_limit(max_bytes: int, remaining: list[int]) -> None:
    shares_ = shares(max_bytes, remaining)
    assert sum(shares_) == min(max_bytes, sum(remaining))
    average = max_bytes // len(remaining)
    assert all(min(size, average) <= share <= size for share, size in zip(shares_, remaining, strict=True))
    unsatisfied = [share for share, size in zip(shares_, remaining, strict=True) if share < size]
    assert max(shares_) - min(unsatisfied, default=max(shares_)) <= 1


def served(sizes: dict[SnapshotId, int], epoch: int = 5, *, is_leader: bool = True) -> ServedPartition:
    return ServedPartition(LeaderIdAndEpoch(1, epoch), is_leader, sizes.get)


def snapshot_request(
    *requested: PartitionSnapshot, cluster_id: str | None = CLUSTER, topic: str = TOPIC, max_bytes: int = 100
) -> FetchSnapshotRequest:
    return FetchSnapshotRequest(cluster_id, 2, max_bytes, [TopicSnapshot(topic, requested)])


@pytest.mark.parametrize(
    ("requested", "is_leader", "code"),
    [
        (PartitionSnapshot(0, 5, ID, 0), True, ErrorCode.NONE),
        (PartitionSnapshot(0, -1, ID, 999), True, ErrorCode.NONE),
        (PartitionSnapshot(0, 5, ID, 1000), True, ErrorCode.POSITION_OUT_OF_RANGE),
        (PartitionSnapshot(0, 5, ID, -1), True, ErrorCode.POSITION_OUT_OF_RANGE),
        (PartitionSnapshot(0, 5, SnapshotId(100, 4), 0), True, ErrorCode.SNAPSHOT_NOT_FOUND),
        (PartitionSnapshot(0, 5, None, 0), True, ErrorCode.SNAPSHOT_NOT_FOUND),
        (PartitionSnapshot(0, 5, ID, 0), False, ErrorCode.NOT_LEADER_OR_FOLLOWER),
        (PartitionSnapshot(0, 4, ID, 0), True, ErrorCode.FENCED_LEADER_EPOCH),
        (PartitionSnapshot(0, 6, ID, 0), True, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (PartitionSnapshot(0, 6, ID, 0), False, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (PartitionSnapshot(1, 5, ID, 0), True, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_fetch_snapshot_errors_are_reported_per_partition(
    requested: PartitionSnapshot, is_leader: bool, code: ErrorCode
) -> None:
    plan = plan_fetch_snapshot(
        snapshot_request(requested), CLUSTER, {(TOPIC, 0): served({ID: 1000}, is_leader=is_leader)}, 1 << 20
    )
    result = plan.response.topics[0].partitions[0]
    assert plan.response.error_code == 0
    assert (result.error_code, result.index, result.snapshot_id) == (code, requested.partition, requested.snapshot_id)
    assert bool(plan.parts) == (code == ErrorCode.NONE)
    if code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        assert result.current_leader == LeaderIdAndEpoch(1, 5)
    assert plan.filled(lambda part: b"x" * part.size).topics[0].partitions[0].error_code == code


def test_fetch_snapshot_checks_cluster_id() -> None:
    requested = PartitionSnapshot(0, 5, ID, 0)
    partitions = {(TOPIC, 0): served({ID: 10})}
    other = plan_fetch_snapshot(snapshot_request(requested, cluster_id="other"), CLUSTER, partitions, 100)
    assert other == (FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID), ())
    assert plan_fetch_snapshot(snapshot_request(requested, cluster_id=None), CLUSTER, partitions, 100).parts


def test_smaller_byte_limit_is_shared_by_valid_partitions() -> None:
    partitions = {("a", 0): served({ID: 1000}), ("a", 1): served({ID: 30}), ("b", 0): served({ID: 1000})}
    topics = [
        TopicSnapshot("a", [PartitionSnapshot(0, 5, ID, 10), PartitionSnapshot(1, 5, ID, 20)]),
        TopicSnapshot("b", [PartitionSnapshot(0, 5, ID, 0), PartitionSnapshot(7, 5, ID, 0)]),
    ]
    plan = plan_fetch_snapshot(FetchSnapshotRequest(CLUSTER, 2, 500, topics), CLUSTER, partitions, 90)
    assert plan.parts == (Part("a", 0, ID, 10, 40), Part("a", 1, ID, 20, 10), Part("b", 0, ID, 0, 40))
    response = plan.filled(lambda part: bytes(part.size))
    sizes = [len(result.unaligned_records) for topic in response.topics for result in topic.partitions]
    assert sizes == [40, 10, 40, 0]


def partition_response(position: int, data: bytes, size: int, **values: object) -> PartitionSnapshotResponse:
    return PartitionSnapshotResponse(0, 0, ID, None, size, position, data)._replace(**values)


def test_snapshot_fetch_writes_responses_in_order() -> None:
    fetch = SnapshotFetch(TOPIC, 0, ID)
    assert fetch.request(5) == PartitionSnapshot(0, 5, ID, 0)
    assert fetch.on_response(partition_response(0, b"ab", 5)) == WriteBytes(0, b"ab")
    assert isinstance(fetch.on_response(partition_response(0, b"ab", 5)), Ignored)
    assert fetch.written() is FetchState.FETCHING
    assert fetch.request(5).position == 2
    assert fetch.on_response(partition_response(2, b"cde", 5)) == WriteBytes(2, b"cde")
    assert fetch.written() is FetchState.WHOLE
    assert isinstance(fetch.on_response(partition_response(5, b"f", 6)), Ignored)


@pytest.mark.parametrize(
    "foreign",
    [
        partition_response(0, b"ab", 5, snapshot_id=SnapshotId(100, 4)),
        partition_response(0, b"ab", 5, snapshot_id=SnapshotId(99, 3)),
        partition_response(0, b"", 0, snapshot_id=SnapshotId(99, 3), error_code=ErrorCode.SNAPSHOT_NOT_FOUND),
        partition_response(0, b"ab", 5, snapshot_id=None),
        partition_response(0, b"ab", 5),
        partition_response(3, b"ab", 5),
        partition_response(2, b"", 5),
    ],
)
def test_responses_for_other_snapshots_or_positions_are_ignored(foreign: PartitionSnapshotResponse) -> None:
    fetch = SnapshotFetch(TOPIC, 0, ID, position=2)
    assert isinstance(fetch.on_response(foreign), Ignored)
    assert (fetch.state, fetch.position) == (FetchState.FETCHING, 2)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (partition_response(0, b"", 0, error_code=98), ErrorCode.SNAPSHOT_NOT_FOUND),
        (partition_response(0, b"", 0, error_code=99, snapshot_id=None), ErrorCode.POSITION_OUT_OF_RANGE),
        (partition_response(0, b"", 0, error_code=6), ErrorCode.NOT_LEADER_OR_FOLLOWER),
        (partition_response(0, b"", 0, error_code=9999), ErrorCode.UNKNOWN_SERVER_ERROR),
        (partition_response(2, b"abcd", 5), ErrorCode.CORRUPT_MESSAGE),
        (partition_response(2, b"a", 6), ErrorCode.CORRUPT_MESSAGE),
    ],
)
def test_error_response_ends_snapshot_fetch(wrong: PartitionSnapshotResponse, code: ErrorCode) -> None:
    fetch = SnapshotFetch(TOPIC, 0, ID)
    fetch.on_response(partition_response(0, b"ab", 5))
    fetch.written()
    ended = fetch.on_response(wrong)
    assert isinstance(ended, Ended)
    assert ended.error_code == code
    assert fetch.state is FetchState.ENDED
    assert isinstance(fetch.on_response(partition_response(2, b"cde", 5)), Ignored)


def test_several_snapshot_fetches_share_a_request() -> None:
    first, second, other = SnapshotFetch("a", 0, ID), SnapshotFetch("a", 1, ID, 7), SnapshotFetch("b", 0, ID)
    request = fetch_request(CLUSTER, 4, 99, [(first, 5), (second, 6), (other, -1)])
    assert request == FetchSnapshotRequest(
        CLUSTER,
        4,
        99,
        (
            TopicSnapshot("a", (PartitionSnapshot(0, 5, ID, 0), PartitionSnapshot(1, 6, ID, 7))),
            TopicSnapshot("b", (PartitionSnapshot(0, -1, ID, 0),)),
        ),
    )
    partitions = {("a", 0): served({ID: 10}), ("a", 1): served({ID: 10}, epoch=6)}
    response = plan_fetch_snapshot(request, CLUSTER, partitions, 100).filled(lambda part: b"x" * part.size)
    done = dict(steps([first, second, other], response))
    assert done[first] == WriteBytes(0, b"x" * 10)
    assert done[second] == WriteBytes(7, b"xxx")
    assert isinstance(done[other], Ended)
    first.written()
    late = SnapshotFetch("c", 0, ID)
    assert isinstance(dict(steps([late], response))[late], Ignored)
    refused = FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert steps([late], refused) == [(late, Ended(ErrorCode.INCONSISTENT_CLUSTER_ID, "the leader returned an error"))]


@given(st.binary(min_size=1, max_size=400), st.integers(1, 60), st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_transfer_over_lossy_network_delivers_same_bytes(content: bytes, max_bytes: int, seed: int) -> None:
    rng = Random(seed)
    partitions = {(TOPIC, 0): served({ID: len(content)})}
    file = bytearray()
    fetch = SnapshotFetch(TOPIC, 0, ID)
    old = FetchSnapshotResponse()
    for _ in range(5000):
        request = fetch_request(CLUSTER, 2, max_bytes, [(fetch, 5)])
        plan = plan_fetch_snapshot(request, CLUSTER, partitions, 40)
        response = plan.filled(lambda part: content[part.position : part.position + part.size])
        fate = rng.random()
        if fate < 0.2:
            continue
        ((_, step),) = steps([fetch], old if fate < 0.4 else response)
        old = response
        if isinstance(step, WriteBytes):
            if rng.random() < 0.1:  # The transfer restarts from the written bytes.
                fetch = SnapshotFetch(TOPIC, 0, ID, len(file))
                continue
            assert step.position == len(file)
            file += step.data
            if fetch.written() is FetchState.WHOLE:
                break
    assert bytes(file) == content
