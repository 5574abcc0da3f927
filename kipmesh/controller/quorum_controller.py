"""One voter of the metadata quorum: the log, the image and, while this node leads, the active controller.

The driver replicates the log and the loader keeps the image of the committed records. While this node leads, an
`ActiveController` makes decisions: from the moment the start of its epoch is committed and the image contains the whole
log, until the step in which the driver observes another epoch. An inactive controller refuses requests with
NOT_CONTROLLER and names the active one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from kipmesh.controller.active import ActiveController
from kipmesh.controller.decision_queue import DecideWith, as_kafka_error
from kipmesh.controller.metrics import ControllerMetrics
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
"""Time between attempts to activate when the first records of an epoch cannot be appended (full disk)."""


class QuorumController:
    """The controller part of one voter, and the listener of its `QuorumDriver`. Use it within one event loop.

    The future `failed` receives the error if this node cannot continue.
    """

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
        """Whether this node is active, or knows a leader and has committed metadata of that leader's epoch."""
        driver, loader = self.driver, self.loader
        if driver.is_leader:
            return self.active is not None
        return driver.election.leader_id >= 0 and loader.applied_end > 0 and loader.image.epoch == driver.epoch

    @property
    def image(self) -> MetadataImage:
        """The committed metadata; on the active controller, also its uncommitted decisions."""
        return self.loader.image

    def end_offset(self) -> int:
        """Return the log end offset of the metadata log."""
        return self.driver.replica.log.log_end_offset

    @property
    def pending_operations(self) -> int:
        """Number of operations that are queued or not yet committed; 0 while inactive."""
        return self.active.pending if self.active is not None else 0

    @property
    def waiting_fetches(self) -> int:
        """Number of quorum fetches that wait at this leader for new records; 0 on other voters."""
        leadership = self.driver.machine.leadership
        return len(leadership.waiting) if leadership is not None else 0

    def start(self) -> None:
        """Join the quorum and start loading the image."""
        self.driver.start()
        self.loader.start()

    async def stop(self, *, cleanly: bool) -> None:
        """Stop. If `cleanly`, first commit pending operations for up to `shutdown.grace.ms`, resign as leader and flush
        the log. Remaining operations fail with NOT_CONTROLLER."""
        self._is_stopped = True
        if cleanly and self.active is not None:
            await self.active.drain(self._config.shutdown_grace_ms / 1000, self._refusal())
        await (self.driver.stop() if cleanly else self.driver.abort())
        if self._activation is not None:
            self._activation.cancel()
        self._deactivate(self._refusal())
        await self.loader.stop()

    def _fail(self, error: BaseException) -> None:
        """Stop being a controller after a fatal error. Other voters, if any, may still commit pending operations."""
        log.error("controller failed", error=str(error))
        alone = len(self._config.voters) == 1
        self._deactivate(as_kafka_error(error) if alone else self._outcome_unknown("has failed"))
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # retrieved: no warning if the owner never awaits it

    # --- notifications of the driver and the loader

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Deactivate if `state` and `epoch` end the epoch that this node led, and schedule an activation if this node
        may lead now. `leader_id` is -1 if the leader is unknown."""
        if leader_id not in (-1, self._known_leader):
            self._known_leader = leader_id
            self._metrics.new_active_controllers.inc()
        active = self.active
        if active is not None and (state is not State.LEADER or epoch != active.epoch):
            log.info("controller deactivated", epoch=active.epoch, pending=active.pending)
            self._deactivate(self._outcome_unknown(f"is no longer active; {self._describe_active()}"))
        self._activate_soon()

    def committed(self, high_watermark: int) -> None:
        """Apply the records below `high_watermark`, and complete the responses that waited for their commit."""
        self.loader.committed(high_watermark)
        if self.active is not None:
            self.active.committed(high_watermark)
        else:
            self._activate_soon()

    async def _published(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Activate if possible, now that the image has reached the high watermark."""
        self._activate()

    # --- the active controller

    def _activate_soon(self) -> None:
        """Schedule `_activate`: the driver refuses appends during its own steps."""
        if self._activation is None:
            self._activation = asyncio.get_running_loop().call_soon(self._activate)

    def _activate(self) -> None:
        """Become active if this node leads, the start of its epoch is committed and the image contains the whole
        log."""
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
            log.warning("controller activation failed", epoch=active.epoch, error=str(error))
            self._deactivate(error)
            self._activation = asyncio.get_running_loop().call_later(ACTIVATION_RETRY_S, self._activate)
            return
        image = self.image
        log.info("controller activated", epoch=active.epoch, brokers=len(image.brokers), topics=len(image.topics))

    def _deactivate(self, refusal: KafkaError) -> None:
        active, self.active = self.active, None
        if active is not None:
            active.end(refusal)

    async def do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        """Make a decision and return its response once it is committed. `operation` names it in metrics.

        Raises KafkaError: NOT_CONTROLLER if this controller is not active, has lost contact with a majority or stops
        being active before the commit (a single voter that failed raises its fatal error instead); REQUEST_TIMED_OUT if
        too many operations are pending; or the error of the decision.
        """
        active, leadership = self.active, self.driver.machine.leadership
        if active is None:
            raise self._refusal()
        if leadership is None or leadership.has_lost_quorum(monotonic_ms()):
            # The process may have been paused: requests left in its sockets must not be decided in this epoch.
            raise KafkaError(ErrorCode.NOT_CONTROLLER, f"controller {self._config.node_id} has lost its quorum")
        return await active.do(operation, decide, is_cleanup=is_cleanup)

    def disconnected(self, broker_id: int, connection: int) -> None:
        """Record the end of a broker's heartbeat stream; ignored while inactive."""
        if self.active is not None:
            self.active.disconnected(broker_id, connection)

    def _refusal(self) -> KafkaError:
        text = f"controller {self._config.node_id} is stopping" if self._is_stopped else self._describe_active()
        return KafkaError(ErrorCode.NOT_CONTROLLER, text)

    def _outcome_unknown(self, reason: str) -> KafkaError:
        text = f"the request may or may not take effect: controller {self._config.node_id} {reason}"
        return KafkaError(ErrorCode.NOT_CONTROLLER, text)

    def _describe_active(self) -> str:
        leader = self.driver.leader
        if leader is None or self._failed.done():
            return "no controller is active"
        if leader.id == self._config.node_id:
            return f"controller {leader.id} is becoming active"
        return f"controller {leader.id} ({leader.address}) is active"
