"""Consumer groups with Kafka's classic protocol, sans-IO.

`coordinator` manages the groups of one partition of `__consumer_offsets`, `records` encodes that partition, and `table`
is the state that follows from it. `assignors` assign partitions to members.
"""
