"""Replication by pull: Fetch on both sides, appends, the high watermark, and where a snapshot has to help.

A leader answers a fetch at once when there is something to say (records, a higher high watermark than that replica was
told, a diverging epoch, a snapshot id, an error); otherwise the fetch waits for it or for its deadline. Replicas get
records before they are committed, consumers only what is below the high watermark. A follower that is a voter sends
the next Fetch only when all that it has is durable, because its fetch offset is its word for that.

What a fetch position means to a leader (630-08): below the log start, or at it (above 0) with an epoch other than the
oldest snapshot's, or with a last fetched epoch older than that, it gets the latest snapshot's id; where its last epoch
ends elsewhere here, a diverging epoch; else records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import elections, timing, wire
from kipmesh.core.raft.leadership import WAITING_MAX, Leadership, Waiting
from kipmesh.core.raft.transitions import Cause, State
from kipmesh.core.raft.types import (
    Answer,
    AppendAsFollower,
    AppendAsLeader,
    Committed,
    FetchSnapshot,
    Flush,
    QuorumError,
    Read,
    RefuseAppend,
    TruncateLog,
)
from kipmesh.core.replica.follower import follower_high_watermark, has_diverged, truncation_offset
from kipmesh.core.snapshot.retention import is_sent_a_snapshot

if TYPE_CHECKING:
    from kipmesh.core.raft.machine import Machine

_NOT_HERE = m.PartitionData()


# -- the leader's side


def on_fetch(machine: Machine, request_id: int, request: m.FetchRequest) -> None:
    """A replica or a consumer asks for records."""
    if request.cluster_id not in (None, machine.config.cluster_id):
        machine.emit(Answer(request_id, m.FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)))
        return
    asked = wire.only_fetch(request)
    if asked is None:
        machine.emit(Answer(request_id, m.FetchResponse(error_code=ErrorCode.INVALID_REQUEST)))
        return
    if asked.fetch_offset == 0 and asked.last_fetched_epoch < 0:
        asked = asked._replace(last_fetched_epoch=0)  # nothing fetched yet
    error = _fetch_error(machine, request, asked)
    leadership = machine.leadership
    if error is not ErrorCode.NONE or leadership is None:
        _answer_error(machine, request_id, error)
        return
    leadership.is_alive(request.replica_id, machine.now_ms)
    position = fetch_position(machine, asked)
    if position is None:
        _observe(machine, leadership, request.replica_id, asked.fetch_offset)
    wait = Waiting(
        request_id,
        request.replica_id,
        asked,
        max(1, min(request.max_bytes, asked.partition_max_bytes or request.max_bytes)),
        machine.now_ms + request.max_wait_ms,
    )
    if not _answer_fetch(machine, leadership, wait, at_once=request.max_wait_ms == 0):
        _wait(machine, leadership, wait)


def _fetch_error(machine: Machine, request: m.FetchRequest, asked: m.FetchPartition) -> ErrorCode:
    epoch = asked.current_leader_epoch
    if request.max_wait_ms < 0 or asked.fetch_offset < 0 or request.replica_id == machine.config.node_id:
        return ErrorCode.INVALID_REQUEST
    if request.replica_id >= 0 and (epoch < 0 or not 0 <= asked.last_fetched_epoch <= epoch):
        return ErrorCode.INVALID_REQUEST
    if 0 <= epoch < machine.epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if epoch > machine.epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    return ErrorCode.NONE if machine.state is State.LEADER else ErrorCode.NOT_LEADER_OR_FOLLOWER


def _answer_error(machine: Machine, request_id: int, error: ErrorCode) -> None:
    election = machine.told_election
    leader = m.LeaderIdAndEpoch(election.leader_id, election.epoch)
    data = m.PartitionData(0, error, current_leader=leader)
    machine.emit(Answer(request_id, wire.fetch_response(data)))


def fetch_position(machine: Machine, asked: m.FetchPartition) -> m.EpochEndOffset | m.SnapshotId | None:
    """What is wrong with a position: where it diverges, or the snapshot to fetch first; None for nothing."""
    log, offset, epoch = machine.log, asked.fetch_offset, asked.last_fetched_epoch
    if (offset == 0 and epoch == 0 and log.log_start_offset == 0) or epoch < 0:
        return None
    oldest = machine.oldest_snapshot
    if is_sent_a_snapshot(offset, epoch, log.log_start_offset, oldest):
        return machine.latest_snapshot
    if oldest is not None and offset == log.log_start_offset > 0:
        return None  # of the oldest snapshot's epoch: the log begins there
    end = log.end_offset_for_epoch(epoch)
    if end.end_offset < 0:  # an epoch that this log knows nothing of
        end = m.EpochEndOffset(machine.last_epoch, log.log_end_offset)
    elif oldest is not None and end == m.EpochEndOffset(
        epoch, oldest.end_offset
    ):  # of an epoch below all that the log has
        end = m.EpochEndOffset(oldest.epoch, oldest.end_offset)
    return end if has_diverged(offset, epoch, end) else None


def _observe(machine: Machine, leadership: Leadership, replica_id: int, offset: int) -> None:
    replica = leadership.replica(replica_id, machine.now_ms)
    if replica is not None:
        replica.fetched(offset, machine.log.log_end_offset, machine.now_ms)
        if replica_id in leadership.voters:
            advance_leader(machine, leadership)


def _answer_fetch(machine: Machine, leadership: Leadership, wait: Waiting, *, at_once: bool) -> bool:
    """Answer if there is something to say, or anyway; gives whether it was answered."""
    asked, log = wait.partition, machine.log
    told = _NOT_HERE._replace(
        high_watermark=machine.high_watermark,
        last_stable_offset=machine.high_watermark,
        log_start_offset=log.log_start_offset,
        current_leader=m.LeaderIdAndEpoch(machine.config.node_id, machine.epoch),
    )
    position = fetch_position(machine, asked)
    read = None
    if isinstance(position, m.EpochEndOffset):
        told = told._replace(diverging_epoch=position)
    elif isinstance(position, m.SnapshotId):
        told = told._replace(snapshot_id=position)
    else:
        limit = log.log_end_offset if wait.replica_id >= 0 else machine.high_watermark
        if not log.log_start_offset <= asked.fetch_offset <= log.log_end_offset:
            told = told._replace(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        elif asked.fetch_offset < limit:
            read = Read(asked.fetch_offset, wait.max_bytes, limit)
        elif not at_once and not _has_news(machine, leadership, wait.replica_id):
            return False
    replica = leadership.voters.get(wait.replica_id) or leadership.observers.get(wait.replica_id)
    if replica is not None:
        replica.high_watermark_told = machine.high_watermark
    machine.emit(Answer(wait.request_id, wire.fetch_response(told), read))
    return True


def _has_news(machine: Machine, leadership: Leadership, replica_id: int) -> bool:
    """Whether the replica was not told of the high watermark yet."""
    replica = leadership.voters.get(replica_id) or leadership.observers.get(replica_id)
    return replica is not None and replica.high_watermark_told < machine.high_watermark


def _wait(machine: Machine, leadership: Leadership, wait: Waiting) -> None:
    key = wait.replica_id if wait.replica_id >= 0 else -1 - wait.request_id
    before = leadership.waiting.pop(key, None)
    if before is not None:  # it asked anew: nobody reads the answer to the older one
        _answer_fetch(machine, leadership, before, at_once=True)
    if len(leadership.waiting) >= WAITING_MAX:
        _answer_fetch(machine, leadership, wait, at_once=True)
    else:
        leadership.waiting[key] = wait


def answer_waiting(machine: Machine, leadership: Leadership) -> None:
    """Answer the fetches that there is something to say to, or that waited long enough."""
    for key, wait in list(leadership.waiting.items()):
        if _answer_fetch(machine, leadership, wait, at_once=machine.now_ms >= wait.deadline_ms):
            del leadership.waiting[key]


def refuse_waiting(machine: Machine, leadership: Leadership) -> None:
    """This node leads no more: whoever waits looks for the next leader."""
    for wait in leadership.waiting.values():
        _answer_error(machine, wait.request_id, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    leadership.waiting.clear()


def advance_leader(machine: Machine, leadership: Leadership) -> None:
    """Move the high watermark to what a majority of voters has."""
    offset = leadership.committed_offset(machine.durable_end)
    if offset > machine.high_watermark:
        machine.high_watermark = offset
        machine.emit(Committed(offset))
        answer_waiting(machine, leadership)


def poll_leader(machine: Machine, leadership: Leadership) -> None:
    """Resign without a quorum, tell of the epoch, answer fetches that waited long enough."""
    now_ms = machine.now_ms
    if leadership.has_lost_quorum(now_ms):
        machine.resign()
        return
    leadership.begin_round(now_ms)
    for voter in sorted(leadership.to_tell):
        if machine.is_free(voter):
            machine.send(voter, wire.epoch_request(m.BeginQuorumEpochRequest, machine.config, machine.epoch))
    if any(now_ms >= wait.deadline_ms for wait in leadership.waiting.values()):
        answer_waiting(machine, leadership)


def on_append(machine: Machine, token: int, batch: bytes, epoch: int) -> None:
    """The active controller decided something in `epoch`."""
    if machine.state is State.LEADER and epoch == machine.epoch:
        machine.emit(AppendAsLeader(token, batch, epoch))
    else:
        error = ErrorCode.NOT_LEADER_OR_FOLLOWER
        machine.emit(RefuseAppend(token, error, machine.told_election.leader_id))


# -- the log


def flush_if_needed(machine: Machine) -> None:
    """What a voter has it makes durable; observers leave that to their log's owner."""
    if machine.config.is_voter and machine.durable_end < machine.log.log_end_offset:
        machine.emit(Flush())


