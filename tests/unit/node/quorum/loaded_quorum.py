"""A metadata quorum over gRPC and files in which every node has a loader, as in controllers and brokers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kipmesh.core import record_batch
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.raft import State
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.messages import SnapshotId
from kipmesh.node import wall_ms
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.node.quorum.metrics import QuorumMetrics
from tests.unit.node.quorum.loader_support import NEVER, apply_own
from tests.unit.node.quorum.quorum_support import Node, Quorum, until


class LoadedNode:
    """The loader of one node between two boots."""

    def __init__(self, node: Node, snapshots: SnapshotLimits, retention: RetentionLimits) -> None:
        self.node = node
        self.registry = CollectorRegistry()
        self.published: list[tuple[int, MetadataDelta]] = []
        self.metrics = QuorumMetrics(self.registry)
        self.loader = MetadataLoader(
            node.driver,
            self.publish,
            self.metrics,
            node.failures.append,
            snapshots=snapshots,
            retention=retention,
            clean_interval_s=0.02,
        )
        self.listener = node.driver.listener
        node.driver.listener = self
        self.loader.start()

    async def publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self.published.append((image.offset, delta))

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        self.listener.state_changed(state, epoch, leader_id)
        self.loader.state_changed(state, epoch, leader_id)

    def committed(self, high_watermark: int) -> None:
        self.listener.committed(high_watermark)
        self.loader.committed(high_watermark)

    def truncated(self, offset: int) -> None:
        self.listener.truncated(offset)
        self.loader.truncated(offset)

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        self.listener.snapshot_installed(snapshot_id)
        self.loader.snapshot_installed(snapshot_id)


class LoadedQuorum(Quorum):
    """A quorum whose nodes have loaders."""

    def __init__(
        self,
        directory: Path,
        voters: int,
        observers: int = 0,
        *,
        snapshots: SnapshotLimits = NEVER,
        retention: RetentionLimits | None = None,
        **timing: Any,
    ) -> None:
        super().__init__(directory, voters, observers, **timing)
        self.loaded: dict[int, LoadedNode] = {}

        def add_loader(node: Node) -> None:
            self.loaded[node.node_id] = LoadedNode(node, snapshots, retention or RetentionLimits())

        self.on_boot = add_loader

    async def __aexit__(self, *_: object) -> None:
        for loaded in self.loaded.values():
            await loaded.loader.stop()
        await super().__aexit__()

    async def active(self) -> Node:
        """Wait for a leader whose image has all records of its log."""
        leader = await self.leader()
        await until(lambda: self.loaded[leader.node_id].loader.applied_end == leader.replica.log.log_end_offset)
        return leader

    def append_and_apply(self, leader: Node, records: Sequence[r.Record]) -> int:
        """Append and apply records as the active controller does, and return the log end offset."""
        epoch = leader.driver.epoch
        batch = record_batch.build(
            [(None, r.encode_record(record)) for record in records],
            base_offset=leader.replica.log.log_end_offset,
            leader_epoch=epoch,
            timestamp_ms=wall_ms(),
        )
        end = leader.driver.append(batch, epoch)
        apply_own(self.loaded[leader.node_id].loader, batch)
        return end

    async def applied_everywhere(self, end: int) -> None:
        """Wait until all running nodes have applied all records below `end`."""
        up = [node.node_id for node in self.all if node.is_up]
        await until(lambda: all(self.loaded[id_].loader.applied_end >= end for id_ in up))
