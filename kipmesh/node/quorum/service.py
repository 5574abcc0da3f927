"""The gRPC service Quorum of a voter, for peers, observers and tools.

The state machine checks cluster ids, epochs and senders. This module limits the wait of a Fetch and the partitions of
DescribeQuorum and FetchSnapshot. FetchSnapshot (630-09 to 630-11) runs on a thread, with the leader at its arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.raft.types import Response, SnapshotServed
from kipmesh.core.snapshot.transfer import Part, ServedPartition, plan_fetch_snapshot
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.snapshots import SnapshotStore
from kipmesh.transport.grpc.server import RequestContext

FETCH_MAX_WAIT_MS = 60_000
DESCRIBED_PARTITIONS_MAX = 100
"""Maximum number of partitions in one DescribeQuorum; only one partition has a quorum."""
RESPONSE_BYTES_MAX = 10 << 20
"""Default of `replica.fetch.response.max.bytes`."""
PARTITIONS_MAX = 100
"""Maximum number of partitions in one FetchSnapshot; only one partition has snapshots."""


@dataclass(eq=False)
class QuorumService:
    """Handlers of the service Quorum for one driver. Waiting fetches complete when the driver stops.

    `served` is called with each FetchSnapshot response; `snapshot_response_bytes_max` limits its size in bytes.
    """

    driver: QuorumDriver
    served: Callable[[m.FetchSnapshotResponse], None] | None = None
    _: KW_ONLY
    snapshot_response_bytes_max: int = RESPONSE_BYTES_MAX

    async def vote(
        self,
        request: m.VoteRequest | m.BeginQuorumEpochRequest | m.EndQuorumEpochRequest,
        context: RequestContext,
    ) -> Response:
        """Handle Vote (52), BeginQuorumEpoch (53) and EndQuorumEpoch (54). Errors are in the response."""
        return await self.driver.request(request)

    begin_quorum_epoch = end_quorum_epoch = vote

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> Response:
        """Handle Fetch (1) of `__cluster_metadata-0` from replicas and consumers. Waits at most `FETCH_MAX_WAIT_MS`."""
        return await self.driver.request(request._replace(max_wait_ms=min(request.max_wait_ms, FETCH_MAX_WAIT_MS)))

    async def fetch_snapshot(self, request: m.FetchSnapshotRequest, context: RequestContext) -> m.FetchSnapshotResponse:
        """Handle FetchSnapshot (59), and pass the response to `served`."""
        response = await self.serve_snapshot(request)
        if self.served is not None:
            self.served(response)
        return response

    async def serve_snapshot(self, request: m.FetchSnapshotRequest) -> m.FetchSnapshotResponse:
        """Return the response to FetchSnapshot; the files are read on a thread.

        Top-level errors: NOT_LEADER_OR_FOLLOWER after the driver has ended, INVALID_REQUEST for more than
        PARTITIONS_MAX partitions, and those of `read_snapshot`.
        """
        driver = self.driver
        if driver.has_ended:
            return m.FetchSnapshotResponse(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if sum(len(topic.partitions) for topic in request.topics) > PARTITIONS_MAX:
            return m.FetchSnapshotResponse(error_code=ErrorCode.INVALID_REQUEST)
        is_leader, leader = driver.is_leader, m.LeaderIdAndEpoch(driver.election.leader_id, driver.epoch)
        cluster_id = driver.config.cluster_id
        if is_leader and follows_leader(request, cluster_id, driver.epoch):
            driver.post(SnapshotServed(request.replica_id))
        limit, store = self.snapshot_response_bytes_max, driver.replica.store
        return await asyncio.to_thread(read_snapshot, request, store, cluster_id, leader, is_leader, limit)

    async def describe_quorum(
        self, request: m.DescribeQuorumRequest, context: RequestContext
    ) -> m.DescribeQuorumResponse:
        """Handle DescribeQuorum (55). A request without topics describes the metadata partition.

        Top-level error: INVALID_REQUEST for more than DESCRIBED_PARTITIONS_MAX partitions.
        """
        if sum(max(1, len(topic.partition_indexes)) for topic in request.topics) > DESCRIBED_PARTITIONS_MAX:
            return m.DescribeQuorumResponse(error_code=ErrorCode.INVALID_REQUEST)
        return self.driver.describe(request)


def follows_leader(request: m.FetchSnapshotRequest, cluster_id: str, epoch: int) -> bool:
    """Return whether the sender follows the leader of `epoch`, so that it counts for check-quorum (630-12).

    The request must name the metadata partition in that epoch, and no other cluster.
    """
    return request.cluster_id in (None, cluster_id) and any(
        topic.name == CLUSTER_METADATA_TOPIC and part.partition == 0 and part.current_leader_epoch == epoch
        for topic in request.topics
        for part in topic.partitions
    )


def read_snapshot(
    request: m.FetchSnapshotRequest,
    store: SnapshotStore,
    cluster_id: str,
    leader: m.LeaderIdAndEpoch,
    is_leader: bool,
    response_bytes_max: int,
) -> m.FetchSnapshotResponse:
    """Return the response to FetchSnapshot with bytes from `store`. Blocks on file I/O.

    Top-level errors: INCONSISTENT_CLUSTER_ID, and KAFKA_STORAGE_ERROR if the disk fails. A snapshot that was deleted
    meanwhile gets SNAPSHOT_NOT_FOUND. `leader` and `is_leader` describe the quorum when the request arrived.
    """

    def size_of(snapshot_id: m.SnapshotId) -> int | None:
        return store.size(snapshot_id) if snapshot_id.end_offset >= 0 and snapshot_id.epoch >= 0 else None

    deleted: set[m.SnapshotId] = set()

    def read(part: Part) -> bytes:
        data = store.read(part.snapshot_id, part.position, part.size)
        if data is None:
            deleted.add(part.snapshot_id)
        return data or b""

    served = ServedPartition(leader, is_leader, size_of)
    partitions = {(CLUSTER_METADATA_TOPIC, 0): served}
    try:
        response = plan_fetch_snapshot(request, cluster_id, partitions, response_bytes_max).filled(read)
    except StorageError as error:
        return m.FetchSnapshotResponse(error_code=error.code)
    return _without(response, deleted) if deleted else response


def _without(response: m.FetchSnapshotResponse, deleted: set[m.SnapshotId]) -> m.FetchSnapshotResponse:
    """Return the response with SNAPSHOT_NOT_FOUND for snapshots that were deleted between planning and reading."""

    def mark(part: m.PartitionSnapshotResponse) -> m.PartitionSnapshotResponse:
        if part.snapshot_id not in deleted:
            return part
        return part._replace(error_code=ErrorCode.SNAPSHOT_NOT_FOUND, size=0, unaligned_records=b"")

    topics = [topic._replace(partitions=tuple(map(mark, topic.partitions))) for topic in response.topics]
    return response._replace(topics=tuple(topics))
