"""A partition's leader: followers' log ends, ISR and high watermark (REP-01 to REP-04).

Pure state: the driver reports appends, fetches and responses of the controller, and requests ISR changes. Invariants:

- `high_watermark` never decreases within one leadership and never passes the leader's log end;
- it is the lowest log end over the maximal ISR (committed and pending members) and over caught-up replicas that may
  join, and does not move while the ISR is below `min_insync_replicas`;
- at most one ISR change is in flight; until the controller has responded, both ISRs count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

UNKNOWN_OFFSET = -1
UNKNOWN_EPOCH = -1


class IsrChange(NamedTuple):
    """An ISR to request from the controller, with the epochs known when it was decided.

    The controller rejects a member that has registered again since then, because it may have lost its log.
    """

    members: tuple[tuple[int, int], ...]
    """(broker id, broker epoch) of each member, by id; epoch -1 if the member has not fetched from this leader yet."""
    leader_epoch: int
    partition_epoch: int

    @property
    def isr(self) -> frozenset[int]:
        """Broker ids of the members."""
        return frozenset([broker for broker, _ in self.members])


@dataclass(slots=True, weakref_slot=True, eq=False)
class FollowerFetches:
    """Broker epoch and time (monotonic ms) of the last fetch in a follower's fetch session.

    The session's partitions share this object. An incremental fetch lists only partitions whose position has changed;
    for the other partitions it confirms that their position is still the same (227-07, 227-10).
    """

    broker_epoch: int
    last_fetch_ms: int


@dataclass(slots=True, eq=False)
class FollowerProgress:
    """Progress of one follower, as known by the leader. `last_caught_up_ms`: when it last had the leader's whole log.

    While the follower has the whole log, fetches of its session that do not read this partition prove that it still
    does: `apply_session_fetches` applies the time of the last such fetch before the leader's log grows. The partition
    of a follower that lags is read by each fetch that has a new position or whose predecessor returned records. Other
    fetches carry no information about it.
    """

    last_caught_up_ms: int
    broker_epoch: int = UNKNOWN_EPOCH
    fetches: FollowerFetches | None = None
    log_end_offset: int = UNKNOWN_OFFSET
    log_start_offset: int = UNKNOWN_OFFSET
    last_fetch_ms: int = 0
    last_fetch_leader_end: int = UNKNOWN_OFFSET

    def record_fetch(
        self,
        fetch_offset: int,
        log_start_offset: int,
        broker_epoch: int,
        leader_end: int,
        now_ms: int,
        fetches: FollowerFetches | None,
    ) -> None:
        """Record a fetch that read this partition from `fetch_offset`: the follower has all records below it."""
        self.apply_session_fetches(leader_end)
        self.broker_epoch = broker_epoch
        self.fetches = fetches
        if fetch_offset >= leader_end:
            self.last_caught_up_ms = max(self.last_caught_up_ms, now_ms)
        elif fetch_offset >= self.last_fetch_leader_end >= 0:
            # It has reached the leader's log end as of its previous fetch, so it was caught up at that time.
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.log_end_offset = fetch_offset
        self.log_start_offset = log_start_offset
        self.last_fetch_ms = now_ms
        self.last_fetch_leader_end = leader_end

    def apply_session_fetches(self, leader_end: int) -> None:
        """Count the session's last fetch for this partition, if the follower has the log up to its end `leader_end`.

        Updates the times of the last fetch and of being caught up. Does nothing for a follower that lags.
        """
        fetches = self.fetches
        if fetches is not None and self.log_end_offset == leader_end and fetches.last_fetch_ms > self.last_fetch_ms:
            self.last_fetch_ms = fetches.last_fetch_ms
            self.last_fetch_leader_end = leader_end
            self.last_caught_up_ms = max(self.last_caught_up_ms, fetches.last_fetch_ms)

    def detach_session(self, leader_end: int) -> None:
        """Detach from the session, whose later fetches do not cover this partition. The session's last fetch still
        counts."""
        self.apply_session_fetches(leader_end)
        self.fetches = None

    @property
    def last_session_fetch_ms(self) -> int:
        """Time (monotonic ms) of the last fetch of this partition or its session, or 0 if there was none."""
        return max(self.last_fetch_ms, self.fetches.last_fetch_ms if self.fetches is not None else 0)

    def is_caught_up(self, leader_end: int, now_ms: int, lag_max_ms: int) -> bool:
        """Whether the follower has the whole log up to `leader_end`, or had it within the last `lag_max_ms`."""
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
    """Broker epoch of a broker that may join the ISR (registered, not fenced, not shutting down), else -1."""
    now_ms: InitVar[int]
    pending: IsrChange | None = None
    offline: frozenset[int] = frozenset()
    """Replicas in failed log directories. They may not join the ISR."""
    epoch_start_offset: int = field(init=False)
    followers: dict[int, FollowerProgress] = field(init=False)

    def __post_init__(self, replicas: Sequence[int], now_ms: int) -> None:
        self.isr = frozenset(self.isr)
        self.epoch_start_offset = self.log_end_offset
        self.high_watermark = min(self.high_watermark, self.log_end_offset)
        self.min_insync_replicas = min(self.min_insync_replicas, len(replicas))
        self.followers = {
            # An ISR member has the full lag time to send its first fetch.
            replica: FollowerProgress(now_ms if replica in self.isr else -self.lag_max_ms)
            for replica in replicas
            if replica != self.broker_id
        }
        self.advance(now_ms)

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Committed and pending ISR members. Each may be elected, so each must have all acknowledged records."""
        return self.isr | self.pending.isr if self.pending else self.isr

    @property
    def is_under_min_isr(self) -> bool:
        """Whether writes with acks=all must be refused: the ISR is smaller than `min_insync_replicas` (REP-04)."""
        return len(self.isr) < self.min_insync_replicas

    @property
    def high_watermark_is_known(self) -> bool:
        """Whether the high watermark has reached the start of this leader's epoch (392-09, 392-10)."""
        return self.high_watermark >= self.epoch_start_offset

    def members_last_fetch_ms(self) -> list[int]:
        """Return the time (monotonic ms, 0 for never) of the last fetch of each ISR member except this leader."""
        return [self.followers[member].last_session_fetch_ms for member in self.isr if member in self.followers]

    def appended(self, log_end_offset: int, now_ms: int) -> bool:
        """Record that the leader's log grew to `log_end_offset`; return whether the high watermark moved."""
        for progress in self.followers.values():
            progress.apply_session_fetches(self.log_end_offset)
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
        """Record a follower's fetch; return whether the high watermark moved. `replica` must be in `followers`.

        `fetches` is the fetch session, whose later fetches cover this partition without reading it. Ignores the fetch
        and returns False if the broker has registered again since it was sent: its old process may have had another
        log.
        """
        progress = self.followers[replica]
        if broker_epoch < progress.broker_epoch and broker_epoch != self.eligible_epoch(replica):
            return False
        progress.record_fetch(fetch_offset, log_start_offset, broker_epoch, self.log_end_offset, now_ms, fetches)
        return self.advance(now_ms)

    def follower_left(self, replica: int) -> None:
        """Record that a follower's fetch session no longer contains this partition. Ignored for other brokers."""
        progress = self.followers.get(replica)
        if progress is not None:
            progress.detach_session(self.log_end_offset)

    @property
    def has_followers_behind(self) -> bool:
        """Whether any follower, in the ISR or not, has not fetched yet or has a different log end than the leader."""
        return any(progress.log_end_offset != self.log_end_offset for progress in self.followers.values())

    def _is_eligible(self, replica: int) -> bool:
        """Whether the replica may join the ISR under the registration with which it fetched."""
        epoch = self.followers[replica].broker_epoch
        return replica not in self.offline and epoch != UNKNOWN_EPOCH and epoch == self.eligible_epoch(replica)

    def advance(self, now_ms: int) -> bool:
        """Advance the high watermark as far as log ends and ISR allow (REP-02); return whether it moved."""
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
        """Return the ISR change that adds the follower `replica` after its fetch, or None if it may not join now.

        It may join if no change is pending, it is not a member, its registration is eligible, its log directory is
        online, and its log end has reached the high watermark and the start of the leader's epoch.
        """
        if self.pending is not None or replica in self.isr or not self._is_eligible(replica):
            return None
        end = self.followers[replica].log_end_offset
        if end >= self.high_watermark and end >= self.epoch_start_offset:
            return self._change(self.isr | {replica})
        return None

    def isr_without_laggards(self, now_ms: int) -> IsrChange | None:
        """Return the ISR change that removes members that lag for more than `lag_max_ms`.

        Returns None if there are no such members or a change is pending.
        """
        if self.pending is not None:
            return None
        laggards = {
            replica
            for replica in self.isr
            if replica in self.followers
            and not self.followers[replica].is_caught_up(self.log_end_offset, now_ms, self.lag_max_ms)
        }
        return self._change(self.isr - laggards) if laggards else None

    def isr_change_sent(self, change: IsrChange) -> None:
        """Record that the change was sent to the controller. It becomes `pending` and counts for the maximal ISR."""
        self.pending = change

    def isr_change_refused(self) -> None:
        """Record that the controller definitely rejected the pending change (INELIGIBLE_REPLICA).

        After any other error the pending ISR still counts: the change may have been made, and the metadata log will
        show it.
        """
        self.pending = None

    def isr_changed(self, isr: Collection[int], partition_epoch: int, now_ms: int) -> bool:
        """Apply an ISR from the metadata log and drop the pending change; return whether the high watermark moved.

        Ignored unless `partition_epoch` is newer than the current one.
        """
        if partition_epoch <= self.partition_epoch:
            return False
        self.partition_epoch = partition_epoch
        self.isr = frozenset(isr)
        self.pending = None
        return self.advance(now_ms)

    def replicas_changed(self, replicas: Sequence[int], min_insync_replicas: int, now_ms: int) -> bool:
        """Apply a new assignment or `min.insync.replicas`; return whether the high watermark moved."""
        self.min_insync_replicas = min(min_insync_replicas, len(replicas))
        wanted = set(replicas) - {self.broker_id}
        for removed in self.followers.keys() - wanted:
            del self.followers[removed]
        for added in wanted - self.followers.keys():
            self.followers[added] = FollowerProgress(-self.lag_max_ms)
        return self.advance(now_ms)
