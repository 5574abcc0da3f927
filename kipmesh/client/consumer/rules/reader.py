"""State machine of one consumed partition: where to fetch, and how to handle responses (392-08, 392-10, 392-14).

Sans-IO. The driver calls `next` for the wanted action, `sent` when it has sent the request, and passes the response
with the request id that `sent` returned. Events return effects, to be applied in order. Responses with another id are
ignored. `deadline_ms` returns when time alone changes the result of `next` or `tick`. See docs/closest_replica.md.

Invariants:
- position <= fetch offset; only `MoveTo` and the application decrease the fetch offset;
- in a new leader epoch nothing is fetched until the leader has confirmed the position, if its epoch is known;
- `auto.offset.reset` applies only after the leader has confirmed that the offset is out of range;
- a truncation is reported if and only if it reaches below the position;
- the high watermark decreases only with a reported truncation (392-10).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from kipmesh.client.consumer.rules import values as t
from kipmesh.client.consumer.rules.preferred_replica import NO_NODE, PreferredReplica
from kipmesh.client.consumer.rules.states import Cause, Leave, State, next_state, reaction_to
from kipmesh.core.errors import ErrorCode
from kipmesh.core.replica.serving import CONSUMER_ID, FOLLOWER_READER_ID
from kipmesh.messages import EpochEndOffset, PartitionData

_R = TypeVar("_R", t.FetchFrom, t.ListOffsetsAtLeader, t.EndOfEpochAtLeader)

STALLS_MAX = 5
"""Consecutive lagging responses of a follower after which it counts as failed."""


ENTRIES_MAX: Final = 64
"""Maximum remembered epochs. A truncation below the oldest one is reported as reaching its start."""


class EpochEnd(NamedTuple):
    """A consumed epoch and the offset after its last record."""

    epoch: int
    end_offset: int


_NO_EPOCH: Final = EpochEnd(-1, -1)


class Divergence(NamedTuple):
    """The consumed records and the leader's log are equal below `end_offset` (None: unknown) and differ from there."""

    end_offset: int | None
    epoch: int
    """Epoch of the leader's record before `end_offset`."""


@dataclass(slots=True, eq=False)
class EpochHistory:
    """Leader epochs of the records fetched since the last seek, with their first offsets, in ascending order (392-08).

    Kafka's consumer only knows the epoch of its last record. It detects that the log was truncated, but not always
    where. With the start of every epoch, the reader can search back epoch by epoch like a follower (REP-01).
    """

    _entries: list[tuple[int, int]] = field(default_factory=list)
    _base: int = -1
    """Offset of the last seek if the epoch of the record before it is known."""

    @property
    def last_epoch(self) -> int:
        """Epoch of the record before the fetch offset; -1 if unknown."""
        return self._entries[-1][0] if self._entries else -1

    @property
    def first_offset(self) -> int:
        """First offset of the oldest epoch; -1 if the history is empty."""
        return self._entries[0][1] if self._entries else -1

    def begin(self, offset: int, epoch: int) -> None:
        """Clear the history and start at `offset`. `epoch` is that of the record before `offset`, -1 if unknown."""
        self._entries = [(epoch, offset)] if epoch >= 0 else []
        self._base = offset if epoch >= 0 else -1

    def read(self, first_offset: int, epoch: int) -> None:
        """Record that the fetched records from `first_offset` on have this epoch, which must not be below the last."""
        if epoch > self.last_epoch:
            self._entries.append((epoch, first_offset))
            del self._entries[:-ENTRIES_MAX]

    def floor(self, epoch: int, fetch_offset: int) -> EpochEnd | None:
        """Return the largest consumed epoch that is not above `epoch`, with its end; None if there is none.

        The last epoch ends at `fetch_offset`.
        """
        entries = self._entries
        above = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if not above:
            return None
        end = entries[above][1] if above < len(entries) else fetch_offset
        return EpochEnd(entries[above - 1][0], end)

    def cut(self, offset: int) -> None:
        """Remove the records from `offset` on. The epoch of the record before `offset` becomes the last one.

        The history becomes empty if that epoch is not in it.
        """
        entries = self._entries
        while len(entries) > 1 and entries[-1][1] >= offset:
            entries.pop()
        if entries and entries[0][1] >= offset and not entries[0][1] == offset == self._base:
            entries.clear()


