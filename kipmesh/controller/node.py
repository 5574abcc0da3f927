"""The controller node: its parts, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import contextlib

import structlog
from prometheus_client import CollectorRegistry

from kipmesh.controller.active import ActiveController
from kipmesh.controller.decision_queue import ControllerParts
from kipmesh.controller.handlers import controller_pipeline
from kipmesh.controller.metrics import ControllerMetrics
from kipmesh.controller.quorum_controller import QuorumController
from kipmesh.core.config import ControllerConfig, TopicConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.quorum.driver import raft_config
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.node.quorum.service import QuorumService
from kipmesh.node.tls import ProcessTls
from kipmesh.storage.fs import FileSystem, RealFileSystem, StorageError
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.transport.grpc.client import ConnectionPool
from kipmesh.transport.grpc.server import Server
from kipmesh.transport.metrics import RequestMetrics

log = structlog.get_logger(__name__)

SERVER_STOP_GRACE_S = 0.2
"""Time for responses in progress; fetch streams are closed after it."""
OPEN_FILES_MAX = 64


class ControllerNode:
    """One voter of the metadata quorum, within one event loop. A fatal error is set on the future `failed`, which
    `stop` cancels.

    | part                | purpose                                          | calls                             |
    | ------------------- | ------------------------------------------------ | --------------------------------- |
    | `LogManager`        | the metadata log directory                       |                                   |
    | `ConnectionPool`    | connections to the other voters                  |                                   |
    | `QuorumController`  | log, image and, while active, decisions          | log, connections; fails `failed`  |
    | `Server`            | gRPC: APIs of the quorum and of the controller   | `QuorumController`                |
    | `ControllerMetrics` | counters, and gauges of the `QuorumController`   | `QuorumController`                |
    """

    def __init__(self, config: ControllerConfig, *, fs: FileSystem | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.grpc_port = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tls = ProcessTls(config, self.registry)
        self._fs = fs or RealFileSystem()
        self._metrics = ControllerMetrics(self.registry)
        self._quorum_metrics = QuorumMetrics(self.registry)
        self._manager = LogManager(
            self._fs,
            (config.metadata_log_dir,),
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            defaults=TopicConfig.parse({}),
            open_files_max=OPEN_FILES_MAX,
        )
        self._pool = ConnectionPool(f"controller-{config.node_id}", self.tls.mesh_client())
        self._is_loaded = False
        self._is_stopped = False
        self._quorum: QuorumController | None = None
        self._server: Server | None = None

    @property
    def ready(self) -> bool:
        """Whether the node serves requests and either is active or has metadata of the current leader's epoch."""
        is_serving = self.grpc_port and not self._is_stopped and not self.failed.done()
        return bool(is_serving and self._quorum is not None and self._quorum.ready)

    @property
    def active(self) -> ActiveController | None:
        """The `ActiveController` of this node while it is the active controller, else None."""
        return self._quorum.active if self._quorum is not None else None

    @property
    def is_active(self) -> bool:
        """Whether this node is the active controller."""
        return self.active is not None

    @property
    def image(self) -> MetadataImage:
        """The committed metadata; on the active controller, also its uncommitted decisions. Empty before the log is
        loaded."""
        return self._quorum.image if self._quorum is not None else MetadataImage()

    @property
    def epoch(self) -> int:
        """The quorum epoch, or 0 before the log is loaded."""
        return self._quorum.driver.epoch if self._quorum is not None else 0

    async def start(self) -> None:
        """Load the log, serve gRPC and join the quorum. Raises InvalidConfigError (this node is not a voter),
        PortInUseError or StorageError. After a failure the node is aborted."""
        voters = [voter.id for voter in self.config.voters]
        if self.config.node_id not in voters:
            raise InvalidConfigError(
                f"controller.quorum.voters must contain node.id {self.config.node_id}, "
                f"got {self.config.controller_quorum_voters!r}"
            )
        if len(voters) % 2 == 0:
            log.warning("even number of voters, one less tolerates as many failures", voters=voters)
        started_ms = monotonic_ms()
        try:
            quorum = self._quorum = QuorumController(
                self.config,
                await asyncio.to_thread(self._load),
                pool=self._pool,
                metrics=self._metrics,
                quorum_metrics=self._quorum_metrics,
                failed=self.failed,
            )
            self._metrics.watch(quorum)
            await self._serve(quorum)
            quorum.start()
        except BaseException:
            await self.abort()
            raise
        log.info(
            "controller started",
            node_id=self.config.node_id,
            voters=voters,
            epoch=self.epoch,
            log_end_offset=quorum.end_offset(),
            port=self.grpc_port,
            took_ms=monotonic_ms() - started_ms,
        )

    def _load(self) -> QuorumReplica:
        """Load log, snapshots and vote from disk. Runs on a thread. Raises StorageError."""
        self._is_loaded = True
        self._manager.load(wall_ms())
        return QuorumReplica.open(
            self._manager,
            cluster_id=self.config.cluster_id,
            voters=raft_config(self.config).voters,
            is_voter=True,
            segment_bytes=self.config.metadata_log_segment_bytes,
            now_ms=wall_ms(),
        )

    async def _serve(self, quorum: QuorumController) -> None:
        metrics = RequestMetrics()
        self.registry.register(metrics)
        service = QuorumService(
            quorum.driver,
            self._quorum_metrics.snapshot_served,
            snapshot_response_bytes_max=self.config.replica_fetch_response_max_bytes,
        )
        parts = ControllerParts(
            do=quorum.do,
            now_ms=monotonic_ms,
            next_offset=quorum.end_offset,
            disconnected=quorum.disconnected,
        )
        self._server = Server(
            controller_pipeline(parts, service, metrics),
            self.config.socket_request_max_bytes,
            tls=self.tls.mesh_server(self.config.mesh_listener),
        )
        listener = self.config.endpoints[0]
        self.grpc_port = await self._server.start(listener.host, listener.port)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Commit pending operations, resign as leader, flush and close the log. After a fatal error, the log is closed
        without being marked as cleanly shut down. Idempotent."""
        if not self._is_stopped:
            await self._stop(cleanly=True)
            if not self.failed.done():
                self.failed.cancel()
            log.info("controller stopped", node_id=self.config.node_id)

    async def abort(self) -> None:
        """Stop as in a crash: no peer is notified, nothing is flushed, and the log is not marked as cleanly shut down.
        Idempotent."""
        if not self._is_stopped:
            await self._stop(cleanly=False)

    async def _stop(self, *, cleanly: bool) -> None:
        self._is_stopped = True
        epoch = self.epoch
        if self._quorum is not None:
            await self._quorum.stop(cleanly=cleanly)
        if self._server is not None and self.grpc_port:
            with contextlib.suppress(asyncio.CancelledError):
                await self._server.stop(SERVER_STOP_GRACE_S if cleanly else 0)
        await self._pool.close()
        self.tls.close()
        has_failed = self.failed.done() and not self.failed.cancelled()
        if self._is_loaded:
            with contextlib.suppress(StorageError):  # already reported by `failed` or in the log
                if has_failed or not cleanly:
                    await asyncio.to_thread(self._manager.abandon)
                else:
                    await asyncio.to_thread(self._manager.close, epoch)
