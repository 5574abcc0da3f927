"""Records of logs and snapshots: of the metadata log, of `__consumer_offsets`, control records."""
