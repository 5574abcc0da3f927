"""Compacts the logs of a broker (`cleanup.policy=compact`), one at a time, on a thread.

Of the logs that are due by `min.cleanable.dirty.ratio` or `max.compaction.lag.ms`, the one with the highest dirty ratio
is compacted first, as in Apache Kafka. The thread works for some milliseconds and then rests as long, so that the event
loop gets its share of the processor. It reads and writes at most `log.cleaner.io.max.bytes.per.second`. A log that
cannot be compacted, for example because a batch is corrupt, is skipped until the next start.

Invariant: the event loop, which owns the log, makes every visible change; it never waits for the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Disk
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import CorruptRecordError, KafkaError
from kipmesh.node.quorum.pacing import Pace
from kipmesh.storage.log.compaction import (
    OffsetMap,
    Plan,
    build_offset_map,
    compact,
    group_segments,
    mark_clean,
    plan_compaction,
)
from kipmesh.storage.log.segment import Segment
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

SLICE_S = 0.004
"""Working time of the thread before it rests as long."""


class StoppedError(Exception):
    """Raised on the cleaner's thread when the broker stops, to end a compaction."""


class Throttle:
    """Limits the processor time and the bytes per second of the cleaner's thread. Any thread may call `stop`."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._stop = threading.Event()
        self.stop = self._stop.set
        """Make the current or next call of the throttle raise StoppedError."""
        self._began_s = time.monotonic()
        self._bytes = 0

    def begin(self) -> None:
        """Start measuring the time and bytes of a new piece of work."""
        self._began_s, self._bytes = time.monotonic(), 0

    def __call__(self, size_bytes: int) -> None:
        """Count bytes that were read or written. Sleeps if the time slice is used up or the rate is exceeded.

        Raises StoppedError after `stop`.
        """
        self._bytes += size_bytes
        worked_s = time.monotonic() - self._began_s
        rest_s = max(worked_s if worked_s >= SLICE_S else 0.0, self._bytes / self._bytes_per_second - worked_s)
        if self._stop.is_set() or (rest_s > 0 and self._stop.wait(rest_s)):
            raise StoppedError
        if rest_s > 0:
            self.begin()


@dataclass(eq=False)
class Cleaner:
    """The log cleaner of one broker. `now_ms` is wall time."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    log_manager: LogManager
    disk: Disk
    metrics: BrokerMetrics
    now_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._thread = Disk(f"cleaner-{self.config.node_id}")
        self.throttle = Throttle(self.config.log_cleaner_io_max_bytes_per_second)
        self._uncleanable: set[tuple[bytes, int]] = set()
        self._max_dirty_percent = 0.0
        self._recopy_percent = 0.0
        self._last_run_s = 0.0
        gauge, cleaner, manager = self.metrics.gauge, "kafka_log_logcleaner_", "kafka_log_logcleanermanager_"
        text = "Highest dirty ratio of a log at the last check, in percent."
        gauge(manager + "max_dirty_percent", text, lambda: self._max_dirty_percent)
        text = "Bytes that the last compaction wrote, in percent of the bytes that it read."
        gauge(cleaner + "cleaner_recopy_percent", text, lambda: self._recopy_percent)
        gauge(cleaner + "max_clean_time_secs", "Seconds that the last compaction took.", lambda: self._last_run_s)
        text = "Partitions whose logs cannot be compacted."
        gauge(manager + "uncleanable_partitions_count", text, lambda: len(self._uncleanable))

    async def run(self) -> None:
        """Compact due logs periodically, until cancelled. Returns immediately if `log.cleaner.enable` is false."""
        while self.config.log_cleaner_enable:
            await asyncio.sleep(self.config.log_cleaner_backoff_ms / 1000)
            try:
                await self.run_once()
            except (KafkaError, OSError) as error:
                log.error("compaction failed", error=str(error))

    async def run_once(self) -> None:
        """Compact every log that is due, the one with the highest dirty ratio first. Failures of a log are logged.

        Raises KafkaError if the recovery points cannot be written afterwards.
        """
        plans = await self._plans()
        self._max_dirty_percent = max((plan.dirty_ratio * 100 for plan in plans), default=0.0)
        due = sorted((plan for plan in plans if plan.is_due), key=lambda plan: -plan.dirty_ratio)
        for old in due:
            dirty_log = old.log
            replica = self.hosted_replicas.get(dirty_log.topic_id, dirty_log.partition)
            if replica is None or replica.log is not dirty_log:
                continue
            plan = plan_compaction(dirty_log, self.now_ms(), replica.high_watermark)  # it may have changed since
            if plan is not None:
                await self._compact(plan)
        if due:
            await self.disk.run(self.log_manager.checkpoint_recovery_points)

    async def _plans(self) -> list[Plan]:
        pace, plans = Pace(), []
        for replica in self.hosted_replicas:
            if replica.log.config.is_compacted and replica.key not in self._uncleanable:
                plan = plan_compaction(replica.log, self.now_ms(), replica.high_watermark)
                if plan is not None:
                    plans.append(plan)
            await pace.give_way()
        return plans

    async def _compact(self, plan: Plan) -> None:
        began_s, dirty_log = time.monotonic(), plan.log
        before = sum(segment.size_bytes for segment in plan.segments)
        size_before = dirty_log.size_bytes
        try:
            newest = await self._thread.run(lambda: self._newest(plan))
            for group in group_segments(plan, newest.end_offset):
                await self._replace(plan, group, newest)
            if not mark_clean(plan, newest):
                log.info("log changed during its compaction", log=repr(dirty_log))
                return
        except StoppedError:
            return
        except (KafkaError, OSError) as error:
            if not dirty_log.durability.is_unchanged(plan.generation):  # truncated or deleted: ignore the error
                return
            if isinstance(error, CorruptRecordError):
                self._uncleanable.add((dirty_log.topic_id, dirty_log.partition))
            log.error("log not compacted", log=repr(dirty_log), error=str(error))
            return
        self._last_run_s = time.monotonic() - began_s
        freed = size_before - dirty_log.size_bytes
        self._recopy_percent = 100 * (before - freed) / before if before else 0.0
        log.info("log compacted", log=repr(dirty_log), bytes_before=before, bytes_freed=freed, keys=len(newest.offsets))

    def _newest(self, plan: Plan) -> OffsetMap:
        self.throttle.begin()
        return build_offset_map(plan, self.config.log_cleaner_dedupe_buffer_size, self.throttle)

    async def _replace(self, plan: Plan, group: list[Segment], newest: OffsetMap) -> None:
        swap = await self._thread.run(lambda: compact(plan, group, newest, self.now_ms(), self.throttle))
        if swap is None:
            return
        try:
            if swap.begin():
                await self._thread.run(swap.sync)
                if swap.take_over(self.now_ms()):
                    await self._thread.run(swap.sync)
                    swap.finish()
        finally:
            plan.generation = swap.generation
            await self._thread.run(swap.discard)

    async def close(self) -> None:
        """End a running compaction and wait for the thread. Call it after the task of `run` has ended."""
        self.throttle.stop()
        await self._thread.run(lambda: None)
        self._thread.close()
