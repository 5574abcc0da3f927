"""Replication rules of a partition's leader and followers, replica selection, and responses to readers. Sans-IO."""
