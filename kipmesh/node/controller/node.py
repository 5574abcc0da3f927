"""The controller process: what it is made of, in which order it starts and stops.

Start: open and recover the metadata log, replay it into the image, begin a new epoch, serve. One voter is the whole
quorum here (2 of 8 brings more), so it is active from its start on. The owner task alone changes the image; sessions
end by one timer, set to when the first of them would.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from kipmesh.core.config import ControllerConfig
from kipmesh.core.errors import InvalidConfigError, KafkaError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.node.clock import monotonic_ms, wall_ms
from kipmesh.node.controller.events import log_decided
from kipmesh.node.controller.metadata_log import MetadataLog
from kipmesh.node.controller.metrics import ControllerMetrics
from kipmesh.node.controller.owner import Owner
from kipmesh.node.controller.quorum import QuorumService, QuorumState
from kipmesh.node.controller.services import AdminService, ControllerService
from kipmesh.rpc.server import Server
from kipmesh.storage.errors import StorageError
from kipmesh.storage.fs import FileSystem, RealFileSystem

log = structlog.get_logger(__name__)

SERVER_STOP_GRACE_S = 0.2
"""For answers under way; streams of fetchers end with it."""
SESSION_RETRY_S = 0.1
_RESERVED_ID_START = 0b111110
"""Kafka's random ids never begin with `-` in their base64 form."""


def new_topic_id() -> bytes:
    """A random topic id as Kafka makes them."""
    while True:
        topic_id = uuid.uuid4().bytes
        if topic_id[0] >> 2 != _RESERVED_ID_START:
            return topic_id


