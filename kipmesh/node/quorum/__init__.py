"""One replica of the metadata quorum, on controllers and brokers: gRPC, files and threads for `kipmesh.core.raft`.

`driver` executes the effects of the state machine. `transport` sends requests to voters, `service` serves requests and
snapshots, `snapshot_fetcher` fetches a snapshot. `loader` maintains the image of the committed metadata and
`snapshot_maker` writes snapshots of it.
"""
