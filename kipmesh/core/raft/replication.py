"""Pull replication of the metadata log: Fetch on both sides, appends, high watermark.

A leader responds to a fetch immediately if there are records, a higher high watermark than last sent to that replica, a
diverging epoch, a snapshot id or an error. Otherwise the fetch waits until its deadline. Replicas receive uncommitted
records; consumers only records below the high watermark. A voter sends its next Fetch only when its log is durable,
because its fetch offset acknowledges all records before it.

Response to a fetch position (630-08): the latest snapshot's id if the offset is below the log start, or at a log start
above 0 with another epoch than the oldest snapshot's, or if the last fetched epoch is older than that epoch; a
diverging epoch if the last fetched epoch ends elsewhere in the leader's log; otherwise records.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import elections, snapshots, types, wire
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.leadership import WAITING_MAX, Leadership, WaitingFetch
from kipmesh.core.raft.types import RaftConfig, State
from kipmesh.core.replica.follower import follower_high_watermark, has_diverged, truncation_offset
from kipmesh.core.snapshot.retention import needs_snapshot

# -- leader


def on_fetch(context: RaftContext, request_id: int, request: m.FetchRequest, fetch: m.FetchPartition) -> None:
    """Handle a Fetch request: record the replica's position, then respond, or let the fetch wait.

    Errors: INVALID_REQUEST, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER, OFFSET_OUT_OF_RANGE.
    """
    if fetch.fetch_offset == 0 and fetch.last_fetched_epoch < 0:
        fetch = fetch._replace(last_fetched_epoch=0)  # nothing fetched yet
    error = _fetch_error(context, request, fetch)
    leadership = context.leadership
    if error is not ErrorCode.NONE or leadership is None:
        context.emit(types.Respond(request_id, wire.fetch_error(context.advertised_election, error)))
        return
    leadership.mark_alive(request.replica_id, context.now_ms)
    if fetch_position(context, fetch) is None:
        replica = leadership.replica(request.replica_id, context.now_ms)
        if replica is not None:
            replica.record_fetch(fetch.fetch_offset, context.log.log_end_offset, context.now_ms)
            if request.replica_id in leadership.voters:
                advance_leader(context, leadership)
    wait = WaitingFetch(
        request_id,
        request.replica_id,
        fetch,
        max(1, min(request.max_bytes, fetch.partition_max_bytes or request.max_bytes)),
        context.now_ms + request.max_wait_ms,
    )
    if not _respond_to_fetch(context, leadership, wait, immediately=request.max_wait_ms == 0):
        _add_waiting(context, leadership, wait)


def _fetch_error(context: RaftContext, request: m.FetchRequest, fetch: m.FetchPartition) -> ErrorCode:
    epoch = fetch.current_leader_epoch
    if request.max_wait_ms < 0 or fetch.fetch_offset < 0 or request.replica_id == context.config.node_id:
        return ErrorCode.INVALID_REQUEST
    if request.replica_id >= 0 and (epoch < 0 or not 0 <= fetch.last_fetched_epoch <= epoch):
        return ErrorCode.INVALID_REQUEST
    if 0 <= epoch < context.epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if epoch > context.epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    return ErrorCode.NONE if context.state is State.LEADER else ErrorCode.NOT_LEADER_OR_FOLLOWER


def fetch_position(context: RaftContext, fetch: m.FetchPartition) -> m.EpochEndOffset | m.SnapshotId | None:
    """Return the diverging epoch of a fetch position, the snapshot to fetch first, or None if records can follow."""
    log, offset, epoch = context.log, fetch.fetch_offset, fetch.last_fetched_epoch
    if (offset == 0 and epoch == 0 and log.log_start_offset == 0) or epoch < 0:
        return None
    oldest = snapshots.oldest_snapshot(context)
    if needs_snapshot(offset, epoch, log.log_start_offset, oldest):
        return context.latest_snapshot
    if oldest is not None and offset == log.log_start_offset > 0:
        return None  # the log begins at the oldest snapshot, whose epoch matches
    end = log.end_offset_for_epoch(epoch)
    if end.end_offset < 0:  # the log does not know this epoch
        end = m.EpochEndOffset(context.last_epoch, log.log_end_offset)
    elif oldest is not None and end == m.EpochEndOffset(epoch, oldest.end_offset):
        # the epoch is older than all batches in the log
        end = m.EpochEndOffset(oldest.epoch, oldest.end_offset)
    return end if has_diverged(offset, epoch, end) else None


def _respond_to_fetch(context: RaftContext, leadership: Leadership, wait: WaitingFetch, *, immediately: bool) -> bool:
    """Respond if there is something to return or if `immediately`; return whether a response was sent."""
    fetch, log, high_watermark = wait.partition, context.log, context.high_watermark
    data = m.PartitionData(
        high_watermark=high_watermark,
        last_stable_offset=high_watermark,
        log_start_offset=log.log_start_offset,
        current_leader=m.LeaderIdAndEpoch(context.config.node_id, context.epoch),
    )
    replica = leadership.voters.get(wait.replica_id) or leadership.observers.get(wait.replica_id)
    position = fetch_position(context, fetch)
    read = None
    if isinstance(position, m.EpochEndOffset):
        data = data._replace(diverging_epoch=position)
    elif isinstance(position, m.SnapshotId):
        data = data._replace(snapshot_id=position)
    else:
        limit = log.log_end_offset if wait.replica_id >= 0 else high_watermark
        if not log.log_start_offset <= fetch.fetch_offset <= log.log_end_offset:
            data = data._replace(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        elif fetch.fetch_offset < limit:
            read = types.Read(fetch.fetch_offset, wait.max_bytes, limit)
        elif not immediately and (replica is None or replica.sent_high_watermark >= high_watermark):
            return False
    if replica is not None:
        replica.sent_high_watermark = high_watermark
    context.emit(types.Respond(wait.request_id, wire.fetch_response(data), read))
    return True


def _add_waiting(context: RaftContext, leadership: Leadership, wait: WaitingFetch) -> None:
    key = wait.replica_id if wait.replica_id >= 0 else -1 - wait.request_id
    before = leadership.waiting.pop(key, None)
    if before is not None:  # the replica sent a new Fetch and no longer reads the response to the older one
        _respond_to_fetch(context, leadership, before, immediately=True)
    if len(leadership.waiting) >= WAITING_MAX:
        _respond_to_fetch(context, leadership, wait, immediately=True)
    else:
        leadership.waiting[key] = wait


def _respond_to_waiting(context: RaftContext, leadership: Leadership) -> None:
    """Respond to waiting fetches that have something to return or whose deadline has passed."""
    for key, wait in list(leadership.waiting.items()):
        if _respond_to_fetch(context, leadership, wait, immediately=context.now_ms >= wait.deadline_ms):
            del leadership.waiting[key]


def advance_leader(context: RaftContext, leadership: Leadership) -> None:
    """Advance the high watermark to the offset that a majority of voters has, then respond to waiting fetches."""
    if context.commit(leadership.committed_offset(context.durable_end)):
        _respond_to_waiting(context, leadership)


def poll_leader(context: RaftContext, leadership: Leadership) -> None:
    """Perform the due actions of a leader.

    Resigns without a quorum, sends BeginQuorumEpoch, and responds to fetches whose deadline has passed.
    """
    now_ms = context.now_ms
    if leadership.has_lost_quorum(now_ms):
        elections.resign(context)
        return
    leadership.start_round(now_ms)
    for voter in sorted(leadership.unnotified_voters):
        if context.is_free(voter):
            context.send(voter, wire.epoch_request(m.BeginQuorumEpochRequest, context.config, context.epoch))
    if any(now_ms >= wait.deadline_ms for wait in leadership.waiting.values()):
        _respond_to_waiting(context, leadership)


def on_append(context: RaftContext, token: int, batch: bytes, epoch: int) -> None:
    """Append a batch of the active controller, or refuse it (NOT_LEADER_OR_FOLLOWER) unless this node leads `epoch`."""
    if context.state is State.LEADER and epoch == context.epoch:
        context.emit(types.AppendAsLeader(token, batch, epoch))
    else:
        context.emit(types.RefuseAppend(token, ErrorCode.NOT_LEADER_OR_FOLLOWER, context.advertised_election.leader_id))


# -- log


def flush_if_needed(context: RaftContext) -> None:
    """Emit `Flush` if this is a voter whose log is not durable up to its end. The driver flushes an observer's log."""
    if context.config.is_voter and context.durable_end < context.log.log_end_offset:
        context.emit(types.Flush())


