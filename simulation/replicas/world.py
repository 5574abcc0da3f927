"""One run of the replication simulator: brokers, controllers, network, clients, faults and checker of a seed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import structlog

from kipmesh.controller import decision_queue
from kipmesh.messages import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from kipmesh.node.quorum import pacing
from kipmesh.storage import log_manager
from simulation.engine import BaseWorld, Engine, Outcome, run_world
from simulation.replicas import settings as limits
from simulation.replicas.broker import SimBroker
from simulation.replicas.checker import Checker
from simulation.replicas.clients import Consumer, Producer
from simulation.replicas.faults import Faults
from simulation.replicas.quorum import Quorum
from simulation.replicas.settings import VIRTUAL_MS, Settings
from simulation.replicas.transport import SimNetwork

SETTLE_MS = 1_000.0
"""Extra time for followers and consumers after the last commit."""
SETTLE_TIMES = 5
"""Maximum number of extensions by SETTLE_MS."""
_SLICED: tuple[Any, ...] = (pacing, decision_queue)


class World(BaseWorld):
    """One run of the replication simulator. Tests may fix some of the sizes."""

    NAME = "simulation.replicas"
    LEADER_CHANGES = "elections"

    def __init__(
        self,
        seed: int,
        *,
        brokers: int | None = None,
        min_isr: int | None = None,
        is_unclean: bool | None = None,
        only_faults: tuple[str, ...] = (),
    ) -> None:
        self.engine = engine = Engine(seed)
        rng = engine.rng
        self.settings = settings = Settings(rng, brokers, min_isr, is_unclean)
        self.network = network = SimNetwork(engine)
        self.checker = checker = Checker(engine, settings)
        self.quorum = quorum = Quorum(network, settings, checker)
        self.brokers = {node_id: SimBroker(quorum, settings, checker, node_id) for node_id in settings.broker_ids}
        self.producers = [Producer(network, settings, checker, number) for number in range(1, 3)]
        racks = (*limits.RACKS, "")
        self.consumers = [
            Consumer(network, settings, checker, number, rng.randrange(settings.partitions), rng.choice(racks))
            for number in range(1, rng.randint(2, 3) + 1)
        ]
        self.clients: tuple[Producer | Consumer, ...] = (*self.producers, *self.consumers)
        self.fault_every_ms = rng.uniform(350, 1800)
        until_ms = VIRTUAL_MS - limits.QUIET_MS
        self.faults = Faults(self.brokers, self.clients, quorum, checker, until_ms, only_faults)

    @property
    def shape(self) -> str:
        """Number of brokers and partitions, for messages."""
        return f"{len(self.brokers)} brokers, {self.settings.partitions} partitions"

    def run(self) -> None:
        """Run the simulation to its end. Raises InvariantError for a violation."""
        with deterministic():
            try:
                self._run()
            finally:
                self._end()

    def _run(self) -> None:
        engine = self.engine
        self.quorum.begin()
        for broker in self.brokers.values():
            broker.boot()
        self._create_topic_when_ready()
        for client in self.clients:
            client.start()
        self.faults.begin(self.fault_every_ms)
        engine.run_until(limits.PRODUCE_UNTIL_MS)
        for producer in self.producers:
            producer.is_done = True
        engine.run_until(VIRTUAL_MS)
        for _ in range(SETTLE_TIMES):
            engine.run_until(max(VIRTUAL_MS, self.checker.committed_ms + SETTLE_MS))
        engine.check_problems()
        blocked = self.checker.check_converged()
        for client in self.clients:
            client.check_at_end(blocked)
        engine.counts["committed"] = sum(committed.end for committed in self.checker.committed)

    def _end(self) -> None:
        """Stop all processes without writing anything more to disk."""
        for process in list(self.network.processes.values()):
            process.loop.kill()
        for broker in self.brokers.values():
            if broker.parts is not None:
                broker.parts.manager.abandon()

    def _create_topic_when_ready(self) -> None:
        """Create the topic once all brokers are registered and unfenced. Checks every 10 ms."""
        unfenced = [broker for broker in self.checker.image.brokers.values() if not broker.fenced]
        if len(unfenced) < len(self.brokers):
            self.engine.after(10, self._create_topic_when_ready)
        else:
            self.producers[0].spawn(self._create_topic())

    async def _create_topic(self) -> None:
        """Create the topic, with each partition on random brokers. Reports a defect if that fails."""
        rng, ids = self.engine.rng, list(self.brokers)
        count = min(len(ids), rng.choice((2, 3, 3, 3, 4)))
        assignments = [
            CreatableReplicaAssignment(partition, rng.sample(ids, count))
            for partition in range(self.settings.partitions)
        ]
        topic = CreatableTopic(limits.TOPIC, -1, -1, assignments)
        connection = self.producers[0].process.pool.get(limits.address_of(limits.CONTROLLER_IDS[0]))
        response = await connection.call("Admin", "CreateTopics", CreateTopicsRequest([topic], 1000), 1.0)
        if response.topics[0].error_code:
            self.engine.report(f"CreateTopics failed: {response}")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Context manager that makes production code independent of the machine. Restores all settings on exit.

    Work is not split into time slices, one thread closes logs, and nothing is logged.
    """
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


def run_seed(seed: int) -> Outcome:
    """Run one seed and return its outcome. Raises InvariantError with the command that replays the seed."""
    return run_world(World(seed))
