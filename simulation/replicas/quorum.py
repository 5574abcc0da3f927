"""Simulated metadata quorum: one reliable log and its leader, as brokers and the active controller use them.

`simulation.quorum` simulates Raft itself. Here a leader appends, its records are committed later, and a new leader
loses some of the uncommitted ones. The active controller is production code, from the request handlers to the image.
Brokers are notified of commits and leaders with a delay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry

from kipmesh.controller.active import ActiveController
from kipmesh.controller.decision_queue import ControllerParts, DecideWith
from kipmesh.controller.handlers import controller_pipeline
from kipmesh.controller.metrics import ControllerMetrics
from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.record_batch import parse_header
from simulation.engine import WALL_MS
from simulation.replicas.checker import Checker
from simulation.replicas.loop import SimLoop
from simulation.replicas.settings import CONTROLLER_IDS, Settings
from simulation.replicas.transport import Process, SimNetwork

_METRICS = ControllerMetrics(CollectorRegistry())


class Entry(NamedTuple):
    """A batch of the metadata log, and its end offset."""

    batch: bytes
    end_offset: int


class Leadership:
    """The leadership of one controller in one epoch. Replaces the driver and loader that `ActiveController` uses."""

    def __init__(self, quorum: Quorum, node_id: int, epoch: int) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.epoch = epoch
        self.high_watermark = quorum.end
        self.replica = SimpleNamespace(log=SimpleNamespace(log_end_offset=quorum.end))
        self.image = MetadataImage()
        self.pending: list[Entry] = []
        for entry in quorum.committed:
            self.image.replay(entry.batch, MetadataDelta())

    def append(self, batch: bytes, epoch: int) -> None:
        """Append a batch to the metadata log. It is committed later, or lost if the leader changes.

        Raises KafkaError(NOT_CONTROLLER) if this is no longer the current leadership.
        """
        if self.quorum.leadership is not self:
            raise KafkaError(ErrorCode.NOT_CONTROLLER, "another controller is the leader")
        end = parse_header(batch).next_offset
        self.replica.log.log_end_offset = end
        self.pending.append(Entry(batch, end))
        self.quorum.commit_later(self)

    def apply_own_steps(self, batch: bytes) -> Generator[None, None, MetadataDelta]:
        """Apply the controller's own batch to its image in steps. Returns the changes."""
        delta = MetadataDelta()
        yield from self.image.replay_steps(batch, delta)
        return delta


class ControllerNode:
    """One of three controllers, at most one of which is active."""

    def __init__(self, quorum: Quorum, node_id: int) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.process: Process | None = None
        self.active: ActiveController | None = None

    def boot(self) -> None:
        """Start the process. It is not the active controller yet."""
        network, engine = self.quorum.network, self.quorum.engine
        rate = 1 + engine.rng.uniform(-0.005, 0.005)
        loop = SimLoop(engine, engine.check_problems, rate)  # type: ignore[abstract]
        process = self.process = Process(network, self.node_id, loop, f"controller-{self.node_id}")

        def disconnected(broker_id: int, connection: int) -> None:
            if self.active is not None:
                self.active.disconnected(broker_id, connection)

        process.pipeline = controller_pipeline(
            ControllerParts(do=self._do, now_ms=loop.now_ms, next_offset=self._next_offset, disconnected=disconnected)
        )
        network.processes[self.node_id] = process

    async def _do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        active = self.active
        if active is None or self.quorum.leader_id != self.node_id:
            raise KafkaError(ErrorCode.NOT_CONTROLLER, "this controller is not active")
        return await active.do(operation, decide, is_cleanup=is_cleanup)

    def _next_offset(self) -> int:
        leadership = self.quorum.leadership
        return leadership.replica.log.log_end_offset if leadership is not None else 0

    def lead(self, leadership: Leadership) -> None:
        """Become the active controller of this leadership. Does nothing if no process runs."""
        process, engine, settings = self.process, self.quorum.engine, self.quorum.settings
        if process is None:
            return

        now_ms = process.loop.now_ms
        self.active = ActiveController(
            settings.controller_config(self.node_id),
            epoch=leadership.epoch,
            driver=cast("Any", leadership),
            loader=cast("Any", leadership),
            metrics=_METRICS,
            on_failure=lambda error: engine.report(f"controller {self.node_id} failed: {error!r}"),
            now_ms=now_ms,
            stamp_ms=lambda: WALL_MS + now_ms(),
            make_topic_id=lambda: settings.topic_id,
        )
        self.active.start()

    def resign(self) -> None:
        """Stop being active, because the leadership ended. Does nothing if not active."""
        active, self.active = self.active, None
        if active is not None:
            active.end(KafkaError(ErrorCode.NOT_CONTROLLER, "another controller is the leader"))

    def stop(self) -> None:
        """Kill the process, if one runs."""
        process, self.process, self.active = self.process, None, None
        if process is not None:
            process.end()