def on_log_changed(context: RaftContext) -> None:
    """Continue after an append or truncation: flush, then respond to waiting fetches or advance the high watermark."""
    context.durable_end = min(context.durable_end, context.log.log_end_offset)
    flush_if_needed(context)
    if context.leadership is not None:
        _respond_to_waiting(context, context.leadership)
    else:
        _advance_follower(context)


def on_append_rejected(context: RaftContext) -> None:
    """Resign if this leader could not append its LeaderChange record. A follower retries after `fetch_max_wait_ms`."""
    if context.leadership is not None:
        if context.log.log_end_offset == context.leadership.epoch_start_offset:
            elections.resign(context)
    elif context.state.follows:
        context.retry_later(context.election.leader_id, context.config.fetch_max_wait_ms)


def on_persisted(context: RaftContext, end_offset: int) -> None:
    """Record that the log below `end_offset` is durable, and advance a leader's high watermark."""
    context.durable_end = min(end_offset, context.log.log_end_offset)
    flush_if_needed(context)
    if context.leadership is not None:
        advance_leader(context, context.leadership)


# -- follower


def poll_follower(context: RaftContext) -> None:
    """Send Fetch to the leader; after the fetch timeout, become a candidate (voter) or leave the leader (observer)."""
    leader_id = context.election.leader_id
    if context.deadline_ms is not None and context.now_ms >= context.deadline_ms:
        if context.state is State.FOLLOWER:
            elections.become_candidate(context, elections.Cause.FETCH_TIMEOUT)
        else:
            elections.abandon_leader(context)
    elif context.is_free(leader_id) and context.fetching_snapshot is None and may_fetch(context):
        context.send(leader_id, _next_fetch(context))


