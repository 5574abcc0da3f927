"""The metadata quorum in a process: the driver of `kipmesh.core.raft.machine` over gRPC, files and threads.

Controllers and brokers share all of it. `driver` does what the machine says. `transport` sends its requests to the
other voters; `service` responds to theirs and serves snapshots; `snapshot_fetcher` fetches one. `loader` keeps the
image of the committed metadata, `snapshot_maker` makes snapshots of it.
"""
