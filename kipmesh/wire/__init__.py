"""The listener for Kafka's own protocol: an edge beside `kipmesh.rpc`, over the same handlers.

Bytes become the values of `kipmesh.core.messages` and back; no rule of the log, of groups or of sessions is here. How
it is made, and how an API is added: docs/wire.md.
"""
