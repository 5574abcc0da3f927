"""Seeded simulators of production code: `simulation.quorum` (Raft) and `simulation.replicas` (replication).

Both run in virtual time on a simulated network and simulated disks that fail. A seed determines every step.
"""
