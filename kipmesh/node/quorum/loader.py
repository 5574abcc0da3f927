"""Loads and maintains the image of the committed metadata (630-12, 630-14).

One task loads the newest snapshot, replays the log up to the high watermark, and then follows the high watermark. It
publishes changes in log order. An active controller applies its own batches through `apply_own_steps`, so its image is
ahead of the high watermark. The image is replaced by a new object when the log is truncated below it, is replaced by a
snapshot, or starts after it. A batch is applied in steps (630-16); until its last step the image is inconsistent.

Invariants: only `apply_own_steps` applies records above the high watermark. `applied_end` is 0 while the image does not
match the log. A partially applied batch is always completed; until then the image is neither published, captured nor
replaced. After a record that cannot be applied, nothing is applied, published or written to a snapshot (630-15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass

import structlog

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, difference_steps
from kipmesh.core.raft import State
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.messages import SnapshotId
from kipmesh.node import monotonic_ms
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.node.quorum.pacing import Pace, collector_off, free_delta, free_image, freeze
from kipmesh.node.quorum.snapshot_maker import CLEAN_INTERVAL_S, SnapshotMaker
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.snapshot_file import ImageLoader

log = structlog.get_logger(__name__)

APPLY_BYTES = 32 << 10
"""Bytes of the log that are read and applied at a time; a single batch may be larger."""
IDLE_S = 1.0
"""Maximum time between two calls of `idle`, and between two checks whether a snapshot is due."""
FREEZE_PARTITIONS = 20_000
"""Number of new or changed partitions after which they are hidden from the garbage collector."""

Publish = Callable[[MetadataImage, MetadataDelta], Awaitable[None]]


@dataclass(eq=False, repr=False)
class MetadataLoader:
    """Maintains the image of one replica within one event loop. It may be the driver's listener.

    `publish` is awaited with the image and delta after each advance; the delta is empty for control records and
    excludes the batches of `apply_own_steps`. `on_failure` is called at most once, after which the loader does nothing.
    `snapshots` and `retention` are the limits for making snapshots and for cleaning the log. `idle` is awaited by the
    loader's task at least every IDLE_S seconds.
    """

    quorum: QuorumDriver
    publish: Publish
    metrics: QuorumMetrics
    on_failure: Callable[[BaseException], None]
    _: KW_ONLY
    snapshots: InitVar[SnapshotLimits]
    retention: InitVar[RetentionLimits]
    idle: Callable[[], Awaitable[None]] | None = None
    clean_interval_s: InitVar[float] = CLEAN_INTERVAL_S

    def __post_init__(self, snapshots: SnapshotLimits, retention: RetentionLimits, clean_interval_s: float) -> None:
        self.image = MetadataImage()
        """The current image; a reload replaces the object."""
        self._maker = SnapshotMaker(
            self.quorum, snapshots, retention, self.metrics, self._fail, clean_interval_s=clean_interval_s
        )
        self._high_watermark = 0
        self._must_load = True
        self._delta = MetadataDelta()
        self._wake = asyncio.Event()
        self._unpublished = 0
        self._own_end = 0
        self._unfrozen = 0
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def applied_end(self) -> int:
        """The offset after the last applied record, or 0 while the image is being loaded or has failed."""
        return self.image.offset + 1 if self.is_loaded else 0

    @property
    def is_loaded(self) -> bool:
        """Whether the image matches the log, so that it can be read. False while it is being loaded or has failed."""
        return not self._must_load and not self.image.failed and self._failure is None

    @property
    def _touched_end(self) -> int:
        """The offset after the last record that has been applied, including a partially applied batch."""
        return max(self.image.offset + 1, self._own_end)

    def start(self) -> None:
        """Start the task that loads the image and follows the high watermark."""
        self.metrics.watch(self.quorum, lambda: self.applied_end)
        self._high_watermark = max(self._high_watermark, self.quorum.high_watermark)
        self._maker.start()
        self._task = asyncio.create_task(self._run(), name="metadata-loader")

    async def stop(self) -> None:
        """Stop the snapshot maker, and the task at its next step, and wait for both. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._maker.stop()

    # -- QuorumListener

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Do nothing: the loader depends only on log changes."""

    def committed(self, high_watermark: int) -> None:
        """Apply the records up to `high_watermark` soon."""
        self._high_watermark = max(self._high_watermark, high_watermark)
        self._maker.committed()
        self._wake.set()

    def truncated(self, offset: int) -> None:
        """Reload the image if it contains records from `offset` on, which this node applied before it was deposed."""
        self._maker.truncated(offset)
        if offset < self._touched_end:
            log.warning("applied metadata truncated, reloading", log_end_offset=offset, applied=self._touched_end - 1)
            self._request_reload()

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """Reload the image unless it is committed and includes the snapshot that replaced the log."""
        self._maker.snapshot_installed(snapshot_id)
        if not snapshot_id.end_offset <= self._touched_end <= self._high_watermark:
            self._request_reload()
        self._high_watermark = max(self._high_watermark, snapshot_id.end_offset)

    def _request_reload(self) -> None:
        self._must_load = True
        self._wake.set()

    # -- active controller

    def apply_own_steps(self, batch: bytes) -> Generator[None, None, MetadataDelta]:
        """Apply a batch that this node has just appended, with its offset and epoch, and return the changes.

        Yields about every 10 ms. The caller must run the first step directly after the append and exhaust the
        generator, even if the batch is truncated meanwhile. Raises RuntimeError if the image does not end at the batch,
        and CorruptRecordError (after `on_failure`) if the batch cannot be applied.
        """
        header = record_batch.parse_header(batch)
        image = self.image
        if not self.is_loaded or image.is_within_batch or image.offset + 1 != header.base_offset:
            raise RuntimeError(f"batch at offset {header.base_offset} does not follow image end {self.applied_end}")
        delta = MetadataDelta()
        self._own_end = header.last_offset + 1
        try:
            yield from image.replay_steps(batch, delta)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._own_end = 0
            self._wake.set()  # the task did not touch the image meanwhile
        self._maker.schedule.applied(delta.outdated, len(batch))
        self._freeze_changed(len(delta.changed_partitions))
        return delta

    def _freeze_changed(self, partitions: int) -> None:
        """Count new partition objects; once there are FREEZE_PARTITIONS, hide them from the garbage collector."""
        self._unfrozen += partitions
        if self._unfrozen >= FREEZE_PARTITIONS:
            self._unfrozen = 0
            freeze()

    # -- the task

    async def _run(self) -> None:
        try:
            while self._failure is None:
                self._wake.clear()
                if not self._is_applying_own:
                    if not self.is_loaded or self.image.offset + 1 < self.quorum.replica.log.log_start_offset:
                        await self._load()
                    await self._follow()
                if self.is_loaded:
                    self._maker.poll(self.image)
                if self.idle is not None:
                    await self.idle()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._wake.wait()
        except Exception as error:
            self._fail(error)

    @property
    def _is_applying_own(self) -> bool:
        """Whether a batch of the active controller is partially applied."""
        return self._own_end > 0

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._maker.image_failed()
            self._wake.set()
            log.error("metadata loader failed", error=str(error), applied=self.image.offset)
            self.on_failure(error)

    async def _follow(self) -> None:
        """Apply records up to the high watermark and publish the changes."""
        if not self.is_loaded:
            return
        self._unpublished += await self._replay(self.image, self._delta)
        await self._publish_applied()

    async def _publish_applied(self) -> None:
        """Publish what `_replay` has applied, including what a batch of the active controller has delayed."""
        if not self._unpublished or self._failure is not None or self._is_applying_own or self.image.failed:
            return
        deltas, self._delta, self._unpublished = [self._delta], MetadataDelta(), 0
        await self.publish(self.image, deltas[0])
        await free_delta(deltas)

    async def _replay(self, image: MetadataImage, delta: MetadataDelta | None) -> int:
        """Apply the log up to the high watermark and return the number of bytes applied.

        Changes are added to `delta`, if any. Stops after a complete batch if the image must be reloaded.
        """
        pace, applied = Pace(), 0
        while self._failure is None:
            if image is self.image and (self._must_load or self._is_applying_own):
                break
            metadata_log, start = self.quorum.replica.log, image.offset + 1
            end = min(self._high_watermark, metadata_log.log_end_offset)
            if not metadata_log.log_start_offset <= start < end:
                break
            data = metadata_log.read(start, APPLY_BYTES, end, True)
            if not data:
                break
            for position, header in record_batch.iterate(data):  # the disk may have corrupted it
                record_batch.check_crc(data, position, header)
            changes = MetadataDelta() if delta is None else delta
            changes.outdated = set()
            partitions = image.partition_count
            for _ in image.replay_steps(data, changes):
                await pace.give_way()
            self._maker.schedule.applied(changes.outdated, len(data))
            applied += len(data)
            if image is self.image:
                self._freeze_changed(max(0, image.partition_count - partitions) + len(changes.outdated))
            await pace.give_way()
        return applied

    # -- loading

    async def _load(self) -> None:
        """Rebuild the image from the newest snapshot and the log after it, and publish the difference."""
        self._must_load = True
        await self._publish_applied()  # the difference does not include these changes
        self.metrics.is_loading.set(1)
        pace, deltas = Pace(), [MetadataDelta()]
        with collector_off():
            image = None
            while image is None:
                image = await self._load_once()
            for _ in difference_steps(self.image, image, deltas[0]):
                await pace.give_way()
        if self._failure is not None:  # the replay ended early
            return
        previous, self.image = [self.image], image
        self._delta, self._unpublished, self._unfrozen = MetadataDelta(), 0, 0
        self._must_load = False
        self.metrics.is_loading.set(0)
        await self.publish(image, deltas[0])
        del image
        await free_delta(deltas)
        await free_image(previous)

    async def _load_once(self) -> MetadataImage | None:
        """Return an image, or None if the log or the newest snapshot was replaced meanwhile. Raises StorageError."""
        replica = self.quorum.replica
        snapshot_id = replica.latest_snapshot
        if snapshot_id is not None:
            loaded = await self._load_snapshot(snapshot_id)
            if loaded is None:
                return None
            image = loaded
        elif replica.log.log_start_offset == 0:
            image = MetadataImage()
            self._maker.loaded(None)
        else:
            raise StorageError(f"metadata log starts at offset {replica.log.log_start_offset} but has no snapshot")
        await self._replay(image, None)
        if image.offset + 1 >= replica.log.log_start_offset:
            return image
        if replica.latest_snapshot == snapshot_id:
            raise StorageError(
                f"metadata log starts at offset {replica.log.log_start_offset}, but the latest snapshot and the "
                f"records after it end at {image.offset + 1}"
            )
        return None

    async def _load_snapshot(self, snapshot_id: SnapshotId) -> MetadataImage | None:
        """Return the image of the snapshot, or None if it is no longer the newest.

        Raises CorruptRecordError and StorageError.
        """
        replica, metrics = self.quorum.replica, self.metrics
        started_ms, pace = monotonic_ms(), Pace()
        try:
            reader = replica.store.open(snapshot_id)
            loader = ImageLoader(reader, snapshot_id)
            for records in loader.steps():
                metrics.loaded_records.set(records)
                metrics.load_progress.set(reader.read_bytes / reader.size_bytes)
                await pace.give_way()
                if replica.latest_snapshot != snapshot_id:
                    return None
        except CorruptRecordError:
            metrics.corrupt_on_load += 1
            raise
        except StorageError:
            if replica.latest_snapshot != snapshot_id:
                return None  # deleted, because a newer one exists
            raise
        took_ms = monotonic_ms() - started_ms
        metrics.load_progress.set(1)
        metrics.snapshot_loaded(snapshot_id, loader.records, reader.size_bytes, took_ms)
        self._maker.loaded(loader.records)
        log.info(
            "snapshot loaded",
            end_offset=snapshot_id.end_offset,
            epoch=snapshot_id.epoch,
            records=loader.records,
            size_bytes=reader.size_bytes,
            took_ms=took_ms,
        )
        return loader.image
