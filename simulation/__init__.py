"""Seeded simulations of production code: `simulation.quorum` (Raft) and `simulation.replicas` (replication).

Both run in virtual time on a network and disks that fail. A seed determines every step.
"""
