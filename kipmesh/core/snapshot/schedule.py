"""When a replica makes its next snapshot (630-04).

Either what was changed or deleted since the last one is at least a share of it and the log since then is long enough,
or enough time has passed and anything was appended. With no snapshot so far the share counts as reached.

Invariants: what is changed while a snapshot is being made counts for the next one, and if the making fails for both; no
more is remembered than the share needs, once it is known what it is a share of.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kipmesh.core.metadata.states import RecordKey

RETRY_MS = 60_000
"""How long after a failure, as of a full disk, the next attempt is made."""


class SnapshotLimits(NamedTuple):
    """The configuration: Kafka's keys and defaults."""

    changed_records_ratio_min: float = 0.5
    """`metadata.snapshot.min.changed_records.ratio`"""
    record_bytes_between: int = 20 << 20
    """`metadata.log.max.record.bytes.between.snapshots`"""
    interval_ms_max: int = 3_600_000
    """`metadata.log.max.snapshot.interval.ms`; 0 turns it off."""


class SnapshotReason(Enum):
    """Why one is due."""

    CHANGES = "changes"
    INTERVAL = "interval"


class SnapshotSchedule:
    """Counts what is applied at or below the high watermark; belongs to the image's owner."""

    def __init__(self, limits: SnapshotLimits, now_ms: int) -> None:
        self._limits = limits
        self._records: int | None = None
        self._outdated: set[RecordKey] = set()
        self.record_bytes = 0
        """Bytes of the log since the last snapshot."""
        self._since_ms = now_ms
        self._retry_ms = 0
        self._being_made: tuple[set[RecordKey], int] | None = None

    @property
    def is_making(self) -> bool:
        """Whether a snapshot is being made."""
        return self._being_made is not None

    @property
    def changed_records(self) -> int:
        """How many are changed or deleted since the last snapshot, as far as it matters."""
        return len(self._outdated)

    def applied(self, outdated: Iterable[RecordKey], record_bytes: int) -> None:
        """Batches of that many bytes were applied; `outdated` is their `MetadataDelta.outdated`."""
        self.record_bytes += record_bytes
        if self.is_making or not self._is_share_reached():
            self._outdated.update(outdated)

    def due(self, now_ms: int) -> SnapshotReason | None:
        """Why a snapshot should be made now, None when it should not."""
        if self.is_making or not self.record_bytes or now_ms < self._retry_ms:
            return None
        limits = self._limits
        if self.record_bytes >= limits.record_bytes_between and self._is_share_reached():
            return SnapshotReason.CHANGES
        if limits.interval_ms_max and now_ms - self._since_ms >= limits.interval_ms_max:
            return SnapshotReason.INTERVAL
        return None

    def _is_share_reached(self) -> bool:
        records = self._records
        return records is None or len(self._outdated) >= records * self._limits.changed_records_ratio_min

    def begin(self) -> None:
        """The image was captured: from now on the next snapshot is counted for."""
        if self.is_making:
            raise RuntimeError("a snapshot is being made")
        self._being_made = (self._outdated, self.record_bytes)
        self._outdated, self.record_bytes = set(), 0

    def made(self, records: int, now_ms: int) -> None:
        """It is complete, with that many records; nothing happens if another was loaded meanwhile."""
        if self._being_made is None:
            return
        self._being_made = None
        self._records = records
        self._since_ms = now_ms

    def failed(self, now_ms: int) -> None:
        """It is not; everything counts again, and the next attempt is made in a while."""
        if self._being_made is None:
            return
        outdated, record_bytes = self._being_made
        self._outdated |= outdated
        self.record_bytes += record_bytes
        self._being_made = None
        self._retry_ms = now_ms + RETRY_MS

    def loaded(self, records: int, now_ms: int) -> None:
        """The image now is what a snapshot of that many records says; what is being made, if anything, is not."""
        self._being_made = None
        self._retry_ms = 0
        self._outdated, self.record_bytes = set(), 0
        self._records = records
        self._since_ms = now_ms
