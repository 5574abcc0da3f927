"""A seeded, single-threaded simulation of the metadata quorum on production code.

Virtual time, a network that delays, loses, doubles, reorders and partitions, disks that fail and forget, clocks that
drift and processes that stop; on them `kipmesh.core.raft` and `kipmesh.storage` as they are. Everything follows from
the seed. After every step the invariants of 630-19 are checked as far as they concern the log.
"""

from simulation.engine import InvariantError, Outcome, run_world
from simulation.quorum.world import World, run_seed

__all__ = ["InvariantError", "Outcome", "World", "run_seed", "run_world"]
