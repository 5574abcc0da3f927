"""Snapshots in the metadata quorum's state machine (630-08, 630-11, 630-12). The driver generates and fetches them.

A follower that needs records below the leader's log start fetches a snapshot and sends no Fetch meanwhile. The latest
snapshot never becomes older. A snapshot contains only committed records.
"""

from __future__ import annotations

from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.types import FetchSnapshot, QuorumError
from kipmesh.core.snapshot.ids import age_order
from kipmesh.messages import SnapshotId


def oldest_snapshot(context: RaftContext) -> SnapshotId | None:
    """Return the earliest snapshot, or the latest if the earliest ends below the log start; None without snapshots.

    Snapshots below a raised log start are about to be deleted, and do not reveal the epoch at the log start.
    """
    earliest = context.earliest_snapshot
    if earliest is not None and earliest.end_offset < context.log.log_start_offset:
        return context.latest_snapshot
    return earliest


def check_truncation(context: RaftContext, offset: int) -> None:
    """Check that the log may be truncated to `offset`. Raises QuorumError if `offset` is below the high watermark."""
    if offset < context.high_watermark:
        raise QuorumError(
            f"leader {context.election.leader_id} of epoch {context.epoch} requires truncation to offset {offset}, "
            f"below the high watermark {context.high_watermark}"
        )


def start_fetch(context: RaftContext, snapshot_id: SnapshotId) -> None:
    """Fetch the snapshot whose id the leader returned instead of records (630-08).

    Backs off instead if the id has negative values or is not newer than the latest snapshot.

    Raises QuorumError if the snapshot ends below the high watermark.
    """
    latest, leader_id = context.latest_snapshot, context.election.leader_id
    is_valid = snapshot_id.end_offset >= 0 and snapshot_id.epoch >= 0
    if not is_valid or (latest is not None and age_order(latest) >= age_order(snapshot_id)):
        context.retry_later(leader_id)
        return
    check_truncation(context, snapshot_id.end_offset)
    context.fetching_snapshot = snapshot_id
    context.emit(FetchSnapshot(snapshot_id, leader_id, context.epoch))


def on_snapshot_changed(context: RaftContext, latest: SnapshotId, earliest: SnapshotId) -> None:
    """Adopt a generated snapshot, or a fetched one that has replaced the log. Ignored if a newer one is known.

    Ends the snapshot fetch if this completes it, and advances the high watermark to the snapshot's end.
    """
    if context.latest_snapshot is not None and age_order(latest) < age_order(context.latest_snapshot):
        return  # a newer snapshot was reported before
    context.latest_snapshot, context.earliest_snapshot = latest, earliest
    log = context.log
    if log.log_start_offset == log.log_end_offset == latest.end_offset:
        context.durable_end = log.log_end_offset  # the log is empty and the snapshot is durable
    fetching = context.fetching_snapshot
    if fetching is not None and age_order(latest) >= age_order(fetching):
        context.fetching_snapshot = None
    context.commit(latest.end_offset)


def on_fetch_progress(context: RaftContext, *, failed: bool) -> None:
    """Restart the fetch timeout while the leader sends a snapshot (630-12).

    If `failed`, end the snapshot fetch and send Fetch again after the retry backoff (630-11). Ignored if no snapshot is
    being fetched.
    """
    if context.fetching_snapshot is None:
        return
    if failed:
        context.fetching_snapshot = None
        context.retry_later(context.election.leader_id)
    else:
        context.restart_fetch_timeout()
