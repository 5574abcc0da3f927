"""The consumer: fetch sessions (KIP-227), fetching from the closest replica (KIP-392), and group membership.

`consumer.Consumer` is the entry point; `rules` contains the sans-IO decisions for each partition.
"""