def on_log_changed(machine: Machine) -> None:
    """Records were appended, or cut."""
    machine.durable_end = min(machine.durable_end, machine.log.log_end_offset)
    flush_if_needed(machine)
    if machine.leadership is not None:
        answer_waiting(machine, machine.leadership)
    else:
        advance_follower(machine)


def on_append_rejected(machine: Machine) -> None:
    """The log did not take it: a leader that cannot begin its epoch is none, a follower tries again later."""
    if machine.leadership is not None:
        if machine.log.log_end_offset == machine.leadership.epoch_start_offset:
            machine.resign()
    elif machine.state.follows:
        machine.retry_later(machine.election.leader_id, machine.config.fetch_max_wait_ms)


def on_persisted(machine: Machine, end_offset: int) -> None:
    """More of the log is durable."""
    machine.durable_end = min(end_offset, machine.log.log_end_offset)
    flush_if_needed(machine)
    if machine.leadership is not None:
        advance_leader(machine, machine.leadership)


# -- the follower's side


def poll_follower(machine: Machine) -> None:
    """Fetch from the leader; without its answers for too long, look for another one, or stand."""
    if machine.deadline_ms is not None and machine.now_ms >= machine.deadline_ms:
        if machine.state is State.FOLLOWER:
            elections.stand(machine, Cause.FETCH_TIMEOUT)
        else:
            give_up_leader(machine)
    elif machine.is_free(machine.election.leader_id) and machine.fetching_snapshot is None and may_fetch(machine):
        machine.send(machine.election.leader_id, next_fetch(machine))


