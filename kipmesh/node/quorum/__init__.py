"""The metadata quorum in a process: the driver of `kipmesh.core.raft.machine` over gRPC, files and threads.

Controllers and brokers share all of it. `driver` does what the machine says, `transport` asks the other voters,
`service` answers them, `snapshot_fetcher` and `snapshot_serving` carry snapshots.
"""
