"""A follower's handling of its leader's responses (REP-01, 392-01) and the throttle of its fetches.

Pure decisions over numbers; the driver owns the log. A follower never keeps a record that its leader does not have: on
a diverging epoch it truncates and fetches again until the epochs match.
"""

from __future__ import annotations

from typing import NamedTuple

from kipmesh.messages import EpochEndOffset

BURST_MS = 1000
"""Size of the throttle's bucket: the bytes that accumulate in this time."""


def truncation_offset(leader: EpochEndOffset, local: EpochEndOffset, log_end_offset: int) -> int:
    """Return the offset to which a follower truncates its diverged log, at most `log_end_offset`.

    `leader`: largest epoch in the leader's log that is not above the follower's last epoch, with its end offset.
    `local`: largest epoch in the follower's log that is not above `leader.epoch`, with its end offset.
    """
    if leader.epoch < 0 or local.epoch < 0:
        # Without a common epoch, records beyond the leader's offset cannot be trusted.
        return min(max(leader.end_offset, 0), log_end_offset)
    if local.epoch == leader.epoch:
        return min(leader.end_offset, local.end_offset, log_end_offset)
    # The follower lacks the leader's epoch: truncate to the end of the earlier epoch and compare again.
    return min(local.end_offset, log_end_offset)


def has_diverged(fetch_offset: int, last_fetched_epoch: int, at_leader: EpochEndOffset) -> bool:
    """Whether a fetch position is not in the leader's log.

    `at_leader` is the largest epoch in the leader's log that is not above `last_fetched_epoch`, with its end offset.
    """
    return at_leader.epoch < last_fetched_epoch or at_leader.end_offset < fetch_offset


def follower_high_watermark(leader: int, log_end_offset: int, before: int) -> int:
    """Return a follower's own high watermark: the leader's limited to the log end, but at least `before` (392-01)."""
    return max(before, min(leader, log_end_offset))


class FollowerWatermarks(NamedTuple):
    """The two high watermarks of a follower (392-01). Immutable; events return a new value.

    `own` bounds reads and becomes the leader's high watermark after a promotion. `leader` is the leader's, as last
    received; it decides between the four cases of 392-03 to 392-06 and is reported to readers. Invariant: own <=
    leader, except after an unclean election until the first response of the new leader.
    """

    leader_epoch: int
    own: int
    leader: int

    @classmethod
    def start(cls, leader_epoch: int, high_watermark: int) -> FollowerWatermarks:
        """Return the watermarks of a new follower in `leader_epoch`: both are its own `high_watermark`.

        The value received from an earlier leader is dropped: there may be no log that reaches it after an unclean
        election.
        """
        return cls(leader_epoch, high_watermark, high_watermark)

    def observe_leader(self, leader_high_watermark: int, log_end_offset: int) -> FollowerWatermarks:
        """Return the watermarks after a leader's response whose records were appended up to `log_end_offset`.

        `leader` becomes `leader_high_watermark`, `own` becomes `leader` limited to the log end. Neither decreases.
        """
        leader = max(self.leader, leader_high_watermark)
        own = follower_high_watermark(leader, log_end_offset, self.own)
        return self if leader == self.leader and own == self.own else FollowerWatermarks(self.leader_epoch, own, leader)

    def truncated(self, log_end_offset: int) -> FollowerWatermarks:
        """Return the watermarks after a truncation: both `log_end_offset` if that is below `own`, else unchanged."""
        if log_end_offset >= self.own:
            return self
        return FollowerWatermarks(self.leader_epoch, log_end_offset, log_end_offset)

    def restarted(self, leader_log_start: int) -> FollowerWatermarks:
        """Return the watermarks after a full truncation, when the empty log restarts at `leader_log_start`.

        `own` becomes `leader_log_start`. `leader` becomes `leader_log_start` only if that is higher.
        """
        return FollowerWatermarks(self.leader_epoch, leader_log_start, max(self.leader, leader_log_start))


class Throttle:
    """Token bucket that limits the bytes fetched by replicas being added (KIP-73, KIP-455).

    The bucket fills at `rate` bytes per second up to `BURST_MS`. A fetch may start while the bucket is not empty, and
    its response may make it negative, because batches cannot be split. So the bytes fetched in any interval are at most
    `rate` times its length, plus one burst and the responses in flight at its end. Times are in ms, from a monotonic
    clock.
    """

    __slots__ = ("_bytes", "_filled_ms", "rate")

    def __init__(self, now_ms: int) -> None:
        """Create a throttle without a limit."""
        self.rate: int | None = None
        """Bytes per second, or None without a limit."""
        self._bytes = 0.0
        self._filled_ms = now_ms

    def set_limit(self, rate: int | None, now_ms: int) -> None:
        """Change the limit to `rate` > 0 bytes per second, or to no limit if None. A new limit starts with a full
        bucket."""
        if rate != self.rate:
            self.rate = rate
            self._filled_ms = now_ms
            self._bytes = 0.0 if rate is None else rate * BURST_MS / 1000

    def available(self, now_ms: int) -> float:
        """Return the bytes that may be fetched now: infinite without a limit, 0 or less if the caller must wait."""
        if self.rate is None:
            return float("inf")
        self._fill(self.rate, now_ms)
        return self._bytes

    def consume(self, size_bytes: int, now_ms: int) -> None:
        """Remove received bytes from the bucket, which may become negative. Does nothing without a limit."""
        if self.rate is not None:
            self._fill(self.rate, now_ms)
            self._bytes -= size_bytes

    def wait_ms(self, now_ms: int) -> int:
        """Return the time in ms until a fetch may start; 0 if the bucket is not empty or there is no limit."""
        if self.rate is None:
            return 0
        self._fill(self.rate, now_ms)
        return 0 if self._bytes > 0 else int(-self._bytes * 1000 / self.rate) + 1

    def _fill(self, rate: int, now_ms: int) -> None:
        passed_ms = max(now_ms - self._filled_ms, 0)
        self._filled_ms = max(now_ms, self._filled_ms)
        self._bytes = min(self._bytes + rate * passed_ms / 1000, rate * BURST_MS / 1000)
