"""Snapshots of the committed metadata: made beside the state machine, and what they replace deleted (630-03 to 630-06).

Making: the image is captured when the schedule says so; a task writes the records in slices, giving way between them,
and completes the file on a thread. An active controller's image is ahead of the high watermark: its snapshot is
completed only once the high watermark has reached its end, and dropped when that part of the log is cut. Cleaning: now
and then, and after each snapshot, the log start is raised as far as 630-05 allows; then, on a thread, made durable, and
what is below it deleted.

Invariants: a snapshot is completed only of committed records; none is made of an image that failed to apply a record
(630-15); one is made at a time, and it and the cleaning do not touch the folder at the same time. A full disk delays
both and ends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import structlog

from kipmesh.core.config.node import NodeConfig
from kipmesh.core.metadata.image import CapturedImage, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.core.snapshot.retention import ReplicaEnd, RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits, SnapshotReason, SnapshotSchedule
from kipmesh.messages import SnapshotId
from kipmesh.node import BackgroundTasks, monotonic_ms, wall_ms
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.node.quorum.pacing import Pace, freeze
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.snapshots import SnapshotWriter

log = structlog.get_logger(__name__)

CLEAN_INTERVAL_S = 10.0
_T = TypeVar("_T")


def snapshot_limits(config: NodeConfig) -> SnapshotLimits:
    """When snapshots are made."""
    return SnapshotLimits(
        config.metadata_snapshot_min_changed_records_ratio,
        config.metadata_log_max_record_bytes_between_snapshots,
        config.metadata_log_max_snapshot_interval_ms,
    )


def retention_limits(config: NodeConfig) -> RetentionLimits:
    """What is kept."""
    return RetentionLimits(config.metadata_start_offset_lag_time_max_ms, config.metadata_max_retention_bytes)


class _DroppedError(Exception):
    """What is captured is not of this log any more, or not needed."""


class _Making:
    """One snapshot under way."""

    def __init__(self, captured: CapturedImage) -> None:
        self.captured = captured
        self.end_offset = captured.snapshot_id.end_offset
        self.dropped = ""
        self.moved = asyncio.Event()

    def drop(self, why: str) -> None:
        """Stop at the next slice; nothing is left of it."""
        self.dropped = self.dropped or why
        self.moved.set()

    def check(self) -> None:
        """_DroppedError."""
        if self.dropped:
            raise _DroppedError(self.dropped)


@dataclass(eq=False, repr=False)
class SnapshotMaker:
    """Belongs to the image's owner, `loader.MetadataLoader`; make it inside the event loop."""

    quorum: QuorumDriver
    limits: SnapshotLimits
    retention: RetentionLimits
    metrics: QuorumMetrics
    on_failure: Callable[[BaseException], None]
    _: KW_ONLY
    clean_interval_s: float = CLEAN_INTERVAL_S

    def __post_init__(self) -> None:
        self.schedule = SnapshotSchedule(self.limits, monotonic_ms())
        self._making: _Making | None = None
        self._tasks = BackgroundTasks(self.on_failure)
        self._to_clean = asyncio.Event()
        self._folder = asyncio.Lock()
        self._is_ended = False

    # -- from the image's owner; all of it is quick

    def start(self) -> None:
        """Clean from now on."""
        self._tasks.spawn(self._clean_for_ever(), "metadata-clean")

    def loaded(self, records: int | None) -> None:
        """The image is now what the latest snapshot of that many records says, or empty for None."""
        if records is None:
            self.schedule = SnapshotSchedule(self.limits, monotonic_ms())
        else:
            self.schedule.loaded(records, monotonic_ms())

    def poll(self, image: MetadataImage) -> None:
        """Begin to make a snapshot if one is due and the image is a state of the cluster."""
        if self._is_ended or self._making is not None or image.is_within_batch:
            return
        reason = self.schedule.due(monotonic_ms())
        latest = self.quorum.replica.latest_snapshot
        if reason is None or (latest is not None and image.offset < latest.end_offset):
            return
        freeze()  # or a collection would look at the whole image meanwhile
        making = self._making = _Making(image.capture())
        self.schedule.begin()
        self._tasks.spawn(self._make(making, reason), "metadata-snapshot")

    def committed(self) -> None:
        """The high watermark moved."""
        if self._making is not None:
            self._making.moved.set()

    def truncated(self, offset: int) -> None:
        """The log was cut to `offset`."""
        if self._making is not None and offset < self._making.end_offset:
            self._making.drop(f"the log was cut to {offset}")

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """The log was replaced."""
        if self._making is not None:
            self._making.drop(f"a snapshot of the leader's came that ends at {snapshot_id.end_offset}")
        self._to_clean.set()

    def image_failed(self) -> None:
        """No snapshot any more (630-15)."""
        self._is_ended = True
        if self._making is not None:
            self._making.drop("the image failed")

    async def stop(self) -> None:
        """Leave nothing half done; waits for what is on a thread."""
        self._is_ended = True
        await self._tasks.cancel()

    # -- making

    async def _make(self, making: _Making, reason: SnapshotReason) -> None:
        snapshot_id = making.captured.snapshot_id
        begin_ms = monotonic_ms()
        log.info("making a snapshot", end_offset=snapshot_id.end_offset, epoch=snapshot_id.epoch, reason=reason.value)
        try:
            records, size = await self._write(making)
        except _DroppedError as error:
            self.schedule.failed(monotonic_ms())
            log.info("snapshot dropped", end_offset=snapshot_id.end_offset, reason=str(error))
        except (StorageError, OSError) as error:
            self.schedule.failed(monotonic_ms())
            self.metrics.failures.inc()
            log.warning("no snapshot is made, the next try is in a while", error=str(error))
        else:
            took_ms = monotonic_ms() - begin_ms
            self.schedule.made(records, monotonic_ms())
            self.metrics.snapshot_made(snapshot_id, records, size, took_ms)
            self._to_clean.set()
            log.info(
                "snapshot made", end_offset=snapshot_id.end_offset, records=records, size_bytes=size, took_ms=took_ms
            )
        finally:
            self._making = None

    async def _write(self, making: _Making) -> tuple[int, int]:
        """Records and bytes of the complete snapshot. _DroppedError, StorageError; then there is none."""
        captured = making.captured
        replica = self.quorum.replica
        writer = replica.store.create(
            captured.snapshot_id, last_contained_log_timestamp=captured.timestamp_ms, now_ms=wall_ms()
        )
        pace = Pace()
        try:
            for _ in writer.write(image_values(captured)):
                await pace.give_way()
                making.check()
            while self.quorum.high_watermark < making.end_offset:
                making.moved.clear()
                await making.moved.wait()
                making.check()
            return await self._freeze(making, writer)
        finally:
            writer.discard()

    async def _freeze(self, making: _Making, writer: SnapshotWriter) -> tuple[int, int]:
        replica = self.quorum.replica
        async with self._folder:
            making.check()
            size = await _on_thread(writer.freeze)
            if making.dropped and writer.snapshot_id != replica.latest_snapshot:
                # Another one was installed meanwhile: nobody was told of this one.
                await _on_thread(lambda: replica.store.delete([writer.snapshot_id]))
            making.check()
            self.quorum.post(replica.made(writer.snapshot_id))
        return writer.records, size

    # -- cleaning

    async def _clean_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.clean_interval_s):
                    await self._to_clean.wait()
            self._to_clean.clear()
            try:
                await self._clean()
            except (StorageError, OSError) as error:
                # A full disk passes. A log that failed for good ends the node by its next append.
                log.warning("the metadata log cannot be cleaned", error=str(error))

    async def _clean(self) -> None:
        """Raise the log start if that is allowed, then delete what is below it, durably in this order (630-06)."""
        replica = self.quorum.replica
        if replica.latest_snapshot is None or self._is_ended:
            return
        async with self._folder:
            before = replica.log.log_start_offset
            start = self._plan()
            if start > before:
                replica.raise_log_start(start)
                log.info("metadata log start raised", before=before, log_start_offset=start)
            earliest = replica.earliest_snapshot
            if start <= before and (earliest is None or earliest.end_offset >= before):
                return
            event = await _on_thread(replica.clean)
            if event is not None:
                self.quorum.post(event)

    def _plan(self) -> int:
        machine = self.quorum.machine
        now_ms, wall = monotonic_ms(), wall_ms()
        leadership = machine.leadership
        replicas = []
        if leadership is not None:
            for is_voter, seen_by_id in ((True, leadership.voters), (False, leadership.observers)):
                for replica_id, seen in seen_by_id.items():
                    # The plan's clock is the wall's, as that of the records' timestamps; the machine's is monotonic.
                    fetched_ms = wall - (now_ms - seen.last_fetch_ms)
                    replicas.append(ReplicaEnd(replica_id, is_voter, seen.end_offset, fetched_ms))
        return self.quorum.replica.plan_clean(
            leader_log_start=None if leadership is not None else max(0, machine.leader_log_start),
            replicas=replicas,
            high_watermark=self.quorum.high_watermark,
            now_ms=wall,
            limits=self.retention,
        )


async def _on_thread(work: Callable[[], _T]) -> _T:
    """Its result; when cancelled, only after it has ended, for it may be using files that are closed next."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
