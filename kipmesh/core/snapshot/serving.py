"""FetchSnapshot at the leader (630-09 to 630-11): what each partition of a request gets, before any byte is read.

The caller fills the plan with `size` bytes at `position` of each snapshot. Invariant: all parts together have at most
min(the request's maximum, the configured one) bytes, and no partition goes short while another has more than it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode


class ServedPartition(NamedTuple):
    """What this replica knows of a partition whose snapshots it has."""

    leader: m.LeaderIdAndEpoch
    is_leader: bool
    size_of: Callable[[m.SnapshotId], int | None]
    """Bytes of a snapshot, None when it is not there."""


class Part(NamedTuple):
    """Bytes to read for one partition of the response."""

    topic: str
    partition: int
    snapshot_id: m.SnapshotId
    position: int
    size: int


def shares(max_bytes: int, remaining: Sequence[int]) -> list[int]:
    """How many bytes each snapshot may send, as if they were dealt one by one to all that have some left (630-10).

    Each gets at least the average if it has that much; the first ones get what cannot be split evenly.
    """
    given = [0] * len(remaining)
    left = max(max_bytes, 0)
    waiting = [index for index, size in enumerate(remaining) if size > 0]
    while left and waiting:
        round_ = min(left // len(waiting), min(remaining[index] - given[index] for index in waiting))
        if not round_:
            for index in waiting[:left]:
                given[index] += 1
            break
        for index in waiting:
            given[index] += round_
        left -= round_ * len(waiting)
        waiting = [index for index in waiting if given[index] < remaining[index]]
    return given


class FetchSnapshotPlan(NamedTuple):
    """The response but for the bytes, and where they are."""

    response: m.FetchSnapshotResponse
    parts: tuple[Part, ...]

    def filled(self, read: Callable[[Part], bytes]) -> m.FetchSnapshotResponse:
        """The response with the bytes that `read` gives."""
        by_place = {(part.topic, part.partition, part.snapshot_id, part.position): part for part in self.parts}

        def fill(topic: str, answer: m.PartitionSnapshotResponse) -> m.PartitionSnapshotResponse:
            if answer.error_code or answer.snapshot_id is None:
                return answer
            part = by_place[topic, answer.index, answer.snapshot_id, answer.position]
            return answer._replace(unaligned_records=read(part))

        topics = [
            topic._replace(partitions=tuple([fill(topic.name, answer) for answer in topic.partitions]))
            for topic in self.response.topics
        ]
        return self.response._replace(topics=tuple(topics))


def plan_fetch_snapshot(
    request: m.FetchSnapshotRequest,
    cluster_id: str,
    partitions: Mapping[tuple[str, int], ServedPartition],
    response_bytes_max: int,
) -> FetchSnapshotPlan:
    """What the request gets; `response_bytes_max` is `replica.fetch.response.max.bytes`."""
    if request.cluster_id not in (None, cluster_id):
        return FetchSnapshotPlan(m.FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID), ())
    topics = []
    wanted: list[Part] = []
    for topic in request.topics:
        answers = []
        for asked in topic.partitions:
            answer = _answer(asked, partitions.get((topic.name, asked.partition)))
            answers.append(answer)
            if not answer.error_code and answer.snapshot_id is not None:
                size = answer.size - answer.position
                wanted.append(Part(topic.name, answer.index, answer.snapshot_id, answer.position, size))
        topics.append(m.TopicSnapshotResponse(topic.name, tuple(answers)))
    sizes = shares(min(request.max_bytes, response_bytes_max), [part.size for part in wanted])
    parts = tuple([part._replace(size=size) for part, size in zip(wanted, sizes, strict=True)])
    return FetchSnapshotPlan(m.FetchSnapshotResponse(topics=tuple(topics)), parts)


def _answer(asked: m.PartitionSnapshot, served: ServedPartition | None) -> m.PartitionSnapshotResponse:
    answer = m.PartitionSnapshotResponse(
        asked.partition, ErrorCode.NONE, asked.snapshot_id, served.leader if served else None, 0, asked.position
    )
    if served is None:
        return answer._replace(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    epoch = asked.current_leader_epoch
    if 0 <= epoch < served.leader.leader_epoch:
        return answer._replace(error_code=ErrorCode.FENCED_LEADER_EPOCH)
    if epoch > served.leader.leader_epoch:
        return answer._replace(error_code=ErrorCode.UNKNOWN_LEADER_EPOCH)
    if not served.is_leader:
        return answer._replace(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    size = None if asked.snapshot_id is None else served.size_of(asked.snapshot_id)
    if size is None:
        return answer._replace(error_code=ErrorCode.SNAPSHOT_NOT_FOUND)
    if not 0 <= asked.position < size:
        return answer._replace(error_code=ErrorCode.POSITION_OUT_OF_RANGE)
    return answer._replace(size=size)
