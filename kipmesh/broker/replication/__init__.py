"""Replication of partitions: hosted replicas, follower fetchers, ISR changes and log maintenance (rules REP).

Entry point: `replica_manager.ReplicaManager` applies the metadata image to the replicas on this broker. `fetcher`
fetches from leaders. `replica` connects one partition's log to the rules of `kipmesh.core.replica`.
"""
