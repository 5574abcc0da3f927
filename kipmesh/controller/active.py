"""What an active controller does in one epoch of the quorum: it decides, and ends sessions of brokers silent or gone.

Made when the node leads, the start of its epoch is committed and the image has everything that is in the log; thrown
away when the epoch ends. Nothing is handed on but the log: the next active controller, here or elsewhere, begins with
the image and a fresh session for every broker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import structlog

from kipmesh.controller.events import log_decided
from kipmesh.controller.leader_balance import LeaderBalance
from kipmesh.controller.metrics import ControllerMetrics
from kipmesh.controller.owner import Decide, DecideWith, Owner
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
"""Before a broker that refuses each of them is missing."""
_RESERVED_ID_START = 0b111110
"""Kafka's random ids never begin with `-` in their base64 form."""


def new_topic_id() -> bytes:
    """A random topic id as Kafka makes them."""
    while True:
        topic_id = uuid.uuid4().bytes
        if topic_id[0] >> 2 != _RESERVED_ID_START:
            return topic_id


@dataclass(eq=False)
class LeaderProbes:
    """Probes of brokers that died together with the previous active controller: nothing listens where they were.

    A new controller has seen no connection of theirs break, and gives them a fresh session. But the address of a
    process that died refuses connections, while a process that is held, slow or isolated does not. So a controller that
    becomes active probes the brokers that it has not heard of yet. Those that refuse at every address, each time, are
    missing, as if their connection had broken (`kipmesh.core.metadata.sessions`); a heartbeat still ends that.

    `unheard` gives the brokers not heard of yet, with their addresses; `refused` receives the missing ones.
    """

    _: KW_ONLY
    unheard: Callable[[], Mapping[int, Collection[Address]]]
    refused: Callable[[int], None]
    interval_s: float

    def __post_init__(self) -> None:
        self._prober = LivenessProber()

    async def run(self) -> None:
        """Probe; the first time one interval from now."""
        try:
            await self._run()
        finally:
            self._prober.close()

    async def _run(self) -> None:
        suspects: set[int] | None = None
        for _ in range(PROBES):
            await asyncio.sleep(self.interval_s)
            unheard = self.unheard()
            if suspects is not None:
                unheard = {broker_id: unheard[broker_id] for broker_id in suspects & unheard.keys()}
            responses = await asyncio.gather(*[self._is_gone(addresses) for addresses in unheard.values()])
            suspects = {broker_id for broker_id, is_gone in zip(unheard, responses, strict=True) if is_gone}
            if not suspects:
                return
        for broker_id in sorted(suspects or ()):
            self.refused(broker_id)

    async def _is_gone(self, addresses: Collection[Address]) -> bool:
        responses = await asyncio.gather(*[self._prober.refuses(address, self.interval_s) for address in addresses])
        return bool(responses) and all(responses)


