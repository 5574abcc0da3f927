"""Which snapshots a replica keeps, where its log may start, and what it starts from (630-05, 630-06, 630-08, 630-14).

Invariants (630-06): the log start never goes back; while it is above 0 there is a snapshot at or above it, and at most
at the high watermark; only snapshots below it are deleted, and only after it was raised.

Nothing that a majority may rely on is dropped silently (630-14): if neither a snapshot nor the beginning of the log is
left, a voter refuses to start, and an observer, on which no other replica relies, fetches everything again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kipmesh.core.snapshot.ids import age_order, file_name
from kipmesh.messages import SnapshotId

# -- retention


class RetentionLimits(NamedTuple):
    """The configuration: Kafka's keys and defaults."""

    lag_time_ms_max: int = 604_800_000
    """`metadata.start.offset.lag.time.max.ms`"""
    bytes_max: int = 100 << 20
    """`metadata.max.retention.bytes`, of log and snapshots together."""
    observer_live_ms: int = 300_000
    """How long after its last fetch an observer is waited for."""


class KeptSnapshot(NamedTuple):
    """A snapshot that this replica has, whole."""

    snapshot_id: SnapshotId
    size_bytes: int
    last_contained_log_timestamp: int
    log_bytes_after: int
    """Bytes of the log from its end offset on."""


class ReplicaEnd(NamedTuple):
    """How far another replica is, as its fetches say; a voter that has not fetched yet is at -1."""

    replica_id: int
    is_voter: bool
    log_end_offset: int
    last_fetch_ms: int


def leader_log_start(
    log_start: int,
    high_watermark: int,
    log_bytes: int,
    snapshots: Iterable[KeptSnapshot],
    replicas: Sequence[ReplicaEnd],
    now_ms: int,
    limits: RetentionLimits,
) -> int:
    """The greatest offset that a leader's log may start at (630-05), `log_start` if it must stay.

    It is the end of a snapshot that every live replica has reached, or that is old enough. While log and snapshots
    have more than `bytes_max`, the next newer snapshot will do as well.
    """
    candidates = sorted(
        (each for each in snapshots if log_start <= each.snapshot_id.end_offset <= high_watermark),
        key=lambda each: each.snapshot_id.end_offset,
    )
    live = [each for each in replicas if each.is_voter or now_ms - each.last_fetch_ms <= limits.observer_live_ms]
    reached = min((each.log_end_offset for each in live), default=high_watermark)
    snapshot_bytes = sum(each.size_bytes for each in candidates)
    chosen = log_start
    for each in candidates:
        is_reached = each.snapshot_id.end_offset <= reached
        is_old = now_ms - each.last_contained_log_timestamp >= limits.lag_time_ms_max
        if not (is_reached or is_old or log_bytes + snapshot_bytes > limits.bytes_max):
            break
        chosen = each.snapshot_id.end_offset
        log_bytes = each.log_bytes_after
        # What is below the log start from now on: `each` stays until a newer one is chosen.
        snapshot_bytes = sum(other.size_bytes for other in candidates if other.snapshot_id.end_offset >= chosen)
    return chosen


def follower_log_start(log_start: int, leader_log_start: int, latest: SnapshotId | None) -> int:
    """Where the log of a follower or observer may start: at most at the leader's, and at its own latest snapshot."""
    if latest is None:
        return log_start
    return max(log_start, min(leader_log_start, latest.end_offset))


def obsolete(log_start: int, snapshot_ids: Iterable[SnapshotId]) -> tuple[SnapshotId, ...]:
    """The snapshots to delete, oldest first (630-06)."""
    return tuple(sorted((each for each in snapshot_ids if each.end_offset < log_start), key=age_order))


def needs_snapshot(fetch_offset: int, last_fetched_epoch: int, log_start: int, oldest: SnapshotId | None) -> bool:
    """Whether a fetch is answered with the latest snapshot's id (630-08).

    So it is below the log start, at a log start above 0 with another epoch than the oldest snapshot's, and with a last
    fetched epoch that is older than that: this log can tell nothing of it.
    """
    if oldest is None or (fetch_offset == 0 and log_start == 0):
        return False
    if fetch_offset < log_start or last_fetched_epoch < oldest.epoch:
        return True
    return fetch_offset == log_start and last_fetched_epoch != oldest.epoch


# -- start


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
