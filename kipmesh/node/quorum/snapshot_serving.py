"""FetchSnapshot at a replica: what `plan_fetch_snapshot` says (630-09 to 630-11), with the bytes from the files.

All of it runs on a thread: who leads is a value of the moment the request came.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.snapshot.serving import Part, ServedPartition, plan_fetch_snapshot
from kipmesh.storage.errors import StorageError
from kipmesh.storage.snapshots import SnapshotStore

RESPONSE_BYTES_MAX = 10 << 20
"""The default of `replica.fetch.response.max.bytes`."""
PARTITIONS_MAX = 100
"""Partitions of one request; there is only one that has snapshots."""


def is_answerable(request: m.FetchSnapshotRequest) -> bool:
    """Whether the request is one that can be answered in reasonable time."""
    return sum(len(topic.partitions) for topic in request.topics) <= PARTITIONS_MAX


def counts_as_alive(request: m.FetchSnapshotRequest, cluster_id: str, epoch: int) -> bool:
    """Whether a replica that asks so follows the leader of `epoch` (630-12)."""
    return request.cluster_id in (None, cluster_id) and any(
        topic.name == CLUSTER_METADATA_TOPIC and asked.partition == 0 and asked.current_leader_epoch == epoch
        for topic in request.topics
        for asked in topic.partitions
    )


def serve(
    request: m.FetchSnapshotRequest,
    store: SnapshotStore,
    cluster_id: str,
    leader: m.LeaderIdAndEpoch,
    *,
    is_leader: bool,
    response_bytes_max: int = RESPONSE_BYTES_MAX,
) -> m.FetchSnapshotResponse:
    """The response. Blocking; a disk that cannot be read is an error code."""

    def size_of(snapshot_id: m.SnapshotId) -> int | None:
        return store.size(snapshot_id) if snapshot_id.end_offset >= 0 and snapshot_id.epoch >= 0 else None

    gone: set[m.SnapshotId] = set()

    def read(part: Part) -> bytes:
        data = store.read(part.snapshot_id, part.position, part.size)
        if data is None:
            gone.add(part.snapshot_id)
        return data or b""

    served = ServedPartition(leader, is_leader, size_of)
    partitions = {(CLUSTER_METADATA_TOPIC, 0): served}
    try:
        response = plan_fetch_snapshot(request, cluster_id, partitions, response_bytes_max).filled(read)
    except StorageError as error:
        return m.FetchSnapshotResponse(error_code=error.code)
    return _without(response, gone) if gone else response


def _without(response: m.FetchSnapshotResponse, gone: set[m.SnapshotId]) -> m.FetchSnapshotResponse:
    """Deleted since their size was asked for."""

    def mark(answer: m.PartitionSnapshotResponse) -> m.PartitionSnapshotResponse:
        if answer.snapshot_id not in gone:
            return answer
        return answer._replace(error_code=ErrorCode.SNAPSHOT_NOT_FOUND, size=0, unaligned_records=b"")

    topics = [topic._replace(partitions=tuple(map(mark, topic.partitions))) for topic in response.topics]
    return response._replace(topics=tuple(topics))
