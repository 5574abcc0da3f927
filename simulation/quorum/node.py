"""One simulated replica: runs a production `Machine` and `QuorumReplica` on a disk that may fail.

It keeps the driver contract of `kipmesh.core.raft.machine`: effects in order, `LogChanged` after the log changed,
flushes independent of steps, `quorum-state` durable before later effects. `simulation.quorum.state` is its state
machine, `simulation.quorum.transfer` fetches snapshots. A process can crash at `CRASH_POINTS`: right after an effect of
a kind, or at a step of handling snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Protocol

from kipmesh.core.errors import KafkaError
from kipmesh.core.raft import Machine, RaftConfig, State
from kipmesh.core.raft import types as raft
from kipmesh.core.raft.wire import only_response_partition, with_records
from kipmesh.messages import FetchRequest, VotePartitionResponse, VoteRequest
from kipmesh.storage.fs import StorageError, is_no_space
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import LogChange, QuorumReplica, log_config
from simulation.engine import Network
from simulation.quorum.checker import Checker
from simulation.quorum.host import Host, Settings
from simulation.quorum.state import SimState
from simulation.quorum.transfer import Transfer

DATA = "/data"
SEGMENT_BYTES = 2048
_DEFAULTS = log_config(SEGMENT_BYTES)


def _grants(effect: raft.Effect) -> bool:
    if not isinstance(effect, raft.Respond):
        return False
    vote = only_response_partition(effect.response)
    return isinstance(vote, VotePartitionResponse) and vote.vote_granted


_EFFECT_POINTS: dict[str, Callable[[raft.Effect], bool]] = {
    "quorum-state written": lambda effect: isinstance(effect, raft.PersistElection),
    "vote granted": _grants,
    "vote requested": lambda effect: isinstance(effect, raft.Send) and isinstance(effect.request, VoteRequest),
    "leader change appended": lambda effect: isinstance(effect, raft.AppendLeaderChange),
    "appended as leader": lambda effect: isinstance(effect, raft.AppendAsLeader),
    "appended as follower": lambda effect: isinstance(effect, raft.AppendAsFollower),
    "records sent": lambda effect: isinstance(effect, raft.Respond) and effect.read is not None,
    "truncated": lambda effect: isinstance(effect, raft.TruncateLog),
    "committed": lambda effect: isinstance(effect, raft.Committed),
    "fetch sent": lambda effect: isinstance(effect, raft.Send) and isinstance(effect.request, FetchRequest),
}
SNAPSHOT_POINTS = (
    "snapshot partly written",
    "snapshot made",
    "log start raised",
    "cleaned",
    "snapshot partly received",
    "snapshot fully received",
    "snapshot installed",
)
CRASH_POINTS = (*_EFFECT_POINTS, *SNAPSHOT_POINTS)
"""Points right after which a process can crash."""


def is_passed(point: str, effect: raft.Effect) -> bool:
    """Return whether executing `effect` passes the crash point. Always False for `SNAPSHOT_POINTS`."""
    matches = _EFFECT_POINTS.get(point)
    return matches is not None and matches(effect)


class Watcher(Protocol):
    """Observer of nodes, which reacts to elections and refused starts."""

    def state_changed(self, node: SimNode, state: State) -> None:
        """Handle a change of a node's raft state to `state`."""

    def replace_disks(self) -> None:
        """Replace the disks of voters that refused to start, as soon as the other voters tolerate it."""


