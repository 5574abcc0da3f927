"""A seeded, single-threaded simulation of partitions' replication on production code.

Virtual time and a disk, network and clocks that fail, as in `simulation.quorum`; on them whole brokers and
controllers, but for gRPC and the metadata quorum's Raft. Everything follows from the seed. After every step of a broker
the rules of "Log truth" are checked.
"""

from simulation.engine import InvariantError, Outcome, run_world
from simulation.replicas.world import World, run_seed

__all__ = ["InvariantError", "Outcome", "World", "run_seed", "run_world"]
