"""One simulated machine of the quorum: disk, clocks, a shadow of its log, and at most one process.

A process runs from a start to a crash. `entries` shadows the log from offset `base` with one (epoch, batch CRC) per
offset, so that the checker needs no reads. A snapshot covers the offsets below `base`.
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
    """Settings for all nodes, drawn from a seed."""

    ties: bool
    """Whether jitter is coarse, so that candidates tie."""
    snapshot_limits: SnapshotLimits
    retention_limits: RetentionLimits


class Host:
    """One simulated machine: disk, clocks and at most one process, which `SimNode` implements."""

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
        """Metadata image of the process; ahead of the high watermark on an active controller."""
        self.transfer: object | None = None
        """The running snapshot transfer."""
        self.process = 0
        self.is_paused = False
        self.backlog: list[Action] = []
        self.base = 0
        self.entries: list[Entry] = []
        self.durable_floor = 0
        """Offset below which batches were durable when the last process ended, or are in a durable snapshot."""
        self.checked_high_watermark = 0
        self.checked_log_start = 0
        self.epoch_seen = 0
        self.crash_point = ""
        """The process crashes after passing the point with this name, see `CRASH_POINTS`."""
        self.flipped: set[SnapshotId] = set()
        """Snapshots on this disk that a fault corrupted."""
        self.set_aside: set[SnapshotId] = set()
        """Corrupted snapshots that an earlier start set aside."""
        self.is_log_damaged = False
        """Whether a fault damaged the log on this disk."""
        self.is_refused = False
        """Whether the last start was refused, so that the disk must be replaced."""
        self._rate = 1.0
        self._clock_start_ms = 0.0

    def boot(self) -> None:
        """Start a process on the current disk."""
        raise NotImplementedError

    def step(self, event: Event) -> None:
        """Handle an event and all events that follow from it."""
        raise NotImplementedError

    @property
    def the_replica(self) -> QuorumReplica:
        """Durable state of the process. Raises RuntimeError if no process runs."""
        if self.replica is None:
            raise RuntimeError("no process runs")
        return self.replica

    @property
    def the_log(self) -> Log:
        """Log of the process. Raises RuntimeError if no process runs."""
        return self.the_replica.log

    @property
    def is_up(self) -> bool:
        """Whether a process runs, paused or not."""
        return self.machine is not None

    @property
    def is_leader(self) -> bool:
        """Whether the process is the leader in its own view."""
        return self.machine is not None and self.machine.state is State.LEADER

    @property
    def is_active(self) -> bool:
        """Whether the process is the active controller in its own view.

        It is the leader, has committed an offset of its epoch, and has applied its whole log.
        """
        machine = self.machine
        if machine is None or machine.leadership is None:
            return False
        is_confirmed = machine.high_watermark > machine.leadership.epoch_start_offset
        return is_confirmed and self.applied_end == self.the_log.log_end_offset

    @property
    def applied_end(self) -> int:
        """Offset after the last record applied to the image."""
        return self.image.offset + 1

    # -- the shadow of the log

    @property
    def end(self) -> int:
        """Offset of the next entry: the end of the shadow, which follows the log end."""
        return self.base + len(self.entries)

    def entry(self, offset: int) -> Entry:
        """Return the shadow's entry at `offset`, which must be at least `base` and below `end`."""
        return self.entries[offset - self.base]

    def durable_end(self) -> int:
        """Return the offset below which all entries are durable, as far as known."""
        known = self.replica.log.recovery_point if self.replica else 0
        return min(self.end, max(known, self.durable_floor))

    def has_durably(self, offset: int, entry: Entry) -> bool:
        """Return whether the entry, or a snapshot that covers its offset, is durable."""
        return offset < self.base or (offset < self.durable_end() and self.entry(offset) == entry)

    def has_log_of(self, other: Host) -> bool:
        """Return whether both logs have the same end and the same common entries."""
        base = max(self.base, other.base)
        return self.end == other.end and self.entries[base - self.base :] == other.entries[base - other.base :]

    def update_shadow(self) -> None:
        """Add the log's new batches to the shadow."""
        log = self.the_log
        while self.end < log.log_end_offset:
            for _, header in record_batch.iterate(log.read(self.end, READ_BYTES, log.log_end_offset, True)):
                self.entries += [(header.partition_leader_epoch, header.crc)] * header.record_count

    # -- time

    def local_ms(self) -> int:
        """Return this node's monotonic clock (ms), which starts at a random value and drifts."""
        return int(self._clock_start_ms + self.engine.now_ms * self._rate)

    def wall_ms(self) -> int:
        """Return this node's wall clock (ms), which differs from those of other nodes by a few hundred ms."""
        return WALL_MS + 137 * self.node_id + int(self.engine.now_ms * self._rate)

    def at_process(self, process: int, action: Callable[[], None]) -> None:
        """Run the action now if the process with this number still runs; drop it otherwise.

        A paused process runs it when it resumes.
        """
        if process != self.process or self.machine is None:
            return
        if self.is_paused:
            self.backlog.append(lambda: self.at_process(process, action))
            return
        action()

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Run the action after `delay_ms` if this process is still running then."""
        process = self.process
        self.engine.after(delay_ms, lambda: self.at_process(process, action))

    # -- processes

    def stop(self, *, power: bool = False, clean: bool = False, restart_ms: float | None = None) -> None:
        """End the process, by default as kill does: without writing, but keeping written data.

        With `power`, also loses a random part of unsynced data. With `clean`, first closes the log and writes the
        clean-shutdown marker. `restart_ms` is the delay of the restart, or None for no restart.
        """
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
        """Kill the process, replace the disk with an empty one and restart."""
        self.is_refused = False
        self.stop(restart_ms=self.rng.uniform(50, 1500))
        self.fs = FaultyFileSystem()
        self.entries, self.base, self.durable_floor, self.epoch_seen = [], 0, 0, 0
        self.flipped.clear()
        self.set_aside.clear()
        self.is_log_damaged = False

    @contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Context manager that ends the process (`disk_failed`) on a StorageError or OSError in the block."""
        try:
            yield
        except (StorageError, OSError):
            self.disk_failed()

    def disk_failed(self) -> None:
        """End the process after a disk failure, sometimes with a power failure. It restarts within 1 s."""
        self.counts["disk failures"] += 1
        self.stop(power=self.rng.random() < 0.3, restart_ms=self.rng.uniform(100, 1000))

    def crashed_at(self, point: str) -> bool:
        """Crash if `point` is the node's crash point. Return whether the process crashed; it restarts soon."""
        if self.crash_point != point:
            return False
        self.counts["crashes"] += 1
        self.counts[f"crash at {point}"] += 1
        self.crash_point = ""
        self.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 400))
        return True

    def pause(self) -> Action:
        """Pause the process as SIGSTOP does. Return the action that resumes it, without effect on a later process."""
        self.is_paused = True
        process = self.process
        return lambda: self.resume() if self.process == process and self.is_paused else None

    def resume(self) -> None:
        """Resume a paused process and run its delayed actions."""
        self.is_paused = False
        backlog, self.backlog = self.backlog, []
        for action in backlog:
            action()