def give_up_leader(machine: Machine) -> None:
    """Of an observer: look for another one."""
    machine.silent_leader = (machine.epoch, machine.election.leader_id)
    machine.become(Cause.FETCH_TIMEOUT, machine.epoch)


def poll_unattached_observer(machine: Machine) -> None:
    """Ask one voter after the other; whoever answers says who leads. One that is silent does not hold up the rest."""
    if machine.peers.any_under_way() and (machine.deadline_ms is None or machine.now_ms < machine.deadline_ms):
        return
    machine.deadline_ms = None
    voter = machine.any_free_voter()
    if voter is not None:
        machine.send(voter, next_fetch(machine))
        machine.deadline_ms = machine.now_ms + timing.probe_ms(machine.config)


def may_fetch(machine: Machine) -> bool:
    """Whether all that a Fetch would say is durable; an observer's word does not count, so it need not be."""
    return not machine.config.is_voter or machine.durable_end >= machine.log.log_end_offset


def next_fetch(machine: Machine) -> m.FetchRequest:
    """The Fetch for what follows the log."""
    log = machine.log
    return wire.fetch_request(
        machine.config, machine.epoch, log.log_end_offset, machine.last_epoch, log.log_start_offset
    )


def on_fetch_response(machine: Machine, node_id: int, response: m.FetchResponse) -> None:
    """The leader answered, or somebody who knows it."""
    data = wire.only_data(response)
    if response.error_code or data is None:
        machine.retry_later(node_id)
        return
    leader = data.current_leader or m.LeaderIdAndEpoch(-1, machine.epoch)
    error = elections.error_of(data.error_code)
    if _has_resigned(machine, node_id, error, leader):
        give_up_leader(machine)  # as good as its silence, and sooner
        machine.retry_later(node_id)
        return
    if elections.is_settled(machine, node_id, error, leader.leader_epoch, leader.leader_id):
        return
    if not machine.state.follows or node_id != machine.election.leader_id:
        return
    machine.deadline_ms = machine.now_ms + timing.fetch_timeout_ms(machine.config, machine.jitter)
    machine.leader_log_start = data.log_start_offset
    if data.diverging_epoch is not None:
        truncate(machine, data.diverging_epoch)
    elif data.snapshot_id is not None:
        fetch_snapshot(machine, data.snapshot_id)
    else:
        machine.leader_high_watermark = max(machine.leader_high_watermark, data.high_watermark)
        if data.records:
            machine.emit(AppendAsFollower(data.records))
        else:
            advance_follower(machine)


