"""This node's part in the metadata quorum: the log, the image and, while it leads, the active controller.

The driver replicates the log, the loader keeps the image of what is committed; while this node leads, an
`ActiveController` decides. It becomes active when the start of its epoch is committed and the image has all that the
log has, and is it no more in the same step in which it observes another epoch. An inactive controller refuses requests
with NOT_CONTROLLER and names the active one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from kipmesh.controller.active import ActiveController
from kipmesh.controller.metrics import ControllerMetrics
from kipmesh.controller.owner import DecideWith, as_kafka_error
from kipmesh.core.config import ControllerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.raft import State
from kipmesh.node import monotonic_ms
from kipmesh.node.quorum.driver import QuorumDriver, raft_config
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.node.quorum.snapshot_maker import retention_limits, snapshot_limits
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.transport.grpc.client import ConnectionPool

log = structlog.get_logger(__name__)

ACTIVATION_RETRY_S = 0.5
"""After the log refused what a new epoch begins with, as on a full disk."""


class QuorumController:
    """One voter; make it and use it inside one event loop. Also the driver's listener."""

    def __init__(
        self,
        config: ControllerConfig,
        replica: QuorumReplica,
        *,
        pool: ConnectionPool,
        metrics: ControllerMetrics,
        quorum_metrics: QuorumMetrics,
        failed: asyncio.Future[None],
    ) -> None:
        """`failed` gets the error when this node cannot go on."""
        self.active: ActiveController | None = None
        self._config = config
        self._metrics = metrics
        self._failed = failed
        self.driver = QuorumDriver(
            raft_config(config), config.voters, replica, pool=pool, listener=self, on_failure=self._fail
        )
        self.loader = MetadataLoader(
            self.driver,
            publish=self._published,
            snapshots=snapshot_limits(config),
            retention=retention_limits(config),
            metrics=quorum_metrics,
            on_failure=self._fail,
        )
        self.truncated = self.loader.truncated
        self.snapshot_installed = self.loader.snapshot_installed
        self._activation: asyncio.Handle | None = None
        self._known_leader = -1
        self._is_stopped = False

    @property
    def ready(self) -> bool:
        """Whether it is active, or knows a leader and has metadata that was committed in its epoch."""
        driver, loader = self.driver, self.loader
        if driver.is_leader:
            return self.active is not None
        return driver.election.leader_id >= 0 and loader.applied_end > 0 and loader.image.epoch == driver.epoch

    @property
    def image(self) -> MetadataImage:
        """The metadata as this node knows it: what is committed, on the active controller what is decided."""
        return self.loader.image

    def end_offset(self) -> int:
        """The log end offset of the metadata log."""
        return self.driver.replica.log.log_end_offset

    @property
    def waiting_operations(self) -> int:
        """Decisions whose responses wait to be committed."""
        return self.active.waiting if self.active is not None else 0

    @property
    def waiting_fetches(self) -> int:
        """Fetches that wait for new records."""
        leadership = self.driver.machine.leadership
        return len(leadership.waiting) if leadership is not None else 0

    def start(self) -> None:
        """Take part in the quorum."""
        self.driver.start()
        self.loader.start()

    async def stop(self, *, cleanly: bool) -> None:
        """Respond to what was accepted, let a successor lead, and write everything; or none of that, as in a crash."""
        self._is_stopped = True
        if cleanly and self.active is not None:
            await self.active.drain(self._config.shutdown_grace_ms / 1000, self._refusal())
        await (self.driver.stop() if cleanly else self.driver.abort())
        if self._activation is not None:
            self._activation.cancel()
        self._deactivate(self._refusal())
        await self.loader.stop()

    def _fail(self, error: BaseException) -> None:
        """This node cannot go on; pending operations may be done or not. Other voters, if any, decide that."""
        log.error("controller failed", error=str(error))
        alone = len(self._config.voters) == 1
        self._deactivate(as_kafka_error(error) if alone else self._outcome_unknown("has failed"))
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # nobody may await it: no warning then

    # --- what the driver and the loader report

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Another state, epoch or leader: an epoch that this node led may be over."""
        if leader_id not in (-1, self._known_leader):
            self._known_leader = leader_id
            self._metrics.new_active_controllers.inc()
        active = self.active
        if active is not None and (state is not State.LEADER or epoch != active.epoch):
            log.info("not the active controller any more", epoch=active.epoch, waiting=active.waiting)
            self._deactivate(self._outcome_unknown(f"is not active any more; {self._who_is_active()}"))
        self._activate_soon()

    def committed(self, high_watermark: int) -> None:
        """The high watermark rose: responses may be sent."""
        self.loader.committed(high_watermark)
        if self.active is not None:
            self.active.committed(high_watermark)
        else:
            self._activate_soon()

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
        driver, leadership = self.driver, self.driver.machine.leadership
        if self._is_stopped or self._failed.done() or self.active is not None:
            return
        if not driver.is_leader or leadership is None or leadership.epoch_start_offset >= driver.high_watermark:
            return
        if not self.end_offset() == driver.high_watermark == self.loader.applied_end:
            return
        active = self.active = ActiveController(
            self._config,
            epoch=driver.epoch,
            driver=driver,
            loader=self.loader,
            metrics=self._metrics,
            on_failure=self._fail,
            probes_brokers=True,
        )
        try:
            active.start()
        except KafkaError as error:
            log.warning("the controller cannot begin its epoch", epoch=active.epoch, error=str(error))
            self._deactivate(error)
            self._activation = asyncio.get_running_loop().call_later(ACTIVATION_RETRY_S, self._activate)
            return
        image = self.image
        log.info("active controller", epoch=active.epoch, brokers=len(image.brokers), topics=len(image.topics))

    def _deactivate(self, refusal: KafkaError) -> None:
        active, self.active = self.active, None
        if active is not None:
            active.end(refusal)

    async def do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        """Make a decision while this controller is active; raises KafkaError(NOT_CONTROLLER) if it is not."""
        active, leadership = self.active, self.driver.machine.leadership
        if active is None:
            raise self._refusal()
        if leadership is None or leadership.has_lost_quorum(monotonic_ms()):
            # The process may have stood still: what lies in its sockets is no more for this epoch to answer.
            raise KafkaError(ErrorCode.NOT_CONTROLLER, f"controller {self._config.node_id} has lost its quorum")
        return await active.do(operation, decide, is_cleanup=is_cleanup)

    def disconnected(self, broker_id: int, connection: int) -> None:
        """A broker's heartbeats have lost their connection; an inactive controller ignores that."""
        if self.active is not None:
            self.active.disconnected(broker_id, connection)

    def _refusal(self) -> KafkaError:
        text = f"controller {self._config.node_id} stops" if self._is_stopped else self._who_is_active()
        return KafkaError(ErrorCode.NOT_CONTROLLER, text)

    def _outcome_unknown(self, why: str) -> KafkaError:
        text = f"what it had taken may be done or not: controller {self._config.node_id} {why}"
        return KafkaError(ErrorCode.NOT_CONTROLLER, text)

    def _who_is_active(self) -> str:
        leader = self.driver.leader
        if leader is None or self._failed.done():
            return "no controller is active"
        if leader.id == self._config.node_id:
            return f"controller {leader.id} is about to be active"
        return f"controller {leader.id} ({leader.address}) is active"
