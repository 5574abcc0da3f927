"""A broker as an observer of the metadata quorum: its replica of `__cluster_metadata-0`, followed, loaded, published.

The driver fetches, the loader applies what is committed and makes and cleans the broker's own snapshots (630-03), the
publisher lets the broker act on it, and the channel to the active controller goes where the quorum's leader is.
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
    """The broker's replica, in one of its data folders; an observer never refuses to start (630-14). Blocks."""
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
    """Driver and loader of one broker, and who is told of what.

    `controller_changed` is given the leader, -1 for none that is known, and its epoch.
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
        """More may be applied."""
        self.truncated = self.loader.truncated
        """The log was cut."""

    def start(self) -> None:
        """Follow the quorum."""
        self.loader.start()
        self.driver.start()

    async def stop(self) -> None:
        """Follow it no more, and make the log durable."""
        await self.loader.stop()
        await self.driver.stop()

    async def abort(self) -> None:
        """End as a crash would."""
        await self.loader.stop()
        await self.driver.abort()

    # --- what the driver tells -------------------------------------------------------------------------------------

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Another leader, or none that is known."""
        self.channel.leader_changed(self._voters.get(leader_id))
        self.controller_changed(leader_id, epoch)

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """A snapshot took the log's place."""
        self.loader.snapshot_installed(snapshot_id)
        fetcher = self.driver.fetcher
        took_ms = None if fetcher is None else monotonic_ms() - fetcher.begun_ms
        size_bytes = None
        with suppress(StorageError):
            size_bytes = self.replica.store.size(snapshot_id)
        self._metrics.snapshot_fetched(snapshot_id, size_bytes, took_ms)
