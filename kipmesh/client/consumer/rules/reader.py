"""One partition of a consumer: from whom to fetch, and what to do about every answer (392-08, 392-10, 392-14).

Sans-IO. The driver asks `next` what the partition wants, at any time; does it or not (it may be paused, its buffers
full); says `sent` when it did, and later gives the answer with the number that `sent` gave. Events return effects, to
be done in order. An answer whose number is not the one that is waited for is ignored, so nothing needs to be cancelled
for correctness. `deadline_ms` says when `next` or `tick` may have something new without an event.

The driver's side of it is in docs/closest_replica.md.

Invariants:
- position <= fetch offset; only `fetched`, `MoveTo` and the user move the latter, and only the last two back;
- a position whose epoch is known is never fetched from in a leader epoch before that epoch's leader has confirmed it;
- a reset needs the leader's word; a truncation is reported if and only if it reaches below the position;
- the high watermark goes back by a truncation that is reported, and never otherwise (392-10).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from kipmesh.client.consumer.rules import values as t
from kipmesh.client.consumer.rules.preferred_replica import NOBODY, PreferredReplica
from kipmesh.client.consumer.rules.states import Cause, Leave, State, next_state, reaction_to
from kipmesh.core.errors import ErrorCode
from kipmesh.core.replica.serving import CONSUMER_ID, FOLLOWER_READER_ID
from kipmesh.messages import EpochEndOffset, PartitionData

_R = TypeVar("_R", t.FetchFrom, t.ListOffsetsAtLeader, t.EndOfEpochAtLeader)

STALLS_MAX = 5
"""Answers in a row of a follower that is behind, after which it counts as failed."""


ENTRIES_MAX: Final = 64
"""Older epochs are forgotten: a truncation that reaches back so far is found at the oldest that is known."""


class OwnEpoch(NamedTuple):
    """An epoch that was read, and the offset after its last record."""

    epoch: int
    end_offset: int


class Parted(NamedTuple):
    """Our log and the leader's have the same records below `end_offset` (None: not known), and then differ."""

    end_offset: int | None
    epoch: int
    """Of the leader's record before."""


class EpochHistory:
    """(epoch, first offset) of what was read since the last seek, oldest first: compared with the leader's (392-08).

    Kafka's consumer knows the epoch of its last record only, so it finds that its log was cut, but not always where.
    With the starts of the epochs it can go back epoch by epoch as a follower does ("Log truth").
    Invariants: epochs and start offsets rise; what was read before the first entry is not known.
    """

    __slots__ = ("_base", "_entries")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []
        self._base = -1  # where it began, if the epoch of the record before that is known

    @property
    def last_epoch(self) -> int:
        """The epoch of the record before the fetch offset; -1 if that is not known."""
        return self._entries[-1][0] if self._entries else -1

    @property
    def first_offset(self) -> int:
        """Where it begins; -1 if it is empty."""
        return self._entries[0][1] if self._entries else -1

    def begin(self, offset: int, epoch: int) -> None:
        """Nothing was read yet; the record before `offset` is of `epoch`, -1 if that is not known."""
        self._entries = [(epoch, offset)] if epoch >= 0 else []
        self._base = offset if epoch >= 0 else -1

    def read(self, first_offset: int, epoch: int) -> None:
        """Records from `first_offset` on are of `epoch`; not below the last one."""
        if epoch > self.last_epoch:
            self._entries.append((epoch, first_offset))
            del self._entries[:-ENTRIES_MAX]

    def floor(self, epoch: int, fetch_offset: int) -> OwnEpoch | None:
        """The largest epoch read that is not above `epoch`; None if none is known."""
        entries = self._entries
        above = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if not above:
            return None
        end = entries[above][1] if above < len(entries) else fetch_offset
        return OwnEpoch(entries[above - 1][0], end)

    def cut(self, offset: int) -> None:
        """What was read from `offset` on does not count; the epoch that spans it stays the last one."""
        entries = self._entries
        while len(entries) > 1 and entries[-1][1] >= offset:
            entries.pop()
        if entries and entries[0][1] >= offset and not entries[0][1] == offset == self._base:
            entries.clear()


