"""The consumer: fetches by session from the closest replica (KIP-227, KIP-392), and group membership.

`consumer.Consumer` is the entry point; `rules` decides, sans-IO, which replica serves a partition.
"""
