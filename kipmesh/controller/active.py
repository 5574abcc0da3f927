"""The active controller in one epoch of the quorum: makes decisions and fences brokers whose sessions expire.

An `ActiveController` is created once this node leads, the start of its epoch is committed and the image contains the
whole log. It is discarded when the epoch ends. Only the log survives: the next active controller, on this or another
node, starts with the image and grants every broker a new session.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import structlog

from kipmesh.controller.decision_queue import Decide, DecideWith, DecisionQueue
from kipmesh.controller.events import log_decided
from kipmesh.controller.leader_balance import LeaderBalance
from kipmesh.controller.metrics import ControllerMetrics
from kipmesh.core import record_batch
from kipmesh.core.config import ControllerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.decision import Decision
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.liveness_probe import Address, LivenessProber
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.node.quorum.loader import MetadataLoader

log = structlog.get_logger(__name__)

SESSION_RETRY_MS = 100
PROBES = 2
"""A broker that refuses this number of consecutive probes counts as missing."""
_RESERVED_ID_START = 0b111110
"""The first six bits of an id whose base64 form starts with `-`, which Kafka never generates."""


def new_topic_id() -> bytes:
    """Return a random topic id of 16 bytes that Kafka could have generated: its base64 form does not start with `-`."""
    while True:
        topic_id = uuid.uuid4().bytes
        if topic_id[0] >> 2 != _RESERVED_ID_START:
            return topic_id


@dataclass(eq=False)
class BrokerProbes:
    """Finds brokers that died together with the previous active controller. See ADR 0006.

    A new active controller grants them new sessions, because it did not see their connections break. The address of a
    dead process refuses connections; a paused, slow or isolated process does not. A broker that has not sent a
    heartbeat yet and refuses all probes at all its addresses therefore counts as missing, until it sends a heartbeat.

    Args: unconfirmed: returns broker id -> addresses, for the brokers that have not sent a heartbeat yet; refused:
    called with the id of each missing broker; interval_s: time between probes and maximum time of one probe.
    """

    _: KW_ONLY
    unconfirmed: Callable[[], Mapping[int, Collection[Address]]]
    refused: Callable[[int], None]
    interval_s: float
    _prober: LivenessProber = field(default_factory=LivenessProber, init=False)

    async def run(self) -> None:
        """Probe `PROBES` times, the first time after one interval, and call `refused` for brokers that refused every
        time. Call it once."""
        with contextlib.closing(self._prober):
            for broker_id in sorted(await self._find_missing()):
                self.refused(broker_id)

    async def _find_missing(self) -> set[int]:
        suspects: set[int] | None = None
        for _ in range(PROBES):
            await asyncio.sleep(self.interval_s)
            unconfirmed = self.unconfirmed()
            if suspects is not None:
                unconfirmed = {broker_id: unconfirmed[broker_id] for broker_id in suspects & unconfirmed.keys()}
            results = await asyncio.gather(*[self._refuses(addresses) for addresses in unconfirmed.values()])
            suspects = {broker_id for broker_id, refuses in zip(unconfirmed, results, strict=True) if refuses}
            if not suspects:
                break
        return suspects or set()

    async def _refuses(self, addresses: Collection[Address]) -> bool:
        results = await asyncio.gather(*[self._prober.refuses(address, self.interval_s) for address in addresses])
        return bool(results) and all(results)


class ActiveController:
    """The active controller of one epoch, from `start` to `end`.

    Args: on_failure: called if an appended batch could not be applied; now_ms: monotonic clock; stamp_ms: wall clock
    for record timestamps; make_topic_id: returns a random topic id; probes_brokers: whether to run `BrokerProbes`.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        epoch: int,
        driver: QuorumDriver,
        loader: MetadataLoader,
        metrics: ControllerMetrics,
        on_failure: Callable[[BaseException], None],
        now_ms: Callable[[], int] = monotonic_ms,
        stamp_ms: Callable[[], int] = wall_ms,
        make_topic_id: Callable[[], bytes] = new_topic_id,
        probes_brokers: bool = False,
    ) -> None:
        self.epoch = epoch
        self._now_ms = now_ms
        self._stamp_ms = stamp_ms
        self._config = config
        self._driver = driver
        self._loader = loader
        self._metrics = metrics
        self._controller = MetadataController(config, loader.image, make_topic_id)
        self._decisions = DecisionQueue(
            append=self._append,
            apply=self._apply,
            end_offset=self._end_offset,
            high_watermark=driver.high_watermark,
            on_failure=on_failure,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_ms = 0
        self._is_over = False
        loss_s = config.broker_connection_loss_timeout_ms / 1000
        self._probes = (
            BrokerProbes(unconfirmed=self._controller.brokers.unconfirmed, refused=self._refused, interval_s=loss_s / 2)
            if probes_brokers and loss_s
            else None
        )
        self._balance = LeaderBalance(self.do, config.leader_imbalance_check_interval_seconds)
        self._tasks: list[asyncio.Task[None]] = []
        self.committed = self._decisions.committed

    @property
    def pending(self) -> int:
        """Number of operations that are queued or not yet committed."""
        return self._decisions.pending

    def start(self) -> None:
        """Grant every unfenced broker a new session and append the feature records that the log lacks.

        Raises KafkaError if the records cannot be appended.
        """
        first = self._controller.activate(self._now_ms())
        self._decisions.decide_all([lambda: Decision(first, None)])
        self._arm_timer()
        if self._probes is not None:
            self._tasks.append(asyncio.create_task(self._probes.run(), name="kipmesh-broker-probes"))
        if self._config.auto_leader_rebalance_enable:
            self._tasks.append(asyncio.create_task(self._balance.run(), name="kipmesh-leader-balance"))

    def end(self, refusal: KafkaError) -> None:
        """End the epoch: fail all pending and later operations with `refusal`."""
        self._stop_tasks()
        self._decisions.end(refusal)

    async def drain(self, grace_s: float, refusal: KafkaError) -> None:
        """Refuse new operations with `refusal`, wait up to `grace_s` for the commit of the pending ones, then fail the
        rest with `refusal` too."""
        self._stop_tasks()
        await self._decisions.drain(grace_s, refusal)

    def _stop_tasks(self) -> None:
        self._is_over = True
        self._cancel_timer()
        for task in self._tasks:
            task.cancel()

    # --- operations

    async def do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        """Make a decision and return its response once it is committed in this epoch. `operation` names it in metrics.

        Raises KafkaError: REQUEST_TIMED_OUT if too many operations are pending, the error of the decision or of its
        append, or the refusal passed to `end` or `drain` if the epoch ends before the commit.
        """
        self._metrics.operations.labels(operation).inc()
        try:
            return await self._decisions.submit(lambda: decide(self._controller), is_cleanup=is_cleanup)
        finally:
            self._arm_timer()  # the operation may have started the first session

    def _end_offset(self) -> int:
        return self._driver.replica.log.log_end_offset

    def _append(self, records: Sequence[r.Record]) -> bytes:
        batch = record_batch.build(
            [(None, r.encode_record(record)) for record in records],
            base_offset=self._end_offset(),
            leader_epoch=self.epoch,
            timestamp_ms=self._stamp_ms(),
        )
        self._driver.append(batch, self.epoch)
        return batch

    def _apply(self, records: Sequence[r.Record], batch: bytes) -> Iterator[None]:
        image = self._loader.image
        before = [
            image.partition(record.topic_id, record.partition_id)
            if isinstance(record, r.PartitionChangeRecord)
            else None
            for record in records
        ]
        delta = yield from self._loader.apply_own_steps(batch)
        self._controller.changed(delta)
        self._metrics.records.inc(len(records))
        elected, unclean = log_decided(image, records, before, delta)
        self._metrics.elections.inc(elected)
        self._metrics.unclean_elections.inc(unclean)

    # --- sessions

    def disconnected(self, broker_id: int, connection: int) -> None:
        """Record the end of heartbeat stream `connection`, and check soon whether the broker has reconnected. Ignored
        after the end of the epoch."""
        now_ms = self._now_ms()
        if not self._is_over and self._controller.brokers.disconnected(broker_id, connection, now_ms):
            log.info("broker disconnected", broker_id=broker_id)
            self._check_sessions_soon(now_ms)

    def _refused(self, broker_id: int) -> None:
        now_ms = self._now_ms()
        if not self._is_over and self._controller.brokers.refused(broker_id, now_ms):
            log.info("broker address refused connections", broker_id=broker_id)
            self._check_sessions_soon(now_ms)

    def _check_sessions_soon(self, now_ms: int) -> None:
        if self._timer is not None and self._deadline_ms > now_ms + self._controller.sessions.check_interval_ms:
            self._cancel_timer()
        self._arm_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm_timer(self) -> None:
        """Start the timer for the earliest session deadline; heartbeats do not move a running timer."""
        if self._timer is not None or self._is_over:
            return
        deadline_ms = self._controller.sessions.next_deadline_ms()
        if deadline_ms is not None:
            self._deadline_ms = deadline_ms
            delay_s = max(deadline_ms - self._now_ms(), 1) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        """Fence the brokers whose sessions have expired. If the timer fired late, first extend all sessions."""
        self._timer = None
        now_ms = self._now_ms()
        if now_ms - self._deadline_ms > self._config.broker_session_timeout_ms // 2:
            log.warning("session timer fired late, sessions extended", late_ms=now_ms - self._deadline_ms)
            self._controller.sessions.extend(now_ms)
        try:
            self._decisions.decide_all(self._fencings()).add_done_callback(self._expired_fenced)
        except KafkaError as error:
            self._retry_later(error)

    def _expired_fenced(self, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._arm_timer()
        else:
            self._retry_later(error)

    def _retry_later(self, error: BaseException) -> None:
        """Retry fencing after SESSION_RETRY_MS. It can fail on a full disk or during an election, for example."""
        if not isinstance(error, KafkaError) or error.code is not ErrorCode.NOT_CONTROLLER:
            log.error("fencing expired brokers failed", error=str(error))
        if not self._is_over:
            self._deadline_ms = self._now_ms() + SESSION_RETRY_MS
            self._timer = asyncio.get_running_loop().call_later(SESSION_RETRY_MS / 1000, self._timer_fired)

    def _fencings(self) -> Iterator[Decide]:
        """Yield one decision per expired broker, then one that retries pending elections. Expired brokers need separate
        decisions, because the choice of leaders depends on earlier fencings."""
        missing = self._controller.sessions.missing()
        expired = self._controller.brokers.expired(self._now_ms())
        for index, broker_id in enumerate(expired):
            if broker_id in missing:
                log.warning("broker lost", broker_id=broker_id)
            yield partial(self._fence, expired[index:])
            (self._metrics.lost_brokers if broker_id in missing else self._metrics.timed_out_heartbeats).inc()
        if expired:
            yield lambda: Decision(self._controller.brokers.elect_pending(), None)

    def _fence(self, expired: list[int]) -> Decision[None]:
        return Decision(self._controller.brokers.fence(expired), None)
