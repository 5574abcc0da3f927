"""The group coordinator of a broker: one shard per partition of `__consumer_offsets`.

`groups.GroupsHandler` is the entry point. The rules are in `kipmesh.core.group`; a shard persists their records.
"""
