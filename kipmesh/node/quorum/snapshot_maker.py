"""Makes snapshots of the committed metadata and cleans the metadata log (630-03 to 630-06).

When a snapshot is due, the image is captured. A task writes the records in slices and completes the file on a thread,
after the high watermark has reached its end. It is dropped if that part of the log is truncated. Cleaning raises the
log start as far as 630-05 allows, periodically and after each snapshot, then deletes older segments and snapshots.

Invariants: a snapshot contains committed records only, and never those of a failed image (630-15). One snapshot is made
at a time. Completion and cleaning never use the directory at the same time. A full disk only delays both.
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
    """Return the configured limits that decide when a snapshot is due (630-04)."""
    return SnapshotLimits(
        config.metadata_snapshot_min_changed_records_ratio,
        config.metadata_log_max_record_bytes_between_snapshots,
        config.metadata_log_max_snapshot_interval_ms,
    )


def retention_limits(config: NodeConfig) -> RetentionLimits:
    """Return the configured limits that decide how far the log start may be raised (630-05)."""
    return RetentionLimits(config.metadata_start_offset_lag_time_max_ms, config.metadata_max_retention_bytes)


class _DroppedError(Exception):
    """Raised in the task of a pending snapshot after `drop`: the snapshot is no longer valid or needed."""


class _PendingSnapshot:
    """A snapshot that is being made, and whether it was dropped."""

    def __init__(self, captured: CapturedImage) -> None:
        self.captured = captured
        self.end_offset = captured.snapshot_id.end_offset
        self.dropped = ""
        self.changed = asyncio.Event()

    def drop(self, reason: str) -> None:
        """Make the snapshot's task stop at its next slice and delete the file. Only the first `reason` is logged."""
        self.dropped = self.dropped or reason
        self.changed.set()

    def check(self) -> None:
        """Raise _DroppedError if the snapshot was dropped."""
        if self.dropped:
            raise _DroppedError(self.dropped)