class ControllerNode:
    """One voter of the metadata quorum; make it and use it inside one event loop."""

    def __init__(self, config: ControllerConfig, *, fs: FileSystem | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.grpc_port = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.image = MetadataImage()
        self._metrics = ControllerMetrics(self.registry)
        self._log = MetadataLog(
            fs or RealFileSystem(),
            config.metadata_log_dir,
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            segment_bytes=config.metadata_log_segment_bytes,
        )
        self._controller = MetadataController(config, self.image, new_topic_id)
        self._epoch = 0
        self._is_loaded = False
        self._is_stopped = False
        self._owner: Owner | None = None
        self._quorum: QuorumService | None = None
        self._server: Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_ms = 0

    @property
    def ready(self) -> bool:
        """Whether this is the active controller."""
        return self._owner is not None and self._owner.is_active and self.grpc_port > 0

    @property
    def epoch(self) -> int:
        """The quorum's epoch, from `start` on."""
        return self._epoch

    # --- start and stop

    async def start(self) -> None:
        """Load, become active, serve; raises KafkaError or PortInUseError with one clear line."""
        voters = self.config.voters
        if len(voters) != 1 or voters[0].id != self.config.node_id:
            raise InvalidConfigError(
                f"controller.quorum.voters: {self.config.controller_quorum_voters!r}: a quorum is one voter, this node "
                f"({self.config.node_id})"
            )
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await asyncio.to_thread(self._load)
            self._make_services()
            await self._serve()
        except BaseException:
            await self.stop()
            raise
        log.info(
            "controller started",
            node_id=self.config.node_id,
            epoch=self._epoch,
            log_end_offset=self._log.end_offset,
            brokers=len(self.image.brokers),
            topics=len(self.image.topics),
            port=self.grpc_port,
            took_ms=round((loop.time() - began) * 1000),
        )

    def _load(self) -> None:
        """On a thread: the log, the image, the new epoch's first records, all on disk."""
        self._log.load(wall_ms())
        self._is_loaded = True
        delta = MetadataDelta()
        for batches in self._log.batches():
            self.image.replay(batches, delta)
        self._epoch = max(self._log.latest_epoch, 0) + 1
        node_id = self.config.node_id
        self._controller.applied(self._log.append_leader_change(node_id, [node_id], self._epoch, wall_ms()))
        first = self._controller.activate(monotonic_ms())
        if first:
            self._controller.applied(self._log.append(first, self._epoch, wall_ms()))
        self._log.flush()

    def _make_services(self) -> None:
        state = QuorumState(self.config.cluster_id, self.config.node_id, self._epoch, self.config.voters)
        quorum = QuorumService(state, self._log, self._high_watermark, wall_ms)
        owner = Owner(
            append=self._append,
            flush=self._log.flush,
            end_offset=self._end_offset,
            on_high_watermark=quorum.high_watermark_moved,
            on_failure=self._fail,
            is_log_healthy=self._is_log_healthy,
        )
        self._quorum, self._owner = quorum, owner
        self._metrics.watch_image(self.image)
        self._metrics.watch_quorum(
            node_id=self.config.node_id,
            epoch=self._epoch,
            high_watermark=self._high_watermark,
            log_end_offset=self._end_offset,
            observers=lambda: quorum.observers,
            waiting_fetches=lambda: quorum.waiting_fetches,
            queued=lambda: owner.queued,
        )
        self._metrics.active.set_function(lambda: float(owner.is_active))
        self._server = Server(
            {
                "Quorum": quorum,
                "Controller": ControllerService(self._controller, self._do, monotonic_ms, self._end_offset),
                "Admin": AdminService(self._controller, self._do, self._elect_pending),
            },
            self.config.socket_request_max_bytes,
        )

    async def _serve(self) -> None:
        assert self._owner is not None
        assert self._server is not None
        self._owner.start()
        listener = self.config.endpoints[0]
        self.grpc_port = await self._server.start(listener.host, listener.port)
        await self._server.set_serving(True)
        self._arm_timer()

    async def stop(self) -> None:
        """Answer what was taken, write everything, give the folder back; idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._owner is not None:
            await self._owner.stop(self.config.shutdown_grace_ms / 1000)
        if self._quorum is not None:
            self._quorum.stop()
        if self._server is not None and self.grpc_port:
            await self._server.stop(SERVER_STOP_GRACE_S)
        if self._is_loaded:
            with contextlib.suppress(StorageError):  # told by `failed` already, or by the log
                await asyncio.to_thread(self._log.close, self._epoch)
        if not self.failed.done():
            self.failed.cancel()
        log.info("controller stopped", node_id=self.config.node_id)

    def _fail(self, error: BaseException) -> None:
        log.error("controller failed", error=str(error))
        if not self.failed.done():
            self.failed.set_exception(error)

    def _is_log_healthy(self) -> bool:
        """Whether the log takes more, even if its last append failed: a full disk may have room later."""
        return self._log.log.failed is None

    # --- operations

    def _end_offset(self) -> int:
        return self._log.end_offset

    def _high_watermark(self) -> int:
        return self._owner.high_watermark if self._owner is not None else 0

    async def _do(self, operation: str, decide: Callable[[], Decision[Any]]) -> Any:
        assert self._owner is not None
        self._metrics.operations.labels(operation).inc()
        response = await self._owner.do(decide)
        if self._timer is None:
            self._arm_timer()
        return response

    def _append(self, records: Sequence[r.Record]) -> None:
        before = [
            self.image.partition(record.topic_id, record.partition_id)
            if isinstance(record, r.PartitionChangeRecord)
            else None
            for record in records
        ]
        batch = self._log.append(records, self._epoch, wall_ms())
        delta = self._controller.applied(batch)
        self._metrics.records.inc(len(records))
        elected, unclean = log_decided(self.image, records, before, delta)
        self._metrics.elections.inc(elected)
        self._metrics.unclean_elections.inc(unclean)

    async def _elect_pending(self) -> None:
        await self._do("Elect", lambda: Decision(self._controller.elect_pending(), None))

    # --- sessions

    def _arm_timer(self) -> None:
        """One timer, for when the first session would end; heartbeats meanwhile do not touch it."""
        if self._timer is not None or self._is_stopped:
            return
        deadline_ms = self._controller.next_deadline_ms()
        if deadline_ms is not None:
            self._deadline_ms = deadline_ms
            delay_s = max(deadline_ms - monotonic_ms(), 1) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        assert self._owner is not None
        try:
            self._owner.submit(self._end_sessions).add_done_callback(_retrieve)
        except KafkaError:  # too much is waiting, or the node stops
            if self.ready:
                self._timer = asyncio.get_running_loop().call_later(SESSION_RETRY_S, self._timer_fired)

    def _end_sessions(self) -> Decision[None]:
        """Fence the brokers that are silent, one decision each: who leads next follows from those before."""
        assert self._owner is not None
        now_ms = monotonic_ms()
        if now_ms - self._deadline_ms > self.config.broker_session_timeout_ms // 2:
            log.warning("the controller was away, sessions begin anew", late_ms=now_ms - self._deadline_ms)
            self._controller.extend_sessions(now_ms)
        silent = self._controller.expired(now_ms)
        for index in range(len(silent)):
            self._metrics.timed_out_heartbeats.inc()
            self._owner.submit_next(self._fence_decision(silent[index:]))
        if silent:
            self._owner.submit_next(lambda: Decision(self._controller.elect_pending(), None))
        self._arm_timer()
        return Decision((), None)

    def _fence_decision(self, silent: list[int]) -> Callable[[], Decision[None]]:
        return lambda: Decision(self._controller.fence(silent), None)


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """Take note of a timer's result; a failure is told by `failed`."""
    if not answer.cancelled():
        answer.exception()
