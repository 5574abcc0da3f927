"""The image of the committed metadata on a controller or broker: loaded, kept up to date, published (630-12, 630-14).

One task owns the image. It loads the newest snapshot and replays the log after it, up to the high watermark, then
follows the high watermark; what changed goes to `publish`, in the log's order, from this task: raft's steps do not wait
for it. An active controller applies what it appended itself by `apply_own_steps`, so that its image is ahead of
the high watermark. Should it be deposed and that part of the log be cut, the image has what never happened, and is
loaded anew; so is one that the log's start has passed, or whose log was replaced by a snapshot. Readers then get
another object, and the difference to the one before.

One record may change tens of thousands of partitions (630-16), so batches are applied in steps, and others run between
two of them. Who began a batch ends it, whatever happens to the log meanwhile; until then the image is no state of the
cluster, and is neither published nor captured, nor thrown away.

Invariants: nothing above the high watermark is applied but by `apply_own_steps`; `applied_end` is 0 while the image is
not that of the log; after a record that cannot be applied nothing is applied, published or snapshotted any more
(630-15).
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
from kipmesh.node.quorum.pacing import Pace, collector_off, freeze, let_go, let_go_of_delta
from kipmesh.node.quorum.snapshot_maker import CLEAN_INTERVAL_S, SnapshotMaker
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.snapshot_file import ImageLoader

log = structlog.get_logger(__name__)

APPLY_BYTES = 32 << 10
"""Of the log, applied at a time while others wait; more if a batch is larger."""
IDLE_S = 1.0
"""At least that often `idle` is called and a snapshot is looked for."""
FREEZE_PARTITIONS = 20_000
"""New or changed partitions after which the garbage collector is told not to look at them."""

Publish = Callable[[MetadataImage, MetadataDelta], Awaitable[None]]


@dataclass(eq=False, repr=False)
class MetadataLoader:
    """See the module; make it inside the event loop. It may be the driver's listener.

    `publish(image, delta)` is awaited after each advance, with an empty delta too if only control records came.

    What `apply_own_steps` applied is not in it: its caller has that delta. `idle` is awaited by the same task after
    each round, at least every second. `on_failure` is called at most once, and then nothing is done any more.
    `snapshot_maker.snapshot_limits` and `retention_limits` give the limits of a configuration.
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
        """For others to read; another object after a snapshot was loaded."""
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
        """The offset after the last applied record; 0 while the image is loaded (anew) or failed."""
        return self.image.offset + 1 if self.is_loaded else 0

    @property
    def is_loaded(self) -> bool:
        """Whether the image is that of the log: after the first load, and not while it is loaded anew."""
        return not self._must_load and not self.image.failed and self._failure is None

    @property
    def _reach(self) -> int:
        """The offset after the last record that the image has anything of."""
        return max(self.image.offset + 1, self._own_end)

    def start(self) -> None:
        """Load, and follow the high watermark from now on."""
        self.metrics.watch(self.quorum, lambda: self.applied_end)
        self._high_watermark = max(self._high_watermark, self.quorum.high_watermark)
        self._maker.start()
        self._task = asyncio.create_task(self._run(), name="metadata-loader")

    async def stop(self) -> None:
        """End at the next slice; idempotent."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._maker.stop()

    # -- what the driver tells

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Nothing follows from it: what happens to the log is told."""

    def committed(self, high_watermark: int) -> None:
        """The high watermark moved."""
        self._high_watermark = max(self._high_watermark, high_watermark)
        self._maker.committed()
        self._wake.set()

    def truncated(self, offset: int) -> None:
        """The log was cut to `offset`: what a deposed leader had applied beyond it never happened."""
        self._maker.truncated(offset)
        if offset < self._reach:
            log.warning("applied metadata was not committed", log_end_offset=offset, applied=self._reach - 1)
            self._load_again()

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """The log was replaced: only what is committed, and reaches the snapshot, is still right."""
        self._maker.snapshot_installed(snapshot_id)
        if not snapshot_id.end_offset <= self._reach <= self._high_watermark:
            self._load_again()
        self._high_watermark = max(self._high_watermark, snapshot_id.end_offset)

    def _load_again(self) -> None:
        self._must_load = True
        self._wake.set()

    # -- the active controller

    def apply_own_steps(self, batch: bytes) -> Generator[None, None, MetadataDelta]:
        """Apply a batch that was just appended, as the log has it: with its offset and epoch. Returns what it changed.

        In steps of about 10 ms, of which the first follows the append at once. It is to be brought to its end, even if
        the batch is cut meanwhile. RuntimeError when the image does not have all that is before it; CorruptRecordError
        (and `on_failure`) when it cannot be applied.
        """
        header = record_batch.parse_header(batch)
        image = self.image
        if not self.is_loaded or image.is_within_batch or image.offset + 1 != header.base_offset:
            raise RuntimeError(f"a batch at {header.base_offset} for an image that ends at {self.applied_end}")
        delta = MetadataDelta()
        self._own_end = header.last_offset + 1
        try:
            yield from image.replay_steps(batch, delta)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._own_end = 0
            self._wake.set()  # the task leaves the image alone until then
        self._maker.schedule.applied(delta.outdated, len(batch))
        self._freeze_changed(len(delta.changed_partitions))
        return delta

    def _freeze_changed(self, partitions: int) -> None:
        """So many of the image's partitions are new objects."""
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
        """Whether a batch of an active controller is half applied."""
        return self._own_end > 0

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._maker.image_failed()
            self._wake.set()
            log.error("the metadata is not followed any more", error=str(error), applied=self.image.offset)
            self.on_failure(error)

    async def _follow(self) -> None:
        """Apply up to the high watermark, and publish."""
        if not self.is_loaded:
            return
        self._unpublished += await self._replay(self.image, self._delta)
        await self._publish_applied()

    async def _publish_applied(self) -> None:
        """Tell what `_replay` applied, now or before a batch of ours came between."""
        if not self._unpublished or self._failure is not None or self._is_applying_own or self.image.failed:
            return
        deltas, self._delta, self._unpublished = [self._delta], MetadataDelta(), 0
        await self.publish(self.image, deltas[0])
        await let_go_of_delta(deltas)

    async def _replay(self, image: MetadataImage, delta: MetadataDelta | None) -> int:
        """Apply the log up to the high watermark, as far as it is there and the image that of the log; gives bytes.

        Without a delta nobody wants to know what changed. A batch that was begun is applied to its end.
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
            for position, header in record_batch.iterate(data):  # the disk may have changed since it was written
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
        """Another image: the newest snapshot and the log after it; published as the difference to the one before."""
        self._must_load = True
        await self._publish_applied()  # the difference does not have it
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
        before, self.image = [self.image], image
        self._delta, self._unpublished, self._unfrozen = MetadataDelta(), 0, 0
        self._must_load = False
        self.metrics.is_loading.set(0)
        await self.publish(image, deltas[0])
        del image
        await let_go_of_delta(deltas)
        await let_go(before)

    async def _load_once(self) -> MetadataImage | None:
        """None when the log or the newest snapshot was replaced meanwhile."""
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
            raise StorageError(f"the metadata log starts at {replica.log.log_start_offset} and there is no snapshot")
        await self._replay(image, None)
        if image.offset + 1 >= replica.log.log_start_offset:
            return image
        if replica.latest_snapshot == snapshot_id:
            raise StorageError(
                f"the metadata log starts at {replica.log.log_start_offset}, and its latest snapshot and what can be "
                f"applied after it end at {image.offset + 1}"
            )
        return None

    async def _load_snapshot(self, snapshot_id: SnapshotId) -> MetadataImage | None:
        """None when it is not the newest any more."""
        replica, metrics = self.quorum.replica, self.metrics
        begin_ms, pace = monotonic_ms(), Pace()
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
                return None  # it was deleted after a newer one came
            raise
        took_ms = monotonic_ms() - begin_ms
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