def judge(history: EpochHistory, asked: OwnEpoch, found: EpochEndOffset, fetch_offset: int) -> OwnEpoch | Parted | None:
    """The leader says `found` about the end of `asked.epoch`: what of that which we have read is in its log?

    None: all up to the fetch offset. An epoch of ours: that is to be asked about next. `found` is the leader's largest
    epoch that is not above the one asked about; (-1, -1) if there is none.
    """
    if found.epoch < 0 or found.end_offset < 0:
        return Parted(None, -1)
    if found.epoch >= asked.epoch:
        end_offset = min(found.end_offset, asked.end_offset)
        return None if end_offset == fetch_offset else Parted(end_offset, found.epoch)
    own = history.floor(found.epoch, fetch_offset)
    if own is None:
        return Parted(min(found.end_offset, history.first_offset), found.epoch)
    if own.epoch < found.epoch:
        return own  # the leader's epoch is none of ours: back to the end of our own earlier one
    return Parted(min(found.end_offset, own.end_offset), found.epoch)


class _OutOfRange(NamedTuple):
    """What a replica said when it did not have the fetch offset (392-07)."""

    log_start_offset: int = -1
    high_watermark: int = -1


class _Waiting(NamedTuple):
    """A request under way."""

    request_id: int
    request: t.Request
    sent_ms: int


