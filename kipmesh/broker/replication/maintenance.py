"""Periodic maintenance of a broker's logs: retention, fsyncs by time, checkpoints, producer expiry and ISR shrinks.

Each job has its own interval. The frequent jobs process only partitions that changed. A job that fails is logged and
runs again after its interval.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import structlog

from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.isr_changes import IsrChanges
from kipmesh.broker.replication.replica import DirtyReplicas, Disk, Replica
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import KafkaError
from kipmesh.messages.schema import MAX_INT64
from kipmesh.node.quorum.pacing import Pace
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

DELETE_INTERVAL_MS = 10_000


@dataclass(eq=False)
class Maintenance:
    """Runs the maintenance jobs of one broker. `now_ms` is the wall clock."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    dirty_replicas: DirtyReplicas
    log_manager: LogManager
    disk: Disk
    isr_changes: IsrChanges
    now_ms: Callable[[], int]
    monotonic_ms: Callable[[], int]

    async def run(self) -> None:
        """Run each job at its interval, until cancelled. Disk errors are logged."""
        config = self.config
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
        pace, held_back = Pace(), []
        for replica in self.hosted_replicas:
            with _log_failure(replica, "retention"):
                removed = replica.retain(self.now_ms())
                if removed:
                    log.info("segments deleted", topic=replica.topic, partition=replica.partition, segments=removed)
                if replica.held_back(self.now_ms()):
                    held_back.append(str(replica))
            await pace.give_way()
        if held_back:
            log.info("retention waits for the high watermark", partitions=len(held_back), example=held_back[0])

    async def _remove_deleted(self) -> None:
        await self.disk.run(lambda: self.log_manager.remove_deleted(self.now_ms()))

    async def _flush(self) -> None:
        unflushed, pace = self.dirty_replicas.unflushed, Pace()
        for replica in list(unflushed):
            unflushed.pop(replica, None)  # before the flush: an append during it adds the replica again
            if replica.log.needs_flush(self.now_ms()):
                with _log_failure(replica, "flush"):
                    await self.disk.run(replica.log.flush)
            if self._may_be_due(replica):
                unflushed[replica] = None
            await pace.give_way()

    def _may_be_due(self, replica: Replica) -> bool:
        """Whether an fsync may become due without another append, which would mark the partition again."""
        if self.hosted_replicas.get(*replica.key) is not replica:
            return False
        replica_log = replica.log
        by_time = replica_log.config.flush_ms < MAX_INT64 and replica_log.unflushed_messages > 0
        return by_time or replica_log.needs_flush(self.now_ms())

    async def _checkpoint_recovery_points(self) -> None:
        await self.disk.run(self.log_manager.checkpoint_recovery_points)
        await self.disk.run(self.log_manager.checkpoint_log_starts)

    async def _checkpoint_high_watermarks(self) -> None:
        await self.dirty_replicas.checkpoint_high_watermarks(self.log_manager, self.disk)

    async def _expire_producers(self) -> None:
        pace, seen_before_ms = Pace(), self.now_ms() - self.config.producer_id_expiration_ms
        for replica in self.hosted_replicas:
            replica.log.producers.states.expire(seen_before_ms)
            await pace.give_way()

    async def _shrink_isrs(self) -> None:
        """Propose ISRs without laggards for partitions that this broker leads and whose followers may lack records."""
        pace = Pace()
        for replica in list(self.dirty_replicas.behind):
            may_change, isr = replica.check_lag(self.monotonic_ms())
            if isr is not None:
                self.isr_changes.propose(replica, isr)
            if not may_change:
                self.dirty_replicas.behind.pop(replica, None)
            await pace.give_way()


@contextlib.contextmanager
def _log_failure(replica: Replica, job: str) -> Iterator[None]:
    """Return a context that logs a KafkaError of one replica, so that the job continues with the others."""
    try:
        yield
    except KafkaError as error:
        log.warning(
            "log maintenance failed", job=job, topic=replica.topic, partition=replica.partition, error=str(error)
        )


async def _repeat(job: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await job()
        except (KafkaError, OSError) as error:
            log.error("maintenance job failed", job=job.__name__, error=str(error))
