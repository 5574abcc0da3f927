"""The state machine of one simulated process: a production image of the metadata, and the snapshots made of it.

It is what a node has to be beside its quorum: the image is loaded from the newest snapshot and follows the high
watermark, or, where this node is the active controller, its own log's end; when the log was cut below that, it is
loaded anew. Snapshots are due, captured, written some records at a time while the image goes on, frozen once the high
watermark has reached their end, and cleaned away, all by the production rules (630-03 to 630-06, 630-15).
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
class Making:
    """A snapshot that is being made."""

    captured: CapturedImage
    writer: SnapshotWriter
    values: Iterator[bytes]
    is_written: bool = False


class SimState:
    """See the module; made with each process."""

    def __init__(self, node: Host, checker: Checker) -> None:
        self.node = node
        self.checker = checker
        self.counts = node.counts
        self.schedule = SnapshotSchedule(node.settings.snapshot_limits, node.wall_ms())
        self.making: Making | None = None
        self.is_cleaning = False
        self.fails_next = False
        """Whether the next records that are applied will not fit, as with a defect of the state machine."""

    # -- the image

    def load(self) -> None:
        """Begin anew with the newest snapshot, or with nothing."""
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
                self.counts["corrupt snapshots met while running"] += 1
                node.stop(restart_ms=node.rng.uniform(50, 500))
                return
            node.image = loader.image
            self.schedule.loaded(loader.records, node.wall_ms())
            self.counts["snapshots loaded"] += 1
            self.checker.loaded(node, latest)

    def apply(self, end: int) -> None:
        """Apply the log up to `end`, which is at a batch's end."""
        node, log = self.node, self.node.the_log
        if node.applied_end < log.log_start_offset:
            self.load()
        while node.applied_end < end and node.machine is not None:
            data = log.read(node.applied_end, READ_BYTES, end, True)
            if not data:
                node.engine.fail(f"the high watermark {end} of node {node.node_id} is within a batch")
            delta = MetadataDelta()
            try:
                node.image.replay(self._broken(data) if self.fails_next else data, delta)
            except CorruptRecordError as error:
                self.failed(error)
                return
            self.schedule.applied(delta.outdated, len(data))

    def _broken(self, data: bytes) -> bytes:
        """The first batch, with a record that fits no image behind what is in it."""
        self.fails_next = False
        header = record_batch.parse_header(data)
        values = [] if header.is_control else [one.value for one in record_batch.read_records(data, 0, header)]
        broken = [(None, value) for value in values[:-1]] + [(None, encode_record(RemoveTopicRecord(bytes(16))))]
        return record_batch.build(
            broken,
            base_offset=header.base_offset,
            leader_epoch=header.partition_leader_epoch,
            timestamp_ms=header.max_timestamp,
        )

    def failed(self, error: Exception) -> None:
        """Records do not fit: the process ends, and writes no snapshot of that any more (630-15)."""
        self.counts["applies failed"] += 1
        self.node.stop(restart_ms=self.node.rng.uniform(50, 1000))

    def truncated(self, end: int) -> None:
        """The log was cut: what was applied of it, and captured, is no state of the cluster."""
        if self.making is not None and self.making.captured.snapshot_id.end_offset > end:
            self._abort()
        node = self.node
        if node.applied_end > end:
            self.counts["images reloaded"] += 1
            self.load()
            if node.machine is not None:
                self.apply(min(max(node.machine.high_watermark, 0), end))

    # -- snapshots

    def tick(self) -> None:
        """Look now and then whether a snapshot is due, or the log may start later."""
        if self.making is None and self.schedule.due(self.node.wall_ms()) is not None:
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
        self.counts["snapshots begun"] += 1
        self.making = Making(captured, writer, image_values(captured))
        self._later(self.making)

    def _later(self, making: Making) -> None:
        self.node.later(self.node.rng.uniform(0.5, 30), lambda: self._go_on(making))

    def _go_on(self, making: Making) -> None:
        node = self.node
        if self.making is not making:
            return
        try:
            if not making.is_written:
                values = list(islice(making.values, node.rng.randint(1, 20)))
                making.is_written = not values
                if values:
                    making.writer.append(values)
                if node.crashed_at("snapshot written in part"):
                    return
            elif self._may_freeze(making):
                self._freeze(making)
                return
        except StorageError:  # a full disk, or a broken one: the image goes on all the same
            self.counts["snapshots not written"] += 1
            self._abort()
            return
        self._later(making)

    def _may_freeze(self, making: Making) -> bool:
        machine = self.node.machine
        return machine is not None and machine.high_watermark >= making.captured.snapshot_id.end_offset

    def _freeze(self, making: Making) -> None:
        node = self.node
        making.writer.freeze()
        self.making = None
        if node.crashed_at("snapshot made"):
            return
        self.counts["snapshots made"] += 1
        self.checker.made(node, making.captured)
        self.schedule.completed(making.writer.records, node.wall_ms())
        node.step(node.the_replica.register_snapshot(making.captured.snapshot_id))

    def _abort(self) -> None:
        """What is being made is not wanted, or cannot be written."""
        making, self.making = self.making, None
        if making is not None:
            self.counts["snapshots aborted"] += 1
            making.writer.discard()
            self.schedule.failed(self.node.wall_ms())

    # -- cleaning

    def _ends(self) -> list[ReplicaEnd]:
        node, machine = self.node, self.node.machine
        leadership = machine.leadership if machine is not None else None
        if leadership is None:
            return []
        back_ms = node.wall_ms() - node.local_ms()
        return [
            ReplicaEnd(replica_id, replicas is leadership.voters, seen.end_offset, seen.last_fetch_ms + back_ms)
            for replicas in (leadership.voters, leadership.observers)
            for replica_id, seen in replicas.items()
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
                self.counts["cleanings put off"] += 1
                return
            node.disk_failed()
            return
        self.counts["snapshots deleted"] += len(before) - len(replica.store.snapshot_ids())
        if node.crashed_at("cleaned"):
            return
        self.checker.cleaned(node)
        if event is not None:
            node.step(event)
