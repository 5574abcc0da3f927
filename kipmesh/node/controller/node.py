"""The controller process: what it is made of, in which order it starts and stops, and when it is active.

A voter of the metadata quorum. The driver replicates the log, the loader keeps the image of what is committed; while
this node leads, an `ActiveController` decides. It becomes active when the start of its epoch is committed and the image
has all that the log has, and is it no more in the same step in which it learns of another epoch. Whoever asks an
inactive controller is told who is active.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from kipmesh.core.config import ControllerConfig, TopicConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.raft import State
from kipmesh.messages import SnapshotId
from kipmesh.node.clock import monotonic_ms, wall_ms
from kipmesh.node.controller.active import ActiveController
from kipmesh.node.controller.handlers import controller_pipeline
from kipmesh.node.controller.metrics import ControllerMetrics
from kipmesh.node.controller.owner import DecideWith, as_kafka_error
from kipmesh.node.controller.parts import ControllerParts
from kipmesh.node.quorum.driver import QuorumDriver, raft_config
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.node.quorum.service import QuorumService
from kipmesh.node.quorum.snapshot_maker import retention_limits, snapshot_limits
from kipmesh.node.tls import ProcessTls
from kipmesh.rpc.client import ConnectionPool
from kipmesh.rpc.server import Server
from kipmesh.storage.errors import StorageError
from kipmesh.storage.fs import FileSystem, RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum_replica import QuorumReplica
from kipmesh.transport.metrics import RequestMetrics

log = structlog.get_logger(__name__)

SERVER_STOP_GRACE_S = 0.2
"""For answers under way; streams of fetchers end with it."""
OPEN_FILES_MAX = 64
ACTIVATION_RETRY_S = 0.5
"""After the log refused what a new epoch begins with, as on a full disk."""


class ControllerNode:
    """One voter of the metadata quorum; make it and use it inside one event loop. Also the driver's listener."""

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
        self._driver: QuorumDriver | None = None
        self._loader: MetadataLoader | None = None
        self._server: Server | None = None
        self._active: ActiveController | None = None
        self._activation: asyncio.Handle | None = None
        self._known_leader = -1

    @property
    def ready(self) -> bool:
        """Whether it serves and is active, or knows a leader and has metadata that was committed in its epoch."""
        driver, loader = self._driver, self._loader
        if driver is None or loader is None or self._is_stopped or not self.grpc_port or self.failed.done():
            return False
        if driver.is_leader:
            return self.is_active
        return driver.leader_id >= 0 and loader.applied_end > 0 and loader.image.epoch == driver.epoch

    @property
    def is_active(self) -> bool:
        """Whether this is the active controller."""
        return self._active is not None

    @property
    def image(self) -> MetadataImage:
        """The metadata as this node knows it: what is committed, on the active controller what is decided."""
        return self._loader.image if self._loader is not None else MetadataImage()

    @property
    def epoch(self) -> int:
        """The quorum's epoch."""
        return self._driver.epoch if self._driver is not None else 0

    # --- start and stop

    async def start(self) -> None:
        """Load, serve, take part in the quorum; raises KafkaError or PortInUseError with one clear line."""
        voters = tuple(voter.id for voter in self.config.voters)
        if self.config.node_id not in voters:
            raise InvalidConfigError(
                f"controller.quorum.voters: {self.config.controller_quorum_voters!r} must name this node "
                f"({self.config.node_id})"
            )
        if len(voters) % 2 == 0:
            log.warning("an even number of voters survives no more failures than one less", voters=list(voters))
        began_ms = monotonic_ms()
        try:
            replica = await asyncio.to_thread(self._load)
            driver, loader = self._make_quorum(replica)
            await self._serve(driver)
            driver.start()
            loader.start()
        except BaseException:
            await self.abort()
            raise
        log.info(
            "controller started",
            node_id=self.config.node_id,
            voters=list(voters),
            epoch=self.epoch,
            log_end_offset=replica.log.log_end_offset,
            port=self.grpc_port,
            took_ms=monotonic_ms() - began_ms,
        )

    def _load(self) -> QuorumReplica:
        """On a thread: the log, the snapshots, the vote."""
        self._is_loaded = True
        self._manager.load(wall_ms())
        return QuorumReplica.open(
            self._fs,
            self._manager,
            cluster_id=self.config.cluster_id,
            voters=raft_config(self.config).voters,
            is_voter=True,
            segment_bytes=self.config.metadata_log_segment_bytes,
            now_ms=wall_ms(),
        )

    def _make_quorum(self, replica: QuorumReplica) -> tuple[QuorumDriver, MetadataLoader]:
        config = self.config
        driver = QuorumDriver(
            raft_config(config),
            config.voters,
            replica,
            self._pool,
            self,
            self._fail,
            snapshot_response_bytes_max=config.replica_fetch_response_max_bytes,
        )
        loader = MetadataLoader(
            driver,
            self._published,
            snapshots=snapshot_limits(config),
            retention=retention_limits(config),
            metrics=self._quorum_metrics,
            on_failure=self._fail,
        )
        self._driver, self._loader = driver, loader
        self._metrics.watch(
            image=lambda: self.image,
            is_active=lambda: self.is_active,
            waiting_operations=self._waiting_operations,
            waiting_fetches=self._waiting_fetches,
        )
        return driver, loader

    async def _serve(self, driver: QuorumDriver) -> None:
        metrics = RequestMetrics()
        self.registry.register(metrics)
        quorum = QuorumService(driver, self._quorum_metrics.snapshot_served)
        parts = ControllerParts(
            do=self._do, now_ms=monotonic_ms, next_offset=self._end_offset, disconnected=self._disconnected
        )
        self._server = Server(
            controller_pipeline(parts, quorum, metrics),
            self.config.socket_request_max_bytes,
            tls=self.tls.mesh_server(self.config.mesh_listener),
        )
        listener = self.config.endpoints[0]
        self.grpc_port = await self._server.start(listener.host, listener.port)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Answer what was taken, let a successor lead, write everything, give the folder back; idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._active is not None:
            await self._active.drain(self.config.shutdown_grace_ms / 1000, self._refusal())
        epoch = self.epoch
        if self._driver is not None:
            await self._driver.stop()
        await self._end(SERVER_STOP_GRACE_S)
        if self._is_loaded:
            with contextlib.suppress(StorageError):  # told by `failed` already, or by the log
                if self.failed.done() and not self.failed.cancelled():
                    await asyncio.to_thread(self._manager.abandon)
                else:
                    await asyncio.to_thread(self._manager.close, epoch)
        if not self.failed.done():
            self.failed.cancel()
        log.info("controller stopped", node_id=self.config.node_id)

    async def abort(self) -> None:
        """Stop as a crash would, as far as one process can: nobody is told, nothing is flushed or marked clean."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._driver is not None:
            await self._driver.abort()
        await self._end(0)
        if self._is_loaded:
            await asyncio.to_thread(self._manager.abandon)

    async def _end(self, grace_s: float) -> None:
        if self._activation is not None:
            self._activation.cancel()
        self._deactivate(self._refusal())
        if self._loader is not None:
            await self._loader.stop()
        if self._server is not None and self.grpc_port:
            with contextlib.suppress(asyncio.CancelledError):
                await self._server.stop(grace_s)
        await self._pool.close()
        self.tls.close()

    def _fail(self, error: BaseException) -> None:
        """This node cannot go on; what waits may be done or not, and where there are others, they know."""
        log.error("controller failed", error=str(error))
        alone = len(self.config.voters) == 1
        self._deactivate(as_kafka_error(error) if alone else self._outcome_unknown("has failed"))
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # somebody may never look: no warning then

    # --- what the driver tells

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Another state, epoch or leader: an epoch that this node led may be over."""
        if leader_id not in (-1, self._known_leader):
            self._known_leader = leader_id
            self._metrics.new_active_controllers.inc()
        active = self._active
        if active is not None and (state is not State.LEADER or epoch != active.epoch):
            log.info("not the active controller any more", epoch=active.epoch, waiting=active.waiting)
            self._deactivate(self._outcome_unknown(f"is not active any more; {self._who_is_active()}"))
        self._activate_soon()

    def committed(self, high_watermark: int) -> None:
        """The high watermark rose: answers may go out."""
        assert self._loader is not None
        self._loader.committed(high_watermark)
        if self._active is not None:
            self._active.committed(high_watermark)
        else:
            self._activate_soon()

    def truncated(self, offset: int) -> None:
        """The log was cut."""
        assert self._loader is not None
        self._loader.truncated(offset)

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """The log was replaced."""
        assert self._loader is not None
        self._loader.snapshot_installed(snapshot_id)

    async def _published(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """The image is that of the high watermark."""
        self._activate()

    # --- being active

    def _activate_soon(self) -> None:
        """Not within a step of the driver, which takes no appends meanwhile."""
        if self._activation is None:
            self._activation = asyncio.get_running_loop().call_soon(self._activate)

    def _activate(self) -> None:
        """Become active if everything is there for it."""
        if self._activation is not None:
            self._activation.cancel()
            self._activation = None
        driver, loader = self._driver, self._loader
        if driver is None or loader is None or self._is_stopped or self.failed.done() or self._active is not None:
            return
        leadership, end = driver.machine.leadership, self._end_offset()
        if not driver.is_leader or leadership is None or leadership.epoch_start_offset >= driver.high_watermark:
            return
        if not end == driver.high_watermark == loader.applied_end:
            return
        active = self._active = ActiveController(
            self.config, driver.epoch, driver, loader, self._metrics, self._fail, knocks=True
        )
        try:
            active.start()
        except KafkaError as error:
            log.warning("the controller cannot begin its epoch", epoch=active.epoch, error=str(error))
            self._deactivate(error)
            loop = asyncio.get_running_loop()
            self._activation = loop.call_later(ACTIVATION_RETRY_S, self._activate)
            return
        log.info(
            "active controller", epoch=active.epoch, brokers=len(self.image.brokers), topics=len(self.image.topics)
        )

    def _deactivate(self, refusal: KafkaError) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.end(refusal)

    async def _do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        active = self._active
        if active is None:
            raise self._refusal()
        leadership = self._driver.machine.leadership if self._driver is not None else None
        if leadership is None or leadership.has_lost_quorum(monotonic_ms()):
            # The process may have stood still: what lies in its sockets is no more for this epoch to answer.
            raise KafkaError(ErrorCode.NOT_CONTROLLER, f"controller {self.config.node_id} has lost its quorum")
        return await active.do(operation, decide, is_cleanup=is_cleanup)

    def _disconnected(self, broker_id: int, connection: int) -> None:
        """A broker's heartbeats have lost their connection; who was not active then has seen nothing."""
        if self._active is not None:
            self._active.disconnected(broker_id, connection)

    def _refusal(self) -> KafkaError:
        if self._is_stopped:
            return KafkaError(ErrorCode.NOT_CONTROLLER, f"controller {self.config.node_id} stops")
        return KafkaError(ErrorCode.NOT_CONTROLLER, self._who_is_active())

    def _outcome_unknown(self, why: str) -> KafkaError:
        text = f"what it had taken may be done or not: controller {self.config.node_id} {why}"
        return KafkaError(ErrorCode.NOT_CONTROLLER, text)

    def _who_is_active(self) -> str:
        leader = self._driver.leader if self._driver is not None else None
        if leader is None or self.failed.done():
            return "no controller is active"
        if leader.id == self.config.node_id:
            return f"controller {leader.id} is about to be active"
        return f"controller {leader.id} ({leader.address}) is active"

    # --- what metrics and services read

    def _end_offset(self) -> int:
        assert self._driver is not None
        return self._driver.replica.log.log_end_offset

    def _waiting_operations(self) -> int:
        active = self._active
        return active.waiting if active is not None else 0

    def _waiting_fetches(self) -> int:
        leadership = self._driver.machine.leadership if self._driver is not None else None
        return len(leadership.waiting) if leadership is not None else 0
