"""Snapshots of `__cluster_metadata`: the rules of KIP-630 as pure functions and sans-IO state machines."""
