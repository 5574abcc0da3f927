"""Snapshot ids, snapshot file names (630-01) and the order of snapshots (630-13, 630-14).

A snapshot id is (end offset, epoch). File names are written like Apache Kafka's: 20 digits for the end offset and 10
for the epoch. KIP-630's 20 digits for the epoch are accepted when parsing.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from kipmesh.messages import SnapshotId

SUFFIX = ".checkpoint"

_MAX_INT32 = (1 << 31) - 1
_MAX_INT64 = (1 << 63) - 1
_NAME = re.compile(r"(\d{20})-(\d{20}|\d{10})\.checkpoint(\.part|\.deleted|\.corrupt)?", re.ASCII)


class FileKind(Enum):
    """State of a snapshot file, given by the suffix of its name."""

    COMPLETE = ""
    PART = ".part"
    """Being written or fetched."""
    DELETED = ".deleted"
    CORRUPT = ".corrupt"
    """Kept for inspection."""


class SnapshotFile(NamedTuple):
    """Content of a snapshot's file name."""

    snapshot_id: SnapshotId
    kind: FileKind


def file_name(snapshot_id: SnapshotId, kind: FileKind = FileKind.COMPLETE) -> str:
    """Return the file name of a snapshot. Raises ValueError if end offset or epoch is negative or too large."""
    end_offset, epoch = snapshot_id.end_offset, snapshot_id.epoch
    if not (0 <= end_offset <= _MAX_INT64 and 0 <= epoch <= _MAX_INT32):
        raise ValueError(f"invalid snapshot id {end_offset}-{epoch}: must be an int64 and an int32 of at least 0")
    return f"{end_offset:020d}-{epoch:010d}{SUFFIX}{kind.value}"


def parse_file_name(name: str) -> SnapshotFile | None:
    """Return the content of a snapshot's file name, or None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    end_offset, epoch = int(match[1]), int(match[2])
    if end_offset > _MAX_INT64 or epoch > _MAX_INT32:
        return None
    return SnapshotFile(SnapshotId(end_offset, epoch), FileKind(match[3] or ""))


def age_order(snapshot_id: SnapshotId) -> tuple[int, int]:
    """Return a sort key for snapshot ids, oldest first: by epoch, then end offset."""
    return snapshot_id.epoch, snapshot_id.end_offset


def latest_end(log_end_offset: int, log_epoch: int, snapshot_id: SnapshotId | None) -> SnapshotId:
    """Return the later of a log's end and a snapshot's end, by epoch, then offset, for use in elections (630-13).

    `log_epoch` is -1 for an empty log, so that the end of any snapshot is later. Without a snapshot, returns the log's
    end.
    """
    log_end = SnapshotId(log_end_offset, log_epoch)
    return log_end if snapshot_id is None else max(log_end, snapshot_id, key=age_order)
