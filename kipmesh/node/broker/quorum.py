"""A broker as an observer of the metadata quorum: its replica of `__cluster_metadata-0`, followed, loaded, published.

The driver fetches, the loader applies what is committed and makes and cleans the broker's own snapshots (630-03), the
publisher lets the broker act on it, and the channel to the active controller goes where the quorum's leader is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry

from kipmesh.core.config import BrokerConfig
from kipmesh.core.raft import State
from kipmesh.messages import SnapshotId
from kipmesh.node.broker.controller_channel import ControllerChannel
from kipmesh.node.broker.publisher import MetadataPublisher
from kipmesh.node.clock import monotonic_ms, wall_ms
from kipmesh.node.quorum.driver import QuorumDriver, raft_config
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.node.quorum.metrics import QuorumMetrics, SnapshotSeen
from kipmesh.node.quorum.snapshot_maker import CLEAN_INTERVAL_S, retention_limits, snapshot_limits
from kipmesh.rpc.client import ConnectionPool
from kipmesh.storage.errors import StorageError
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum_replica import QuorumReplica


def open_replica(config: BrokerConfig, fs: FileSystem, log_manager: LogManager) -> QuorumReplica:
    """The broker's replica, in one of its data folders; an observer never refuses to start (630-14). Blocks."""
    return QuorumReplica.open(
        fs,
        log_manager,
        cluster_id=config.cluster_id,
        voters=tuple(voter.id for voter in config.voters),
        is_voter=False,
        segment_bytes=config.metadata_log_segment_bytes,
        now_ms=wall_ms(),
    )


class BrokerQuorum:
    """Driver and loader of one broker, and who is told of what."""

    def __init__(
        self,
        config: BrokerConfig,
        replica: QuorumReplica,
        pool: ConnectionPool,
        channel: ControllerChannel,
        publisher: MetadataPublisher,
        registry: CollectorRegistry,
        on_failure: Callable[[BaseException], None],
        controller_changed: Callable[[int, int], None],
        on_snapshot: Callable[[SnapshotSeen], None] | None = None,
    ) -> None:
        """`controller_changed` is given the leader, -1 for none that is known, and its epoch."""
        self.replica = replica
        self._metrics = QuorumMetrics(registry)
        self._metrics.on_snapshot = on_snapshot
        self._controller_changed = controller_changed
        self._channel = channel
        self._voters = {voter.id: voter for voter in config.voters}
        self.driver = QuorumDriver(raft_config(config), config.voters, replica, pool, self, on_failure)
        self.loader = MetadataLoader(
            self.driver,
            publisher.publish,
            snapshots=snapshot_limits(config),
            retention=retention_limits(config),
            metrics=self._metrics,
            on_failure=on_failure,
            idle=publisher.idle,
            clean_interval_s=CLEAN_INTERVAL_S,
        )

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
        self._channel.leader_changed(self._voters.get(leader_id))
        self._controller_changed(leader_id, epoch)

    def committed(self, high_watermark: int) -> None:
        """More may be applied."""
        self.loader.committed(high_watermark)

    def truncated(self, offset: int) -> None:
        """The log was cut."""
        self.loader.truncated(offset)

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """A snapshot took the log's place."""
        self.loader.snapshot_installed(snapshot_id)
        fetcher = self.driver.fetcher
        took_ms = None if fetcher is None else monotonic_ms() - fetcher.begun_ms
        size_bytes = None
        with suppress(StorageError):
            size_bytes = self.replica.store.size(snapshot_id)
        self._metrics.snapshot_fetched(snapshot_id, size_bytes, took_ms)
