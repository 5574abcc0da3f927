"""A broker as an observer of the metadata quorum: fetches, loads and publishes `__cluster_metadata-0`.

The driver fetches the log. The loader applies committed records, and makes and deletes the broker's own snapshots
(630-03). The publisher applies the metadata to the broker. The controller channel follows the quorum's leader.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.broker.membership.publisher import MetadataPublisher
from kipmesh.core.config import BrokerConfig
from kipmesh.core.raft import State
from kipmesh.messages import SnapshotId
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.quorum.driver import QuorumDriver, raft_config
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.node.quorum.metrics import QuorumMetrics, SnapshotSeen
from kipmesh.node.quorum.snapshot_maker import CLEAN_INTERVAL_S, retention_limits, snapshot_limits
from kipmesh.storage.fs import FileSystem, StorageError
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.transport.grpc.client import ConnectionPool


def open_replica(config: BrokerConfig, fs: FileSystem, log_manager: LogManager) -> QuorumReplica:
    """Open the broker's replica of the metadata log in its metadata log directory. Blocks.

    Without a valid snapshot, an observer fetches the metadata again instead of failing (630-14). Raises StorageError.
    """
    return QuorumReplica.open(
        log_manager,
        cluster_id=config.cluster_id,
        voters=tuple(voter.id for voter in config.voters),
        is_voter=False,
        segment_bytes=config.metadata_log_segment_bytes,
        now_ms=wall_ms(),
    )


@dataclass(eq=False)
class BrokerQuorum:
    """The metadata quorum replica of one broker: its driver and its loader. Implements `QuorumListener`.

    Args: on_failure: receives an error that must end the process; controller_changed: receives the leader's id, -1 if
    it is unknown, and the epoch; on_snapshot: receives each snapshot that was made, fetched or loaded.
    """

    config: BrokerConfig
    replica: QuorumReplica
    pool: ConnectionPool
    channel: ControllerChannel
    publisher: MetadataPublisher
    registry: CollectorRegistry
    on_failure: Callable[[BaseException], None]
    controller_changed: Callable[[int, int], None]
    on_snapshot: Callable[[SnapshotSeen], None] | None = None

    def __post_init__(self) -> None:
        self._metrics = QuorumMetrics(self.registry)
        self._metrics.on_snapshot = self.on_snapshot
        self._voters = {voter.id: voter for voter in self.config.voters}
        self.driver = QuorumDriver(
            raft_config(self.config), self.config.voters, self.replica, self.pool, self, self.on_failure
        )
        self.loader = MetadataLoader(
            self.driver,
            self.publisher.publish,
            snapshots=snapshot_limits(self.config),
            retention=retention_limits(self.config),
            metrics=self._metrics,
            on_failure=self.on_failure,
            idle=self.publisher.idle,
            clean_interval_s=CLEAN_INTERVAL_S,
        )
        self.committed = self.loader.committed
        """Driver event: the high watermark advanced."""
        self.truncated = self.loader.truncated
        """Driver event: the log was truncated."""

    def start(self) -> None:
        """Start fetching, loading and publishing the metadata."""
        self.loader.start()
        self.driver.start()

    async def stop(self) -> None:
        """Stop the loader and the driver, and sync the metadata log to disk."""
        await self.loader.stop()
        await self.driver.stop()

    async def abort(self) -> None:
        """Stop the loader and the driver as in a crash, without syncing the metadata log."""
        await self.loader.stop()
        await self.driver.abort()

    # --- events of the driver ----------------------------------------------------------------------------------------

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Driver event: the state, the epoch or the leader (-1: unknown) changed."""
        self.channel.leader_changed(self._voters.get(leader_id))
        self.controller_changed(leader_id, epoch)

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """Driver event: a fetched snapshot replaced the log."""
        self.loader.snapshot_installed(snapshot_id)
        fetcher = self.driver.fetcher
        took_ms = None if fetcher is None else monotonic_ms() - fetcher.started_ms
        size_bytes = None
        with suppress(StorageError):
            size_bytes = self.replica.store.size(snapshot_id)
        self._metrics.snapshot_fetched(snapshot_id, size_bytes, took_ms)
