"""The checkpoint of high watermarks: those that moved, now and then, and at once those that went back.

A high watermark goes back only when records below it are lost as the rules allow ("Log truth" in docs/rules.md). Then
the checkpoint is above the log's end, and whatever gets these offsets next would count as committed after a start.
`Replica.must_checkpoint` keeps the log from growing until a lower one is on disk.
"""

from __future__ import annotations

from kipmesh.core.errors import KafkaError
from kipmesh.node.broker.changes import Changes
from kipmesh.node.broker.disk import Disk
from kipmesh.storage.log_manager import LogManager


async def checkpoint_high_watermarks(changes: Changes, log_manager: LogManager, disk: Disk) -> None:
    """Write those that moved since the last time; KafkaError, and then they are still to be written."""
    moved, changes.high_watermarks = changes.high_watermarks, {}
    if not moved:
        return
    # What the disk's thread writes is in the order of the calls: an older value never replaces a newer one.
    values = {replica: replica.high_watermark for replica in moved}
    high_watermarks = {(replica.topic, replica.partition): value for replica, value in values.items()}
    try:
        await disk.run(lambda: log_manager.checkpoint_high_watermarks(high_watermarks))
    except KafkaError:
        changes.high_watermarks.update(moved)
        raise
    for replica, value in values.items():
        replica.checkpointed(value)


def is_due(changes: Changes) -> bool:
    """Whether a log must not grow before this is written."""
    return any(replica.must_checkpoint for replica in changes.high_watermarks)
