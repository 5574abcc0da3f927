"""What logs and snapshots hold: records of the metadata log, of `__consumer_offsets`, control records."""
