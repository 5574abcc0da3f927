"""The data path of a broker: Produce, Fetch, ListOffsets, OffsetsForLeaderEpoch, DeleteRecords and Metadata requests.

`kipmesh.broker.handlers` adapts request versions and calls the classes of this package. `selection` chooses the
preferred read replica (KIP-392), `fetch_sessions` creates the session cache (KIP-227).
"""
