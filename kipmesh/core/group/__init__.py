"""Consumer groups by Kafka's classic protocol, sans-IO: coordinator, records, and how partitions are assigned.

`coordinator` keeps the groups of one partition of `__consumer_offsets`; `records` are what that partition says, and
`table` is what follows from them. `consumer_protocol`, `assignors` and `sticky` are what the members do with it.
"""
