"""A partition's leader: replicas' log ends, ISR and high watermark ("Log truth" in docs/rules.md).

Pure state: the driver tells it of appends, of followers' fetches and of the controller's answers, and asks it what
to do. Invariants:

- `high_watermark` never goes back within one leadership and never passes the leader's own log end;
- it is the least log end over the maximal ISR (committed and pending members) and over joiners that are caught up,
  and does not move while the ISR is below `min_insync_replicas`;
- at most one ISR change is in flight; until the controller has answered, both ISRs count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

UNKNOWN_OFFSET = -1
UNKNOWN_EPOCH = -1


class IsrChange(NamedTuple):
    """An ISR to ask the controller for: what was known when it was decided, never looked up again.

    A member that registered anew since then may have lost its log; its epoch here tells the controller.
    """

    members: tuple[tuple[int, int], ...]
    """(broker id, broker epoch) of each, by id; epoch -1 for a member that has not fetched from this leader yet."""
    leader_epoch: int
    partition_epoch: int

    @property
    def isr(self) -> frozenset[int]:
        """The members' ids."""
        return frozenset([broker for broker, _ in self.members])


@dataclass(slots=True, weakref_slot=True, eq=False)
class FollowerFetches:
    """A follower's fetches in one session, shared by its partitions there: when the last one was taken.

    A fetch of a session says again what was said before of every partition of it, but names and reads only what
    changed (227-07, 227-10). So a partition that was not read stands where it stood, and was fetched all the same.
    """

    broker_epoch: int
    last_fetch_ms: int


@dataclass(slots=True, eq=False)
class FollowerProgress:
    """How far one follower is, from its fetches. `last_caught_up_ms` is when it last had the leader's whole log.

    While the follower has the leader's whole log, `last_caught_up_ms` may be older than its last fetch: `fetches` has
    that, and `settle` takes it over before the log grows. Of a follower that is behind, each fetch that brings a new
    position is read, and each that is answered with records: others say nothing new.
    """

    last_caught_up_ms: int
    broker_epoch: int = UNKNOWN_EPOCH
    fetches: FollowerFetches | None = None
    log_end_offset: int = UNKNOWN_OFFSET
    log_start_offset: int = UNKNOWN_OFFSET
    last_fetch_ms: int = 0
    last_fetch_leader_end: int = UNKNOWN_OFFSET

    def fetched(
        self,
        fetch_offset: int,
        log_start_offset: int,
        broker_epoch: int,
        leader_end: int,
        now_ms: int,
        fetches: FollowerFetches | None,
    ) -> None:
        """A fetch from `fetch_offset`, read: the follower has everything below it."""
        self.settle(leader_end)
        self.broker_epoch = broker_epoch
        self.fetches = fetches
        if fetch_offset >= leader_end:
            self.last_caught_up_ms = max(self.last_caught_up_ms, now_ms)
        elif fetch_offset >= self.last_fetch_leader_end >= 0:
            # It has by now what the leader had at its last fetch: it was caught up then.
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.log_end_offset = fetch_offset
        self.log_start_offset = log_start_offset
        self.last_fetch_ms = now_ms
        self.last_fetch_leader_end = leader_end

    def settle(self, leader_end: int) -> None:
        """Take over what fetches that did not read this have shown; the leader's log still ends at `leader_end`."""
        fetches = self.fetches
        if fetches is not None and self.log_end_offset == leader_end and fetches.last_fetch_ms > self.last_fetch_ms:
            self.last_fetch_ms = fetches.last_fetch_ms
            self.last_fetch_leader_end = leader_end
            self.last_caught_up_ms = max(self.last_caught_up_ms, fetches.last_fetch_ms)

    def left(self, leader_end: int) -> None:
        """Fetches of its session do not speak for this partition any more."""
        self.settle(leader_end)
        self.fetches = None

    @property
    def heard_ms(self) -> int:
        """When it fetched last, this or anything else of its session; 0 for never."""
        return max(self.last_fetch_ms, self.fetches.last_fetch_ms if self.fetches is not None else 0)

    def is_caught_up(self, leader_end: int, now_ms: int, lag_max_ms: int) -> bool:
        """Whether it has the whole log, or had within `lag_max_ms`."""
        return self.log_end_offset == leader_end or now_ms - self.last_caught_up_ms <= lag_max_ms


