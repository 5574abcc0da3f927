"""A broker's recurring housekeeping: retention, fsyncs by time, checkpoints, ISR shrinks.

Each job sleeps for its own interval and touches what needs it; a failure of a job is logged and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import structlog

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import KafkaError
from kipmesh.node.broker.disk import Disk
from kipmesh.node.broker.isr_changes import IsrChanges
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import Replica
from kipmesh.node.broker.replica_manager import ReplicaManager
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

DELETE_INTERVAL_MS = 10_000
YIELD_EVERY_LOGS = 100


class Maintenance:
    """Runs the jobs of one broker."""

    def __init__(
        self,
        config: BrokerConfig,
        partitions: Partitions,
        replica_manager: ReplicaManager,
        log_manager: LogManager,
        disk: Disk,
        isr_changes: IsrChanges,
        now_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._partitions = partitions
        self._replica_manager = replica_manager
        self._log_manager = log_manager
        self._disk = disk
        self._isr_changes = isr_changes
        self._now_ms = now_ms
        self._checkpointed: dict[tuple[str, int], int] = {}

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
                (self._shrink_isrs, max(config.replica_lag_time_max_ms // 2, 1)),
            ):
                group.create_task(_repeat(job, interval_ms / 1000))

    async def _retain(self) -> None:
        for number, replica in enumerate(self._partitions):
            with _noted(replica, "retention"):
                replica.log.maybe_roll(self._now_ms())
                removed = replica.log.run_retention(self._now_ms(), replica.high_watermark)
                if removed:
                    log.info("segments deleted", topic=replica.topic, partition=replica.partition, segments=removed)
            if number % YIELD_EVERY_LOGS == 0:
                await asyncio.sleep(0)

    async def _remove_deleted(self) -> None:
        await self._disk.run(lambda: self._log_manager.remove_deleted(self._now_ms()))

    async def _flush(self) -> None:
        for replica in self._partitions:
            if replica.log.needs_flush(self._now_ms()):
                with _noted(replica, "flush"):
                    await self._disk.flush(replica.log)

    async def _checkpoint_recovery_points(self) -> None:
        await self._disk.run(self._log_manager.checkpoint_recovery_points)
        await self._disk.run(self._log_manager.checkpoint_log_starts)

    async def _checkpoint_high_watermarks(self) -> None:
        high_watermarks = self._replica_manager.high_watermarks()
        if high_watermarks != self._checkpointed:
            await self._disk.run(lambda: self._log_manager.checkpoint_high_watermarks(high_watermarks))
            self._checkpointed = high_watermarks

    async def _shrink_isrs(self) -> None:
        self._replica_manager.shrink_isrs(self._isr_changes.propose)


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
