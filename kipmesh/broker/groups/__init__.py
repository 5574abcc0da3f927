"""Consumer groups on a broker: group coordinators for the partitions of `__consumer_offsets` that the broker leads."""
