"""Seeded, single-threaded simulation of the metadata quorum on production code.

Runs `kipmesh.core.raft` and `kipmesh.storage` unchanged in virtual time, with a network that delays, loses, duplicates,
reorders and partitions, failing disks, drifting clocks and paused processes. The seed determines everything. Every step
checks the log invariants of 630-19.
"""

from simulation.engine import InvariantError, Outcome, run_world
from simulation.quorum.world import World, run_seed

__all__ = ["InvariantError", "Outcome", "World", "run_seed", "run_world"]
