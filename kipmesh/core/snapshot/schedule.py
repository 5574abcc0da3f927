"""Decides when a replica makes its next snapshot (630-04).

A snapshot is due when the records changed or deleted since the last one reach a ratio of it and the log since then is
long enough. It is also due after an interval if anything was appended. Without a snapshot the ratio counts as reached.

Invariants: changes during a snapshot count for the next one, and if the snapshot fails, changes before it count again.
No more changed records are remembered than the ratio needs, once the size of the last snapshot is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kipmesh.core.metadata.states import RecordKey

RETRY_MS = 60_000
"""Time after a failure, such as a full disk, before the next attempt."""


class SnapshotLimits(NamedTuple):
    """Snapshot settings with Kafka's names and defaults."""

    changed_records_ratio_min: float = 0.5
    """`metadata.snapshot.min.changed_records.ratio`"""
    record_bytes_between: int = 20 << 20
    """`metadata.log.max.record.bytes.between.snapshots`"""
    interval_ms_max: int = 3_600_000
    """`metadata.log.max.snapshot.interval.ms`; 0 disables it."""


class SnapshotReason(Enum):
    """Why a snapshot is due; the value is its name in logs."""

    CHANGES = "changes"
    INTERVAL = "interval"


class SnapshotSchedule:
    """Counts changes up to the high watermark since the last snapshot. Not thread-safe: used by the image's owner."""

    def __init__(self, limits: SnapshotLimits, now_ms: int) -> None:
        self._limits = limits
        self._records: int | None = None
        self._outdated: set[RecordKey] = set()
        self.record_bytes = 0
        """Bytes of the log since the last snapshot."""
        self._since_ms = now_ms
        self._retry_ms = 0
        self._in_progress: tuple[set[RecordKey], int] | None = None

    @property
    def is_in_progress(self) -> bool:
        """Whether a snapshot is in progress."""
        return self._in_progress is not None

    @property
    def changed_records(self) -> int:
        """Number of records changed or deleted since the last snapshot, up to the number that the ratio requires."""
        return len(self._outdated)

    def applied(self, outdated: Iterable[RecordKey], record_bytes: int) -> None:
        """Count applied batches of `record_bytes` bytes; `outdated` is their `MetadataDelta.outdated`."""
        self.record_bytes += record_bytes
        if self.is_in_progress or not self._is_ratio_reached():
            self._outdated.update(outdated)

    def due(self, now_ms: int) -> SnapshotReason | None:
        """Return why a snapshot is due now, or None if it is not.

        Returns None while a snapshot is in progress, if nothing was appended, or for `RETRY_MS` after a failure.
        """
        if self.is_in_progress or not self.record_bytes or now_ms < self._retry_ms:
            return None
        limits = self._limits
        if self.record_bytes >= limits.record_bytes_between and self._is_ratio_reached():
            return SnapshotReason.CHANGES
        if limits.interval_ms_max and now_ms - self._since_ms >= limits.interval_ms_max:
            return SnapshotReason.INTERVAL
        return None

    def _is_ratio_reached(self) -> bool:
        records = self._records
        return records is None or len(self._outdated) >= records * self._limits.changed_records_ratio_min

    def begin(self) -> None:
        """Start a snapshot. The image has been captured, and later changes count for the next snapshot.

        Raises RuntimeError if a snapshot is already in progress.
        """
        if self.is_in_progress:
            raise RuntimeError("a snapshot is already in progress")
        self._in_progress = (self._outdated, self.record_bytes)
        self._outdated, self.record_bytes = set(), 0

    def completed(self, records: int, now_ms: int) -> None:
        """Record that the snapshot in progress is complete with `records` records. Ignored if `loaded` discarded it."""
        if self._in_progress is None:
            return
        self._in_progress = None
        self._records = records
        self._since_ms = now_ms

    def failed(self, now_ms: int) -> None:
        """Record that the snapshot in progress failed. Ignored if none is in progress.

        The changes counted before the snapshot count again, and no snapshot is due until `RETRY_MS` after `now_ms`.
        """
        if self._in_progress is None:
            return
        outdated, record_bytes = self._in_progress
        self._outdated |= outdated
        self.record_bytes += record_bytes
        self._in_progress = None
        self._retry_ms = now_ms + RETRY_MS

    def loaded(self, records: int, now_ms: int) -> None:
        """Reset for an image loaded from a snapshot with `records` records. Discards a snapshot in progress."""
        self._in_progress = None
        self._retry_ms = 0
        self._outdated, self.record_bytes = set(), 0
        self._records = records
        self._since_ms = now_ms
