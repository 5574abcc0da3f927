"""The metadata quorum, as brokers and the active controller meet it: one log that is reliable, and who leads it.

Raft itself is what `kipmesh.testing.sim` is about. Here a leader appends, its records are committed a while later, and
when another leads, some of what was not committed yet is gone. The active controller is production code, from the
service that takes its requests down to the image. Brokers hear of commits and leaders late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from prometheus_client import CollectorRegistry

from kipmesh.core.config import ControllerConfig, Voter
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.record_batch import parse_header
from kipmesh.node.controller.active import ActiveController
from kipmesh.node.controller.handlers import controller_pipeline
from kipmesh.node.controller.metrics import ControllerMetrics
from kipmesh.node.controller.owner import DecideWith
from kipmesh.node.controller.parts import ControllerParts
from kipmesh.testing.replica_sim.loop import SimLoop
from kipmesh.testing.replica_sim.transport import Process

if TYPE_CHECKING:
    from kipmesh.testing.replica_sim.world import World

CONTROLLER_IDS = (101, 102, 103)
WALL_MS = 1_700_000_000_000
_METRICS = ControllerMetrics(CollectorRegistry())


class Entry(NamedTuple):
    """A batch of the log."""

    batch: bytes
    end_offset: int


class _Log:
    """What `ActiveController` reads of its node's log."""

    def __init__(self, end_offset: int) -> None:
        self.log_end_offset = end_offset


class _Replica:
    def __init__(self, log: _Log) -> None:
        self.log = log


class Leadership:
    """A controller's driver and loader while it leads: the parts that `ActiveController` uses."""

    def __init__(self, quorum: Quorum, node_id: int, epoch: int) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.epoch = epoch
        self.high_watermark = quorum.end
        self.replica = _Replica(_Log(quorum.end))
        self.image = MetadataImage()
        self.pending: list[Entry] = []
        for entry in quorum.committed:
            self.image.replay(entry.batch, MetadataDelta())

    def append(self, batch: bytes, epoch: int) -> None:
        """See QuorumDriver; it is committed some time later."""
        if self.quorum.leadership is not self:
            raise KafkaError(ErrorCode.NOT_CONTROLLER, "another controller leads")
        end = parse_header(batch).next_offset
        self.replica.log.log_end_offset = end
        self.pending.append(Entry(batch, end))
        self.quorum.commit_later(self)

    def apply_own_steps(self, batch: bytes) -> Generator[None, None, MetadataDelta]:
        """See MetadataLoader."""
        delta = MetadataDelta()
        yield from self.image.replay_steps(batch, delta)
        return delta


class ControllerNode:
    """One of three, which lead in turn."""

    def __init__(self, quorum: Quorum, node_id: int) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.process: Process | None = None
        self.active: ActiveController | None = None

    def boot(self) -> None:
        """Start a process."""
        world = self.quorum.world
        loop = SimLoop.make(world.scheduler, world.check_problems, 1 + world.rng.uniform(-0.005, 0.005))
        process = self.process = Process(world.network, self.node_id, loop, f"controller-{self.node_id}")

        def now_ms() -> int:
            return int(loop.time() * 1000)

        def disconnected(broker_id: int, connection: int) -> None:
            if self.active is not None:
                self.active.disconnected(broker_id, connection)

        process.pipeline = controller_pipeline(
            ControllerParts(do=self._do, now_ms=now_ms, next_offset=self._next_offset, disconnected=disconnected)
        )
        world.network.start(process)

    async def _do(self, operation: str, decide: DecideWith, *, is_cleanup: bool = False) -> Any:
        active = self.active
        if active is None or self.quorum.leader_id != self.node_id:
            raise KafkaError(ErrorCode.NOT_CONTROLLER, "this controller is not active")
        return await active.do(operation, decide, is_cleanup=is_cleanup)

    def _next_offset(self) -> int:
        leadership = self.quorum.leadership
        return leadership.replica.log.log_end_offset if leadership is not None else 0

    def lead(self, leadership: Leadership) -> None:
        """Become the active controller."""
        process, world = self.process, self.quorum.world
        if process is None:
            return

        def now_ms() -> int:
            return int(process.loop.time() * 1000)

        self.active = ActiveController(
            self.quorum.config(self.node_id),
            leadership.epoch,
            cast("Any", leadership),
            cast("Any", leadership),
            _METRICS,
            lambda error: world.fail(f"controller {self.node_id} failed: {error!r}"),
            now_ms=now_ms,
            stamp_ms=lambda: WALL_MS + now_ms(),
            make_topic_id=lambda: world.topic_id,
        )
        self.active.start()

    def resign(self) -> None:
        """It has learned that another leads."""
        active, self.active = self.active, None
        if active is not None:
            active.end(KafkaError(ErrorCode.NOT_CONTROLLER, "another controller leads"))

    def stop(self) -> None:
        """Its process ends."""
        process, self.process, self.active = self.process, None, None
        if process is not None:
            process.end()