@dataclass(eq=False, repr=False)
class SnapshotMaker:
    """Makes snapshots for one `MetadataLoader` and cleans the metadata log, within one event loop.

    Cleaning raises the log start and deletes older segments and snapshots. `on_failure` is called with an
    unexpected error. `clean_interval_s` is the maximum time between two cleanings.
    """

    quorum: QuorumDriver
    limits: SnapshotLimits
    retention: RetentionLimits
    metrics: QuorumMetrics
    on_failure: Callable[[BaseException], None]
    _: KW_ONLY
    clean_interval_s: float = CLEAN_INTERVAL_S

    def __post_init__(self) -> None:
        self.schedule = SnapshotSchedule(self.limits, monotonic_ms())
        self._pending: _PendingSnapshot | None = None
        self._tasks = BackgroundTasks(self.on_failure)
        self._clean_soon = asyncio.Event()
        self._directory_lock = asyncio.Lock()
        self._is_ended = False

    # -- notifications of the loader, which must not block

    def start(self) -> None:
        """Start the periodic cleaning of the metadata log."""
        self._tasks.spawn(self._clean_periodically(), "metadata-clean")

    def loaded(self, records: int | None) -> None:
        """Record that the image was loaded from a snapshot with `records` records, or is empty (None)."""
        if records is None:
            self.schedule = SnapshotSchedule(self.limits, monotonic_ms())
        else:
            self.schedule.loaded(records, monotonic_ms())

    def poll(self, image: MetadataImage) -> None:
        """Start making a snapshot if one is due and the image contains no partially applied batch."""
        if self._is_ended or self._pending is not None or image.is_within_batch:
            return
        reason = self.schedule.due(monotonic_ms())
        latest = self.quorum.replica.latest_snapshot
        if reason is None or (latest is not None and image.offset < latest.end_offset):
            return
        freeze()  # otherwise a collection during the capture would traverse the whole image
        pending = self._pending = _PendingSnapshot(image.capture())
        self.schedule.begin()
        self._tasks.spawn(self._make(pending, reason), "metadata-snapshot")

    def committed(self) -> None:
        """Let the pending snapshot check whether the high watermark has reached its end offset."""
        if self._pending is not None:
            self._pending.changed.set()

    def truncated(self, offset: int) -> None:
        """Drop the pending snapshot if it contains records at or above `offset`."""
        if self._pending is not None and offset < self._pending.end_offset:
            self._pending.drop(f"the log was truncated to {offset}")

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """Drop the pending snapshot, because a fetched one has replaced the log, and clean the log soon."""
        if self._pending is not None:
            self._pending.drop(f"a snapshot of the leader with end offset {snapshot_id.end_offset} was installed")
        self._clean_soon.set()

    def image_failed(self) -> None:
        """Drop the pending snapshot, and make no more snapshots (630-15)."""
        self._is_ended = True
        if self._pending is not None:
            self._pending.drop("the image failed")

    async def stop(self) -> None:
        """Cancel the pending snapshot and the cleaning, and wait for operations on threads."""
        self._is_ended = True
        await self._tasks.cancel()

    # -- snapshots

    async def _make(self, pending: _PendingSnapshot, reason: SnapshotReason) -> None:
        snapshot_id = pending.captured.snapshot_id
        started_ms = monotonic_ms()
        log.info("making a snapshot", end_offset=snapshot_id.end_offset, epoch=snapshot_id.epoch, reason=reason.value)
        try:
            records, size = await self._write(pending)
        except _DroppedError as error:
            self.schedule.failed(monotonic_ms())
            log.info("snapshot dropped", end_offset=snapshot_id.end_offset, reason=str(error))
        except (StorageError, OSError) as error:
            self.schedule.failed(monotonic_ms())
            self.metrics.failures.inc()
            log.warning("making a snapshot failed, retrying later", error=str(error))
        else:
            took_ms = monotonic_ms() - started_ms
            self.schedule.completed(records, monotonic_ms())
            self.metrics.snapshot_made(snapshot_id, records, size, took_ms)
            self._clean_soon.set()
            log.info(
                "snapshot made", end_offset=snapshot_id.end_offset, records=records, size_bytes=size, took_ms=took_ms
            )
        finally:
            self._pending = None

    async def _write(self, pending: _PendingSnapshot) -> tuple[int, int]:
        """Write and complete the snapshot; return its number of records and its size in bytes.

        Raises _DroppedError or StorageError after deleting the file.
        """
        captured = pending.captured
        replica = self.quorum.replica
        writer = replica.store.create(
            captured.snapshot_id, last_contained_log_timestamp=captured.timestamp_ms, now_ms=wall_ms()
        )
        pace = Pace()
        try:
            for _ in writer.write(image_values(captured)):
                await pace.give_way()
                pending.check()
            while self.quorum.high_watermark < pending.end_offset:
                pending.changed.clear()
                await pending.changed.wait()
                pending.check()
            return await self._complete(pending, writer)
        finally:
            writer.discard()

    async def _complete(self, pending: _PendingSnapshot, writer: SnapshotWriter) -> tuple[int, int]:
        replica = self.quorum.replica
        async with self._directory_lock:
            pending.check()
            size = await _on_thread(writer.freeze)
            if pending.dropped and writer.snapshot_id != replica.latest_snapshot:
                # A fetched snapshot was installed meanwhile, and this one was never announced.
                await _on_thread(lambda: replica.store.delete([writer.snapshot_id]))
            pending.check()
            self.quorum.post(replica.register_snapshot(writer.snapshot_id))
        return writer.records, size

    # -- cleaning

    async def _clean_periodically(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.clean_interval_s):
                    await self._clean_soon.wait()
            self._clean_soon.clear()
            try:
                await self._clean()
            except (StorageError, OSError) as error:
                # A full disk is temporary. After a permanent failure of the log, the next append ends the node.
                log.warning("cleaning the metadata log failed", error=str(error))

    async def _clean(self) -> None:
        """Raise the log start if allowed, make it durable, then delete segments and snapshots below it (630-06)."""
        replica = self.quorum.replica
        if replica.latest_snapshot is None or self._is_ended:
            return
        async with self._directory_lock:
            before = replica.log.log_start_offset
            start = self._plan_log_start()
            if start > before:
                replica.raise_log_start(start)
                log.info("metadata log start raised", before=before, log_start_offset=start)
            earliest = replica.earliest_snapshot
            if start <= before and (earliest is None or earliest.end_offset >= before):
                return
            event = await _on_thread(replica.clean)
            if event is not None:
                self.quorum.post(event)

    def _plan_log_start(self) -> int:
        machine = self.quorum.machine
        now_ms, wall = monotonic_ms(), wall_ms()
        leadership = machine.leadership
        replicas = []
        if leadership is not None:
            for is_voter, states in ((True, leadership.voters), (False, leadership.observers)):
                for replica_id, state in states.items():
                    # The plan uses the wall clock, because record timestamps do; the machine's clock is monotonic.
                    fetched_ms = wall - (now_ms - state.last_fetch_ms)
                    replicas.append(ReplicaEnd(replica_id, is_voter, state.end_offset, fetched_ms))
        return self.quorum.replica.plan_clean(
            leader_log_start=None if leadership is not None else max(0, machine.leader_log_start),
            replicas=replicas,
            high_watermark=self.quorum.high_watermark,
            now_ms=wall,
            limits=self.retention,
        )


async def _on_thread(work: Callable[[], _T]) -> _T:
    """Run `work` on a thread. Cancellation waits until `work` ends, because the files it may use are closed next."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
