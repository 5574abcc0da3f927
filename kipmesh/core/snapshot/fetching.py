"""A snapshot on its way from the leader (630-12): one `SnapshotFetch` for each partition, which does no IO.

Its owner sends `fetch_request`, gives the answer to `steps`, does what those say, and calls `written` when the bytes
are in the `.part` file. After a broken transfer it asks again: the position is that of the bytes that were written.

    FETCHING --written, all there--> WHOLE      the owner checks the file and renames it
    FETCHING --an error------------> ENDED      the owner asks Fetch again

Invariant: the position never goes back, and bytes are written there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode


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


class SnapshotFetch:
    """The transfer of one snapshot."""

    def __init__(self, topic: str, partition: int, snapshot_id: m.SnapshotId, position: int = 0) -> None:
        """`position` is the size of the `.part` file that an earlier transfer in this process left."""
        self.topic = topic
        self.partition = partition
        self.snapshot_id = snapshot_id
        self.position = position
        self.size: int | None = None
        """Bytes of the snapshot, None until the first answer."""
        self.state = FetchState.FETCHING
        self._writing = 0

    def asked(self, leader_epoch: int) -> m.PartitionSnapshot:
        """What to ask for next."""
        return m.PartitionSnapshot(self.partition, leader_epoch, self.snapshot_id, self.position)

    def answered(self, answer: m.PartitionSnapshotResponse) -> Step:
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

    def not_written(self) -> None:
        """They are not: the same are asked for again."""
        self._writing = 0

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
        topics.setdefault(fetch.topic, []).append(fetch.asked(leader_epoch))
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
        done.append((fetch, Ignored("the response does not name it") if answer is None else fetch.answered(answer)))
    return done
