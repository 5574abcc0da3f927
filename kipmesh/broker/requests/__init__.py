"""The data path of a broker: what Produce, Fetch, ListOffsets and Metadata requests do.

The handlers of `kipmesh.broker.handlers` decode nothing and decide nothing; they call the classes of this package.
`selection` chooses the preferred read replica (KIP-392) and `fetch_sessions` owns the sessions (KIP-227).
"""
