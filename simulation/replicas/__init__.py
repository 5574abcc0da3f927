"""Seeded, single-threaded simulation of partition replication on production code.

Runs whole brokers and controllers in virtual time, with failing disks, network and clocks as in `simulation.quorum`.
Only gRPC and the Raft of the metadata quorum are replaced. The seed determines everything. Every step of a broker
checks the REP rules.
"""

from simulation.engine import InvariantError, Outcome, run_world
from simulation.replicas.world import World, run_seed

__all__ = ["InvariantError", "Outcome", "World", "run_seed", "run_world"]
