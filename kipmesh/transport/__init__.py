"""Shared by gRPC and the Kafka listener: the pipeline of a request, its metrics, faults for tests.

A front end decodes a frame, calls `Pipeline.handle`, encodes the response and calls `Pipeline.finished`.
"""
