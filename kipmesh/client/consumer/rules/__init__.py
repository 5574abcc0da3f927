"""What a consumer decides, sans-IO: from which replica it reads a partition, and what it does when that fails (392-08,
392-10, 392-13 to 392-17).

`reader.PartitionReader` is the entry point; `preferred_replica` chooses the replica. docs/closest_replica.md describes
what the driver has to call.
"""
