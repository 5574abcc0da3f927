"""A seeded, single-threaded simulation of partitions' replication on production code.

Virtual time and a disk, network and clocks that fail, as in `kipmesh.testing.sim`; on them whole brokers and
controllers, but for gRPC and the metadata quorum's Raft. Everything follows from the seed. After every step of a broker
the rules of "Log truth" are checked.
"""

from kipmesh.testing.replica_sim.world import Outcome, World, run_seed, run_world
from kipmesh.testing.sim.checker import InvariantError

__all__ = ["InvariantError", "Outcome", "World", "run_seed", "run_world"]
