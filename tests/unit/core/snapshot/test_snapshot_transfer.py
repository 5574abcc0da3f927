"""FetchSnapshot: sharing the bytes beside an oracle, errors, and a leader and a follower driven against each other."""

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


def dealt(max_bytes: int, remaining: list[int]) -> list[int]:
    """The oracle: byte by byte to each in turn that has one left."""
    given_ = [0] * len(remaining)
    left = max_bytes
    while left and given_ != remaining:
        for index, size in enumerate(remaining):
            if left and given_[index] < size:
                given_[index] += 1
                left -= 1
    return given_


@given(st.integers(0, 60), st.lists(st.integers(0, 20), max_size=6))
def test_bytes_are_shared_as_if_dealt(max_bytes: int, remaining: list[int]) -> None:
    assert shares(max_bytes, remaining) == dealt(max_bytes, remaining)


@given(st.integers(0, 1 << 31), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50))
def test_each_gets_the_average_and_nothing_is_left(max_bytes: int, remaining: list[int]) -> None:
    given_ = shares(max_bytes, remaining)
    assert sum(given_) == min(max_bytes, sum(remaining))
    average = max_bytes // len(remaining)
    assert all(min(size, average) <= share <= size for share, size in zip(given_, remaining, strict=True))
    unsatisfied = [share for share, size in zip(given_, remaining, strict=True) if share < size]
    assert max(given_) - min(unsatisfied, default=max(given_)) <= 1


def served(sizes: dict[SnapshotId, int], epoch: int = 5, *, is_leader: bool = True) -> ServedPartition:
    return ServedPartition(LeaderIdAndEpoch(1, epoch), is_leader, sizes.get)


def ask(
    *asked: PartitionSnapshot, cluster_id: str | None = CLUSTER, topic: str = TOPIC, max_bytes: int = 100
) -> FetchSnapshotRequest:
    return FetchSnapshotRequest(cluster_id, 2, max_bytes, [TopicSnapshot(topic, asked)])


@pytest.mark.parametrize(
    ("asked", "is_leader", "code"),
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
def test_errors(asked: PartitionSnapshot, is_leader: bool, code: ErrorCode) -> None:
    plan = plan_fetch_snapshot(ask(asked), CLUSTER, {(TOPIC, 0): served({ID: 1000}, is_leader=is_leader)}, 1 << 20)
    answer = plan.response.topics[0].partitions[0]
    assert plan.response.error_code == 0
    assert (answer.error_code, answer.index, answer.snapshot_id) == (code, asked.partition, asked.snapshot_id)
    assert bool(plan.parts) == (code == ErrorCode.NONE)
    if code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        assert answer.current_leader == LeaderIdAndEpoch(1, 5)
    assert plan.filled(lambda part: b"x" * part.size).topics[0].partitions[0].error_code == code


def test_clusters() -> None:
    asked = PartitionSnapshot(0, 5, ID, 0)
    partitions = {(TOPIC, 0): served({ID: 10})}
    other = plan_fetch_snapshot(ask(asked, cluster_id="other"), CLUSTER, partitions, 100)
    assert other == (FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID), ())
    assert plan_fetch_snapshot(ask(asked, cluster_id=None), CLUSTER, partitions, 100).parts


def test_the_smaller_limit_is_shared_by_those_without_errors() -> None:
    partitions = {("a", 0): served({ID: 1000}), ("a", 1): served({ID: 30}), ("b", 0): served({ID: 1000})}
    topics = [
        TopicSnapshot("a", [PartitionSnapshot(0, 5, ID, 10), PartitionSnapshot(1, 5, ID, 20)]),
        TopicSnapshot("b", [PartitionSnapshot(0, 5, ID, 0), PartitionSnapshot(7, 5, ID, 0)]),
    ]
    plan = plan_fetch_snapshot(FetchSnapshotRequest(CLUSTER, 2, 500, topics), CLUSTER, partitions, 90)
    assert plan.parts == (Part("a", 0, ID, 10, 40), Part("a", 1, ID, 20, 10), Part("b", 0, ID, 0, 40))
    response = plan.filled(lambda part: bytes(part.size))
    sizes = [len(answer.unaligned_records) for topic in response.topics for answer in topic.partitions]
    assert sizes == [40, 10, 40, 0]


