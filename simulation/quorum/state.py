"""State machine of one simulated process: a production metadata image and its snapshots.

The image is loaded from the newest snapshot and follows the high watermark, or the end of the log on an active
controller. A truncation below its offset reloads it. Production rules (630-03 to 630-06, 630-15) decide when snapshots
are due. They are captured, written in steps while the image advances, frozen when the high watermark has reached their
end, and cleaned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.image import CapturedImage, MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.core.metadata.records import RemoveTopicRecord, encode_record
from kipmesh.core.snapshot.retention import ReplicaEnd
from kipmesh.core.snapshot.schedule import SnapshotSchedule
from kipmesh.storage.fs import StorageError, is_no_space
from kipmesh.storage.quorum.snapshot_file import ImageLoader
from kipmesh.storage.quorum.snapshots import SnapshotWriter
from simulation.quorum.checker import Checker
from simulation.quorum.host import READ_BYTES, Host


@dataclass(eq=False, slots=True)
class PendingSnapshot:
    """A snapshot that is being written."""

    captured: CapturedImage
    writer: SnapshotWriter
    values: Iterator[bytes]
    is_written: bool = False


class SimState:
    """State machine of one process: its metadata image and its snapshots (see the module docstring)."""

    def __init__(self, node: Host, checker: Checker) -> None:
        self.node = node
        self.checker = checker
        self.counts = node.counts
        self.schedule = SnapshotSchedule(node.settings.snapshot_limits, node.wall_ms())
        self.pending: PendingSnapshot | None = None
        self.is_cleaning = False
        self.fails_next = False
        """Whether the next applied records get a record that does not fit, as a defect of the state machine would."""

    # -- the image

    def load(self) -> None:
        """Reload the image from the latest snapshot, or start empty if there is none.

        A corrupt snapshot ends the process, which restarts later.
        """
        node, replica = self.node, self.node.the_replica
        self._abort()
        latest = replica.latest_snapshot
        node.image = MetadataImage()
        if latest is not None:
            loader = ImageLoader(replica.store.open(latest), latest)
            try:
                for _ in loader.steps():
                    pass
            except CorruptRecordError:
                self.counts["corrupt snapshots loaded"] += 1
                node.stop(restart_ms=node.rng.uniform(50, 500))
                return
            node.image = loader.image
            self.schedule.loaded(loader.records, node.wall_ms())
            self.counts["snapshots loaded"] += 1
            self.checker.check_loaded_snapshot(node, latest)

    def apply(self, end: int) -> None:
        """Apply the log up to offset `end`, which must be the end of a batch.

        Records that do not fit the image end the process.
        """
        node, log = self.node, self.node.the_log
        if node.applied_end < log.log_start_offset:
            self.load()
        while node.applied_end < end and node.machine is not None:
            data = log.read(node.applied_end, READ_BYTES, end, True)
            if not data:
                node.engine.fail(f"high watermark {end} of node {node.node_id} is within a batch")
            delta = MetadataDelta()
            try:
                node.image.replay(self._broken(data) if self.fails_next else data, delta)
            except CorruptRecordError as error:
                self.apply_failed(error)
                return
            self.schedule.applied(delta.outdated, len(data))

    def _broken(self, data: bytes) -> bytes:
        """Return the first batch with its last record replaced by one that fits no image."""
        self.fails_next = False
        header = record_batch.parse_header(data)
        values = [] if header.is_control else [record.value for record in record_batch.read_records(data, 0, header)]
        broken = [(None, value) for value in values[:-1]] + [(None, encode_record(RemoveTopicRecord(bytes(16))))]
        return record_batch.build(
            broken,
            base_offset=header.base_offset,
            leader_epoch=header.partition_leader_epoch,
            timestamp_ms=header.max_timestamp,
        )

    def apply_failed(self, error: Exception) -> None:
        """End the process after a failed apply, without writing a snapshot (630-15). It restarts later."""
        self.counts["applies failed"] += 1
        self.node.stop(restart_ms=self.node.rng.uniform(50, 1000))

    def truncate(self, end: int) -> None:
        """Abort a snapshot and reload the image, each only if it is ahead of a log that was truncated to `end`."""
        if self.pending is not None and self.pending.captured.snapshot_id.end_offset > end:
            self._abort()
        node = self.node
        if node.applied_end > end:
            self.counts["images reloaded"] += 1
            self.load()
            if node.machine is not None:
                self.apply(min(max(node.machine.high_watermark, 0), end))

    # -- snapshots

    def tick(self) -> None:
        """Start a snapshot if one is due, and plan to raise the log start and delete older snapshots."""
        if self.pending is None and self.schedule.due(self.node.wall_ms()) is not None:
            self._begin()
        if not self.is_cleaning and self.node.machine is not None:
            self._plan_clean()

    def _begin(self) -> None:
        node, replica = self.node, self.node.the_replica
        latest = replica.latest_snapshot
        if latest is not None and node.applied_end <= latest.end_offset:
            return
        captured = node.image.capture()
        self.schedule.begin()
        try:
            writer = replica.store.create(
                captured.snapshot_id, last_contained_log_timestamp=captured.timestamp_ms, now_ms=node.wall_ms()
            )
        except StorageError:
            self.schedule.failed(node.wall_ms())
            return
        self.counts["snapshots started"] += 1
        self.pending = PendingSnapshot(captured, writer, image_values(captured))
        self._later(self.pending)

    def _later(self, pending: PendingSnapshot) -> None:
        self.node.later(self.node.rng.uniform(0.5, 30), lambda: self._advance(pending))

    def _advance(self, pending: PendingSnapshot) -> None:
        node = self.node
        if self.pending is not pending:
            return
        try:
            if not pending.is_written:
                values = list(islice(pending.values, node.rng.randint(1, 20)))
                pending.is_written = not values
                if values:
                    pending.writer.append(values)
                if node.crashed_at("snapshot partly written"):
                    return
            elif self._may_freeze(pending):
                self._freeze(pending)
                return
        except StorageError:  # a full or broken disk does not stop the image
            self.counts["snapshots not written"] += 1
            self._abort()
            return
        self._later(pending)

    def _may_freeze(self, pending: PendingSnapshot) -> bool:
        machine = self.node.machine
        return machine is not None and machine.high_watermark >= pending.captured.snapshot_id.end_offset

    def _freeze(self, pending: PendingSnapshot) -> None:
        node = self.node
        pending.writer.freeze()
        self.pending = None
        if node.crashed_at("snapshot made"):
            return
        self.counts["snapshots made"] += 1
        self.checker.check_frozen_snapshot(node, pending.captured)
        self.schedule.completed(pending.writer.records, node.wall_ms())
        node.step(node.the_replica.register_snapshot(pending.captured.snapshot_id))

    def _abort(self) -> None:
        """Discard the snapshot that is being written, if any."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.counts["snapshots aborted"] += 1
            pending.writer.discard()
            self.schedule.failed(self.node.wall_ms())

    # -- cleaning

    def _ends(self) -> list[ReplicaEnd]:
        node, machine = self.node, self.node.machine
        leadership = machine.leadership if machine is not None else None
        if leadership is None:
            return []
        offset_ms = node.wall_ms() - node.local_ms()
        return [
            ReplicaEnd(replica_id, replicas is leadership.voters, replica.end_offset, replica.last_fetch_ms + offset_ms)
            for replicas in (leadership.voters, leadership.observers)
            for replica_id, replica in replicas.items()
        ]

    def _plan_clean(self) -> None:
        node, replica, machine = self.node, self.node.the_replica, self.node.machine
        if machine is None:
            return
        with node.ending_on_failure():
            start = replica.plan_clean(
                leader_log_start=None if machine.leadership is not None else machine.leader_log_start,
                replicas=self._ends(),
                high_watermark=max(machine.high_watermark, 0),
                now_ms=node.wall_ms(),
                limits=node.settings.retention_limits,
            )
            if start > node.the_log.log_start_offset:
                replica.raise_log_start(start)
                self.counts["log starts raised"] += 1
                if node.crashed_at("log start raised"):
                    return
            elif node.rng.random() < 0.95:
                return
            self.is_cleaning = True
            node.later(node.rng.uniform(0.5, 30), self._clean)

    def _clean(self) -> None:
        node, replica = self.node, self.node.the_replica
        self.is_cleaning = False
        before = replica.store.snapshot_ids()
        try:
            event = replica.clean()
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and is_no_space(error.__cause__):
                self.counts["cleanings postponed"] += 1
                return
            node.disk_failed()
            return
        self.counts["snapshots deleted"] += len(before) - len(replica.store.snapshot_ids())
        if node.crashed_at("cleaned"):
            return
        self.checker.check_cleaned(node)
        if event is not None:
            node.step(event)