def probe_ms(config: RaftConfig) -> int:
    """Return the time until an observer without a leader sends Fetch to another voter, in ms.

    This is a fifth of the election timeout, but at least the retry backoff.
    """
    return max(config.retry_backoff_ms, config.election_timeout_ms // 5)


def poll_unattached_observer(context: RaftContext) -> None:
    """Send Fetch to one voter after another, `probe_ms` apart, until one names the leader."""
    is_early = context.deadline_ms is None or context.now_ms < context.deadline_ms
    if is_early and any(peer.request_id for peer in context.peers.values()):
        return
    context.deadline_ms = None
    voter = context.next_free_voter()
    if voter is not None:
        context.send(voter, _next_fetch(context))
        context.deadline_ms = context.now_ms + probe_ms(context.config)


def may_fetch(context: RaftContext) -> bool:
    """Whether this replica may send Fetch: always for an observer, but for a voter only if its whole log is durable."""
    return not context.config.is_voter or context.durable_end >= context.log.log_end_offset


def _next_fetch(context: RaftContext) -> m.FetchRequest:
    log = context.log
    return wire.fetch_request(
        context.config, context.epoch, log.log_end_offset, context.last_epoch, log.log_start_offset
    )


def on_fetch_response(context: RaftContext, node_id: int, data: m.PartitionData) -> None:
    """Handle a Fetch response of the leader, or of a voter that names the leader.

    A response of the leader leads to a truncation, a snapshot fetch, an append, or a higher high watermark. An observer
    leaves a leader that has resigned.
    """
    leader = data.current_leader or m.LeaderIdAndEpoch(-1, context.epoch)
    has_resigned = (
        context.state is State.OBSERVER_FOLLOWER
        and node_id == context.election.leader_id
        and data.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        and leader == m.LeaderIdAndEpoch(-1, context.epoch)
    )
    if has_resigned:  # no need to wait for the fetch timeout
        elections.abandon_leader(context)
        context.retry_later(node_id)
        return
    if elections.handle_common_response(context, node_id, data.error_code, leader.leader_epoch, leader.leader_id):
        return
    if not context.state.follows or node_id != context.election.leader_id:
        return
    context.restart_fetch_timeout()
    context.leader_log_start = data.log_start_offset
    if data.diverging_epoch is not None:
        truncate(context, data.diverging_epoch)
    elif data.snapshot_id is not None:
        snapshots.start_fetch(context, data.snapshot_id)
    else:
        context.leader_high_watermark = max(context.leader_high_watermark, data.high_watermark)
        if data.records:
            context.emit(types.AppendAsFollower(data.records))
        else:
            _advance_follower(context)


def _advance_follower(context: RaftContext) -> None:
    """Advance the high watermark to the leader's, limited to the local log end."""
    end_offset = context.log.log_end_offset
    context.commit(follower_high_watermark(context.leader_high_watermark, end_offset, context.high_watermark))


def truncate(context: RaftContext, diverging: m.EpochEndOffset) -> None:
    """Truncate the log to the `truncation_offset` for the leader's `diverging` epoch. Backs off if nothing is removed.

    Raises QuorumError if committed records would be removed.
    """
    log = context.log
    offset = truncation_offset(diverging, log.end_offset_for_epoch(diverging.epoch), log.log_end_offset)
    snapshots.check_truncation(context, offset)
    if offset >= log.log_end_offset:
        context.retry_later(context.election.leader_id)
    context.emit(types.TruncateLog(offset))
