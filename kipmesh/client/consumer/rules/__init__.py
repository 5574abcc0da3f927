"""Decisions of a consumer, sans-IO: which replica serves a partition, and how to handle errors (392-08, 392-10,
392-13 to 392-17).

`reader.PartitionReader` is the entry point; `preferred_replica` selects the replica. docs/closest_replica.md lists the
methods that the driver calls.
"""