def compare_epoch_end(
    history: EpochHistory, own: EpochEnd, leader: EpochEndOffset, fetch_offset: int
) -> EpochEnd | Divergence | None:
    """Compare a consumed epoch's end with the leader's OffsetsForLeaderEpoch response for that epoch.

    `leader` is the leader's largest epoch that is not above `own.epoch`, or (-1, -1) if there is none. Returns None if
    the leader has all records up to the fetch offset, a Divergence where the logs differ, or an EpochEnd: the earlier
    consumed epoch to compare next.
    """
    if leader.epoch < 0 or leader.end_offset < 0:
        return Divergence(None, -1)
    if leader.epoch >= own.epoch:
        end_offset = min(leader.end_offset, own.end_offset)
        return None if end_offset == fetch_offset else Divergence(end_offset, leader.epoch)
    earlier = history.floor(leader.epoch, fetch_offset)
    if earlier is None:
        return Divergence(min(leader.end_offset, history.first_offset), leader.epoch)
    if earlier.epoch < leader.epoch:
        return earlier  # no records of the leader's epoch were consumed
    return Divergence(min(leader.end_offset, earlier.end_offset), leader.epoch)


class _Bounds(NamedTuple):
    """Bounds of a replica's log from an OFFSET_OUT_OF_RANGE response (392-07); -1 if unknown."""

    log_start_offset: int = -1
    high_watermark: int = -1


class _PendingRequest(NamedTuple):
    request_id: int
    request: t.Request
    sent_ms: int


