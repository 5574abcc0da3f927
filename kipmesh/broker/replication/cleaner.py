"""Compacts the logs of a broker's partitions (`cleanup.policy=compact`), one at a time, on a thread of its own.

Among the logs that are due, by `min.cleanable.dirty.ratio` or `max.compaction.lag.ms`, the one with the largest dirty
part goes first, as in Apache Kafka. The thread works in slices of some milliseconds with as long a rest after each, so
that the event loop has its share of the processor, and reads and writes at most `log.cleaner.io.max.bytes.per.second`.
A log that cannot be compacted, because a batch is damaged say, is left alone until the next start.

Invariants: the log's owner, the event loop, takes every step that others can see; the thread never waits for it.
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
from kipmesh.storage.log.compaction import Newest, Plan, compact, done, groups, newest_offsets, plan_of
from kipmesh.storage.log.segment import Segment
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

SLICE_S = 0.004
"""How long the thread works before it rests as long."""


class StoppedError(Exception):
    """The broker stops."""


class Throttle:
    """Lets the thread rest: by its share of time, and by bytes a second. Used by one thread; stopped by any."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._stop = threading.Event()
        self.stop = self._stop.set
        """Ends the work at its next step."""
        self._began_s = time.monotonic()
        self._bytes = 0

    def begin(self) -> None:
        """A piece of work begins."""
        self._began_s, self._bytes = time.monotonic(), 0

    def __call__(self, size_bytes: int) -> None:
        """So many bytes were read or written. May rest; raises when stopped."""
        self._bytes += size_bytes
        worked_s = time.monotonic() - self._began_s
        rest_s = max(worked_s if worked_s >= SLICE_S else 0.0, self._bytes / self._bytes_per_second - worked_s)
        if self._stop.is_set() or (rest_s > 0 and self._stop.wait(rest_s)):
            raise StoppedError
        if rest_s > 0:
            self.begin()


@dataclass(eq=False)
class Cleaner:
    """See the module."""

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
        text = "Dirty part of the log that has most of it, at the last look."
        gauge(manager + "max_dirty_percent", text, lambda: self._max_dirty_percent)
        text = "What the last compaction wrote, of what it read."
        gauge(cleaner + "cleaner_recopy_percent", text, lambda: self._recopy_percent)
        gauge(cleaner + "max_clean_time_secs", "Seconds that the last compaction took.", lambda: self._last_run_s)
        text = "Partitions whose logs cannot be compacted."
        gauge(manager + "uncleanable_partitions_count", text, lambda: len(self._uncleanable))

    async def run(self) -> None:
        """Compact what is due, for ever; returns at once where `log.cleaner.enable` is false."""
        while self.config.log_cleaner_enable:
            await asyncio.sleep(self.config.log_cleaner_backoff_ms / 1000)
            try:
                await self.run_once()
            except (KafkaError, OSError) as error:
                log.error("looking for logs to compact failed", error=str(error))

    async def run_once(self) -> None:
        """Compact every log that is due."""
        plans = await self._plans()
        self._max_dirty_percent = max((plan.dirty_ratio * 100 for plan in plans), default=0.0)
        due = sorted((plan for plan in plans if plan.is_due), key=lambda plan: -plan.dirty_ratio)
        for old in due:
            held = old.log
            replica = self.hosted_replicas.get(held.topic_id, held.partition)
            if replica is None or replica.log is not held:
                continue
            plan = plan_of(held, self.now_ms(), replica.high_watermark)  # it may have waited for the others
            if plan is not None:
                await self._compact(plan)
        if due:
            await self.disk.run(self.log_manager.checkpoint_recovery_points)

    async def _plans(self) -> list[Plan]:
        pace, found = Pace(), []
        for replica in self.hosted_replicas:
            held = replica.log
            if held.config.is_compacted and (held.topic_id, held.partition) not in self._uncleanable:
                plan = plan_of(held, self.now_ms(), replica.high_watermark)
                if plan is not None:
                    found.append(plan)
            await pace.give_way()
        return found

    async def _compact(self, plan: Plan) -> None:
        began_s, held = time.monotonic(), plan.log
        before = sum(segment.size_bytes for segment in plan.segments)
        size_before = held.size_bytes
        try:
            newest = await self._thread.run(lambda: self._newest(plan))
            for group in groups(plan, newest.end_offset):
                await self._replace(plan, group, newest)
            if not done(plan, newest):
                log.info("a log that was changed meanwhile is compacted again", log=repr(held))
                return
        except StoppedError:
            return
        except (KafkaError, OSError) as error:
            if not held.durability.is_unchanged(plan.generation):  # cut or deleted meanwhile: the error says nothing
                return
            if isinstance(error, CorruptRecordError):
                self._uncleanable.add((held.topic_id, held.partition))
            log.error("a log could not be compacted", log=repr(held), error=str(error))
            return
        self._last_run_s = time.monotonic() - began_s
        gone = size_before - held.size_bytes
        self._recopy_percent = 100 * (before - gone) / before if before else 0.0
        log.info("log compacted", log=repr(held), bytes_before=before, bytes_gone=gone, keys=len(newest.offsets))

    def _newest(self, plan: Plan) -> Newest:
        self.throttle.begin()
        return newest_offsets(plan, self.config.log_cleaner_dedupe_buffer_size, self.throttle)

    async def _replace(self, plan: Plan, group: list[Segment], newest: Newest) -> None:
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
        """Stop, and wait for the thread; after the task of `run` has ended."""
        self.throttle.stop()
        await self._thread.run(lambda: None)
        self._thread.close()
