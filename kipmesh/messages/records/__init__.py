"""Records of the metadata log and its snapshots, of `__consumer_offsets`, and control records."""
