"""One simulated replica: the driver of a production `Machine` and `QuorumReplica`, on a disk that may fail.

It is what a driver has to be (the contract in `kipmesh.core.raft.machine`): effects in order, `LogChanged` after the
log changed, flushes apart from the steps, `quorum-state` durable before what follows. Its state machine is
`kipmesh.testing.sim.state`, the snapshots that it fetches `kipmesh.testing.sim.transfer`.

`entries` shadows the log from `base` on, one (epoch, batch CRC) an offset, so that the checker needs no reads; what is
below `base` is in a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

from kipmesh.core import record_batch
from kipmesh.core.errors import KafkaError
from kipmesh.core.raft import Machine, RaftConfig, State
from kipmesh.core.raft.types import (
    Answer,
    AppendAsLeader,
    AppendRejected,
    Committed,
    Effect,
    ElectionState,
    Event,
    FetchSnapshot,
    Flush,
    Persisted,
    PersistElection,
    RefuseAppend,
    Send,
    SnapshotServed,
    StateChanged,
    TimerFired,
)
from kipmesh.core.raft.wire import with_records
from kipmesh.messages import FetchSnapshotRequest, SnapshotId
from kipmesh.storage.errors import StorageError, is_no_space
from kipmesh.storage.log import Log
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum_replica import LogChange, QuorumReplica, log_config
from kipmesh.testing.faulty_fs import FaultyFileSystem
from kipmesh.testing.sim.network import received
from kipmesh.testing.sim.points import is_passed
from kipmesh.testing.sim.state import READ_BYTES, SimState
from kipmesh.testing.sim.transfer import Transfer, served

if TYPE_CHECKING:
    from kipmesh.testing.sim.world import World

DATA = "/data"
SEGMENT_BYTES = 2048
_DEFAULTS = log_config(SEGMENT_BYTES)
_WALL_MS = 1_700_000_000_000

Entry = tuple[int, int]


class SimNode:
    """See the module. A process is a run of it between a start and a crash."""

    def __init__(self, world: World, config: RaftConfig) -> None:
        self.world = world
        self.config = config
        self.node_id = config.node_id
        self.rng = Random(world.rng.getrandbits(64))
        self.fs = FaultyFileSystem()
        self.machine: Machine | None = None
        self.manager: LogManager | None = None
        self.replica: QuorumReplica | None = None
        self.state: SimState | None = None
        self.transfer: Transfer | None = None
        self.process = 0
        self.is_paused = False
        self.backlog: list[Callable[[], None]] = []
        self.base = 0
        self.entries: list[Entry] = []
        self.durable_floor = 0
        """What is below was durable when the last process ended, or is in a snapshot that is."""
        self.checked_high_watermark = 0
        self.checked_log_start = 0
        self.epoch_seen = 0
        self.crash_point = ""
        """The process ends when it has passed a point of that name, see `points`."""
        self.flipped: set[SnapshotId] = set()
        """Snapshots that a fault changed on this disk."""
        self.set_aside: set[SnapshotId] = set()
        """Those of them that an earlier start set aside."""
        self.is_log_damaged = False
        """Whether a fault changed the log on this disk."""
        self.is_refused = False
        """Whether the last start was refused, and somebody has to replace the disk."""
        self._open: dict[int, tuple[SimNode, int, int]] = {}
        self._requests = 0
        self._is_flushing = False
        self._wants_flush = False
        self._wake_ms: float | None = None
        self._rate = 1.0
        self._clock_start_ms = 0.0

    # -- what a running process has

    @property
    def the_replica(self) -> QuorumReplica:
        """Its durable state."""
        if self.replica is None:
            raise RuntimeError("no process runs")
        return self.replica

    @property
    def the_log(self) -> Log:
        """Its log."""
        return self.the_replica.log

    @property
    def the_state(self) -> SimState:
        """Its state machine."""
        if self.state is None:
            raise RuntimeError("no process runs")
        return self.state

    @property
    def is_leader(self) -> bool:
        """Whether it takes itself for the leader."""
        return self.machine is not None and self.machine.state is State.LEADER

    @property
    def is_active(self) -> bool:
        """Whether it takes itself for the active controller."""
        machine, state = self.machine, self.state
        if machine is None or state is None or machine.leadership is None:
            return False
        is_confirmed = machine.high_watermark > machine.leadership.epoch_start_offset
        return is_confirmed and state.end == self.the_log.log_end_offset

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

    def _note_log(self) -> None:
        """Take into the shadow what the log has behind it."""
        log = self.the_log
        while self.end < log.log_end_offset:
            self._note(log.read(self.end, READ_BYTES, log.log_end_offset, True))

    def _note(self, data: bytes) -> None:
        for _, header in record_batch.iterate(data):
            self.entries += [(header.partition_leader_epoch, header.crc)] * header.record_count

    def replaced_log(self, snapshot_id: SnapshotId) -> None:
        """A snapshot is in the log's place."""
        self.base, self.entries = snapshot_id.end_offset, []
        self.durable_floor = snapshot_id.end_offset

    # -- time

    def local_ms(self) -> int:
        """This node's monotonic clock."""
        return int(self._clock_start_ms + self.world.scheduler.now_ms * self._rate)

    def wall_ms(self) -> int:
        """This node's wall clock, some hundreds of ms from the others'."""
        return _WALL_MS + 137 * self.node_id + int(self.world.scheduler.now_ms * self._rate)

    def jitter(self) -> float:
        """Random, or in some runs so coarse that candidates tie."""
        return self.rng.choice((0.0, 0.5)) if self.world.ties else self.rng.random()

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
        self.world.scheduler.after(delay_ms, lambda: self.at_process(process, action))

    def _schedule_wake(self) -> None:
        deadline = self.machine.next_deadline_ms() if self.machine else None
        if deadline is None:
            return
        due_ms = self.world.scheduler.now_ms + max(0.0, (deadline - self.local_ms() + 1) / self._rate)
        if self._wake_ms is None or due_ms < self._wake_ms - 0.5:
            self._wake_ms = due_ms
            process = self.process
            self.world.scheduler.after(due_ms - self.world.scheduler.now_ms, lambda: self._wake(process, due_ms))

    def _wake(self, process: int, due_ms: float) -> None:
        if process != self.process or self.machine is None or self._wake_ms != due_ms:
            return
        self._wake_ms = None
        if self.is_paused:
            self.backlog.append(lambda: self.deliver(process, TimerFired()))
            return
        deadline = self.machine.next_deadline_ms()
        if deadline is not None and deadline <= self.local_ms():
            self.step(TimerFired())
        else:
            self._schedule_wake()

    # -- processes

    def boot(self) -> None:
        """Start a process on what the disk has."""
        self.process += 1
        self._rate = 1.0 if self.world.ties else self.rng.uniform(0.95, 1.05)
        self._clock_start_ms = self.rng.uniform(0, 1e6)
        self._open.clear()
        self._is_flushing = self._wants_flush = self.is_paused = self.is_refused = False
        self.backlog.clear()
        self._wake_ms = self.transfer = None
        try:
            self.replica = self._open_replica()
        except StorageError:
            self.stop(restart_ms=500)
            return
        except KafkaError as error:
            self._refused(error)
            return
        self.world.checker.started(self)
        before, base_before = self.entries, self.base
        self.base, self.entries = self.the_log.log_start_offset, []
        with self.ending_on_failure():
            self._note_log()
            self.world.checker.booted(self, before, base_before)
            self.durable_floor = max(self.durable_floor, self.base)
            self.checked_high_watermark = 0
            self.machine = self.the_replica.machine(self.config, self.world.machine_type)
            self.state = self.world.state_type(self)
            self.state.load()
            if self.machine is not None:
                self._run(lambda machine: machine.start(self.local_ms(), self.jitter()))
                self.later(self.rng.uniform(50, 150), self._tick)

    def _open_replica(self) -> QuorumReplica:
        config = self.config
        self.manager = LogManager(
            self.fs, (DATA,), cluster_id=config.cluster_id, node_id=self.node_id, defaults=_DEFAULTS
        )
        self.manager.load(self.wall_ms())
        return QuorumReplica.open(
            self.fs,
            self.manager,
            cluster_id=config.cluster_id,
            voters=config.voters,
            is_voter=config.is_voter,
            segment_bytes=SEGMENT_BYTES,
            now_ms=self.wall_ms(),
        )

    def _refused(self, error: KafkaError) -> None:
        """The start is refused (630-14): somebody replaces the disk as soon as the others can stand it."""
        self.world.counts["starts refused"] += 1
        self.world.checker.refused(self, error)
        self.stop()
        self.is_refused = True
        self.world.scheduler.after(300, self.world.faults.replace_disks)

    def _tick(self) -> None:
        with self.ending_on_failure():
            self.the_state.tick()
            if self.manager is not None and self.rng.random() < 0.03:
                self._checkpoint(self.manager)
        if self.machine is not None:
            self.later(self.rng.uniform(200, 600), self._tick)

    def _checkpoint(self, manager: LogManager) -> None:
        """As nodes do now and then; what a full disk does not take comes with the next one."""
        try:
            manager.checkpoint_recovery_points()
        except StorageError as error:
            if not (isinstance(error.__cause__, OSError) and is_no_space(error.__cause__)):
                raise

    def stop(self, *, power: bool = False, clean: bool = False, restart_ms: float | None = None) -> None:
        """End the process; without power the disk forgets what was not synced. A clean stop closes the log."""
        if self.manager is not None and clean:
            self.manager.close(-1)
        if self.replica is not None:
            self.durable_floor = self.durable_end()
        if self.manager is not None:
            self.manager.abandon()
        self.process += 1
        self.machine = self.manager = self.replica = self.state = self.transfer = None
        if power:
            self.fs.crash(self.rng)
        if restart_ms is not None:
            self.world.scheduler.after(restart_ms, self._restart)

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
        self.world.counts["disk failures"] += 1
        self.stop(power=self.rng.random() < 0.3, restart_ms=self.rng.uniform(100, 1000))

    def crashed_at(self, point: str) -> bool:
        """Whether it crashed, at a point where it was to."""
        if self.crash_point != point:
            return False
        self.world.counts["crashes"] += 1
        self.world.counts[f"crash at {point}"] += 1
        self.crash_point = ""
        self.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 400))
        return True

    def resume(self) -> None:
        """Continue a stopped process: what came meanwhile comes now."""
        self.is_paused = False
        backlog, self.backlog = self.backlog, []
        for action in backlog:
            action()

    # -- events

    def deliver(self, process: int, event: Event) -> None:
        """An event for one process."""
        self.at_process(process, lambda: self.step(event))

    def deliver_request(self, source: SimNode, process: int, sent: Send) -> None:
        """A request of another node."""
        if self.is_paused:
            self.backlog.append(lambda: self.deliver_request(source, process, sent))
        elif self.machine is not None:
            self._requests += 1
            self._open[self._requests] = (source, process, sent.request_id)
            self.step(received(self._requests, sent))

    def serve_snapshot(self, transfer: Transfer, number: int, request: FetchSnapshotRequest) -> None:
        """A FetchSnapshot request of another node."""
        if self.is_paused:
            self.backlog.append(lambda: self.serve_snapshot(transfer, number, request))
        elif self.machine is not None:
            with self.ending_on_failure():
                response = served(self.machine, self.the_replica, request)
                self.step(SnapshotServed(request.replica_id))
                self.world.network.snapshot_response(self, transfer, number, response)

    def step(self, event: Event) -> None:
        """One event with all that follows from it at once."""
        self._run(lambda machine: machine.step(event, self.local_ms(), self.jitter()))

    def _run(self, act: Callable[[Machine], list[Effect]]) -> None:
        following: Event | None = None
        while self.machine is not None:
            machine = self.machine
            effects = act(machine) if following is None else machine.step(following, self.local_ms(), self.jitter())
            try:
                following = self._execute(effects)
            except (StorageError, OSError):
                self.disk_failed()
            if self.machine is None:
                return
            self.world.checker.stepped(self, machine)
            if following is None:
                self._schedule_wake()
                return

    def apply_own(self, state: SimState) -> None:
        """The active controller applies what it appended at once; only then may it decide something else."""
        if self.state is state and self.is_leader:
            with self.ending_on_failure():
                state.apply(self.the_log.log_end_offset)

    # -- effects

    def _execute(self, effects: list[Effect]) -> Event | None:
        following: Event | None = None
        for effect in effects:
            match effect:
                case Send():
                    self.world.network.request(self, effect)
                case Answer():
                    self._answer(effect)
                case Flush():
                    self._flush()
                case Committed(high_watermark):
                    self.world.checker.rose(self, high_watermark)
                    self.the_state.apply(min(high_watermark, self.the_log.log_end_offset))
                    self.world.checker.applied(self)
                case PersistElection(election):
                    self.persist(election)
                case StateChanged(state):
                    if self.transfer is not None:
                        self.transfer.drop()
                    self.world.state_changed(self, state)
                case RefuseAppend(token):
                    self.world.client.refused(token)
                case FetchSnapshot():
                    self.transfer = Transfer(self, effect)
                    self.later(self.rng.uniform(0.0, 2.0), self.transfer.begin)
                case _:
                    following = self._change_log(effect)
            if self.machine is None:
                return None
            point = self.crash_point
            if point and is_passed(point, effect) and self.crashed_at(point):
                return None
        return following

    def persist(self, election: ElectionState) -> None:
        """Write `quorum-state`."""
        self.the_replica.persist(election)

    def _change_log(self, effect: LogChange) -> Event:
        log, offset = self.the_log, self.the_log.log_end_offset
        result = self.the_replica.change_log(effect, self.wall_ms())
        if isinstance(result, AppendRejected):
            self.world.counts["appends rejected"] += 1
        if log.log_end_offset < self.end:
            self.world.counts["truncations"] += 1
            self.world.checker.truncated(self, log.log_end_offset)
            del self.entries[log.log_end_offset - self.base :]
            self.durable_floor = min(self.durable_floor, log.log_end_offset)
            self.the_state.truncated(log.log_end_offset)
        elif log.log_end_offset > self.end:
            self._note_log()
            if isinstance(effect, AppendAsLeader):
                self.world.client.appended(self, effect.token, offset, effect.epoch)
        return result

    def _answer(self, effect: Answer) -> None:
        opened = self._open.pop(effect.request_id, None)
        if opened is None:
            return
        target, process, request_id = opened
        response = effect.response
        if effect.read is not None:
            response = with_records(response, self.the_replica.read(effect.read))
        self.world.network.response(self, target, process, request_id, response)

    def _flush(self) -> None:
        self._wants_flush = True
        if not self._is_flushing:
            self._begin_flush()

    def _begin_flush(self) -> None:
        self._is_flushing, self._wants_flush = True, False
        self.later(self.rng.uniform(0.5, self.world.flush_max_ms), self._flushed)

    def _flushed(self) -> None:
        end = -1
        with self.ending_on_failure():
            end = self.the_replica.flush()
        if self.machine is None:
            return
        self._is_flushing = False
        if self._wants_flush:
            self._begin_flush()
        self.step(Persisted(end))
