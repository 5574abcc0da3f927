"""Replication of the metadata log by pull: Fetch on both sides, appends, the high watermark.

A leader answers a fetch at once when there is something to say (records, a higher high watermark than that replica was
told, a diverging epoch, a snapshot id, an error); otherwise the fetch waits for it or for its deadline. Replicas get
records before they are committed, consumers only what is below the high watermark. A follower that is a voter sends
the next Fetch only when all that it has is durable, because its fetch offset is its word for that.

What a fetch position means to a leader (630-08): below the log start, or at it (above 0) with an epoch other than the
oldest snapshot's, or with a last fetched epoch older than that, it gets the latest snapshot's id; where its last epoch
ends elsewhere here, a diverging epoch; else records.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import elections, snapshots, wire
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.leadership import WAITING_MAX, Leadership, Waiting
from kipmesh.core.raft.types import (
    AppendAsFollower,
    AppendAsLeader,
    Flush,
    RaftConfig,
    Read,
    RefuseAppend,
    Respond,
    State,
    TruncateLog,
)
from kipmesh.core.replica.follower import follower_high_watermark, has_diverged, truncation_offset
from kipmesh.core.snapshot.retention import is_sent_a_snapshot

# -- the leader's side


def on_fetch(context: RaftContext, request_id: int, request: m.FetchRequest, asked: m.FetchPartition) -> None:
    """Handle the Fetch of a replica or a consumer."""
    if asked.fetch_offset == 0 and asked.last_fetched_epoch < 0:
        asked = asked._replace(last_fetched_epoch=0)  # nothing fetched yet
    error = _fetch_error(context, request, asked)
    leadership = context.leadership
    if error is not ErrorCode.NONE or leadership is None:
        context.emit(Respond(request_id, wire.fetch_error(context.told_election, error)))
        return
    leadership.is_alive(request.replica_id, context.now_ms)
    if fetch_position(context, asked) is None:
        _observe_position(context, leadership, request.replica_id, asked.fetch_offset)
    wait = Waiting(
        request_id,
        request.replica_id,
        asked,
        max(1, min(request.max_bytes, asked.partition_max_bytes or request.max_bytes)),
        context.now_ms + request.max_wait_ms,
    )
    if not _respond_to_fetch(context, leadership, wait, at_once=request.max_wait_ms == 0):
        _wait(context, leadership, wait)


def _fetch_error(context: RaftContext, request: m.FetchRequest, asked: m.FetchPartition) -> ErrorCode:
    epoch = asked.current_leader_epoch
    if request.max_wait_ms < 0 or asked.fetch_offset < 0 or request.replica_id == context.config.node_id:
        return ErrorCode.INVALID_REQUEST
    if request.replica_id >= 0 and (epoch < 0 or not 0 <= asked.last_fetched_epoch <= epoch):
        return ErrorCode.INVALID_REQUEST
    if 0 <= epoch < context.epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if epoch > context.epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    return ErrorCode.NONE if context.state is State.LEADER else ErrorCode.NOT_LEADER_OR_FOLLOWER


def fetch_position(context: RaftContext, asked: m.FetchPartition) -> m.EpochEndOffset | m.SnapshotId | None:
    """Return where a fetch position diverges, or the snapshot to fetch first; None if records can follow it."""
    log, offset, epoch = context.log, asked.fetch_offset, asked.last_fetched_epoch
    if (offset == 0 and epoch == 0 and log.log_start_offset == 0) or epoch < 0:
        return None
    oldest = snapshots.oldest_snapshot(context)
    if is_sent_a_snapshot(offset, epoch, log.log_start_offset, oldest):
        return context.latest_snapshot
    if oldest is not None and offset == log.log_start_offset > 0:
        return None  # of the oldest snapshot's epoch: the log begins there
    end = log.end_offset_for_epoch(epoch)
    if end.end_offset < 0:  # an epoch that this log knows nothing of
        end = m.EpochEndOffset(context.last_epoch, log.log_end_offset)
    elif oldest is not None and end == m.EpochEndOffset(epoch, oldest.end_offset):
        # of an epoch below all that the log has
        end = m.EpochEndOffset(oldest.epoch, oldest.end_offset)
    return end if has_diverged(offset, epoch, end) else None


def _observe_position(context: RaftContext, leadership: Leadership, replica_id: int, offset: int) -> None:
    replica = leadership.replica(replica_id, context.now_ms)
    if replica is not None:
        replica.fetched(offset, context.log.log_end_offset, context.now_ms)
        if replica_id in leadership.voters:
            advance_leader(context, leadership)


def _respond_to_fetch(context: RaftContext, leadership: Leadership, wait: Waiting, *, at_once: bool) -> bool:
    """Respond if there is news for the replica, or `at_once`; return whether a response was sent."""
    asked, log, high_watermark = wait.partition, context.log, context.high_watermark
    data = m.PartitionData(
        high_watermark=high_watermark,
        last_stable_offset=high_watermark,
        log_start_offset=log.log_start_offset,
        current_leader=m.LeaderIdAndEpoch(context.config.node_id, context.epoch),
    )
    replica = leadership.voters.get(wait.replica_id) or leadership.observers.get(wait.replica_id)
    position = fetch_position(context, asked)
    read = None
    if isinstance(position, m.EpochEndOffset):
        data = data._replace(diverging_epoch=position)
    elif isinstance(position, m.SnapshotId):
        data = data._replace(snapshot_id=position)
    else:
        limit = log.log_end_offset if wait.replica_id >= 0 else high_watermark
        if not log.log_start_offset <= asked.fetch_offset <= log.log_end_offset:
            data = data._replace(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        elif asked.fetch_offset < limit:
            read = Read(asked.fetch_offset, wait.max_bytes, limit)
        elif not at_once and (replica is None or replica.high_watermark_told >= high_watermark):
            return False
    if replica is not None:
        replica.high_watermark_told = high_watermark
    context.emit(Respond(wait.request_id, wire.fetch_response(data), read))
    return True


def _wait(context: RaftContext, leadership: Leadership, wait: Waiting) -> None:
    key = wait.replica_id if wait.replica_id >= 0 else -1 - wait.request_id
    before = leadership.waiting.pop(key, None)
    if before is not None:  # the replica sent a new Fetch: the response to the older one is not read
        _respond_to_fetch(context, leadership, before, at_once=True)
    if len(leadership.waiting) >= WAITING_MAX:
        _respond_to_fetch(context, leadership, wait, at_once=True)
    else:
        leadership.waiting[key] = wait


def _respond_to_waiting(context: RaftContext, leadership: Leadership) -> None:
    """Respond to the fetches that there is news for, or whose time is over."""
    for key, wait in list(leadership.waiting.items()):
        if _respond_to_fetch(context, leadership, wait, at_once=context.now_ms >= wait.deadline_ms):
            del leadership.waiting[key]


def advance_leader(context: RaftContext, leadership: Leadership) -> None:
    """Move the high watermark to what a majority of voters has."""
    if context.commit(leadership.committed_offset(context.durable_end)):
        _respond_to_waiting(context, leadership)


def poll_leader(context: RaftContext, leadership: Leadership) -> None:
    """Resign without a quorum, announce the epoch, respond to fetches that waited long enough."""
    now_ms = context.now_ms
    if leadership.has_lost_quorum(now_ms):
        elections.resign(context)
        return
    leadership.begin_round(now_ms)
    for voter in sorted(leadership.to_tell):
        if context.is_free(voter):
            context.send(voter, wire.epoch_request(m.BeginQuorumEpochRequest, context.config, context.epoch))
    if any(now_ms >= wait.deadline_ms for wait in leadership.waiting.values()):
        _respond_to_waiting(context, leadership)


def on_append(context: RaftContext, token: int, batch: bytes, epoch: int) -> None:
    """Append what the active controller decided in `epoch`, if this node still leads it."""
    if context.state is State.LEADER and epoch == context.epoch:
        context.emit(AppendAsLeader(token, batch, epoch))
    else:
        context.emit(RefuseAppend(token, ErrorCode.NOT_LEADER_OR_FOLLOWER, context.told_election.leader_id))


# -- the log


def flush_if_needed(context: RaftContext) -> None:
    """Make a voter's log durable; observers leave that to their log's owner."""
    if context.config.is_voter and context.durable_end < context.log.log_end_offset:
        context.emit(Flush())


def on_log_changed(context: RaftContext) -> None:
    """Continue after records were appended, or cut."""
    context.durable_end = min(context.durable_end, context.log.log_end_offset)
    flush_if_needed(context)
    if context.leadership is not None:
        _respond_to_waiting(context, context.leadership)
    else:
        _advance_follower(context)


def on_append_rejected(context: RaftContext) -> None:
    """Resign as a leader that cannot begin its epoch; as a follower, retry later."""
    if context.leadership is not None:
        if context.log.log_end_offset == context.leadership.epoch_start_offset:
            elections.resign(context)
    elif context.state.follows:
        context.retry_later(context.election.leader_id, context.config.fetch_max_wait_ms)


def on_persisted(context: RaftContext, end_offset: int) -> None:
    """Count what is durable: more of the log is."""
    context.durable_end = min(end_offset, context.log.log_end_offset)
    flush_if_needed(context)
    if context.leadership is not None:
        advance_leader(context, context.leadership)


# -- the follower's side


def poll_follower(context: RaftContext) -> None:
    """Fetch from the leader; without its responses for too long, search for another one or become a candidate."""
    leader_id = context.election.leader_id
    if context.deadline_ms is not None and context.now_ms >= context.deadline_ms:
        if context.state is State.FOLLOWER:
            elections.become_candidate(context, elections.Cause.FETCH_TIMEOUT)
        else:
            elections.give_up_leader(context)
    elif context.is_free(leader_id) and context.fetching_snapshot is None and may_fetch(context):
        context.send(leader_id, _next_fetch(context))


def probe_ms(config: RaftConfig) -> int:
    """Time that an observer without a leader gives one voter to respond before it sends a Fetch to the next, too."""
    return max(config.retry_backoff_ms, config.election_timeout_ms // 5)


def poll_unattached_observer(context: RaftContext) -> None:
    """Send a Fetch to one voter after the other until one names the leader; a silent one does not delay the rest."""
    is_early = context.deadline_ms is None or context.now_ms < context.deadline_ms
    if is_early and any(peer.request_id for peer in context.peers.values()):
        return
    context.deadline_ms = None
    voter = context.any_free_voter()
    if voter is not None:
        context.send(voter, _next_fetch(context))
        context.deadline_ms = context.now_ms + probe_ms(context.config)


def may_fetch(context: RaftContext) -> bool:
    """Whether all that a Fetch would claim is durable. An observer's claim does not count, so it need not be."""
    return not context.config.is_voter or context.durable_end >= context.log.log_end_offset


