"""Snapshot ids and the names of their files (630-01), and which of two is newer (630-13, 630-14).

A snapshot id is (end offset, epoch). Apache Kafka writes the end offset with 20 digits and the epoch with 10; the
proposal's 20 digits are read as well.
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
    """What a snapshot's file is."""

    COMPLETE = ""
    PART = ".part"
    """Being written or fetched."""
    DELETED = ".deleted"
    CORRUPT = ".corrupt"
    """Set aside for somebody to look at."""


class SnapshotFile(NamedTuple):
    """What the name of a file says."""

    snapshot_id: SnapshotId
    kind: FileKind


def file_name(snapshot_id: SnapshotId, kind: FileKind = FileKind.COMPLETE) -> str:
    """The name that Apache Kafka gives it; raises ValueError for an id that no snapshot has."""
    end_offset, epoch = snapshot_id.end_offset, snapshot_id.epoch
    if not (0 <= end_offset <= _MAX_INT64 and 0 <= epoch <= _MAX_INT32):
        raise ValueError(f"no snapshot has the id {end_offset}-{epoch}")
    return f"{end_offset:020d}-{epoch:010d}{SUFFIX}{kind.value}"


def parse_file_name(name: str) -> SnapshotFile | None:
    """What the name says; None when it is not a snapshot's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    end_offset, epoch = int(match[1]), int(match[2])
    if end_offset > _MAX_INT64 or epoch > _MAX_INT32:
        return None
    return SnapshotFile(SnapshotId(end_offset, epoch), FileKind(match[3] or ""))


def age_order(snapshot_id: SnapshotId) -> tuple[int, int]:
    """A sort key: later epochs are newer, then greater end offsets."""
    return snapshot_id.epoch, snapshot_id.end_offset


def latest_end(log_end_offset: int, log_epoch: int, snapshot_id: SnapshotId | None) -> SnapshotId:
    """What a replica stands for when votes are asked for and granted: the later of its log's end and its snapshot's.

    `log_epoch` is -1 for an empty log, whose end then says nothing (630-13).
    """
    log_end = SnapshotId(log_end_offset, log_epoch)
    return log_end if snapshot_id is None else max(log_end, snapshot_id, key=age_order)
