"""The producer: batching, partitioning, sending, and metadata of the topics in use (KIP-526).

`producer.Producer` is the entry point.
"""
