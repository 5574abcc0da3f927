"""FetchSnapshot on both sides (630-09 to 630-12), without IO.

Leader: `plan_fetch_snapshot` decides the response before any byte is read; `shares` divides its bytes among partitions.
The caller then reads `size` bytes at `position` of each snapshot. Invariant: all parts together have at most min(the
request's maximum, the configured maximum) bytes, divided evenly.

Replica: one `SnapshotFetch` per partition. Its owner sends `fetch_request`, passes the response to `steps`, performs
the resulting step, and calls `written` when the bytes are in the `.part` file. After a broken transfer it repeats the
request from the current position. Invariant: the position never decreases, and bytes are written only there.

    FETCHING --written, complete--> WHOLE      the owner verifies the file and renames it
    FETCHING --error--------------> ENDED      the owner sends Fetch again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode

# -- leader


class ServedPartition(NamedTuple):
    """A partition whose snapshots this replica may serve."""

    leader: m.LeaderIdAndEpoch
    is_leader: bool
    size_of: Callable[[m.SnapshotId], int | None]
    """Returns the bytes of a snapshot, or None if it does not exist."""


class Part(NamedTuple):
    """Byte range of a snapshot to read for one partition of the response."""

    topic: str
    partition: int
    snapshot_id: m.SnapshotId
    position: int
    size: int


def shares(max_bytes: int, remaining: Sequence[int]) -> list[int]:
    """Divide `max_bytes` evenly among snapshots with `remaining` bytes each; return the bytes of each (630-10).

    Each snapshot gets at least an even share if it has that much left; unused shares go to the others. A remainder that
    cannot be divided goes to the first ones.
    """
    allocated = [0] * len(remaining)
    available = max(max_bytes, 0)
    unsatisfied = [index for index, size in enumerate(remaining) if size > 0]
    while available and unsatisfied:
        share = min(available // len(unsatisfied), min(remaining[index] - allocated[index] for index in unsatisfied))
        if not share:
            for index in unsatisfied[:available]:
                allocated[index] += 1
            break
        for index in unsatisfied:
            allocated[index] += share
        available -= share * len(unsatisfied)
        unsatisfied = [index for index in unsatisfied if allocated[index] < remaining[index]]
    return allocated


class FetchSnapshotPlan(NamedTuple):
    """A response without its bytes, and the parts to read, in the order of the response."""

    response: m.FetchSnapshotResponse
    parts: tuple[Part, ...]

    def filled(self, read: Callable[[Part], bytes]) -> m.FetchSnapshotResponse:
        """Return the response with the bytes that `read` returns for each part."""
        parts = iter(self.parts)

        def fill(response: m.PartitionSnapshotResponse) -> m.PartitionSnapshotResponse:
            has_bytes = not response.error_code and response.snapshot_id is not None
            return response._replace(unaligned_records=read(next(parts))) if has_bytes else response

        topics = [topic._replace(partitions=tuple(map(fill, topic.partitions))) for topic in self.response.topics]
        return self.response._replace(topics=tuple(topics))


def plan_fetch_snapshot(
    request: m.FetchSnapshotRequest,
    cluster_id: str,
    partitions: Mapping[tuple[str, int], ServedPartition],
    response_bytes_max: int,
) -> FetchSnapshotPlan:
    """Plan the response to a FetchSnapshot request (630-10, 630-11).

    `partitions`: served partitions by (topic, partition). `response_bytes_max`: `replica.fetch.response.max.bytes`.
    Errors are in the response: INCONSISTENT_CLUSTER_ID at top level; for a partition UNKNOWN_TOPIC_OR_PARTITION,
    FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER, SNAPSHOT_NOT_FOUND, POSITION_OUT_OF_RANGE.
    """
    if request.cluster_id not in (None, cluster_id):
        return FetchSnapshotPlan(m.FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID), ())
    topics = []
    remaining: list[Part] = []
    for topic in request.topics:
        responses = []
        for requested in topic.partitions:
            response = _partition_response(requested, partitions.get((topic.name, requested.partition)))
            responses.append(response)
            if not response.error_code and response.snapshot_id is not None:
                size = response.size - response.position
                remaining.append(Part(topic.name, response.index, response.snapshot_id, response.position, size))
        topics.append(m.TopicSnapshotResponse(topic.name, tuple(responses)))
    sizes = shares(min(request.max_bytes, response_bytes_max), [part.size for part in remaining])
    parts = tuple([part._replace(size=size) for part, size in zip(remaining, sizes, strict=True)])
    return FetchSnapshotPlan(m.FetchSnapshotResponse(topics=tuple(topics)), parts)


def _partition_response(requested: m.PartitionSnapshot, served: ServedPartition | None) -> m.PartitionSnapshotResponse:
    error, size = _check(requested, served)
    leader = served.leader if served else None
    return m.PartitionSnapshotResponse(
        requested.partition, error, requested.snapshot_id, leader, size, requested.position
    )


def _check(requested: m.PartitionSnapshot, served: ServedPartition | None) -> tuple[ErrorCode, int]:
    """Return (error code, size of the snapshot in bytes); the size is 0 with an error."""
    if served is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0
    if 0 <= requested.current_leader_epoch < served.leader.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH, 0
    if requested.current_leader_epoch > served.leader.leader_epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH, 0
    if not served.is_leader:
        return ErrorCode.NOT_LEADER_OR_FOLLOWER, 0
    size = None if requested.snapshot_id is None else served.size_of(requested.snapshot_id)
    if size is None:
        return ErrorCode.SNAPSHOT_NOT_FOUND, 0
    if not 0 <= requested.position < size:
        return ErrorCode.POSITION_OUT_OF_RANGE, 0
    return ErrorCode.NONE, size


# -- replica


class FetchState(Enum):
    """State of a transfer. WHOLE: all bytes are written; ENDED: an error ended the transfer."""

    FETCHING = "fetching"
    WHOLE = "whole"
    ENDED = "ended"


class WriteBytes(NamedTuple):
    """Write the bytes at `position`, then call `SnapshotFetch.written`."""

    position: int
    data: bytes


class Ignored(NamedTuple):
    """The response is not usable (wrong snapshot or position, or no bytes). Send the request again."""

    reason: str


class Ended(NamedTuple):
    """The leader cannot provide this snapshot. Send Fetch again (630-11)."""

    error_code: ErrorCode
    reason: str


Step = WriteBytes | Ignored | Ended


@dataclass(eq=False)
class SnapshotFetch:
    """Transfer of one snapshot of one partition from the leader to this replica."""

    topic: str
    partition: int
    snapshot_id: m.SnapshotId
    position: int = 0
    """Bytes in the `.part` file, including those of an earlier transfer in this process."""
    size: int | None = None
    """Bytes of the snapshot, None before the first response."""
    state: FetchState = FetchState.FETCHING
    _writing: int = 0

    def request(self, leader_epoch: int) -> m.PartitionSnapshot:
        """Return the next request for this partition."""
        return m.PartitionSnapshot(self.partition, leader_epoch, self.snapshot_id, self.position)

    def on_response(self, response: m.PartitionSnapshotResponse) -> Step:
        """Return what to do with this partition's part of a response.

        An error code or an inconsistent size (CORRUPT_MESSAGE) ends the transfer. A response is ignored if it has no
        bytes, is for another snapshot or position, or arrives while bytes are being written or after the transfer
        ended.
        """
        if self.state is not FetchState.FETCHING or self._writing:
            return Ignored("no request is in flight")
        if response.snapshot_id not in (None, self.snapshot_id):
            return Ignored(f"response is for snapshot {response.snapshot_id}, expected {self.snapshot_id}")
        if response.error_code:
            return self.fail(response.error_code, "the leader returned an error")
        if response.snapshot_id is None or response.position != self.position:
            return Ignored(f"response is for position {response.position}, expected {self.position}")
        data = response.unaligned_records
        if self.size not in (None, response.size):
            return self.fail(ErrorCode.CORRUPT_MESSAGE, f"snapshot size changed from {self.size} to {response.size}")
        if response.position + len(data) > response.size:
            return self.fail(ErrorCode.CORRUPT_MESSAGE, f"the response exceeds the snapshot size {response.size}")
        self.size = response.size
        if not data:
            return Ignored("response has no bytes")
        self._writing = len(data)
        return WriteBytes(self.position, data)

    def written(self) -> FetchState:
        """Record that the bytes of the last `WriteBytes` are in the file; return the new state."""
        self.position += self._writing
        self._writing = 0
        if self.state is FetchState.FETCHING and self.position == self.size:
            self.state = FetchState.WHOLE
        return self.state

    def fail(self, error_code: int, reason: str) -> Ended:
        """End the transfer with an error. Unknown codes become UNKNOWN_SERVER_ERROR."""
        self.state = FetchState.ENDED
        try:
            return Ended(ErrorCode(error_code), reason)
        except ValueError:  # sent by a newer version
            return Ended(ErrorCode.UNKNOWN_SERVER_ERROR, f"{reason}: error code {error_code}")


def fetch_request(
    cluster_id: str | None, replica_id: int, max_bytes: int, fetches: Iterable[tuple[SnapshotFetch, int]]
) -> m.FetchSnapshotRequest:
    """Return one request for several transfers, each given with the current epoch of its leader."""
    topics: dict[str, list[m.PartitionSnapshot]] = {}
    for fetch, leader_epoch in fetches:
        topics.setdefault(fetch.topic, []).append(fetch.request(leader_epoch))
    requested = tuple([m.TopicSnapshot(name, tuple(partitions)) for name, partitions in topics.items()])
    return m.FetchSnapshotRequest(cluster_id, replica_id, max_bytes, requested)


def steps(fetches: Sequence[SnapshotFetch], response: m.FetchSnapshotResponse) -> list[tuple[SnapshotFetch, Step]]:
    """Return (transfer, step) pairs for a response. A top-level error ends all transfers.

    A transfer whose partition is missing from the response gets `Ignored` and is requested again.
    """
    if response.error_code:
        return [(fetch, fetch.fail(response.error_code, "the leader returned an error")) for fetch in fetches]
    partitions = {(topic.name, data.index): data for topic in response.topics for data in topic.partitions}
    result: list[tuple[SnapshotFetch, Step]] = []
    for fetch in fetches:
        data = partitions.get((fetch.topic, fetch.partition))
        step = Ignored("response does not contain the partition") if data is None else fetch.on_response(data)
        result.append((fetch, step))
    return result
