"""Replication of partitions: hosted replicas, the follower's fetcher, ISR changes and log maintenance (rules REP).

`replica_manager.ReplicaManager` is the entry point: it applies the metadata image to the replicas that this broker
hosts. `fetcher` follows other leaders and `replica` joins one partition's log to the rules of `kipmesh.core.replica`.
"""