def _has_resigned(machine: Machine, node_id: int, error: ErrorCode, leader: m.LeaderIdAndEpoch) -> bool:
    """Whether an observer hears of its leader itself that it leads this epoch no more, and knows no other."""
    return (
        machine.state is State.OBSERVER_FOLLOWER
        and node_id == machine.election.leader_id
        and error is ErrorCode.NOT_LEADER_OR_FOLLOWER
        and leader == m.LeaderIdAndEpoch(-1, machine.epoch)
    )


def advance_follower(machine: Machine) -> None:
    """What the leader committed, as far as this log reaches."""
    offset = follower_high_watermark(machine.leader_high_watermark, machine.log.log_end_offset, machine.high_watermark)
    if offset > machine.high_watermark:
        machine.high_watermark = offset
        machine.emit(Committed(offset))


def truncate(machine: Machine, diverging: m.EpochEndOffset) -> None:
    """Cut what the leader does not have; QuorumError when that was committed."""
    log = machine.log
    offset = truncation_offset(diverging, log.end_offset_for_epoch(diverging.epoch), log.log_end_offset)
    check_truncation(machine, offset)
    if offset >= log.log_end_offset:
        machine.retry_later(machine.election.leader_id)
    machine.emit(TruncateLog(offset))


def check_truncation(machine: Machine, offset: int) -> None:
    """Nothing below the high watermark is ever cut."""
    if offset < machine.high_watermark:
        raise QuorumError(
            f"leader {machine.election.leader_id} of epoch {machine.epoch} wants the log cut at {offset}, "
            f"below the high watermark {machine.high_watermark}"
        )


# -- snapshots: others make, fetch and store them


def fetch_snapshot(machine: Machine, snapshot_id: m.SnapshotId) -> None:
    """The leader has records no more that this log needs (630-08)."""
    latest = machine.latest_snapshot
    if (
        snapshot_id.end_offset < 0
        or snapshot_id.epoch < 0
        or (latest is not None and _is_at_least(latest, snapshot_id))
    ):
        machine.retry_later(machine.election.leader_id)
        return
    check_truncation(machine, snapshot_id.end_offset)
    machine.fetching_snapshot = snapshot_id
    machine.emit(FetchSnapshot(snapshot_id, machine.election.leader_id, machine.epoch))


def on_snapshot(machine: Machine, latest: m.SnapshotId, earliest: m.SnapshotId) -> None:
    """A snapshot was made here, or fetched and put in the place of the log."""
    if machine.latest_snapshot is not None and not _is_at_least(latest, machine.latest_snapshot):
        return  # told late, by one who looked before the latest was there
    machine.latest_snapshot, machine.earliest_snapshot = latest, earliest
    log = machine.log
    if log.log_start_offset == log.log_end_offset == latest.end_offset:
        machine.durable_end = log.log_end_offset  # the snapshot is durable, and there is nothing else
    if machine.fetching_snapshot is not None and _is_at_least(latest, machine.fetching_snapshot):
        machine.fetching_snapshot = None
    if latest.end_offset > machine.high_watermark:
        machine.high_watermark = latest.end_offset
        machine.emit(Committed(latest.end_offset))


def on_snapshot_fetch(machine: Machine, *, failed: bool) -> None:
    """The transfer goes on, or ended without a snapshot."""
    if machine.fetching_snapshot is None:
        return
    if failed:
        machine.fetching_snapshot = None
        machine.retry_later(machine.election.leader_id)
    else:
        machine.deadline_ms = machine.now_ms + timing.fetch_timeout_ms(machine.config, machine.jitter)


def _is_at_least(one: m.SnapshotId, other: m.SnapshotId) -> bool:
    """Newer is by epoch, then end offset."""
    return (one.epoch, one.end_offset) >= (other.epoch, other.end_offset)