def _next_fetch(context: RaftContext) -> m.FetchRequest:
    log = context.log
    return wire.fetch_request(
        context.config, context.epoch, log.log_end_offset, context.last_epoch, log.log_start_offset
    )


def on_fetch_response(context: RaftContext, node_id: int, data: m.PartitionData) -> None:
    """Handle the response of the leader, or of a voter that names it."""
    leader = data.current_leader or m.LeaderIdAndEpoch(-1, context.epoch)
    has_resigned = (
        context.state is State.OBSERVER_FOLLOWER
        and node_id == context.election.leader_id
        and data.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        and leader == m.LeaderIdAndEpoch(-1, context.epoch)
    )
    if has_resigned:  # an observer need not wait for the fetch timeout
        elections.give_up_leader(context)
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
        snapshots.begin_fetch(context, data.snapshot_id)
    else:
        context.leader_high_watermark = max(context.leader_high_watermark, data.high_watermark)
        if data.records:
            context.emit(AppendAsFollower(data.records))
        else:
            _advance_follower(context)


def _advance_follower(context: RaftContext) -> None:
    """Commit what the leader committed, as far as this log reaches."""
    end_offset = context.log.log_end_offset
    context.commit(follower_high_watermark(context.leader_high_watermark, end_offset, context.high_watermark))


def truncate(context: RaftContext, diverging: m.EpochEndOffset) -> None:
    """Cut what the leader does not have; QuorumError when that was committed."""
    log = context.log
    offset = truncation_offset(diverging, log.end_offset_for_epoch(diverging.epoch), log.log_end_offset)
    snapshots.check_truncation(context, offset)
    if offset >= log.log_end_offset:
        context.retry_later(context.election.leader_id)
    context.emit(TruncateLog(offset))
