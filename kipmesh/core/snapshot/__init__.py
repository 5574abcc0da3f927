"""Rules for snapshots of `__cluster_metadata` (KIP-630): pure functions and sans-IO state machines."""
