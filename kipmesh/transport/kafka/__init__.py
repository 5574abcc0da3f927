"""The listener for Kafka's own protocol, beside `kipmesh.transport.grpc`, with the same pipeline and handlers behind
it.

It frames, limits and authenticates connections, and decodes requests with the codecs of `kipmesh.messages`. See
docs/wire.md.
"""
