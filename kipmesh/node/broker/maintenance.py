"""A broker's recurring housekeeping: retention, fsyncs by time, checkpoints, ISR shrinks.

Each job sleeps for its own interval and touches what needs it: of the frequent ones, none looks at partitions to which
nothing has happened. A failure of a job is logged and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import structlog

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import KafkaError
from kipmesh.messages.limits import MAX_INT64
from kipmesh.node.broker.changes import Changes
from kipmesh.node.broker.disk import Disk
from kipmesh.node.broker.high_watermarks import checkpoint_high_watermarks
from kipmesh.node.broker.isr_changes import IsrChanges
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import Replica
from kipmesh.node.quorum.pacing import Pace
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

DELETE_INTERVAL_MS = 10_000


class Maintenance:
    """Runs the jobs of one broker."""

    def __init__(
        self,
        config: BrokerConfig,
        partitions: Partitions,
        changes: Changes,
        log_manager: LogManager,
        disk: Disk,
        isr_changes: IsrChanges,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._partitions = partitions
        self._changes = changes
        self._log_manager = log_manager
        self._disk = disk
        self._isr_changes = isr_changes
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms

    async def run(self) -> None:
        """All jobs, for ever."""
        config = self._config
        async with asyncio.TaskGroup() as group:
            for job, interval_ms in (
                (self._retain, config.log_retention_check_interval_ms),
                (self._remove_deleted, DELETE_INTERVAL_MS),
                (self._flush, config.log_flush_scheduler_interval_ms),
                (self._checkpoint_recovery_points, config.log_flush_offset_checkpoint_interval_ms),
                (self._checkpoint_high_watermarks, config.replica_high_watermark_checkpoint_interval_ms),
                (self._expire_producers, config.producer_id_expiration_check_interval_ms),
                (self._shrink_isrs, max(config.replica_lag_time_max_ms // 2, 1)),
            ):
                group.create_task(_repeat(job, interval_ms / 1000))

    async def _retain(self) -> None:
        pace, waiting = Pace(), []
        for replica in self._partitions:
            with _noted(replica, "retention"):
                removed = replica.retain(self._now_ms())
                if removed:
                    log.info("segments deleted", topic=replica.topic, partition=replica.partition, segments=removed)
                if replica.held_back(self._now_ms()):
                    waiting.append(f"{replica.topic}-{replica.partition}")
            await pace.give_way()
        if waiting:
            log.info("segments that are due wait for the high watermark", partitions=len(waiting), example=waiting[0])

    async def _remove_deleted(self) -> None:
        await self._disk.run(lambda: self._log_manager.remove_deleted(self._now_ms()))

    async def _flush(self) -> None:
        unflushed, pace = self._changes.unflushed, Pace()
        for replica in list(unflushed):
            unflushed.pop(replica, None)  # before the flush: what is appended meanwhile puts it back
            if replica.log.needs_flush(self._now_ms()):
                with _noted(replica, "flush"):
                    await self._disk.flush(replica.log)
            if self._may_be_due(replica):
                unflushed[replica] = None
            await pace.give_way()

    def _may_be_due(self, replica: Replica) -> bool:
        """Whether an fsync may get due without anything that puts the partition among the unflushed by itself."""
        if self._partitions.get(replica.topic_id, replica.partition) is not replica:
            return False
        held = replica.log
        by_time = held.config.flush_ms < MAX_INT64 and held.unflushed_messages > 0
        return by_time or held.needs_flush(self._now_ms())

    async def _checkpoint_recovery_points(self) -> None:
        await self._disk.run(self._log_manager.checkpoint_recovery_points)
        await self._disk.run(self._log_manager.checkpoint_log_starts)

    async def _checkpoint_high_watermarks(self) -> None:
        await checkpoint_high_watermarks(self._changes, self._log_manager, self._disk)

    async def _expire_producers(self) -> None:
        pace, seen_before_ms = Pace(), self._now_ms() - self._config.producer_id_expiration_ms
        for replica in self._partitions:
            replica.log.producers.expire(seen_before_ms)
            await pace.give_way()

    async def _shrink_isrs(self) -> None:
        """Look at what followers may lag behind in; all other followers are in sync."""
        pace = Pace()
        for replica in list(self._changes.behind):
            may_change, isr = replica.laggards(self._monotonic_ms())
            if isr is not None:
                self._isr_changes.propose(replica, isr)
            if not may_change:
                self._changes.behind.pop(replica, None)
            await pace.give_way()


@contextlib.contextmanager
def _noted(replica: Replica, what: str) -> Iterator[None]:
    """One log that fails, or was just deleted, does not keep the others from their turn."""
    try:
        yield
    except KafkaError as error:
        log.warning(f"{what} failed", topic=replica.topic, partition=replica.partition, error=str(error))


async def _repeat(job: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await job()
        except (KafkaError, OSError) as error:
            log.error("housekeeping failed", job=job.__name__, error=str(error))
