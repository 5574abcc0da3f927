"""From a snapshot's file to the image that it says, some records at a time.

Whoever drives it may give way to others between two steps. Python's garbage collector should be off meanwhile, and the
image frozen for it afterwards (`gc.freeze`): a large image makes full collections long.

Invariant: the image is for use after the last step, and not at all when a step fails.
"""

from __future__ import annotations

from collections.abc import Iterator

from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.records import decode_record
from kipmesh.messages import SnapshotId
from kipmesh.storage.snapshot_file import BATCH_RECORDS_MAX, SnapshotReader


class ImageLoader:
    """Loads one snapshot."""

    def __init__(self, reader: SnapshotReader, snapshot_id: SnapshotId) -> None:
        self.image = MetadataImage(snapshot_id.end_offset - 1, snapshot_id.epoch)
        self.records = 0
        """How many are applied so far."""
        self._reader = reader

    def steps(self) -> Iterator[int]:
        """Apply at most 1,000 records at a time; gives how many are applied so far. CorruptRecordError, OSError."""
        for values in self._reader.values():
            for start in range(0, len(values), BATCH_RECORDS_MAX):
                delta = MetadataDelta()  # everything is new
                for value in values[start : start + BATCH_RECORDS_MAX]:
                    self.image.apply(decode_record(value), delta)
                    self.records += 1
                yield self.records
        self.image.timestamp_ms = self._reader.summary.header.last_contained_log_timestamp
