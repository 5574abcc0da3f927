"""FetchSnapshot on both sides (630-09 to 630-12), without IO.

The leader (`plan_fetch_snapshot`) decides what each partition of a request gets before any byte is read. `shares`
splits the bytes of one response over its partitions. The caller fills the plan with `size` bytes at `position` of each
snapshot. Invariant: all parts together have at most min(the request's maximum, the configured one) bytes, and no
partition goes short while another has more than it.

The replica has one `SnapshotFetch` for each partition. Its owner sends `fetch_request`, gives the response to `steps`,
does what those say, and calls `written` when the bytes are in the `.part` file. After a broken transfer it sends the
request again: the position is that of the bytes that were written.

    FETCHING --written, all there--> WHOLE      the owner checks the file and renames it
    FETCHING --an error------------> ENDED      the owner sends Fetch again

Invariant: the position never goes back, and bytes are written there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode

# -- the leader


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


# -- the replica that fetches


class FetchState(Enum):
    """Where a transfer is."""

    FETCHING = "fetching"
    WHOLE = "whole"
    ENDED = "ended"


class WriteBytes(NamedTuple):
    """Write the bytes there, then call `written`."""

    position: int
    data: bytes


class Ignored(NamedTuple):
    """The answer is not for what was asked, or says nothing: ask again."""

    reason: str


class Ended(NamedTuple):
    """This snapshot is not to be had from this leader: ask Fetch again (630-11)."""

    error_code: ErrorCode
    reason: str


Step = WriteBytes | Ignored | Ended


@dataclass(eq=False)
class SnapshotFetch:
    """The transfer of one snapshot."""

    topic: str
    partition: int
    snapshot_id: m.SnapshotId
    position: int = 0
    """Bytes in the `.part` file; at first those that an earlier transfer in this process left."""
    size: int | None = None
    """Bytes of the snapshot, None until the first response."""
    state: FetchState = FetchState.FETCHING
    _writing: int = 0

    def request(self, leader_epoch: int) -> m.PartitionSnapshot:
        """What to ask for next."""
        return m.PartitionSnapshot(self.partition, leader_epoch, self.snapshot_id, self.position)

    def on_response(self, answer: m.PartitionSnapshotResponse) -> Step:
        """What to do with the partition's part of a response."""
        if self.state is not FetchState.FETCHING or self._writing:
            return Ignored("nothing was asked for")
        if answer.snapshot_id not in (None, self.snapshot_id):
            return Ignored(f"the answer is for snapshot {answer.snapshot_id}")
        if answer.error_code:
            return self.ended(answer.error_code, "the leader refuses")
        if answer.snapshot_id is None or answer.position != self.position:
            return Ignored(f"the answer is for position {answer.position}, {self.position} was asked for")
        data = answer.unaligned_records
        if self.size not in (None, answer.size):
            return self.ended(ErrorCode.CORRUPT_MESSAGE, f"the size changed from {self.size} to {answer.size}")
        if answer.position + len(data) > answer.size:
            return self.ended(ErrorCode.CORRUPT_MESSAGE, f"bytes beyond the snapshot's size of {answer.size}")
        self.size = answer.size
        if not data:
            return Ignored("the answer has no bytes")
        self._writing = len(data)
        return WriteBytes(self.position, data)

    def written(self) -> FetchState:
        """The bytes of the last `WriteBytes` are in the file."""
        self.position += self._writing
        self._writing = 0
        if self.state is FetchState.FETCHING and self.position == self.size:
            self.state = FetchState.WHOLE
        return self.state

    def ended(self, error_code: int, reason: str) -> Ended:
        """Give up."""
        self.state = FetchState.ENDED
        try:
            return Ended(ErrorCode(error_code), reason)
        except ValueError:  # a newer peer's number
            return Ended(ErrorCode.UNKNOWN_SERVER_ERROR, f"{reason}: error code {error_code}")


def fetch_request(
    cluster_id: str | None, replica_id: int, max_bytes: int, fetches: Iterable[tuple[SnapshotFetch, int]]
) -> m.FetchSnapshotRequest:
    """One request for several transfers, each with the current epoch of its leader."""
    topics: dict[str, list[m.PartitionSnapshot]] = {}
    for fetch, leader_epoch in fetches:
        topics.setdefault(fetch.topic, []).append(fetch.request(leader_epoch))
    asked = tuple([m.TopicSnapshot(name, tuple(partitions)) for name, partitions in topics.items()])
    return m.FetchSnapshotRequest(cluster_id, replica_id, max_bytes, asked)


def steps(fetches: Sequence[SnapshotFetch], response: m.FetchSnapshotResponse) -> list[tuple[SnapshotFetch, Step]]:
    """What to do for each transfer; a partition that the response does not name is asked for again."""
    if response.error_code:
        return [(fetch, fetch.ended(response.error_code, "the leader refuses the request")) for fetch in fetches]
    answers = {(topic.name, answer.index): answer for topic in response.topics for answer in topic.partitions}
    done: list[tuple[SnapshotFetch, Step]] = []
    for fetch in fetches:
        answer = answers.get((fetch.topic, fetch.partition))
        done.append((fetch, Ignored("the response does not name it") if answer is None else fetch.on_response(answer)))
    return done
