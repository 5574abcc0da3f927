"""The log of one partition: segments, indexes, epochs, producer snapshots, retention and compaction.

`log_loader.open_log` recovers a log from its directory; `log.Log` appends, reads and truncates. Kafka's own tools read
every file.
"""
