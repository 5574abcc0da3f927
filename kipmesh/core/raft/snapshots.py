"""Snapshots of the metadata log as the quorum sees them (630-08, 630-11, 630-12). The driver makes and fetches them.

A follower that needs records that its leader no longer has fetches a snapshot, and sends no Fetch in the meantime. The
latest snapshot never goes back. What a snapshot contains is committed.
"""

from __future__ import annotations

from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.types import FetchSnapshot, QuorumError
from kipmesh.core.snapshot.ids import age_order
from kipmesh.messages import SnapshotId


def oldest_snapshot(context: RaftContext) -> SnapshotId | None:
    """Return the oldest at or above the log start; the latest while those below a raised log start are being deleted.

    One below it says nothing of the epoch at the log start.
    """
    earliest = context.earliest_snapshot
    if earliest is not None and earliest.end_offset < context.log.log_start_offset:
        return context.latest_snapshot
    return earliest


def check_truncation(context: RaftContext, offset: int) -> None:
    """Raise QuorumError if the leader wants the log to end below the high watermark."""
    if offset < context.high_watermark:
        raise QuorumError(
            f"leader {context.election.leader_id} of epoch {context.epoch} wants the log cut at {offset}, "
            f"below the high watermark {context.high_watermark}"
        )


def begin_fetch(context: RaftContext, snapshot_id: SnapshotId) -> None:
    """Fetch a snapshot that the leader sent instead of records (630-08); QuorumError if it would undo a commit."""
    latest, leader_id = context.latest_snapshot, context.election.leader_id
    is_valid = snapshot_id.end_offset >= 0 and snapshot_id.epoch >= 0
    if not is_valid or (latest is not None and age_order(latest) >= age_order(snapshot_id)):
        context.retry_later(leader_id)
        return
    check_truncation(context, snapshot_id.end_offset)
    context.fetching_snapshot = snapshot_id
    context.emit(FetchSnapshot(snapshot_id, leader_id, context.epoch))


def on_snapshot_changed(context: RaftContext, latest: SnapshotId, earliest: SnapshotId) -> None:
    """Take over a snapshot that was made here, or was fetched and replaced the log."""
    if context.latest_snapshot is not None and age_order(latest) < age_order(context.latest_snapshot):
        return  # reported late: a newer one was reported before
    context.latest_snapshot, context.earliest_snapshot = latest, earliest
    log = context.log
    if log.log_start_offset == log.log_end_offset == latest.end_offset:
        context.durable_end = log.log_end_offset  # the snapshot is durable, and there is nothing else
    fetching = context.fetching_snapshot
    if fetching is not None and age_order(latest) >= age_order(fetching):
        context.fetching_snapshot = None
    context.commit(latest.end_offset)


def on_fetch_progress(context: RaftContext, *, failed: bool) -> None:
    """Keep the leader while it sends a snapshot (630-12); after a failure, send Fetch again (630-11)."""
    if context.fetching_snapshot is None:
        return
    if failed:
        context.fetching_snapshot = None
        context.retry_later(context.election.leader_id)
    else:
        context.restart_fetch_timeout()
