"""What a replica starts from, given the snapshots that it has and the log (630-14).

Invariant: nothing that a majority may rely on is thrown away without somebody saying so: where neither a snapshot nor
the log's beginning is left, a voter refuses to start, and an observer, on which nobody relies, fetches anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.snapshot.ids import age_order, file_name
from kipmesh.messages import SnapshotId


class LogExtent(NamedTuple):
    """What the metadata log has."""

    start_offset: int
    end_offset: int
    last_epoch: int
    """Of its last batch, -1 when it has none."""


class StartFromLog(NamedTuple):
    """No snapshot: the log from offset 0."""


class StartFromSnapshot(NamedTuple):
    """Load it, then replay the log after it."""

    snapshot_id: SnapshotId
    replaces_log: bool
    """First empty the log and let it start at the snapshot's end: it ends before the snapshot."""


class StartRefused(NamedTuple):
    """Do not start; the message is one line for people."""

    message: str


class StartByFetching(NamedTuple):
    """Empty the log and fetch from offset 0: the leader will send a snapshot."""


Start = StartFromLog | StartFromSnapshot | StartRefused | StartByFetching


def candidates(snapshot_ids: Sequence[SnapshotId]) -> list[SnapshotId]:
    """The order in which to look for a valid one: newest first."""
    return sorted(snapshot_ids, key=age_order, reverse=True)


def start(valid: SnapshotId | None, corrupt: Sequence[SnapshotId], log: LogExtent, *, is_voter: bool) -> Start:
    """Where to start; `valid` is the newest valid snapshot, `corrupt` are those that were set aside."""
    if valid is not None:
        if age_order(valid) > (log.last_epoch, log.end_offset) or _was_to_replace(valid, log):
            return StartFromSnapshot(valid, replaces_log=True)
        if log.start_offset <= valid.end_offset:
            return StartFromSnapshot(valid, replaces_log=False)
    if log.start_offset == 0 and valid is None:
        return StartFromLog()
    if not is_voter:
        return StartByFetching()
    why = f"the metadata log starts at offset {log.start_offset} and no valid snapshot ends there or later"
    if corrupt:
        why += f" (set aside as corrupt: {', '.join(file_name(each) for each in corrupt)})"
    return StartRefused(
        f"{why}; this voter may have the only copy of what was agreed on. If the other voters are a majority and are "
        "running, move its metadata folder away and start it again: it then fetches everything from the leader"
    )


def _was_to_replace(valid: SnapshotId, log: LogExtent) -> bool:
    """Whether the snapshot says otherwise than the log's end, which is of a later epoch and not above it.

    What a snapshot has was committed, so the end of the log never was: the leader had sent the snapshot to take its
    place, and the process ended when it was whole and the log not yet emptied.
    """
    return valid.end_offset >= log.end_offset and valid.epoch < log.last_epoch