class ActiveController:
    """One epoch of activity, from `start` to `end`."""

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
        """The last four are what it takes from the machine: both clocks, chance, and the network (LeaderProbes)."""
        self.epoch = epoch
        self._now_ms = now_ms
        self._stamp_ms = stamp_ms
        self._config = config
        self._driver = driver
        self._loader = loader
        self._metrics = metrics
        self._controller = MetadataController(config, loader.image, make_topic_id)
        self._owner = Owner(
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
            LeaderProbes(unheard=self._controller.brokers.unheard, refused=self._refused, interval_s=loss_s / 2)
            if probes_brokers and loss_s
            else None
        )
        self._balance = LeaderBalance(self.do, config.leader_imbalance_check_interval_seconds)
        self._tasks: list[asyncio.Task[None]] = []
        self.committed = self._owner.committed

    @property
    def waiting(self) -> int:
        """Answers that wait for their turn or to be committed."""
        return self._owner.waiting

    def start(self) -> None:
        """Begin: fresh sessions, and what a new log begins with; raises KafkaError when that cannot be appended."""
        first = self._controller.activate(self._now_ms())
        self._owner.decide_all([lambda: Decision(first, None)])
        self._arm_timer()
        if self._probes is not None:
            self._tasks.append(asyncio.create_task(self._probes.run(), name="kipmesh-leader-probes"))
        if self._config.auto_leader_rebalance_enable:
            self._tasks.append(asyncio.create_task(self._balance.run(), name="kipmesh-leader-balance"))

    def end(self, refusal: KafkaError) -> None:
        """The epoch is over: what waits is refused."""
        self._stop_tasks()
        self._owner.end(refusal)

    async def drain(self, grace_s: float, refusal: KafkaError) -> None:
        """Take no more, and give what waits some time to be committed."""
        self._stop_tasks()
        await self._owner.drain(grace_s, refusal)

    def _stop_tasks(self) -> None:
        self._is_over = True
        self._cancel_timer()
        for task in self._tasks:
            task.cancel()

    # --- operations

    async def do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        """Decide, and return the response when it is committed in this epoch; raises KafkaError otherwise."""
        self._metrics.operations.labels(operation).inc()
        try:
            return await self._owner.submit(lambda: decide(self._controller), is_cleanup=is_cleanup)
        finally:
            self._arm_timer()  # the operation may have begun the first session

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
        """A connection that brought a broker's heartbeats is over: look soon whether the broker comes back."""
        now_ms = self._now_ms()
        if self._is_over or not self._controller.brokers.disconnected(broker_id, connection, now_ms):
            return
        log.info("connection of a broker broke", broker_id=broker_id)
        self._check_sessions_soon(now_ms)

    def _refused(self, broker_id: int) -> None:
        """Nothing listens where a broker was: look soon whether it is heard of."""
        now_ms = self._now_ms()
        if self._is_over or not self._controller.brokers.refused(broker_id, now_ms):
            return
        log.info("nothing listens where a broker was", broker_id=broker_id)
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
        """One timer, for when the first session would end; heartbeats meanwhile do not touch it."""
        if self._timer is not None or self._is_over:
            return
        deadline_ms = self._controller.sessions.next_deadline_ms()
        if deadline_ms is not None:
            self._deadline_ms = deadline_ms
            delay_s = max(deadline_ms - self._now_ms(), 1) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        """Fence the brokers that are silent or gone."""
        self._timer = None
        now_ms = self._now_ms()
        if now_ms - self._deadline_ms > self._config.broker_session_timeout_ms // 2:
            log.warning("the controller was away, sessions begin anew", late_ms=now_ms - self._deadline_ms)
            self._controller.sessions.extend(now_ms)
        try:
            self._owner.decide_all(self._fencings()).add_done_callback(self._sessions_ended)
        except KafkaError as error:
            self._retry_later(error)

    def _sessions_ended(self, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._arm_timer()
        else:
            self._retry_later(error)

    def _retry_later(self, error: BaseException) -> None:
        """The disk is full, or an election is under way."""
        if not isinstance(error, KafkaError) or error.code is not ErrorCode.NOT_CONTROLLER:
            log.error("sessions cannot be ended", error=str(error))
        if not self._is_over:
            self._deadline_ms = self._now_ms() + SESSION_RETRY_MS
            self._timer = asyncio.get_running_loop().call_later(SESSION_RETRY_MS / 1000, self._timer_fired)

    def _fencings(self) -> Iterator[Decide]:
        """One decision for each broker: who leads next follows from those before."""
        gone = self._controller.sessions.missing()
        silent = self._controller.brokers.expired(self._now_ms())
        for index, broker_id in enumerate(silent):
            if broker_id in gone:
                log.warning("a broker is gone, and did not come back", broker_id=broker_id)
            yield partial(self._fence, silent[index:])
            (self._metrics.lost_brokers if broker_id in gone else self._metrics.timed_out_heartbeats).inc()
        if silent:
            yield lambda: Decision(self._controller.brokers.elect_pending(), None)

    def _fence(self, silent: list[int]) -> Decision[None]:
        return Decision(self._controller.brokers.fence(silent), None)