def answer(position: int, data: bytes, size: int, **values: object) -> PartitionSnapshotResponse:
    return PartitionSnapshotResponse(0, 0, ID, None, size, position, data)._replace(**values)


def test_a_transfer() -> None:
    fetch = SnapshotFetch(TOPIC, 0, ID)
    assert fetch.request(5) == PartitionSnapshot(0, 5, ID, 0)
    assert fetch.on_response(answer(0, b"ab", 5)) == WriteBytes(0, b"ab")
    assert isinstance(fetch.on_response(answer(0, b"ab", 5)), Ignored)
    assert fetch.written() is FetchState.FETCHING
    assert fetch.request(5).position == 2
    assert fetch.on_response(answer(2, b"cde", 5)) == WriteBytes(2, b"cde")
    assert fetch.written() is FetchState.WHOLE
    assert isinstance(fetch.on_response(answer(5, b"f", 6)), Ignored)


@pytest.mark.parametrize(
    "foreign",
    [
        answer(0, b"ab", 5, snapshot_id=SnapshotId(100, 4)),
        answer(0, b"ab", 5, snapshot_id=SnapshotId(99, 3)),
        answer(0, b"", 0, snapshot_id=SnapshotId(99, 3), error_code=ErrorCode.SNAPSHOT_NOT_FOUND),
        answer(0, b"ab", 5, snapshot_id=None),
        answer(0, b"ab", 5),
        answer(3, b"ab", 5),
        answer(2, b"", 5),
    ],
)
def test_foreign_answers_are_ignored(foreign: PartitionSnapshotResponse) -> None:
    fetch = SnapshotFetch(TOPIC, 0, ID, position=2)
    assert isinstance(fetch.on_response(foreign), Ignored)
    assert (fetch.state, fetch.position) == (FetchState.FETCHING, 2)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (answer(0, b"", 0, error_code=98), ErrorCode.SNAPSHOT_NOT_FOUND),
        (answer(0, b"", 0, error_code=99, snapshot_id=None), ErrorCode.POSITION_OUT_OF_RANGE),
        (answer(0, b"", 0, error_code=6), ErrorCode.NOT_LEADER_OR_FOLLOWER),
        (answer(0, b"", 0, error_code=9999), ErrorCode.UNKNOWN_SERVER_ERROR),
        (answer(2, b"abcd", 5), ErrorCode.CORRUPT_MESSAGE),
        (answer(2, b"a", 6), ErrorCode.CORRUPT_MESSAGE),
    ],
)
def test_errors_end_it(wrong: PartitionSnapshotResponse, code: ErrorCode) -> None:
    fetch = SnapshotFetch(TOPIC, 0, ID)
    fetch.on_response(answer(0, b"ab", 5))
    fetch.written()
    ended = fetch.on_response(wrong)
    assert isinstance(ended, Ended)
    assert ended.error_code == code
    assert fetch.state is FetchState.ENDED
    assert isinstance(fetch.on_response(answer(2, b"cde", 5)), Ignored)


def test_requests_and_responses_of_several() -> None:
    one, two, other = SnapshotFetch("a", 0, ID), SnapshotFetch("a", 1, ID, 7), SnapshotFetch("b", 0, ID)
    request = fetch_request(CLUSTER, 4, 99, [(one, 5), (two, 6), (other, -1)])
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
    done = dict(steps([one, two, other], response))
    assert done[one] == WriteBytes(0, b"x" * 10)
    assert done[two] == WriteBytes(7, b"xxx")
    assert isinstance(done[other], Ended)
    one.written()
    late = SnapshotFetch("c", 0, ID)
    assert isinstance(dict(steps([late], response))[late], Ignored)
    refused = FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
    assert steps([late], refused) == [(late, Ended(ErrorCode.INCONSISTENT_CLUSTER_ID, "the leader returned an error"))]


@given(st.binary(min_size=1, max_size=400), st.integers(1, 60), st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_lost_and_repeated_answers_bring_the_same_bytes(content: bytes, max_bytes: int, seed: int) -> None:
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
            if rng.random() < 0.1:  # the process goes on, the transfer does not
                fetch = SnapshotFetch(TOPIC, 0, ID, len(file))
                continue
            assert step.position == len(file)
            file += step.data
            if fetch.written() is FetchState.WHOLE:
                break
    assert bytes(file) == content
