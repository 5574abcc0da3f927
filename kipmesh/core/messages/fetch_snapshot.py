"""FetchSnapshot (API key 59), as in `protos/kipmesh/v1/fetch_snapshot.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages.fetch import LeaderIdAndEpoch, NodeEndpoint, SnapshotId
from kipmesh.core.messages.limits import MAX_INT32


class PartitionSnapshot(NamedTuple):
    partition: int = 0
    current_leader_epoch: int = 0
    snapshot_id: SnapshotId | None = None
    position: int = 0


class TopicSnapshot(NamedTuple):
    name: str = ""
    partitions: Sequence[PartitionSnapshot] = ()


class FetchSnapshotRequest(NamedTuple):
    cluster_id: str | None = None
    replica_id: int = -1
    max_bytes: int = MAX_INT32
    topics: Sequence[TopicSnapshot] = ()


class PartitionSnapshotResponse(NamedTuple):
    index: int = 0  # type: ignore[assignment]
    error_code: int = 0
    snapshot_id: SnapshotId | None = None
    current_leader: LeaderIdAndEpoch | None = None
    size: int = 0
    position: int = 0
    unaligned_records: bytes = b""


class TopicSnapshotResponse(NamedTuple):
    name: str = ""
    partitions: Sequence[PartitionSnapshotResponse] = ()


class FetchSnapshotResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    topics: Sequence[TopicSnapshotResponse] = ()
    node_endpoints: Sequence[NodeEndpoint] = ()
