"""One run of the simulation: nodes, network, client, faults and checker of one seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from kipmesh.core.raft import Machine, RaftConfig, State
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.testing.sim.checker import Checker, InvariantError
from kipmesh.testing.sim.client import Client
from kipmesh.testing.sim.faults import Faults
from kipmesh.testing.sim.network import Network
from kipmesh.testing.sim.node import SimNode
from kipmesh.testing.sim.scheduler import Scheduler
from kipmesh.testing.sim.state import SimState

VIRTUAL_MS = 60_000.0
QUIET_MS = 14_000.0
"""The last part of a run, without faults."""
_RECORD_BYTES = 120
"""About what a decision takes in the log."""


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    voters: int
    observers: int
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_worth_counting(self) -> bool:
        """Whether there was a fault and a change of leader."""
        return self.counts["faults"] > 0 and self.counts["leader changes"] > 0


class World:
    """Everything of one seed; `node_type` and `machine_type` let tests put known bugs in."""

    def __init__(
        self,
        seed: int,
        *,
        voters: int | None = None,
        observers: int | None = None,
        node_type: type[SimNode] = SimNode,
        machine_type: type[Machine] = Machine,
        state_type: type[SimState] = SimState,
        only_faults: tuple[str, ...] = (),
        fetch_max_bytes: int | None = None,
        always_snapshots: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.counts: Counter[str] = Counter()
        self.scheduler = Scheduler()
        self.machine_type = machine_type
        self.state_type = state_type
        self.network = Network(self.scheduler, self.rng, self.counts)
        self.checker = Checker(self)
        self.client = Client(self)
        self.flush_max_ms = 4.0
        self.propose_every_ms = self.rng.uniform(150, 900)
        drawn = (self.rng.choice((1, 3, 3, 3, 5, 5)), self.rng.choice((0, 1, 1, 2, 3, 5)))
        if drawn[0] == 1:
            drawn = (1, max(1, drawn[1]))  # somebody has to fetch snapshots
        self.voters = voters or drawn[0]
        self.observers = drawn[1] if observers is None else observers
        self.ties = self.rng.random() < 0.35
        drawn_bytes = self.rng.choice((1, 200, 2048))
        self.snapshot_limits = SnapshotLimits(
            changed_records_ratio_min=self.rng.choice((0.1, 0.3, 0.5)),
            record_bytes_between=int(_RECORD_BYTES * VIRTUAL_MS / self.propose_every_ms / self.rng.uniform(15, 40)),
            interval_ms_max=self.rng.choice((0, 4000, 10_000)),
        )
        self.retention_limits = RetentionLimits(
            lag_time_ms_max=self.rng.choice((3000, 10_000, 1_000_000)),
            bytes_max=self.rng.choice((1500, 4000, 1 << 30)),
            observer_live_ms=self.rng.choice((2000, 8000)),
        )
        if always_snapshots:  # after nearly each decision, and nothing waits for who is behind
            self.snapshot_limits = SnapshotLimits(0.0, 1, 0)
            self.retention_limits = RetentionLimits(1, 1, 1)
        ids = tuple(range(1, self.voters + 1))
        self.nodes: dict[int, SimNode] = {}
        for node_id in range(1, self.voters + self.observers + 1):
            config = RaftConfig(
                node_id,
                ids,
                "sim",
                election_timeout_ms=500,
                fetch_timeout_ms=1000,
                election_backoff_max_ms=500,
                request_timeout_ms=600,
                retry_backoff_ms=50,
                fetch_max_wait_ms=500,
                fetch_max_bytes=fetch_max_bytes or drawn_bytes,
            )
            self.nodes[node_id] = node_type(self, config)
        self.network.nodes = self.nodes
        self.faults = Faults(self, self.rng, self.rng.uniform(700, 3500), VIRTUAL_MS - QUIET_MS, only_faults)
        self._last_leader = 0

    def state_changed(self, node: SimNode, state: State) -> None:
        """A node is something else now."""
        if state is State.CANDIDATE:
            self.counts["candidacies"] += 1
        if state is State.LEADER:
            self.counts["elections"] += 1
            if self._last_leader not in (0, node.node_id) or (self._last_leader and self.voters == 1):
                self.counts["leader changes"] += 1
            self._last_leader = node.node_id
            self.faults.elected(node)

    def run(self) -> Outcome:
        """Run all of it; InvariantError says what went wrong."""
        for node in self.nodes.values():
            node.boot()
        self.client.propose()
        self.client.look()
        self.faults.begin()
        self.scheduler.run_until(VIRTUAL_MS - 1500)
        self.client.is_done = True  # let the last ones come through
        self.scheduler.run_until(VIRTUAL_MS)
        self.checker.converged()
        self.client.check()
        if self.client.last_acknowledged_ms < VIRTUAL_MS - QUIET_MS:
            self.checker.fail("nothing was committed after the last fault")
        self.counts["committed"] = len(self.checker.committed)
        self.counts["steps"] = self.scheduler.steps
        return Outcome(self.seed, self.voters, self.observers, self.counts)


def replay_command(seed: int) -> str:
    """How to see a seed again."""
    return f"python -m kipmesh.testing.sim --seed {seed}"


def run_seed(seed: int) -> Outcome:
    """Run one seed; InvariantError names it and the command that replays it, whatever went wrong."""
    return run_world(World(seed))


def run_world(world: World) -> Outcome:
    """The same for a world that somebody made."""
    try:
        return world.run()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        shape = f"{world.voters} voters, {world.observers} observers, {world.scheduler.now_ms:.1f} ms"
        message = f"seed {world.seed} ({shape}): {what}; replay: {replay_command(world.seed)}"
        raise InvariantError(message) from error
