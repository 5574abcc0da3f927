"""Files of the metadata quorum: its log, `quorum-state` and snapshots (KIP-630)."""