class Quorum:
    """See the module."""

    def __init__(self, world: World, rng: Random, counts: Counter[str]) -> None:
        self.world = world
        self.rng = rng
        self.counts = counts
        self.committed: list[Entry] = []
        self.image = MetadataImage()
        """Of what is committed; for the checker and the faults."""
        self.epoch = 0
        self.leadership: Leadership | None = None
        self.nodes = {node_id: ControllerNode(self, node_id) for node_id in CONTROLLER_IDS}
        self.commit_max_ms = 5.0
        self.hear_max_ms = rng.choice((5.0, 30.0, 150.0))
        """How late brokers hear of what is committed, at most, when nothing else is in the way."""
        self._configs: dict[int, ControllerConfig] = {}
        self._busy_until_ms = 0.0
        self._telling: set[int] = set()

    @property
    def end(self) -> int:
        """After the last committed record."""
        return self.committed[-1].end_offset if self.committed else 0

    @property
    def leader_id(self) -> int:
        """-1 for nobody."""
        return self.leadership.node_id if self.leadership is not None else -1

    @property
    def leader(self) -> Voter | None:
        """Who leads, as brokers are told."""
        voters = {voter.id: voter for voter in self.config(CONTROLLER_IDS[0]).voters}
        return voters.get(self.leader_id)

    def config(self, node_id: int) -> ControllerConfig:
        """A controller's."""
        config = self._configs.get(node_id)
        if config is None:
            config = self._configs[node_id] = ControllerConfig.parse(
                self.world.shared_config()
                | {
                    "node.id": node_id,
                    "metadata.log.dir": "/metadata",
                    "min.insync.replicas": self.world.min_isr,
                    "unclean.leader.election.enable": self.world.is_unclean,
                }
            )
        return config

    def begin(self) -> None:
        """Start all of them; the first leads."""
        for node in self.nodes.values():
            node.boot()
        self.elect(CONTROLLER_IDS[0])

    def elect(self, node_id: int) -> None:
        """Another leads: what is not committed is kept in part."""
        before, node = self.leadership, self.nodes[node_id]
        if before is not None:
            self._depose(before)
        if node.process is None or node.process.loop.is_stopped:
            return
        self.epoch += 1
        self.counts["controller elections"] += 1
        self.leadership = leadership = Leadership(self, node_id, self.epoch)
        node.process.loop.deliver(lambda: node.lead(leadership))
        self.tell_all()

    def _depose(self, before: Leadership) -> None:
        kept = self.rng.randint(0, len(before.pending)) if before.pending else 0
        self.counts["metadata batches lost"] += len(before.pending) - kept
        for entry in before.pending[:kept]:
            self._commit(entry)
        self.leadership = None
        node = self.nodes[before.node_id]
        if node.process is not None:
            node.process.loop.deliver(node.resign)

    def depose(self) -> None:
        """Nobody leads for a while."""
        if self.leadership is not None:
            self._depose(self.leadership)
            self.tell_all()

    def commit_later(self, leadership: Leadership) -> None:
        """In the order of the appends."""
        scheduler = self.world.scheduler
        due_ms = max(self._busy_until_ms, scheduler.now_ms + self.rng.uniform(0.5, self.commit_max_ms))
        self._busy_until_ms = due_ms
        scheduler.after(due_ms - scheduler.now_ms, lambda: self._commit_next(leadership))

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
        self.tell_all()

    def _commit(self, entry: Entry) -> None:
        self.committed.append(entry)
        delta = MetadataDelta()
        before = self.world.checker.before_commit()
        self.image.replay(entry.batch, delta)
        self.world.checker.committed_metadata(entry.batch, delta, before)

    # -- what brokers hear

    def tell_all(self) -> None:
        """Brokers hear of it, late."""
        for broker_id in self.world.brokers:
            self.tell(broker_id)

    def tell(self, broker_id: int) -> None:
        """One of them."""
        if broker_id not in self._telling:
            self._telling.add(broker_id)
            self.world.scheduler.after(self.rng.uniform(0.5, self.hear_max_ms), lambda: self._told(broker_id))

    def _told(self, broker_id: int) -> None:
        world = self.world
        broker, network = world.brokers[broker_id], world.network
        source = self.leader_id if self.leader_id >= 0 else CONTROLLER_IDS[0]
        is_lost = bool(network.loss) and self.rng.random() < network.loss
        if (source, broker_id) in network.blocked or (broker_id, source) in network.blocked or is_lost:
            world.scheduler.after(60, lambda: self._told(broker_id))
            return
        self._telling.discard(broker_id)
        broker.hear(len(self.committed), self.leader, self.epoch)
