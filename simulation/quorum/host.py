"""One simulated machine of the quorum: its disk, its clocks, a shadow of its log, and at most one process.

A process is a run between a start and a crash. `entries` shadows the log from `base` on, one (epoch, batch CRC) an
offset, so that the checker needs no reads; what is below `base` is in a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from kipmesh.core import record_batch
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.raft import Machine, RaftConfig, State
from kipmesh.core.raft.types import Event
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.messages import SnapshotId
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log.log import Log
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from simulation.engine import WALL_MS, Action, Network
from simulation.faulty_fs import FaultyFileSystem

READ_BYTES = 1 << 16

Entry = tuple[int, int]


@dataclass(slots=True)
class Settings:
    """What a seed draws for all of its nodes."""

    ties: bool
    """Whether jitter is so coarse that candidates tie."""
    snapshot_limits: SnapshotLimits
    retention_limits: RetentionLimits


class Host:
    """See the module. `SimNode` adds what a process runs."""

    def __init__(self, network: Network, settings: Settings, config: RaftConfig) -> None:
        self.network = network
        self.engine = network.engine
        self.counts = network.engine.counts
        self.settings = settings
        self.config = config
        self.node_id = config.node_id
        self.rng = Random(self.engine.rng.getrandbits(64))
        self.fs = FaultyFileSystem()
        self.machine: Machine | None = None
        self.manager: LogManager | None = None
        self.replica: QuorumReplica | None = None
        self.image = MetadataImage()
        """Of the process, ahead of the high watermark at an active controller."""
        self.transfer: object | None = None
        """The snapshot that is being fetched."""
        self.process = 0
        self.is_paused = False
        self.backlog: list[Action] = []
        self.base = 0
        self.entries: list[Entry] = []
        self.durable_floor = 0
        """What is below was durable when the last process ended, or is in a snapshot that is."""
        self.checked_high_watermark = 0
        self.checked_log_start = 0
        self.epoch_seen = 0
        self.crash_point = ""
        """The process ends when it has passed a point of that name, see `CRASH_POINTS`."""
        self.flipped: set[SnapshotId] = set()
        """Snapshots that a fault changed on this disk."""
        self.set_aside: set[SnapshotId] = set()
        """Those of them that an earlier start set aside."""
        self.is_log_damaged = False
        """Whether a fault changed the log on this disk."""
        self.is_refused = False
        """Whether the last start was refused, and somebody has to replace the disk."""
        self._rate = 1.0
        self._clock_start_ms = 0.0

    def boot(self) -> None:
        """Start a process on what the disk has."""
        raise NotImplementedError

    def step(self, event: Event) -> None:
        """One event with all that follows from it at once."""
        raise NotImplementedError

    @property
    def the_replica(self) -> QuorumReplica:
        """What the process has on its disk."""
        if self.replica is None:
            raise RuntimeError("no process runs")
        return self.replica

    @property
    def the_log(self) -> Log:
        """Its log."""
        return self.the_replica.log

    @property
    def is_leader(self) -> bool:
        """Whether it takes itself for the leader."""
        return self.machine is not None and self.machine.state is State.LEADER

    @property
    def is_active(self) -> bool:
        """Whether it takes itself for the active controller."""
        machine = self.machine
        if machine is None or machine.leadership is None:
            return False
        is_confirmed = machine.high_watermark > machine.leadership.epoch_start_offset
        return is_confirmed and self.applied_end == self.the_log.log_end_offset

    @property
    def applied_end(self) -> int:
        """Everything below is applied to the image."""
        return self.image.offset + 1

    # -- the shadow of the log

    @property
    def end(self) -> int:
        """The offset that the next entry gets."""
        return self.base + len(self.entries)

    def entry(self, offset: int) -> Entry:
        """The entry at an offset at or above `base`."""
        return self.entries[offset - self.base]

    def durable_end(self) -> int:
        """What is below is durable."""
        known = self.replica.log.recovery_point if self.replica else 0
        return min(self.end, max(known, self.durable_floor))

    def has_durably(self, offset: int, entry: Entry) -> bool:
        """Whether it has an entry, or a snapshot in place of it."""
        return offset < self.base or (offset < self.durable_end() and self.entry(offset) == entry)

    def has_log_of(self, other: Host) -> bool:
        """Whether both logs are equal where both have entries, and end at the same offset."""
        base = max(self.base, other.base)
        return self.end == other.end and self.entries[base - self.base :] == other.entries[base - other.base :]

    def note_log(self) -> None:
        """Take into the shadow what the log has behind it."""
        log = self.the_log
        while self.end < log.log_end_offset:
            for _, header in record_batch.iterate(log.read(self.end, READ_BYTES, log.log_end_offset, True)):
                self.entries += [(header.partition_leader_epoch, header.crc)] * header.record_count

    # -- time

    def local_ms(self) -> int:
        """This node's monotonic clock."""
        return int(self._clock_start_ms + self.engine.now_ms * self._rate)

    def wall_ms(self) -> int:
        """This node's wall clock, some hundreds of ms from the others'."""
        return WALL_MS + 137 * self.node_id + int(self.engine.now_ms * self._rate)

    def at_process(self, process: int, action: Callable[[], None]) -> None:
        """Do it now if that process still runs, later if it is stopped."""
        if process != self.process or self.machine is None:
            return
        if self.is_paused:
            self.backlog.append(lambda: self.at_process(process, action))
            return
        action()

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do it that much later, if this process still runs."""
        process = self.process
        self.engine.after(delay_ms, lambda: self.at_process(process, action))

    # -- processes

    def stop(self, *, power: bool = False, clean: bool = False, restart_ms: float | None = None) -> None:
        """End the process; without power the disk forgets what was not synced. A clean stop closes the log."""
        if self.manager is not None and clean:
            self.manager.close(-1)
        if self.replica is not None:
            self.durable_floor = self.durable_end()
        if self.manager is not None:
            self.manager.abandon()
        self.process += 1
        self.machine = self.manager = self.replica = self.transfer = None
        if power:
            self.fs.crash(self.rng)
        if restart_ms is not None:
            self.engine.after(restart_ms, self._restart)

    def _restart(self) -> None:
        if self.machine is None and not self.is_refused:
            self.boot()

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self.is_refused = False
        self.stop(restart_ms=self.rng.uniform(50, 1500))
        self.fs = FaultyFileSystem()
        self.entries, self.base, self.durable_floor, self.epoch_seen = [], 0, 0, 0
        self.flipped.clear()
        self.set_aside.clear()
        self.is_log_damaged = False

    @contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """A process whose disk fails ends."""
        try:
            yield
        except (StorageError, OSError):
            self.disk_failed()

    def disk_failed(self) -> None:
        """The disk failed for good: the process ends, at times with the power."""
        self.counts["disk failures"] += 1
        self.stop(power=self.rng.random() < 0.3, restart_ms=self.rng.uniform(100, 1000))

    def crashed_at(self, point: str) -> bool:
        """Whether it crashed, at a point where it was to."""
        if self.crash_point != point:
            return False
        self.counts["crashes"] += 1
        self.counts[f"crash at {point}"] += 1
        self.crash_point = ""
        self.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 400))
        return True

    def pause(self) -> Action:
        """Stop the process, as SIGSTOP does; call the result to resume it."""
        self.is_paused = True
        process = self.process
        return lambda: self.resume() if self.process == process and self.is_paused else None

    def resume(self) -> None:
        """Continue a stopped process: what came meanwhile comes now."""
        self.is_paused = False
        backlog, self.backlog = self.backlog, []
        for action in backlog:
            action()