class PartitionReader:
    """The state machine of one assigned partition."""

    __slots__ = (
        "_asked",
        "_attempts",
        "_backoff_ms",
        "_config",
        "_doubt",
        "_history",
        "_last_request_id",
        "_preferred",
        "_problem",
        "_reset_to",
        "_retry_at_ms",
        "_stalls",
        "_waiting",
        "fetch_offset",
        "high_watermark",
        "log_start_offset",
        "node_id",
        "position",
        "state",
    )

    def __init__(self, config: t.ReaderConfig, backoff_ms: Callable[[int], int]) -> None:
        # `backoff_ms`: how long to wait after so many failures in a row, jitter included.
        self._config = config
        self._backoff_ms = backoff_ms
        self._preferred = PreferredReplica(config)
        self._history = EpochHistory()
        self.state = State.RESETTING
        self._reset_to = config.reset_to
        self.position: int | None = None
        """The offset of the next record that the user gets; None while it is not known."""
        self.fetch_offset: int | None = None
        """The offset after what is buffered."""
        self.high_watermark = -1
        """The highest of all replicas' (392-10); -1 before there is one."""
        self.log_start_offset = -1
        """That of the last answer."""
        self.node_id = NOBODY
        """Who was last fetched from."""
        self._asked = OwnEpoch(-1, -1)  # what the leader is asked about while VALIDATING
        self._doubt: _OutOfRange | None = None
        self._problem: t.RaiseError | t.TruncationFound | None = None
        self._waiting: _Waiting | None = None
        self._last_request_id = 0
        self._attempts = 0
        self._stalls = 0
        self._retry_at_ms = 0

    # --- what is wanted -----------------------------------------------------------------------------------------------

    @property
    def leader_epoch(self) -> int:
        """The leader epoch that requests carry."""
        return self._preferred.news.leader_epoch

    def is_waiting_for(self, request_id: int) -> bool:
        """Whether the answer to that request still matters."""
        return self._waiting is not None and self._waiting.request_id == request_id

    def next(self, now_ms: int) -> t.Action:
        """What the partition wants now. Changes nothing."""
        state = self.state
        if state is State.HALTED or state is State.DRAINING:
            return t.AWAIT_READER
        if self._waiting is not None:
            return t.AWAIT_ANSWER
        if now_ms < self._retry_at_ms:
            return t.BackOff(self._retry_at_ms)
        if state is State.FETCHING:
            return self._fetch(now_ms)
        return self._ask_leader()

    def _ask_leader(self) -> t.Action:
        leader_id, epoch = self._preferred.news[:2]
        if leader_id == NOBODY:
            return t.AWAIT_METADATA
        if self.state is State.VALIDATING:
            return t.EndOfEpochAtLeader(leader_id, epoch, self._asked.epoch)
        timestamp = self._bound_in_doubt if self.state is State.CONFIRMING else self._reset_to
        return t.AWAIT_READER if timestamp is None else t.ListOffsetsAtLeader(leader_id, epoch, timestamp)

    def _fetch(self, now_ms: int) -> t.Action:
        choice = self._preferred
        node_id = choice.target(now_ms)
        leader_id = choice.news.leader_id
        if node_id == NOBODY:
            return t.AWAIT_METADATA
        is_leader = node_id == leader_id
        chose = not is_leader and self._config.mode is not t.SelectionMode.FETCH
        return t.FetchFrom(
            node_id,
            is_leader,
            FOLLOWER_READER_ID if chose else CONSUMER_ID,
            not is_leader or choice.offers_rack(now_ms),
            self.fetch_offset or 0,
            self._history.last_epoch,
            choice.news.leader_epoch,
        )

    @property
    def _bound_in_doubt(self) -> int:
        """CONFIRMING: which end of the leader's log says whether it has the fetch offset."""
        doubt = self._doubt
        is_large = doubt is not None and 0 <= doubt.log_start_offset <= (self.fetch_offset or 0)
        return t.TIMESTAMP_LATEST if is_large else t.TIMESTAMP_EARLIEST

    def sent(self, request: t.Request, now_ms: int) -> int:
        """A request that `next` gave is under way; gives the number for its answer."""
        self._last_request_id += 1
        self._waiting = _Waiting(self._last_request_id, request, now_ms)
        if isinstance(request, t.FetchFrom):
            self.node_id = request.node_id
            if request.is_leader:
                self._preferred.asked_leader()
        return self._last_request_id

    def deadline_ms(self, now_ms: int) -> int | None:
        """When time alone changes something: the end of a back-off, or of the patience with a follower."""
        waiting = self._waiting
        if waiting is not None:
            return waiting.sent_ms + self._patience_ms if _is_of_follower(waiting.request) else None
        return self._retry_at_ms if self._retry_at_ms > now_ms else None

    @property
    def _patience_ms(self) -> int:
        return self._config.fetch_max_wait_ms + self._config.follower_silence_ms

    def tick(self, now_ms: int) -> t.Effects:
        """Time went by: a follower that is silent for too long is left (392-14)."""
        waiting = self._waiting
        if waiting is None or not _is_of_follower(waiting.request) or now_ms < waiting.sent_ms + self._patience_ms:
            return t.NOTHING
        return (*self._abandon(), *self._leave(waiting.request.node_id, t.LeaveCause.SILENT, now_ms), *t.REFRESH)

    # --- events: metadata and the user --------------------------------------------------------------------------------

    def metadata(self, news: t.PartitionNews, now_ms: int) -> t.Effects:
        """Metadata of the partition; news of an older leader epoch is ignored."""
        before = self._preferred.news
        if news.leader_epoch < before.leader_epoch:
            return t.NOTHING
        effects: list[t.Effect] = []
        fenced = self._preferred.take(news)
        if fenced != NOBODY:
            effects += self._leave(fenced, t.LeaveCause.FENCED, now_ms)
        waiting = self._waiting
        if news.leader_epoch > before.leader_epoch:
            # What is under way was asked in an epoch that is over.
            effects += self._abandon()
            self._attempts = self._retry_at_ms = 0
            if self.fetch_offset is not None and self.state is not State.HALTED and self._history.last_epoch >= 0:
                self._go(Cause.LEADER_CHANGED)
                self._asked = OwnEpoch(self._history.last_epoch, self.fetch_offset)
        elif waiting is not None and _is_of_follower(waiting.request):
            node_id = waiting.request.node_id
            if node_id not in news.replicas or node_id in news.offline_replicas:
                effects += self._abandon()
        elif before.leader_id != news.leader_id:
            self._attempts = self._retry_at_ms = 0
        return tuple(effects)

    def seek(self, offset: int, epoch: int = -1) -> t.Effects:
        """The user goes on at `offset`; `epoch` is that of the record before it, -1 if that is not known."""
        abandoned = self._abandon()
        self._attempts = self._retry_at_ms = 0
        self._doubt = self._problem = None
        self._place(offset, epoch)
        self._go(Cause.SOUGHT_WITH_EPOCH if epoch >= 0 else Cause.SOUGHT)
        self._asked = OwnEpoch(epoch, offset)
        return (*abandoned, t.MoveTo(offset))

    def reset(self, timestamp: int) -> t.Effects:
        """The user goes on at the offset of a timestamp."""
        abandoned = self._abandon()
        self._attempts = self._retry_at_ms = 0
        self._problem = None
        self._begin_reset(Cause.RESET, timestamp)
        return (*abandoned, t.MoveTo(None))

    def recreated(self) -> t.Effects:
        """Another topic has this name now: epochs begin anew. The driver goes on with `seek` or `reset`."""
        self._preferred.forget()
        self.high_watermark = self.log_start_offset = -1
        return self.reset(t.TIMESTAMP_EARLIEST)

    def delivered(self, position: int) -> t.Effects:
        """The user has everything below `position`, which is not above the fetch offset."""
        self.position = position
        return self._drained() if self.state is State.DRAINING else t.NOTHING

    def ask_user(self) -> t.RaiseError | t.TruncationFound | None:
        """What only the user can decide: each poll raises it until a seek or a reset; None if there is nothing.

        That is when HALTED, and without a position where `auto.offset.reset` is none.
        """
        if self.state is State.RESETTING and self._reset_to is None:
            self._problem = t.RaiseError(ErrorCode.OFFSET_OUT_OF_RANGE)
            self._go(Cause.NO_POLICY)
        return self._problem

    # --- events: answers ----------------------------------------------------------------------------------------------

    def fetched(self, request_id: int, answer: PartitionData, spans: Sequence[t.EpochSpan], now_ms: int) -> t.Effects:
        """The answer to a fetch; `spans` are the whole batches in it, batches of one epoch together."""
        request = self._answered(request_id, t.FetchFrom)
        if request is None:
            return t.NOTHING
        if answer.high_watermark > self.high_watermark:
            self.high_watermark = answer.high_watermark
        if answer.error_code:
            return self._refused(request, answer, now_ms)
        self.log_start_offset = answer.log_start_offset
        self._attempts = self._stalls = 0
        if answer.diverging_epoch is not None:
            return self._diverged(request, answer.diverging_epoch, now_ms)
        if answer.preferred_read_replica >= 0 and not spans:
            return self._redirected(request, answer.preferred_read_replica, now_ms)
        return self._read(request, spans, now_ms) if spans else t.TAKE

    def failed(self, request_id: int, code: ErrorCode, now_ms: int) -> t.Effects:
        """The request, of whatever kind, has this error; NETWORK_EXCEPTION when there was no answer."""
        waiting = self._waiting
        if waiting is None or waiting.request_id != request_id:
            return t.NOTHING
        self._waiting = None
        if isinstance(waiting.request, t.FetchFrom):
            return self._refused(waiting.request, PartitionData(error_code=code), now_ms)
        return self._react(waiting.request.node_id, code, True, now_ms)

    def listed(self, request_id: int, offset: int) -> t.Effects:
        """The leader's answer to ListOffsets: an offset, -1 for none (which is the log's beginning)."""
        request = self._answered(request_id, t.ListOffsetsAtLeader)
        if request is None:
            return t.NOTHING
        self._attempts, offset = 0, max(offset, 0)
        is_end = request.timestamp == t.TIMESTAMP_LATEST
        if is_end:
            self.high_watermark = max(self.high_watermark, offset)
        if self.state is State.RESETTING:
            self._place(offset, -1)
            self._go(Cause.FOUND)
            return (t.MoveTo(offset),)
        if self.state is not State.CONFIRMING or self.fetch_offset is None:
            return t.NOTHING
        doubt = self._doubt or _OutOfRange()
        if self.fetch_offset <= offset if is_end else self.fetch_offset >= offset:
            self._doubt = None
            self._go(Cause.LEADER_HAS_IT)
            return t.NOTHING
        return self._confirmed(doubt._replace(**{"high_watermark" if is_end else "log_start_offset": offset}))

    def epoch_ended(self, request_id: int, found: EpochEndOffset) -> t.Effects:
        """The leader's answer to OffsetsForLeaderEpoch."""
        if self._answered(request_id, t.EndOfEpochAtLeader) is None or self.state is not State.VALIDATING:
            return t.NOTHING
        self._attempts = 0
        return self._judge(found)

    def corrupt(self, node_id: int, now_ms: int) -> t.Effects:
        """What `node_id` sent cannot be decoded at the position: read that again, from the leader if it was another."""
        if self.position is None or self.state in (State.RESETTING, State.HALTED):
            return t.NOTHING
        effects = (*self._abandon(), t.MoveTo(self.position))
        self.fetch_offset, self._doubt = self.position, None
        self._history.cut(self.position)
        epoch = self._history.last_epoch
        self._asked = OwnEpoch(epoch, self.position)
        must_validate = self.state is State.VALIDATING and epoch >= 0
        self._go(Cause.SOUGHT_WITH_EPOCH if must_validate else Cause.SOUGHT)
        if node_id != self._preferred.news.leader_id:
            return (*effects, *self._leave(node_id, t.LeaveCause.FAILED, now_ms))
        self._back_off(now_ms)
        return (*effects, t.RaiseError(ErrorCode.CORRUPT_MESSAGE))

    def _answered(self, request_id: int, kind: type[_R]) -> _R | None:
        """The request of that number, if it is waited for and of that kind; from now on nothing is."""
        waiting = self._waiting
        if waiting is None or waiting.request_id != request_id or not isinstance(waiting.request, kind):
            return None
        self._waiting = None
        return waiting.request

    # --- inside: positions --------------------------------------------------------------------------------------------

    def _go(self, cause: Cause) -> None:
        self.state = next_state(self.state, cause)

    def _place(self, offset: int, epoch: int) -> None:
        self.position = self.fetch_offset = offset
        self._history.begin(offset, epoch)

    def _begin_reset(self, cause: Cause, timestamp: int) -> None:
        self.position = self.fetch_offset = None
        self._history.begin(0, -1)
        self._doubt = None
        self._reset_to = timestamp
        self._go(cause)

    def _abandon(self) -> t.Effects:
        waiting, self._waiting = self._waiting, None
        return (t.Abandon(waiting.request_id),) if waiting is not None else t.NOTHING

    # --- inside: answers ----------------------------------------------------------------------------------------------

    def _read(self, request: t.FetchFrom, spans: Sequence[t.EpochSpan], now_ms: int) -> t.Effects:
        history, offset = self._history, self.fetch_offset or 0
        if spans[0].epoch < history.last_epoch:
            # Epochs rise in every log: this one is not that which we have read.
            left = self._doubted(request, t.LeaveCause.DIVERGED, now_ms)
            self._back_off(now_ms)
            return left
        for span in spans:
            history.read(max(span.first_offset, offset), span.epoch)
            offset = max(offset, span.next_offset)
        self.fetch_offset = offset
        return t.TAKE

    def _redirected(self, request: t.FetchFrom, node_id: int, now_ms: int) -> t.Effects:
        if not request.is_leader:
            # Only leaders choose; this one was, or believes it.
            return (*self._leave(request.node_id, t.LeaveCause.FAILED, now_ms), *t.REFRESH)
        if node_id == request.node_id:
            self._back_off(now_ms)
            return t.REFRESH
        if self._preferred.redirect(node_id, now_ms):
            return (t.Redirected(node_id),)
        if not request.offers_rack:  # it insists even so: there is nobody to read from until the replica may be tried
            self._retry_at_ms = self._preferred.rackless_until_ms
        return t.REFRESH

    def _refused(self, request: t.FetchFrom, answer: PartitionData, now_ms: int) -> t.Effects:
        code = ErrorCode.of(answer.error_code)
        if code is not ErrorCode.OFFSET_OUT_OF_RANGE:
            return self._react(request.node_id, code, request.is_leader, now_ms)
        self._attempts = self._stalls = 0
        doubt = self._doubt = _OutOfRange(answer.log_start_offset, answer.high_watermark)
        is_small = (self.fetch_offset or 0) < doubt.log_start_offset
        if request.is_leader and (is_small or self._history.last_epoch < 0):
            return self._confirmed(doubt)
        return self._doubted(request, t.LeaveCause.OUT_OF_RANGE, now_ms)

    def _doubted(self, request: t.FetchFrom, cause: t.LeaveCause, now_ms: int) -> t.Effects:
        """A replica's log is not as ours: the leader is to say whose is right (392-08)."""
        self._asked = OwnEpoch(self._history.last_epoch, self.fetch_offset or 0)
        self._go(Cause.DOUBTED if self._asked.epoch >= 0 else Cause.NOT_THERE)
        return t.NOTHING if request.is_leader else self._leave(request.node_id, cause, now_ms)

    def _diverged(self, request: t.FetchFrom, found: EpochEndOffset, now_ms: int) -> t.Effects:
        effects = self._doubted(request, t.LeaveCause.DIVERGED, now_ms)
        if request.is_leader and self.state is State.VALIDATING:
            return (*effects, *self._judge(found))
        return effects

    def _judge(self, found: EpochEndOffset) -> t.Effects:
        """The leader says where the epoch that was asked about ended: what of ours is in its log?"""
        verdict = judge(self._history, self._asked, found, self.fetch_offset or 0)
        if isinstance(verdict, Parted):
            return self._truncated(verdict.end_offset, verdict.epoch)
        if verdict is not None:
            self._asked = verdict
            return t.NOTHING
        self._go(Cause.VALID if self._doubt is None else Cause.NOT_THERE)
        return t.NOTHING

    def _truncated(self, end_offset: int | None, epoch: int) -> t.Effects:
        """Our log and the leader's part at `end_offset` (None: nothing is known to be common)."""
        self._doubt = None
        position, policy = self.position or 0, self._config.reset_to
        if end_offset is not None and end_offset >= position:
            # Only what nobody has seen yet is gone.
            self._go_back(position, epoch)
            self._go(Cause.VALID)
            return (t.MoveTo(position),)
        report = t.TruncationFound(position, end_offset, epoch, policy is None)
        if policy is None:
            self._problem = report
            self._go(Cause.TRUNCATED_FATALLY)
            self.fetch_offset = position
            return (report, t.MoveTo(position))
        if end_offset is None:
            self.high_watermark = -1
            self._begin_reset(Cause.LOST, policy)
            return (report, t.MoveTo(None))
        self.high_watermark = self.position = end_offset
        self._go_back(end_offset, epoch)
        self._go(Cause.TRUNCATED)
        return (report, t.MoveTo(end_offset))

    def _go_back(self, offset: int, epoch: int) -> None:
        self.fetch_offset = offset
        self._history.cut(offset)
        if self._history.last_epoch > epoch:  # from before the seek that we began with, and unknown to the leader
            self._history.begin(offset, -1)

    def _confirmed(self, doubt: _OutOfRange) -> t.Effects:
        """The leader does not have the offset either."""
        self._doubt = doubt
        self._go(Cause.CONFIRMED)
        return self._drained()

    def _drained(self) -> t.Effects:
        if self.position != self.fetch_offset or self.position is None:
            return t.NOTHING
        doubt, policy = self._doubt or _OutOfRange(), self._config.reset_to
        if policy is None:
            self._problem = t.RaiseError(ErrorCode.OFFSET_OUT_OF_RANGE, self.position, *doubt)
            self._go(Cause.NO_POLICY)
            return (self._problem,)
        reset = t.OffsetReset(self.position, policy, *doubt)
        self._begin_reset(Cause.DRAINED, policy)
        return (reset, t.MoveTo(None))

    # --- inside: errors -----------------------------------------------------------------------------------------------

    def _back_off(self, now_ms: int) -> None:
        self._attempts += 1
        self._retry_at_ms = now_ms + self._backoff_ms(self._attempts)

    def _leave(self, node_id: int, cause: t.LeaveCause, now_ms: int) -> t.Effects:
        self._stalls = self._attempts = self._retry_at_ms = 0
        self._preferred.leave(node_id, now_ms)
        return (t.Left(node_id, cause),)

    def _react(self, node_id: int, code: ErrorCode, from_leader: bool, now_ms: int) -> t.Effects:
        reaction = reaction_to(code, from_leader=from_leader)
        effects: list[t.Effect] = []
        if reaction.leave is Leave.AT_ONCE:
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


def _is_of_follower(request: t.Request) -> bool:
    return isinstance(request, t.FetchFrom) and not request.is_leader
