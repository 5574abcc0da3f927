"""One simulated replica: the driver of a production `Machine` over a production `Log` on a disk that may fail.

It is what a driver has to be (the contract in `kipmesh.core.raft.machine`): effects in order, `LogChanged` after the
log changed, flushes apart from the steps, `quorum-state` durable before what follows. Its state machine adds numbers
to counters and keeps a checksum over everything it applied.

`entries` shadows the log, one (epoch, batch CRC) an offset, so that the checker needs no reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.messages import FetchRequest, VoteRequest, VoteResponse
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.raft import Machine, RaftConfig, State
from kipmesh.core.raft.control import leader_change_batch
from kipmesh.core.raft.types import (
    Answer,
    AppendAsFollower,
    AppendAsLeader,
    AppendLeaderChange,
    AppendRejected,
    Committed,
    Effect,
    ElectionState,
    Event,
    FetchSnapshot,
    Flush,
    LogChanged,
    Persisted,
    PersistElection,
    RefuseAppend,
    Send,
    StateChanged,
    TimerFired,
    TruncateLog,
)
from kipmesh.core.raft.wire import only_vote_answer, with_records
from kipmesh.storage import quorum_state
from kipmesh.storage.errors import StorageError
from kipmesh.storage.log import Log
from kipmesh.storage.log_loader import open_log
from kipmesh.testing.faulty_fs import FaultyFileSystem
from kipmesh.testing.sim.network import received

if TYPE_CHECKING:
    from kipmesh.testing.sim.world import World

FOLDER = f"/data/{CLUSTER_METADATA_TOPIC}-0"
_TOPIC_CONFIG = TopicConfig.parse({"retention.ms": -1, "retention.bytes": -1, "segment.bytes": 4096})
_READ_BYTES = 1 << 16

Entry = tuple[int, int]


def _grants(effect: Effect) -> bool:
    if not isinstance(effect, Answer) or not isinstance(effect.response, VoteResponse):
        return False
    answer = only_vote_answer(effect.response)
    return answer is not None and answer.vote_granted


CRASH_POINTS: dict[str, Callable[[Effect], bool]] = {
    "quorum-state written": lambda effect: isinstance(effect, PersistElection),
    "vote answered": _grants,
    "vote asked": lambda effect: isinstance(effect, Send) and isinstance(effect.request, VoteRequest),
    "leader change appended": lambda effect: isinstance(effect, AppendLeaderChange),
    "appended as leader": lambda effect: isinstance(effect, AppendAsLeader),
    "appended as follower": lambda effect: isinstance(effect, AppendAsFollower),
    "records sent": lambda effect: isinstance(effect, Answer) and effect.read is not None,
    "truncated": lambda effect: isinstance(effect, TruncateLog),
    "committed": lambda effect: isinstance(effect, Committed),
    "fetch sent": lambda effect: isinstance(effect, Send) and isinstance(effect.request, FetchRequest),
}
"""Kinds of effects after which a process may be made to crash."""


class SimNode:
    """See the module. A process is a run of it between a start and a crash."""

    def __init__(self, world: World, config: RaftConfig) -> None:
        self.world = world
        self.config = config
        self.node_id = config.node_id
        self.rng = Random(world.rng.getrandbits(64))
        self.fs = FaultyFileSystem()
        self.machine: Machine | None = None
        self.log: Log | None = None
        self.process = 0
        self.is_paused = False
        self.backlog: list[Callable[[], None]] = []
        self.entries: list[Entry] = []
        self.durable_floor = 0
        """Entries below were durable when the last process ended."""
        self.applied = 0
        self.checksum = 0
        self.checked_high_watermark = 0
        self.epoch_seen = 0
        self.crash_point = ""
        """The process ends when it has done an effect of that kind, see `CRASH_POINTS`."""
        self._open: dict[int, tuple[SimNode, int, int]] = {}
        self._requests = 0
        self._is_flushing = False
        self._wants_flush = False
        self._wake_ms: float | None = None
        self._rate = 1.0
        self._clock_start_ms = 0.0

    # -- time

    def local_ms(self) -> int:
        """This node's monotonic clock."""
        return int(self._clock_start_ms + self.world.scheduler.now_ms * self._rate)

    def jitter(self) -> float:
        """Random, or in some runs so coarse that candidates tie."""
        return self.rng.choice((0.0, 0.5)) if self.world.ties else self.rng.random()

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
        self._is_flushing = self._wants_flush = self.is_paused = False
        self.backlog.clear()
        self._wake_ms = None
        try:
            self.fs.make_dirs(FOLDER)
            self.fs.sync_dir("/data")  # or the first quorum-state could be lost with its folder
            self.fs.sync_dir("/")
            self.log = open_log(self.fs, FOLDER, CLUSTER_METADATA_TOPIC, 0, _TOPIC_CONFIG, self.local_ms())
            election = quorum_state.read(self.fs, FOLDER, self.config.cluster_id)
        except (StorageError, OSError):
            self.stop(restart_ms=500)
            return
        self._load_entries(self.log)
        self.world.checker.booted(self, election)
        self.applied = self.checksum = self.checked_high_watermark = 0
        self.machine = self.world.machine_type(self.config, election, self.log, durable_end=self.log.recovery_point)
        self._run(lambda machine: machine.start(self.local_ms(), self.jitter()))

    def _load_entries(self, log: Log) -> None:
        before, self.entries = self.entries, []
        offset = 0
        while offset < log.log_end_offset:
            data = log.read(offset, _READ_BYTES, log.log_end_offset, True)
            offset = self._note(data)
        self.world.checker.recovered(self, before)

    def _note(self, data: bytes) -> int:
        offset = len(self.entries)
        for _, header in record_batch.iterate(data, allow_partial=True):
            self.entries += [(header.partition_leader_epoch, header.crc)] * header.record_count
            offset = header.next_offset
        return offset

    def stop(self, *, power: bool = False, restart_ms: float | None = None) -> None:
        """End the process; without power the disk forgets what was not synced."""
        if self.machine is not None and self.log is not None:
            self.durable_floor = self.durable_end()
            self.log.abandon()
        self.process += 1
        self.machine = self.log = None
        if power:
            self.fs.crash(self.rng)
        if restart_ms is not None:
            self.world.scheduler.after(restart_ms, self._restart)

    def _restart(self) -> None:
        if self.machine is None:
            self.boot()

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self.stop(restart_ms=self.rng.uniform(50, 1500))
        self.fs = FaultyFileSystem()
        self.entries, self.durable_floor, self.epoch_seen = [], 0, 0

    def durable_end(self) -> int:
        """Entries below are durable."""
        known = self.log.recovery_point if self.log else 0
        return min(len(self.entries), max(known, self.durable_floor))

    def resume(self) -> None:
        """Continue a stopped process: what came meanwhile comes now."""
        self.is_paused = False
        backlog, self.backlog = self.backlog, []
        for action in backlog:
            action()

    # -- events

    def deliver(self, process: int, event: Event) -> None:
        """An event for one process."""
        if process != self.process or self.machine is None:
            return
        if self.is_paused:
            self.backlog.append(lambda: self.deliver(process, event))
            return
        self.step(event)

    def deliver_request(self, source: SimNode, process: int, sent: Send) -> None:
        """A request of another node."""
        if self.is_paused:
            self.backlog.append(lambda: self.deliver_request(source, process, sent))
        elif self.machine is not None:
            self._requests += 1
            self._open[self._requests] = (source, process, sent.request_id)
            self.step(received(self._requests, sent))

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
            except (StorageError, OSError):  # a process whose disk fails ends
                self.world.counts["disk failures"] += 1
                self.stop(restart_ms=self.rng.uniform(100, 1000))
                return
            if self.machine is None:
                return
            self.world.checker.stepped(self, machine)
            if following is None:
                self._schedule_wake()
                return

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
                    self._apply(high_watermark)
                case PersistElection(election):
                    self.persist(election)
                case StateChanged(state):
                    self.world.state_changed(self, state)
                case RefuseAppend(token):
                    self.world.client.refused(token)
                case FetchSnapshot():
                    raise AssertionError("no snapshots here")
                case _:
                    following = self._change_log(effect)
            if self.crash_point and CRASH_POINTS[self.crash_point](effect):
                self._crash()
            if self.machine is None:
                return None
        return following

    def _crash(self) -> None:
        self.world.counts["crashes"] += 1
        self.world.counts[f"crash at {self.crash_point}"] += 1
        self.crash_point = ""
        self.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 400))

    def persist(self, election: ElectionState) -> None:
        """Write `quorum-state`."""
        quorum_state.write(self.fs, FOLDER, election, self.config.cluster_id, self.config.voters)

    def _change_log(self, effect: Effect) -> Event:
        log = self._the_log()
        now_ms = self.local_ms()
        try:
            match effect:
                case TruncateLog(offset):
                    self.world.counts["truncations"] += 1
                    log.truncate_to(offset)
                    self.world.checker.truncated(self, log.log_end_offset)
                    del self.entries[log.log_end_offset :]
                    self.durable_floor = min(self.durable_floor, log.log_end_offset)
                case AppendLeaderChange(epoch, change):
                    self._append(log, leader_change_batch(change, epoch, now_ms), epoch)
                case AppendAsLeader(token, batch, epoch):
                    offset = self._append(log, batch, epoch)
                    self.world.client.appended(self, token, offset, epoch)
                case AppendAsFollower(records):
                    log.append_as_follower(records, now_ms)
                    self._note(records)
        except CorruptRecordError:
            self.world.counts["appends rejected"] += 1
            return AppendRejected()
        except StorageError:
            if log.failed is not None:
                raise
            self._cut_note(log)
            self.world.counts["appends rejected"] += 1
            return AppendRejected()
        return LogChanged()

    def _cut_note(self, log: Log) -> None:
        """A follower's append in several runs may fail after the first: take what is there."""
        if len(self.entries) != log.log_end_offset:
            self.entries.clear()
            offset = 0
            while offset < log.log_end_offset:
                offset = self._note(log.read(offset, _READ_BYTES, log.log_end_offset, True))

    def _append(self, log: Log, batch: bytes, epoch: int) -> int:
        appended = log.append_as_leader(batch, epoch, self.local_ms())
        header = record_batch.parse_header(batch)
        self.entries += [(epoch, header.crc)] * header.record_count
        return appended.first_offset

    def _answer(self, effect: Answer) -> None:
        opened = self._open.pop(effect.request_id, None)
        if opened is None:
            return
        target, process, request_id = opened
        response = effect.response
        if effect.read is not None:
            read = effect.read
            response = with_records(response, self._the_log().read(read.offset, read.max_bytes, read.max_offset, True))
        self.world.network.response(self, target, process, request_id, response)

    def _flush(self) -> None:
        self._wants_flush = True
        if not self._is_flushing:
            self._begin_flush()

    def _begin_flush(self) -> None:
        self._is_flushing, self._wants_flush = True, False
        process = self.process
        self.world.scheduler.after(self.rng.uniform(0.5, self.world.flush_max_ms), lambda: self._flushed(process))

    def _flushed(self, process: int) -> None:
        if process != self.process or self.log is None:
            return
        if self.is_paused:
            self.backlog.append(lambda: self._flushed(process))
            return
        try:
            self.log.flush()
        except StorageError:
            self.world.counts["disk failures"] += 1
            self.stop(restart_ms=self.rng.uniform(100, 1000))
            return
        self._is_flushing = False
        if self._wants_flush:
            self._begin_flush()
        self.step(Persisted(self.log.recovery_point))

    def _apply(self, high_watermark: int) -> None:
        log = self._the_log()
        end = min(high_watermark, log.log_end_offset)
        while self.applied < end:
            data = log.read(self.applied, _READ_BYTES, end, True)
            if not data:
                self.world.checker.fail(f"the high watermark {end} of node {self.node_id} is within a batch")
            for position, header in record_batch.iterate(data):
                if not header.is_control:
                    for record in record_batch.read_records(data, position, header):
                        self.checksum = zlib.crc32(record.value or b"", self.checksum)
                self.applied = header.next_offset
                self.world.checker.applied(self)

    def _the_log(self) -> Log:
        if self.log is None:
            raise RuntimeError("no process runs")
        return self.log

    @property
    def is_leader(self) -> bool:
        """Whether it takes itself for the leader."""
        return self.machine is not None and self.machine.state is State.LEADER
