"""Transports of requests: gRPC, the Kafka listener, and the pipeline, metrics and fault injection that they share.

A front end decodes a frame, calls `Pipeline.handle`, encodes the response and calls `Pipeline.finished`.
"""
