"""One run of the simulation: brokers, controllers, network, clients, faults and checker of one seed."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog

from kipmesh.core.config import BrokerConfig
from kipmesh.messages import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreateTopicsRequest,
)
from kipmesh.node.controller import owner
from kipmesh.node.quorum import pacing
from kipmesh.storage import log_manager
from kipmesh.testing.replica_sim.broker import SimBroker
from kipmesh.testing.replica_sim.checker import Checker
from kipmesh.testing.replica_sim.clients import TOPIC, Consumer, Producer
from kipmesh.testing.replica_sim.faults import Faults
from kipmesh.testing.replica_sim.quorum import CONTROLLER_IDS, Quorum
from kipmesh.testing.replica_sim.transport import SimNetwork, address_of
from kipmesh.testing.sim.checker import InvariantError
from kipmesh.testing.sim.scheduler import Scheduler

VIRTUAL_MS = 15_000.0
QUIET_MS = 5_500.0
"""The last part of a run, without faults."""
STILL_MS = 2_200.0
"""The last part of that, in which nobody produces."""
SETTLE_MS = 1_000.0
"""What followers and consumers are given for a record that came late, and how often a run goes on for one."""
SETTLE_TIMES = 5
RACKS = ("a", "b", "c")
_SLICED: tuple[Any, ...] = (pacing, owner)


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    brokers: int
    partitions: int
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_worth_counting(self) -> bool:
        """Whether there was a fault and a change of leader."""
        return self.counts["faults"] > 0 and self.counts["elections"] > 0


class World:
    """Everything of one seed; tests choose some of it."""

    def __init__(
        self,
        seed: int,
        *,
        brokers: int | None = None,
        min_isr: int | None = None,
        is_unclean: bool | None = None,
        only_faults: tuple[str, ...] = (),
    ) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.counts: Counter[str] = Counter()
        self.scheduler = Scheduler()
        self.network = SimNetwork(self.scheduler, rng, self.counts)
        self.network.problem = self._handler_failed
        drawn = (rng.choice((3, 3, 3, 4, 5)), rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 2, 3)), rng.random() < 0.1)
        count = brokers or drawn[0]
        self.partitions = drawn[1]
        self.min_isr = min_isr or drawn[2]
        self.is_unclean = drawn[3] if is_unclean is None else is_unclean
        self.produce_every_ms = rng.uniform(120, 500)
        self.produce_until_ms = VIRTUAL_MS - STILL_MS
        self.fetch_bytes = rng.choice((1, 300, 1 << 20))
        self.flush_max_ms = 2.0
        self.topic_id = rng.randbytes(16)
        self.quiet = {
            "broker.session.timeout.ms": rng.choice((700, 1000, 1500)),
            "broker.connection.loss.timeout.ms": rng.choice((0, 150)),
            "broker.heartbeat.interval.ms": 200,
        }
        self._broker_keys = self._draw_broker_keys()
        self._problem: str | None = None
        self.checker = Checker(self)
        self.quorum = Quorum(self, rng, self.counts)
        self.brokers = {node_id: SimBroker(self, self._broker_config(node_id)) for node_id in range(1, count + 1)}
        self.producers = [Producer(self, number) for number in range(1, 3)]
        self.consumers = [
            Consumer(self, number, rng.randrange(self.partitions), rng.choice((*RACKS, "")))
            for number in range(1, rng.randint(2, 3) + 1)
        ]
        self.client_ids = [one.process.node_id for one in (*self.producers, *self.consumers)]
        self.faults = Faults(self, rng, rng.uniform(350, 1800), VIRTUAL_MS - QUIET_MS, only_faults)

    def shared_config(self) -> dict[str, Any]:
        """Keys that controllers and brokers share."""
        voters = ",".join(f"{node_id}@{address_of(node_id)}" for node_id in CONTROLLER_IDS)
        return {"cluster.id": "sim", "controller.quorum.voters": voters, **self.quiet}

    def _draw_broker_keys(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "min.insync.replicas": self.min_isr,
            "replica.lag.time.max.ms": rng.choice((500, 900, 1500)),
            "replica.fetch.wait.max.ms": rng.choice((250, 500)),
            "replica.fetch.backoff.ms": 60,
            "replica.fetch.max.bytes": rng.choice((1, 400, 1 << 20)),
            "replica.socket.timeout.ms": 1200,
            "replica.high.watermark.checkpoint.interval.ms": rng.choice((300, 2000)),
            "replica.fetch.high.watermark.wakeup": rng.random() < 0.8,
            "log.flush.scheduler.interval.ms": 300,
            "log.flush.offset.checkpoint.interval.ms": rng.choice((500, 3000)),
            "log.flush.interval.ms": rng.choice((200, 1000, 1 << 40)),
            "log.flush.interval.messages": rng.choice((1, 5, 1 << 40, 1 << 40)),
            "log.segment.bytes": rng.choice((400, 2000, 1 << 20)),
            "log.retention.check.interval.ms": 4000,
            "enable.incremental.fetch": rng.random() < 0.9,
            "shutdown.grace.ms": 1500,
            "replica.selector.class": rng.choice(("", "RackAwareReplicaSelector", "RackAwareReplicaSelector")),
        }

    def _broker_config(self, node_id: int) -> BrokerConfig:
        return BrokerConfig.parse(
            self.shared_config()
            | self._broker_keys
            | {
                "node.id": node_id,
                "listeners": f"MESH://{address_of(node_id)}",
                "log.dirs": "/data",
                "broker.rack": RACKS[node_id % len(RACKS)],
            }
        )

    # -- what goes wrong that should not

    def fail(self, what: str) -> None:
        """Something that is no fault of the plan; told at the next moment when that can be."""
        self._problem = self._problem or what

    def _handler_failed(self, what: str, error: BaseException) -> None:
        self.fail(f"{what} raised {type(error).__name__}: {error}")

    def check_problems(self) -> None:
        """Raise what went wrong."""
        if self._problem is not None:
            raise InvariantError(self._problem)

    # -- a run

    def run(self) -> Outcome:
        """Run all of it; InvariantError says what went wrong."""
        self.quorum.begin()
        for broker in self.brokers.values():
            broker.boot()
        self._when_all_are_there()
        for each in (*self.producers, *self.consumers):
            each.start()
        self.faults.begin()
        self.scheduler.run_until(self.produce_until_ms)
        for producer in self.producers:
            producer.is_done = True
        self.scheduler.run_until(VIRTUAL_MS)
        for _ in range(SETTLE_TIMES):
            self.scheduler.run_until(max(VIRTUAL_MS, self.checker.committed_ms + SETTLE_MS))
        self.check_problems()
        self.checker.converged()
        self.counts["steps"] = self.scheduler.steps
        self.counts["committed"] = sum(truth.end for truth in self.checker.truths)
        return Outcome(self.seed, len(self.brokers), self.partitions, self.counts)

    def end(self) -> None:
        """Let everything go."""
        for process in list(self.network.processes.values()):
            process.loop.kill()
        for broker in self.brokers.values():
            if broker.parts is not None:
                broker.parts.manager.abandon()

    def _when_all_are_there(self) -> None:
        """Create the topic as soon as no broker is fenced."""
        here = [one for one in self.quorum.image.brokers.values() if not one.fenced]
        if len(here) < len(self.brokers):
            self.scheduler.after(10, self._when_all_are_there)
        else:
            loop = self.producers[0].loop
            loop.deliver(lambda: loop.create_task(self._create_topic()))

    async def _create_topic(self) -> None:
        """Each partition on brokers of its own."""
        ids = list(self.brokers)
        count = min(len(ids), self.rng.choice((2, 3, 3, 3, 4)))
        assignments = [
            CreatableReplicaAssignment(partition, self.rng.sample(ids, count)) for partition in range(self.partitions)
        ]
        topic = CreatableTopic(TOPIC, -1, -1, assignments)
        connection = self.producers[0].process.pool.get(address_of(CONTROLLER_IDS[0]))
        response = await connection.call("Admin", "CreateTopics", CreateTopicsRequest([topic], 1000), 1.0)
        if response.topics[0].error_code:
            self.fail(f"the topic was not made: {response}")


@contextlib.contextmanager
def virtual() -> Iterator[None]:
    """Nothing depends on the machine: slices of real time have no end, logs are closed in turn. Nothing is logged."""
    slices, threads = pacing.SLICE_S, log_manager._CLOSING_THREADS
    was_configured, config = structlog.is_configured(), structlog.get_config()
    for module in _SLICED:
        module.SLICE_S = math.inf
    log_manager._CLOSING_THREADS = 1
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)
    try:
        yield
    finally:
        for module in _SLICED:
            module.SLICE_S = slices
        log_manager._CLOSING_THREADS = threads
        structlog.configure(**config)
        if not was_configured:
            structlog.reset_defaults()


def replay_command(seed: int) -> str:
    """How to see a seed again."""
    return f"python -m kipmesh.testing.replica_sim --seed {seed}"


def run_seed(seed: int) -> Outcome:
    """Run one seed; InvariantError names it and the command that replays it, whatever went wrong."""
    return run_world(World(seed))


def run_world(world: World) -> Outcome:
    """The same for a world that somebody made."""
    try:
        with virtual():
            try:
                return world.run()
            finally:
                world.end()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        shape = f"{len(world.brokers)} brokers, {world.partitions} partitions, {world.scheduler.now_ms:.1f} ms"
        message = f"seed {world.seed} ({shape}): {what}; replay: {replay_command(world.seed)}"
        raise InvariantError(message) from error