class SimNode(Host):
    """A `Host` that runs a replica of the quorum. Tests override the types to inject known bugs."""

    machine_type: ClassVar[type[Machine]] = Machine
    state_type: ClassVar[type[SimState]] = SimState

    def __init__(
        self,
        network: Network,
        settings: Settings,
        config: RaftConfig,
        *,
        nodes: Mapping[int, SimNode],
        checker: Checker,
        watcher: Watcher,
    ) -> None:
        super().__init__(network, settings, config)
        self.nodes = nodes
        self.checker = checker
        self.watcher = watcher
        self.state = self.state_type(self, checker)
        self.transfer: Transfer | None = None
        self._open: dict[int, tuple[SimNode, int, int]] = {}
        self._requests = 0
        self._is_flushing = False
        self._wants_flush = False
        self._wake_ms: float | None = None

    def jitter(self) -> float:
        """Return random jitter in [0, 1). With `ties`, it is either 0.0 or 0.5, so that candidates tie."""
        return self.rng.choice((0.0, 0.5)) if self.settings.ties else self.rng.random()

    def _schedule_wake(self) -> None:
        deadline = self.machine.next_deadline_ms() if self.machine else None
        if deadline is None:
            return
        due_ms = self.engine.now_ms + max(0.0, (deadline - self.local_ms() + 1) / self._rate)
        if self._wake_ms is None or due_ms < self._wake_ms - 0.5:
            self._wake_ms = due_ms
            process = self.process
            self.engine.after(due_ms - self.engine.now_ms, lambda: self._wake(process, due_ms))

    def _wake(self, process: int, due_ms: float) -> None:
        if process != self.process or self.machine is None or self._wake_ms != due_ms:
            return
        self._wake_ms = None
        if self.is_paused:
            self.at_process(process, lambda: self.step(raft.TimerFired()))
            return
        deadline = self.machine.next_deadline_ms()
        if deadline is not None and deadline <= self.local_ms():
            self.step(raft.TimerFired())
        else:
            self._schedule_wake()

    # -- processes

    def boot(self) -> None:
        """Start a process on the current disk.

        If the disk fails, retries after 500 ms. If the replica refuses to start, waits until the disk is replaced.
        """
        self.process += 1
        self._rate = 1.0 if self.settings.ties else self.rng.uniform(0.95, 1.05)
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
            self._on_refused_start(error)
            return
        self.checker.check_start(self)
        before, base_before = self.entries, self.base
        self.base, self.entries = self.the_log.log_start_offset, []
        with self.ending_on_failure():
            self.update_shadow()
            self.checker.check_loaded_log(self, before, base_before)
            self.durable_floor = max(self.durable_floor, self.base)
            self.checked_high_watermark = 0
            self.machine = self.the_replica.machine(self.config, self.machine_type)
            self.state = self.state_type(self, self.checker)
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
            self.manager,
            cluster_id=config.cluster_id,
            voters=config.voters,
            is_voter=config.is_voter,
            segment_bytes=SEGMENT_BYTES,
            now_ms=self.wall_ms(),
        )

    def _on_refused_start(self, error: KafkaError) -> None:
        """Handle a refused start (630-14): wait until the disk is replaced."""
        self.counts["starts refused"] += 1
        self.checker.check_refused(self, error)
        self.stop()
        self.is_refused = True
        self.engine.after(300, self.watcher.replace_disks)

    def _tick(self) -> None:
        with self.ending_on_failure():
            self.state.tick()
            if self.manager is not None and self.rng.random() < 0.03:
                self._checkpoint(self.manager)
        if self.machine is not None:
            self.later(self.rng.uniform(200, 600), self._tick)

    def _checkpoint(self, manager: LogManager) -> None:
        """Checkpoint recovery points. Ignores a full disk; raises StorageError for other failures."""
        try:
            manager.checkpoint_recovery_points()
        except StorageError as error:
            if not (isinstance(error.__cause__, OSError) and is_no_space(error.__cause__)):
                raise

    # -- events

    def _send(self, effect: raft.Send) -> None:
        target, process = self.nodes[effect.node_id], self.process
        self.network.transmit(self.node_id, effect.node_id, lambda: target.receive(self, process, effect))

    def receive(self, source: SimNode, process: int, effect: raft.Send) -> None:
        """Handle a request that the process `process` of another node sent.

        A node that is down refuses quickly, as a closed port does, or does not react if the link back is blocked.
        """

        def serve() -> None:
            self._requests += 1
            self._open[self._requests] = (source, process, effect.request_id)
            self.step(raft.RequestReceived(self._requests, effect.request))

        if self.machine is not None:
            self.at_process(self.process, serve)
        elif (self.node_id, source.node_id) not in self.engine.conditions.blocked:
            source.at_process(process, lambda: source.step(raft.RequestFailed(effect.request_id)))

    def step(self, event: raft.Event) -> None:
        """Handle an event and all events that follow from it. Does nothing if no process runs."""
        self._run(lambda machine: machine.step(event, self.local_ms(), self.jitter()))

    def _run(self, act: Callable[[Machine], list[raft.Effect]]) -> None:
        following: raft.Event | None = None
        while self.machine is not None:
            machine = self.machine
            effects = act(machine) if following is None else machine.step(following, self.local_ms(), self.jitter())
            try:
                following = self._execute(effects)
            except (StorageError, OSError):
                self.disk_failed()
            if self.machine is None:
                return
            self.checker.check_step(self, machine)
            if following is None:
                self._schedule_wake()
                return

    def apply_own(self) -> None:
        """Apply the records that the active controller itself appended, which its next decision needs."""
        if self.is_leader:
            with self.ending_on_failure():
                self.state.apply(self.the_log.log_end_offset)

    # -- effects

    def _execute(self, effects: list[raft.Effect]) -> raft.Event | None:
        following: raft.Event | None = None
        for effect in effects:
            match effect:
                case raft.Send():
                    self._send(effect)
                case raft.Respond():
                    self._respond(effect)
                case raft.Flush():
                    self._flush()
                case raft.Committed(high_watermark):
                    self.checker.check_high_watermark(self, high_watermark)
                    self.state.apply(min(high_watermark, self.the_log.log_end_offset))
                    self.checker.check_image(self)
                case raft.PersistElection(election):
                    self.persist(election)
                case raft.StateChanged(state):
                    if self.transfer is not None:
                        self.transfer.drop()
                    self.watcher.state_changed(self, state)
                case raft.RefuseAppend():
                    self.counts["appends refused"] += 1
                case raft.FetchSnapshot():
                    self.transfer = Transfer(self.state, self.nodes[effect.leader_id], effect)
                    self.later(self.rng.uniform(0.0, 2.0), self.transfer.begin)
                case _:
                    following = self._change_log(effect)
            if self.machine is None:
                return None
            point = self.crash_point
            if point and is_passed(point, effect) and self.crashed_at(point):
                return None
        return following

    def persist(self, election: raft.ElectionState) -> None:
        """Write `quorum-state` durably. Raises StorageError."""
        self.the_replica.persist(election)

    def _change_log(self, effect: LogChange) -> raft.Event:
        log = self.the_log
        result = self.the_replica.change_log(effect, self.wall_ms())
        if isinstance(result, raft.AppendRejected):
            self.counts["appends rejected"] += 1
        if log.log_end_offset < self.end:
            self.counts["truncations"] += 1
            self.checker.check_truncation(self, log.log_end_offset)
            del self.entries[log.log_end_offset - self.base :]
            self.durable_floor = min(self.durable_floor, log.log_end_offset)
            self.state.truncate(log.log_end_offset)
        elif log.log_end_offset > self.end:
            self.update_shadow()
        return result

    def _respond(self, effect: raft.Respond) -> None:
        opened = self._open.pop(effect.request_id, None)
        if opened is None:
            return
        target, process, request_id = opened
        response = effect.response
        if effect.read is not None:
            response = with_records(response, self.the_replica.read(effect.read))
        event = raft.ResponseReceived(request_id, response)
        # Only the requesting process receives it, as on a connection.
        arrive = partial(target.at_process, process, lambda: target.step(event))
        self.network.transmit(self.node_id, target.node_id, arrive)

    def _flush(self) -> None:
        self._wants_flush = True
        if not self._is_flushing:
            self._begin_flush()

    def _begin_flush(self) -> None:
        self._is_flushing, self._wants_flush = True, False
        self.later(self.rng.uniform(0.5, self.engine.conditions.flush_max_ms), self._flushed)

    def _flushed(self) -> None:
        end = -1
        with self.ending_on_failure():
            end = self.the_replica.flush()
        if self.machine is None:
            return
        self._is_flushing = False
        if self._wants_flush:
            self._begin_flush()
        self.step(raft.Persisted(end))