@dataclass(slots=True, kw_only=True, eq=False)
class PartitionLeader:
    """The leader's view of one partition during one leader epoch."""

    broker_id: int
    leader_epoch: int
    partition_epoch: int
    replicas: InitVar[Sequence[int]]
    isr: frozenset[int]
    log_end_offset: int
    high_watermark: int
    min_insync_replicas: int
    lag_max_ms: int
    eligible_epoch: Callable[[int], int]
    """The broker epoch of a broker that may be an ISR member now (registered, not fenced, not shutting down), or -1."""
    now_ms: InitVar[int]
    pending: IsrChange | None = None
    lost: frozenset[int] = frozenset()
    """Replicas in data folders that have failed: whatever they fetched, they are not waited for and do not join."""
    epoch_start_offset: int = field(init=False)
    followers: dict[int, FollowerProgress] = field(init=False)

    def __post_init__(self, replicas: Sequence[int], now_ms: int) -> None:
        self.isr = frozenset(self.isr)
        self.epoch_start_offset = self.log_end_offset
        self.high_watermark = min(self.high_watermark, self.log_end_offset)
        self.min_insync_replicas = min(self.min_insync_replicas, len(replicas))
        self.followers = {
            # A member of the ISR is given the whole lag time to show itself.
            replica: FollowerProgress(now_ms if replica in self.isr else -self.lag_max_ms)
            for replica in replicas
            if replica != self.broker_id
        }
        self.advance(now_ms)

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Committed and pending members: whoever of them is elected must have what we acknowledged."""
        return self.isr | self.pending.isr if self.pending else self.isr

    @property
    def is_under_min_isr(self) -> bool:
        """Whether writes with acks=all are to be refused."""
        return len(self.isr) < self.min_insync_replicas

    @property
    def high_watermark_is_known(self) -> bool:
        """Whether the high watermark has reached this leader's epoch (392-09, ListOffsets on a new leader)."""
        return self.high_watermark >= self.epoch_start_offset

    def members_heard_ms(self) -> list[int]:
        """When each other member of the ISR fetched last."""
        return [self.followers[member].heard_ms for member in self.isr if member in self.followers]

    def appended(self, log_end_offset: int, now_ms: int) -> bool:
        """The leader's own log grew; returns whether the high watermark moved (it is the whole ISR)."""
        for progress in self.followers.values():
            progress.settle(self.log_end_offset)
        self.log_end_offset = log_end_offset
        return self.advance(now_ms)

    def follower_fetched(
        self,
        replica: int,
        fetch_offset: int,
        log_start_offset: int,
        broker_epoch: int,
        now_ms: int,
        fetches: FollowerFetches | None = None,
    ) -> bool:
        """A follower's fetch; returns whether the high watermark moved. The replica must be in `followers`.

        `fetches` speaks for later fetches of the same session that do not read this partition. A fetch that waited
        here while its broker registered anew is of another process: what that one had says nothing any more.
        """
        progress = self.followers[replica]
        if broker_epoch < progress.broker_epoch and broker_epoch != self.eligible_epoch(replica):
            return False
        progress.fetched(fetch_offset, log_start_offset, broker_epoch, self.log_end_offset, now_ms, fetches)
        return self.advance(now_ms)

    def follower_left(self, replica: int) -> None:
        """A follower's session has this partition no more."""
        progress = self.followers.get(replica)
        if progress is not None:
            progress.left(self.log_end_offset)

    @property
    def has_followers_behind(self) -> bool:
        """Whether a follower lacks records: only then time decides who is in sync."""
        return any(progress.log_end_offset != self.log_end_offset for progress in self.followers.values())

    def _is_eligible(self, replica: int) -> bool:
        """Whether it may join, as the very registration that fetched: an older one's log end says nothing."""
        epoch = self.followers[replica].broker_epoch
        return replica not in self.lost and epoch != UNKNOWN_EPOCH and epoch == self.eligible_epoch(replica)

    def advance(self, now_ms: int) -> bool:
        """Move the high watermark as far as followers, their lag and registrations allow; return whether it moved."""
        if self.is_under_min_isr:
            return False
        least = self.log_end_offset
        maximal = self.maximal_isr
        for replica, progress in self.followers.items():
            if progress.log_end_offset < least and (
                replica in maximal
                or (progress.is_caught_up(self.log_end_offset, now_ms, self.lag_max_ms) and self._is_eligible(replica))
            ):
                least = progress.log_end_offset
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True

    def _change(self, isr: Collection[int]) -> IsrChange:
        followers = self.followers
        members = [
            (member, followers[member].broker_epoch if member in followers else self.eligible_epoch(member))
            for member in sorted(isr)
        ]
        return IsrChange(tuple(members), self.leader_epoch, self.partition_epoch)

    def isr_to_join(self, replica: int) -> IsrChange | None:
        """What to ask the controller for after a fetch of `replica`: the ISR with it, if it is in sync and outside."""
        if self.pending is not None or replica in self.isr or not self._is_eligible(replica):
            return None
        end = self.followers[replica].log_end_offset
        if end >= self.high_watermark and end >= self.epoch_start_offset:
            return self._change(self.isr | {replica})
        return None

    def isr_without_laggards(self, now_ms: int) -> IsrChange | None:
        """What to ask for without members that are behind for longer than `lag_max_ms`; None for no change."""
        if self.pending is not None:
            return None
        out = {
            replica
            for replica in self.isr
            if replica in self.followers
            and not self.followers[replica].is_caught_up(self.log_end_offset, now_ms, self.lag_max_ms)
        }
        return self._change(self.isr - out) if out else None

    def isr_change_sent(self, change: IsrChange) -> None:
        """The controller was asked."""
        self.pending = change

    def isr_change_refused(self) -> None:
        """The controller certainly did not make the change (INELIGIBLE_REPLICA).

        After any other failure the pending ISR goes on counting: the change may have been made, and the metadata log
        will tell.
        """
        self.pending = None

    def isr_changed(self, isr: Collection[int], partition_epoch: int, now_ms: int) -> bool:
        """What the controller holds now; older news is ignored. Returns whether the high watermark moved."""
        if partition_epoch <= self.partition_epoch:
            return False
        self.partition_epoch = partition_epoch
        self.isr = frozenset(isr)
        self.pending = None
        return self.advance(now_ms)

    def replicas_changed(self, replicas: Sequence[int], min_insync_replicas: int, now_ms: int) -> bool:
        """The assignment or the topic's configuration changed; returns whether the high watermark moved."""
        self.min_insync_replicas = min(min_insync_replicas, len(replicas))
        wanted = set(replicas) - {self.broker_id}
        for gone in self.followers.keys() - wanted:
            del self.followers[gone]
        for new in wanted - self.followers.keys():
            self.followers[new] = FollowerProgress(-self.lag_max_ms)
        return self.advance(now_ms)
