"""FetchSnapshot (59): a range of bytes of a snapshot of the metadata log (630-09)."""

from collections.abc import Sequence

from kipmesh.messages.apis.fetch import LeaderIdAndEpoch, NodeEndpoint, SnapshotId
from kipmesh.messages.schema import MAX_INT32, Int32, Int64, Message, field


class PartitionSnapshot(Message):
    partition: Int32 = field(1)
    current_leader_epoch: Int32 = field(2)
    snapshot_id: SnapshotId | None = field(3)
    position: Int64 = field(4)


class TopicSnapshot(Message):
    name: str = field(1)
    partitions: Sequence[PartitionSnapshot] = field(2)


class FetchSnapshotRequest(Message):
    cluster_id: str | None = field(1)
    replica_id: Int32 = field(2, default=-1)
    max_bytes: Int32 = field(3, default=MAX_INT32)
    topics: Sequence[TopicSnapshot] = field(4)


class PartitionSnapshotResponse(Message):
    index: Int32 = field(1)
    error_code: Int32 = field(2)
    snapshot_id: SnapshotId | None = field(3)
    current_leader: LeaderIdAndEpoch | None = field(4)
    # The size of the snapshot in bytes.
    size: Int64 = field(5)
    position: Int64 = field(6)
    unaligned_records: bytes = field(7)


class TopicSnapshotResponse(Message):
    name: str = field(1)
    partitions: Sequence[PartitionSnapshotResponse] = field(2)


class FetchSnapshotResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    topics: Sequence[TopicSnapshotResponse] = field(3)
    node_endpoints: Sequence[NodeEndpoint] = field(4)