@dataclass(slots=True, eq=False, repr=False)
class PartitionReader:
    """State machine of one assigned partition. Does no IO.

    `backoff_ms` returns the wait in ms after a number of consecutive failures, including jitter.
    """

    config: t.ReaderConfig
    backoff_ms: Callable[[int], int]
    state: State = State.RESETTING
    position: int | None = None
    """Offset of the next record for the application; None until it is known."""
    fetch_offset: int | None = None
    """Offset after the buffered records."""
    high_watermark: int = -1
    """Highest value received from any replica (392-10); -1 if unknown."""
    log_start_offset: int = -1
    """Value of the last response; -1 if unknown."""
    node_id: int = NO_NODE
    """Node of the last fetch."""
    _preferred: PreferredReplica = field(init=False)
    _history: EpochHistory = field(default_factory=EpochHistory)
    _reset_to: int | None = field(init=False)
    _epoch_end: EpochEnd = _NO_EPOCH
    """VALIDATING: the consumed epoch that is compared with the leader's log."""
    _bounds: _Bounds | None = None
    _problem: t.RaiseError | t.TruncationFound | None = None
    _pending: _PendingRequest | None = None
    _last_request_id: int = 0
    _attempts: int = 0
    _stalls: int = 0
    _retry_at_ms: int = 0

    def __post_init__(self) -> None:
        self._preferred = PreferredReplica(self.config)
        self._reset_to = self.config.reset_to

    # --- actions ------------------------------------------------------------------------------------------------------

    @property
    def leader_epoch(self) -> int:
        """Current leader epoch from metadata, as sent in requests; -1 if unknown."""
        return self._preferred.view.leader_epoch

    def is_pending(self, request_id: int) -> bool:
        """Whether the reader is still waiting for the response to that request."""
        return self._pending is not None and self._pending.request_id == request_id

    def next(self, now_ms: int) -> t.Action:
        """Return the action that the partition needs now: a request to send, or what to wait for. Changes no state."""
        state = self.state
        if state is State.HALTED or state is State.DRAINING:
            return t.AWAIT_APPLICATION
        if self._pending is not None:
            return t.AWAIT_RESPONSE
        if now_ms < self._retry_at_ms:
            return t.BackOff(self._retry_at_ms)
        if state is State.FETCHING:
            return self._fetch(now_ms)
        leader_id, epoch = self._preferred.view[:2]
        if leader_id == NO_NODE:
            return t.AWAIT_METADATA
        if state is State.VALIDATING:
            return t.EndOfEpochAtLeader(leader_id, epoch, self._epoch_end.epoch)
        timestamp = self._confirmation_timestamp if state is State.CONFIRMING else self._reset_to
        return t.AWAIT_APPLICATION if timestamp is None else t.ListOffsetsAtLeader(leader_id, epoch, timestamp)

    def _fetch(self, now_ms: int) -> t.Action:
        preferred = self._preferred
        node_id = preferred.target(now_ms)
        if node_id == NO_NODE:
            return t.AWAIT_METADATA
        is_leader = node_id == preferred.view.leader_id
        is_own_selection = not is_leader and self.config.mode is not t.SelectionMode.FETCH
        return t.FetchFrom(
            node_id,
            is_leader,
            FOLLOWER_READER_ID if is_own_selection else CONSUMER_ID,
            not is_leader or preferred.offers_rack(now_ms),
            self.fetch_offset or 0,
            self._history.last_epoch,
            preferred.view.leader_epoch,
        )

    @property
    def _confirmation_timestamp(self) -> int:
        """Return the end of the leader's log, latest or earliest, to compare the fetch offset with when CONFIRMING."""
        bounds = self._bounds
        is_large = bounds is not None and 0 <= bounds.log_start_offset <= (self.fetch_offset or 0)
        return t.TIMESTAMP_LATEST if is_large else t.TIMESTAMP_EARLIEST

    def sent(self, request: t.Request, now_ms: int) -> int:
        """Record that a request returned by `next` was sent. Returns the request id for its response."""
        self._last_request_id += 1
        self._pending = _PendingRequest(self._last_request_id, request, now_ms)
        if isinstance(request, t.FetchFrom):
            self.node_id = request.node_id
            if request.is_leader:
                self._preferred.end_lease()
        return self._last_request_id

    def deadline_ms(self, now_ms: int) -> int | None:
        """Return the time in ms at which the caller must call `next` or `tick` again; None if there is no such time.

        That is the timeout of a pending fetch from a follower or, without a pending request, the end of the backoff.
        """
        pending = self._pending
        if pending is not None:
            return pending.sent_ms + self._follower_timeout_ms if _is_follower_fetch(pending.request) else None
        return self._retry_at_ms if self._retry_at_ms > now_ms else None

    @property
    def _follower_timeout_ms(self) -> int:
        return self.config.fetch_max_wait_ms + self.config.follower_timeout_ms

    def tick(self, now_ms: int) -> t.Effects:
        """Return to the leader if a fetch from a follower has been pending for longer than its timeout (392-14).

        The timeout is `fetch_max_wait_ms` plus `follower_timeout_ms`. Otherwise there are no effects.
        """
        pending = self._pending
        if pending is None or not _is_follower_fetch(pending.request):
            return t.NOTHING
        if now_ms < pending.sent_ms + self._follower_timeout_ms:
            return t.NOTHING
        return (*self._abandon(), *self._leave(pending.request.node_id, t.LeaveCause.SILENT, now_ms), *t.REFRESH)

    # --- events: metadata and the application -------------------------------------------------------------------------

    def metadata(self, view: t.PartitionView, now_ms: int) -> t.Effects:
        """Apply metadata of the partition. Metadata with an older leader epoch is ignored.

        With a newer leader epoch the pending request is abandoned, and the position is validated if its epoch is known.
        """
        before = self._preferred.view
        if view.leader_epoch < before.leader_epoch:
            return t.NOTHING
        effects: list[t.Effect] = []
        fenced = self._preferred.update(view)
        if fenced != NO_NODE:
            effects += self._leave(fenced, t.LeaveCause.FENCED, now_ms)
        pending = self._pending
        if view.leader_epoch > before.leader_epoch:
            effects += self._abandon()
            self._attempts = self._retry_at_ms = 0
            if self.fetch_offset is not None and self.state is not State.HALTED and self._history.last_epoch >= 0:
                self._transition(Cause.LEADER_CHANGED)
                self._epoch_end = EpochEnd(self._history.last_epoch, self.fetch_offset)
        elif pending is not None and _is_follower_fetch(pending.request):
            node_id = pending.request.node_id
            if node_id not in view.replicas or node_id in view.offline_replicas:
                effects += self._abandon()
        elif before.leader_id != view.leader_id:
            self._attempts = self._retry_at_ms = 0
        return tuple(effects)

    def seek(self, offset: int, epoch: int = -1) -> t.Effects:
        """Discard the buffered records and continue at `offset`, as the application requested.

        `epoch` is that of the record before `offset`, -1 if unknown. A known epoch is first validated with the leader.
        """
        abandoned = self._abandon()
        self._attempts = self._retry_at_ms = 0
        self._bounds = self._problem = None
        self._set_position(offset, epoch)
        self._transition(Cause.SEEK_WITH_EPOCH if epoch >= 0 else Cause.SEEK)
        self._epoch_end = EpochEnd(epoch, offset)
        return (*abandoned, t.MoveTo(offset))

    def reset(self, timestamp: int) -> t.Effects:
        """Discard the position and the buffered records, as the application requested.

        The reader requests the offset of `timestamp` (ms or TIMESTAMP_...) from the leader and continues there.
        """
        abandoned = self._abandon()
        self._attempts = self._retry_at_ms = 0
        self._problem = None
        self._begin_reset(Cause.RESET, timestamp)
        return (*abandoned, t.MoveTo(None))

    def recreated(self) -> t.Effects:
        """Discard all state because the topic was deleted and recreated, and `reset` to the earliest offset.

        The driver may then call `seek` or `reset` for another offset.
        """
        self._preferred.forget()
        self.high_watermark = self.log_start_offset = -1
        return self.reset(t.TIMESTAMP_EARLIEST)

    def delivered(self, position: int) -> t.Effects:
        """Record that the application has all records below `position`, which is at most the fetch offset.

        In state DRAINING, delivery of the last buffered record starts the reset or reports OFFSET_OUT_OF_RANGE.
        """
        self.position = position
        return self._reset_if_drained() if self.state is State.DRAINING else t.NOTHING

    def unresolved_problem(self) -> t.RaiseError | t.TruncationFound | None:
        """Return the problem that every poll raises until the application calls seek or reset; None if there is none.

        There is one in state HALTED, which this method enters if there is no position and `auto.offset.reset` is none.
        """
        if self.state is State.RESETTING and self._reset_to is None:
            self._problem = t.RaiseError(ErrorCode.OFFSET_OUT_OF_RANGE)
            self._transition(Cause.NO_POLICY)
        return self._problem

    # --- events: responses --------------------------------------------------------------------------------------------

    def fetched(self, request_id: int, data: PartitionData, spans: Sequence[t.EpochSpan], now_ms: int) -> t.Effects:
        """Handle the partition's data in a fetch response. Its records are buffered only with a TakeRecords effect.

        `spans` describe the whole batches in `data`, one span per run of batches with the same leader epoch.
        """
        request = self._take_request(request_id, t.FetchFrom)
        if request is None:
            return t.NOTHING
        self.high_watermark = max(self.high_watermark, data.high_watermark)
        if data.error_code:
            return self._handle_fetch_error(request, data, now_ms)
        self.log_start_offset = data.log_start_offset
        self._attempts = self._stalls = 0
        if data.diverging_epoch is not None:
            return self._handle_divergence(request, data.diverging_epoch, now_ms)
        if data.preferred_read_replica >= 0 and not spans:
            return self._follow_redirect(request, data.preferred_read_replica, now_ms)
        return self._accept_records(request, spans, now_ms) if spans else t.TAKE

    def failed(self, request_id: int, code: ErrorCode, now_ms: int) -> t.Effects:
        """Handle the error of a fetch or leader request; `code` is NETWORK_EXCEPTION if there was no response."""
        pending = self._pending
        if pending is None or pending.request_id != request_id:
            return t.NOTHING
        self._pending = None
        if isinstance(pending.request, t.FetchFrom):
            return self._handle_fetch_error(pending.request, PartitionData(error_code=code), now_ms)
        return self._handle_error(pending.request.node_id, code, True, now_ms)

    def listed(self, request_id: int, offset: int) -> t.Effects:
        """Handle the offset from the leader's ListOffsets response; -1 (none) counts as offset 0."""
        request = self._take_request(request_id, t.ListOffsetsAtLeader)
        if request is None:
            return t.NOTHING
        self._attempts, offset = 0, max(offset, 0)
        is_end = request.timestamp == t.TIMESTAMP_LATEST
        if is_end:
            self.high_watermark = max(self.high_watermark, offset)
        if self.state is State.RESETTING:
            self._set_position(offset, -1)
            self._transition(Cause.OFFSET_FOUND)
            return (t.MoveTo(offset),)
        if self.state is not State.CONFIRMING or self.fetch_offset is None:
            return t.NOTHING
        bounds = self._bounds or _Bounds()
        if self.fetch_offset <= offset if is_end else self.fetch_offset >= offset:
            self._bounds = None
            self._transition(Cause.ON_LEADER)
            return t.NOTHING
        return self._confirm_out_of_range(
            bounds._replace(**{"high_watermark" if is_end else "log_start_offset": offset})
        )

    def epoch_ended(self, request_id: int, end: EpochEndOffset) -> t.Effects:
        """Handle the end of an epoch from the leader's OffsetsForLeaderEpoch response. May report a truncation."""
        if self._take_request(request_id, t.EndOfEpochAtLeader) is None or self.state is not State.VALIDATING:
            return t.NOTHING
        self._attempts = 0
        return self._compare_with_leader(end)

    def corrupt(self, node_id: int, now_ms: int) -> t.Effects:
        """Refetch from the position because a batch that `node_id` sent cannot be decoded.

        If `node_id` is a follower, the partition returns to the leader. Otherwise the reader backs off, and a
        RaiseError effect reports CORRUPT_MESSAGE. Has no effects without a position or in state HALTED.
        """
        if self.position is None or self.state in (State.RESETTING, State.HALTED):
            return t.NOTHING
        effects = (*self._abandon(), t.MoveTo(self.position))
        self.fetch_offset, self._bounds = self.position, None
        self._history.cut(self.position)
        epoch = self._history.last_epoch
        self._epoch_end = EpochEnd(epoch, self.position)
        must_validate = self.state is State.VALIDATING and epoch >= 0
        self._transition(Cause.SEEK_WITH_EPOCH if must_validate else Cause.SEEK)
        if node_id != self._preferred.view.leader_id:
            return (*effects, *self._leave(node_id, t.LeaveCause.FAILED, now_ms))
        self._back_off(now_ms)
        return (*effects, t.RaiseError(ErrorCode.CORRUPT_MESSAGE))

    def _take_request(self, request_id: int, kind: type[_R]) -> _R | None:
        """Return and clear the pending request if it has that id and type; otherwise None."""
        pending = self._pending
        if pending is None or pending.request_id != request_id or not isinstance(pending.request, kind):
            return None
        self._pending = None
        return pending.request

    # --- internals: positions -----------------------------------------------------------------------------------------

    def _transition(self, cause: Cause) -> None:
        self.state = next_state(self.state, cause)

    def _set_position(self, offset: int, epoch: int) -> None:
        self.position = self.fetch_offset = offset
        self._history.begin(offset, epoch)

    def _begin_reset(self, cause: Cause, timestamp: int) -> None:
        self.position = self.fetch_offset = None
        self._history.begin(0, -1)
        self._bounds = None
        self._reset_to = timestamp
        self._transition(cause)

    def _abandon(self) -> t.Effects:
        pending, self._pending = self._pending, None
        return (t.Abandon(pending.request_id),) if pending is not None else t.NOTHING

    # --- internals: responses -----------------------------------------------------------------------------------------

    def _accept_records(self, request: t.FetchFrom, spans: Sequence[t.EpochSpan], now_ms: int) -> t.Effects:
        history, offset = self._history, self.fetch_offset or 0
        if spans[0].epoch < history.last_epoch:
            # Epochs never decrease within a log, so this log differs from the one consumed before.
            effects = self._verify_position(request, t.LeaveCause.DIVERGED, now_ms)
            self._back_off(now_ms)
            return effects
        for span in spans:
            history.read(max(span.first_offset, offset), span.epoch)
            offset = max(offset, span.next_offset)
        self.fetch_offset = offset
        return t.TAKE

    def _follow_redirect(self, request: t.FetchFrom, node_id: int, now_ms: int) -> t.Effects:
        if not request.is_leader:
            # Only leaders select replicas: this follower was or believes to be the leader.
            return (*self._leave(request.node_id, t.LeaveCause.FAILED, now_ms), *t.REFRESH)
        if node_id == request.node_id:
            self._back_off(now_ms)
            return t.REFRESH
        if self._preferred.redirect(node_id, now_ms):
            return (t.Redirected(node_id),)
        if not request.offers_rack:  # redirected even without a rack: wait until the replica is not excluded
            self._retry_at_ms = self._preferred.rackless_until_ms
        return t.REFRESH

    def _handle_fetch_error(self, request: t.FetchFrom, data: PartitionData, now_ms: int) -> t.Effects:
        code = ErrorCode.of(data.error_code)
        if code is not ErrorCode.OFFSET_OUT_OF_RANGE:
            return self._handle_error(request.node_id, code, request.is_leader, now_ms)
        self._attempts = self._stalls = 0
        bounds = self._bounds = _Bounds(data.log_start_offset, data.high_watermark)
        is_small = (self.fetch_offset or 0) < bounds.log_start_offset
        if request.is_leader and (is_small or self._history.last_epoch < 0):
            return self._confirm_out_of_range(bounds)
        return self._verify_position(request, t.LeaveCause.OUT_OF_RANGE, now_ms)

    def _verify_position(self, request: t.FetchFrom, cause: t.LeaveCause, now_ms: int) -> t.Effects:
        """Start to verify the position with the leader, because a replica's log does not match it (392-08).

        If the replica is a follower, the partition returns to the leader because of `cause`.
        """
        self._epoch_end = EpochEnd(self._history.last_epoch, self.fetch_offset or 0)
        self._transition(Cause.INCONSISTENT if self._epoch_end.epoch >= 0 else Cause.NOT_ON_FOLLOWER)
        return t.NOTHING if request.is_leader else self._leave(request.node_id, cause, now_ms)

    def _handle_divergence(self, request: t.FetchFrom, leader_end: EpochEndOffset, now_ms: int) -> t.Effects:
        effects = self._verify_position(request, t.LeaveCause.DIVERGED, now_ms)
        if request.is_leader and self.state is State.VALIDATING:
            return (*effects, *self._compare_with_leader(leader_end))
        return effects

    def _compare_with_leader(self, leader_end: EpochEndOffset) -> t.Effects:
        result = compare_epoch_end(self._history, self._epoch_end, leader_end, self.fetch_offset or 0)
        if isinstance(result, Divergence):
            return self._handle_truncation(result.end_offset, result.epoch)
        if result is not None:
            self._epoch_end = result
            return t.NOTHING
        self._transition(Cause.VALID if self._bounds is None else Cause.NOT_ON_FOLLOWER)
        return t.NOTHING

    def _handle_truncation(self, end_offset: int | None, epoch: int) -> t.Effects:
        """Handle a truncation of the log to `end_offset` (None: unknown). Reports it if consumed records were lost."""
        self._bounds = None
        position, policy = self.position or 0, self.config.reset_to
        if end_offset is not None and end_offset >= position:
            # Only buffered records were truncated, which the application has not received.
            self._truncate_history(position, epoch)
            self._transition(Cause.VALID)
            return (t.MoveTo(position),)
        report = t.TruncationFound(position, end_offset, epoch, policy is None)
        if policy is None:
            self._problem = report
            self._transition(Cause.TRUNCATED_FATALLY)
            self.fetch_offset = position
            return (report, t.MoveTo(position))
        if end_offset is None:
            self.high_watermark = -1
            self._begin_reset(Cause.NO_COMMON_EPOCH, policy)
            return (report, t.MoveTo(None))
        self.high_watermark = self.position = end_offset
        self._truncate_history(end_offset, epoch)
        self._transition(Cause.TRUNCATED)
        return (report, t.MoveTo(end_offset))

    def _truncate_history(self, offset: int, epoch: int) -> None:
        self.fetch_offset = offset
        self._history.cut(offset)
        if self._history.last_epoch > epoch:  # the epoch that was given to `seek`, unknown to the leader
            self._history.begin(offset, -1)

    def _confirm_out_of_range(self, bounds: _Bounds) -> t.Effects:
        self._bounds = bounds
        self._transition(Cause.NOT_ON_LEADER)
        return self._reset_if_drained()

    def _reset_if_drained(self) -> t.Effects:
        if self.position != self.fetch_offset or self.position is None:
            return t.NOTHING
        bounds, policy = self._bounds or _Bounds(), self.config.reset_to
        if policy is None:
            self._problem = t.RaiseError(ErrorCode.OFFSET_OUT_OF_RANGE, self.position, *bounds)
            self._transition(Cause.NO_POLICY)
            return (self._problem,)
        reset = t.OffsetReset(self.position, policy, *bounds)
        self._begin_reset(Cause.DRAINED, policy)
        return (reset, t.MoveTo(None))

    # --- internals: errors --------------------------------------------------------------------------------------------

    def _back_off(self, now_ms: int) -> None:
        self._attempts += 1
        self._retry_at_ms = now_ms + self.backoff_ms(self._attempts)

    def _leave(self, node_id: int, cause: t.LeaveCause, now_ms: int) -> t.Effects:
        self._stalls = self._attempts = self._retry_at_ms = 0
        self._preferred.exclude(node_id, now_ms)
        return (t.LeftFollower(node_id, cause),)

    def _handle_error(self, node_id: int, code: ErrorCode, from_leader: bool, now_ms: int) -> t.Effects:
        reaction = reaction_to(code, from_leader=from_leader)
        effects: list[t.Effect] = []
        if reaction.leave is Leave.IMMEDIATELY:
            effects += self._leave(node_id, t.LeaveCause.FAILED, now_ms)
        elif reaction.leave is Leave.WHEN_STUCK:
            self._stalls += 1
            if self._stalls >= STALLS_MAX or not self._preferred.is_in_sync(node_id):
                effects += self._leave(node_id, t.LeaveCause.STUCK, now_ms)
            else:
                self._back_off(now_ms)
        elif reaction.back_off:
            self._back_off(now_ms)
        if reaction.refresh:
            effects.append(t.RefreshMetadata())
        if reaction.raises:
            effects.append(t.RaiseError(code))
        return tuple(effects)


def _is_follower_fetch(request: t.Request) -> bool:
    return isinstance(request, t.FetchFrom) and not request.is_leader
