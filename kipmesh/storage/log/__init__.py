"""The log of one partition: segments, indexes, leader epochs, producer snapshots, retention and compaction.

`log_loader.open_log` loads or recovers a log from its directory. `log.Log` appends, reads and truncates. Kafka's tools
can read every file.
"""
