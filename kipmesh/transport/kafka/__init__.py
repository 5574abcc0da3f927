"""The listener for Apache Kafka's protocol: framing, limits, authentication and metrics of connections.

Requests go through the same pipeline and handlers as those of `kipmesh.transport.grpc`. See docs/wire.md.
"""
