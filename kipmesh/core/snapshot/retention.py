"""Retention of snapshots, the metadata log's start offset, and recovery at start (630-05, 630-06, 630-08, 630-14).

Invariants (630-06): the log start never decreases. While it is above 0, there is a snapshot between log start and high
watermark. Only snapshots below the log start are deleted, after it was raised.

Committed records are never dropped silently (630-14): without a valid snapshot or the beginning of the log, a voter
refuses to start, and an observer, whose copy no other replica needs, fetches everything again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kipmesh.core.snapshot.ids import age_order, file_name
from kipmesh.messages import SnapshotId

# -- retention


class RetentionLimits(NamedTuple):
    """Retention settings with Kafka's names and defaults."""

    lag_time_ms_max: int = 604_800_000
    """`metadata.start.offset.lag.time.max.ms`"""
    bytes_max: int = 100 << 20
    """`metadata.max.retention.bytes`, log and snapshots together."""
    observer_live_ms: int = 300_000
    """Time after its last fetch during which an observer counts as live."""


class KeptSnapshot(NamedTuple):
    """A complete snapshot of this replica."""

    snapshot_id: SnapshotId
    size_bytes: int
    last_contained_log_timestamp: int
    log_bytes_after: int
    """Bytes of the log after the snapshot's end offset."""


class ReplicaEnd(NamedTuple):
    """Log end of another replica as of its last fetch; -1 for a voter that has not fetched yet."""

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
    """Return the greatest offset at which the leader's log may start (630-05), or `log_start` if it must stay.

    That is the end of the newest snapshot that all live replicas have reached or that is old enough. While log and
    snapshots exceed `limits.bytes_max`, the next newer snapshot is accepted as well. `now_ms` is wall-clock time.
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
        # Snapshots below the new log start are deleted. `each` stays until a newer one is chosen.
        snapshot_bytes = sum(other.size_bytes for other in candidates if other.snapshot_id.end_offset >= chosen)
    return chosen


def follower_log_start(log_start: int, leader_log_start: int, latest: SnapshotId | None) -> int:
    """Return the log start of a follower or observer: the leader's, but at most the end of its `latest` snapshot.

    The result is never below `log_start`, the current log start, which stays unchanged if there is no snapshot.
    """
    if latest is None:
        return log_start
    return max(log_start, min(leader_log_start, latest.end_offset))


def obsolete(log_start: int, snapshot_ids: Iterable[SnapshotId]) -> tuple[SnapshotId, ...]:
    """Return the snapshots to delete, oldest first: those that end below the log start (630-06)."""
    return tuple(sorted((each for each in snapshot_ids if each.end_offset < log_start), key=age_order))


def needs_snapshot(fetch_offset: int, last_fetched_epoch: int, log_start: int, oldest: SnapshotId | None) -> bool:
    """Whether a fetch position gets the latest snapshot's id instead of records (630-08).

    True if the position is below the log start, if its last fetched epoch is older than the oldest snapshot's, or if it
    is at a log start above 0 and the two epochs differ: the log cannot check such a position. False without snapshots.
    """
    if oldest is None or (fetch_offset == 0 and log_start == 0):
        return False
    if fetch_offset < log_start or last_fetched_epoch < oldest.epoch:
        return True
    return fetch_offset == log_start and last_fetched_epoch != oldest.epoch


# -- recovery


class LogExtent(NamedTuple):
    """Offsets and last epoch of the metadata log."""

    start_offset: int
    end_offset: int
    last_epoch: int
    """Leader epoch of the last batch, -1 if the log is empty."""


class StartFromLog(NamedTuple):
    """Replay the log from offset 0. There is no snapshot."""


class StartFromSnapshot(NamedTuple):
    """Load the snapshot, then replay the log after it."""

    snapshot_id: SnapshotId
    replaces_log: bool
    """The log ends before the snapshot or diverges from it: truncate it fully, start it at the snapshot's end."""


class StartRefused(NamedTuple):
    """Do not start. `problem` describes the cause; the caller adds the remediation."""

    problem: str


class StartByFetching(NamedTuple):
    """Truncate the log fully and fetch from offset 0. The leader will send a snapshot id."""


Start = StartFromLog | StartFromSnapshot | StartRefused | StartByFetching


def candidates(snapshot_ids: Sequence[SnapshotId]) -> list[SnapshotId]:
    """Return snapshots in the order in which to validate them: newest first."""
    return sorted(snapshot_ids, key=age_order, reverse=True)


def start(valid: SnapshotId | None, corrupt: Sequence[SnapshotId], log: LogExtent, *, is_voter: bool) -> Start:
    """Decide how a replica starts: from the snapshot `valid`, or from the log if there is none and it begins at 0.

    If neither is possible, an observer fetches everything and a voter refuses to start. Args: valid: newest valid
    snapshot; corrupt: snapshots that failed validation, for the message.
    """
    if valid is not None:
        if age_order(valid) > (log.last_epoch, log.end_offset) or _replaces_log_end(valid, log):
            return StartFromSnapshot(valid, replaces_log=True)
        if log.start_offset <= valid.end_offset:
            return StartFromSnapshot(valid, replaces_log=False)
    if log.start_offset == 0 and valid is None:
        return StartFromLog()
    if not is_voter:
        return StartByFetching()
    problem = f"the metadata log starts at offset {log.start_offset} and no valid snapshot ends there or later"
    if corrupt:
        problem += f" (set aside as corrupt: {', '.join(file_name(each) for each in corrupt)})"
    return StartRefused(problem)


def _replaces_log_end(valid: SnapshotId, log: LogExtent) -> bool:
    """Whether the log's end, which is of a later epoch and not above the snapshot's end, contradicts the snapshot.

    A snapshot has only committed records, so the end of the log was never committed: the leader sent the snapshot to
    replace the log, and the process stopped after completing the snapshot but before truncating the log.
    """
    return valid.end_offset >= log.end_offset and valid.epoch < log.last_epoch