class Quorum:
    """The simulated metadata quorum: one log and at most one leader. See the module docstring."""

    def __init__(self, network: SimNetwork, settings: Settings, checker: Checker) -> None:
        self.network = network
        self.engine = network.engine
        self.rng = network.engine.rng
        self.counts = network.engine.counts
        self.settings = settings
        self.checker = checker
        self.listeners: dict[int, Callable[[int, Voter | None, int], None]] = {}
        """Callback per broker for the committed end, the leader and its epoch."""
        self.committed: list[Entry] = []
        self.epoch = 0
        self.leadership: Leadership | None = None
        self.nodes = {node_id: ControllerNode(self, node_id) for node_id in CONTROLLER_IDS}
        self.notify_max_ms = self.rng.choice((5.0, 30.0, 150.0))
        """Maximum delay of notifications to brokers, without other faults."""
        self._voters = {voter.id: voter for voter in settings.controller_config(CONTROLLER_IDS[0]).voters}
        self._busy_until_ms = 0.0
        self._notifying: set[int] = set()

    @property
    def end(self) -> int:
        """Offset after the last committed record, 0 if there is none."""
        return self.committed[-1].end_offset if self.committed else 0

    @property
    def leader_id(self) -> int:
        """Id of the current leader, or -1."""
        return self.leadership.node_id if self.leadership is not None else -1

    @property
    def leader(self) -> Voter | None:
        """Id and address of the current leader, or None. Brokers are notified of it with a delay."""
        return self._voters.get(self.leader_id)

    def begin(self) -> None:
        """Start all controllers and elect the first one."""
        for node in self.nodes.values():
            node.boot()
        self.elect(CONTROLLER_IDS[0])

    def elect(self, node_id: int) -> None:
        """Make a controller the leader of the next epoch.

        A random number of the old leader's uncommitted batches survives.

        If the new leader's process is down or paused, the quorum is left without a leader.
        """
        before, node = self.leadership, self.nodes[node_id]
        if before is not None:
            self._end_leadership(before)
        if node.process is None or node.process.loop.is_paused:
            return
        self.epoch += 1
        self.counts["controller elections"] += 1
        self.leadership = leadership = Leadership(self, node_id, self.epoch)
        node.process.loop.deliver(lambda: node.lead(leadership))
        self.notify_all()

    def _end_leadership(self, before: Leadership) -> None:
        kept = self.rng.randint(0, len(before.pending)) if before.pending else 0
        self.counts["metadata batches lost"] += len(before.pending) - kept
        for entry in before.pending[:kept]:
            self._commit(entry)
        self.leadership = None
        node = self.nodes[before.node_id]
        if node.process is not None:
            node.process.loop.deliver(node.resign)

    def depose(self) -> None:
        """End the current leadership and leave the quorum without a leader. Does nothing if it has none."""
        if self.leadership is not None:
            self._end_leadership(self.leadership)
            self.notify_all()

    def commit_later(self, leadership: Leadership) -> None:
        """Commit the next pending batch of this leadership after a delay, in append order.

        The batch is lost if the leadership ends first and the batch does not survive.
        """
        engine = self.engine
        due_ms = max(self._busy_until_ms, engine.now_ms + self.rng.uniform(0.5, engine.conditions.commit_max_ms))
        self._busy_until_ms = due_ms
        engine.after(due_ms - engine.now_ms, lambda: self._commit_next(leadership))

    def _commit_next(self, leadership: Leadership) -> None:
        if leadership is not self.leadership:
            return
        entry = leadership.pending.pop(0)
        self._commit(entry)
        leadership.high_watermark = entry.end_offset
        node = self.nodes[leadership.node_id]
        if node.process is not None and node.active is not None:
            active = node.active
            node.process.loop.deliver(lambda: active.committed(entry.end_offset))
        self.notify_all()

    def _commit(self, entry: Entry) -> None:
        self.committed.append(entry)
        self.checker.commit_metadata(entry.batch)

    # -- notifications to brokers

    def notify_all(self) -> None:
        """Notify all brokers, each after a delay, of the committed end, the leader and its epoch."""
        for broker_id in self.listeners:
            if broker_id not in self._notifying:
                self._notifying.add(broker_id)
                self.engine.after(self.rng.uniform(0.5, self.notify_max_ms), partial(self._notify, broker_id))

    def _notify(self, broker_id: int) -> None:
        conditions = self.engine.conditions
        source = self.leader_id if self.leader_id >= 0 else CONTROLLER_IDS[0]
        is_lost = bool(conditions.loss) and self.rng.random() < conditions.loss
        if {(source, broker_id), (broker_id, source)} & conditions.blocked or is_lost:
            self.engine.after(60, lambda: self._notify(broker_id))
            return
        self._notifying.discard(broker_id)
        self.listeners[broker_id](len(self.committed), self.leader, self.epoch)
