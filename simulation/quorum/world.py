"""One run of the quorum simulator: nodes, network, client, faults and checker of a seed."""

from __future__ import annotations

from kipmesh.core.raft import RaftConfig
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from simulation.engine import BaseWorld, Engine, Network, Outcome, run_world
from simulation.quorum.checker import Checker
from simulation.quorum.client import Client
from simulation.quorum.faults import Faults
from simulation.quorum.host import Settings
from simulation.quorum.node import SimNode

VIRTUAL_MS = 60_000.0
QUIET_MS = 14_000.0
"""Duration of the last part of a run, without faults."""
_RECORD_BYTES = 120
"""Approximate size of a decision in the log."""


class World(BaseWorld):
    """One run of the quorum simulator. Tests pass `node_type` to inject known bugs."""

    NAME = "simulation.quorum"
    LEADER_CHANGES = "leader changes"

    def __init__(
        self,
        seed: int,
        *,
        voters: int | None = None,
        observers: int | None = None,
        node_type: type[SimNode] = SimNode,
        only_faults: tuple[str, ...] = (),
        fetch_max_bytes: int | None = None,
        always_snapshots: bool = False,
    ) -> None:
        self.engine = engine = Engine(seed)
        rng = engine.rng
        propose_every_ms = rng.uniform(150, 900)
        drawn = (rng.choice((1, 3, 3, 3, 5, 5)), rng.choice((0, 1, 1, 2, 3, 5)))
        if drawn[0] == 1:
            drawn = (1, max(1, drawn[1]))  # at least one node has to fetch snapshots
        self.voters = voters or drawn[0]
        self.observers = drawn[1] if observers is None else observers
        ties = rng.random() < 0.35
        drawn_bytes = rng.choice((1, 200, 2048))
        snapshot_limits = SnapshotLimits(
            changed_records_ratio_min=rng.choice((0.1, 0.3, 0.5)),
            record_bytes_between=int(_RECORD_BYTES * VIRTUAL_MS / propose_every_ms / rng.uniform(15, 40)),
            interval_ms_max=rng.choice((0, 4000, 10_000)),
        )
        retention_limits = RetentionLimits(
            lag_time_ms_max=rng.choice((3000, 10_000, 1_000_000)),
            bytes_max=rng.choice((1500, 4000, 1 << 30)),
            observer_live_ms=rng.choice((2000, 8000)),
        )
        if always_snapshots:  # after nearly every decision, without regard to lagging replicas
            snapshot_limits = SnapshotLimits(0.0, 1, 0)
            retention_limits = RetentionLimits(1, 1, 1)
        settings = Settings(ties, snapshot_limits, retention_limits)
        self.nodes: dict[int, SimNode] = {}
        self.checker = Checker(engine, self.nodes)
        self.client = Client(self.nodes, self.checker, propose_every_ms)
        node_ids = range(1, self.voters + self.observers + 1)
        self.faults = Faults(engine, self.nodes, node_ids, VIRTUAL_MS - QUIET_MS, only_faults)
        network = Network(engine)
        for node_id in node_ids:
            config = RaftConfig(
                node_id,
                tuple(range(1, self.voters + 1)),
                "sim",
                election_timeout_ms=500,
                fetch_timeout_ms=1000,
                election_backoff_max_ms=500,
                request_timeout_ms=600,
                retry_backoff_ms=50,
                fetch_max_wait_ms=500,
                fetch_max_bytes=fetch_max_bytes or drawn_bytes,
            )
            self.nodes[node_id] = node_type(
                network, settings, config, nodes=self.nodes, checker=self.checker, watcher=self.faults
            )
        self.fault_every_ms = rng.uniform(700, 3500)

    @property
    def shape(self) -> str:
        """Number of voters and observers, for messages."""
        return f"{self.voters} voters, {self.observers} observers"

    def run(self) -> None:
        """Run the simulation to its end. Raises InvariantError for a violation."""
        engine = self.engine
        for node in self.nodes.values():
            node.boot()
        self.client.propose()
        self.client.acknowledge_committed()
        self.faults.begin(self.fault_every_ms)
        engine.run_until(VIRTUAL_MS - 1500)
        self.client.is_done = True  # let the last decisions commit
        engine.run_until(VIRTUAL_MS)
        self.checker.check_converged()
        self.client.check()
        if self.client.last_acknowledged_ms < VIRTUAL_MS - QUIET_MS:
            engine.fail("nothing was committed after the last fault")
        engine.counts["committed"] = len(self.checker.committed)


def run_seed(seed: int) -> Outcome:
    """Run one seed and return its outcome. Raises InvariantError, with the command that replays the seed."""
    return run_world(World(seed))
