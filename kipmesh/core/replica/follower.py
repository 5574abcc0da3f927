"""What a follower does with its leader's responses ("Log truth" in docs/rules.md), and how much it may fetch.

Pure decisions over numbers; the driver holds the log. A follower never keeps a record that the leader has not: on a
diverging epoch it truncates and fetches again, as often as it takes, epoch by epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from kipmesh.messages import EpochEndOffset

BURST_MS = 1000


def truncation_offset(leader: EpochEndOffset, local: EpochEndOffset, log_end_offset: int) -> int:
    """Where to cut a diverged log.

    `leader` is the end, at the leader, of the largest epoch that is not above the follower's; `local` the follower's
    own answer to the same question (its end of the largest epoch not above `leader.epoch`).
    """
    if leader.epoch < 0 or local.epoch < 0:
        # No common epoch is known: nothing beyond the leader's offset can be trusted.
        return min(max(leader.end_offset, 0), log_end_offset)
    if local.epoch == leader.epoch:
        return min(leader.end_offset, local.end_offset, log_end_offset)
    # The follower lacks the leader's epoch: cut back to the end of its own earlier one and compare again.
    return min(local.end_offset, log_end_offset)


def has_diverged(fetch_offset: int, last_fetched_epoch: int, at_leader: EpochEndOffset) -> bool:
    """The leader's test: `at_leader` is its end of the largest epoch not above `last_fetched_epoch`."""
    return at_leader.epoch < last_fetched_epoch or at_leader.end_offset < fetch_offset


def follower_high_watermark(told: int, log_end_offset: int, before: int) -> int:
    """A follower's own high watermark: what the leader told, as far as its log reaches; never back (392-01)."""
    return max(before, min(told, log_end_offset))


class FollowerWatermarks(NamedTuple):
    """The two high watermarks of a follower (392-01), as a value that events replace.

    `own` bounds reads, and is what it leads with when it is promoted. `told` decides the four cases and is what readers
    are told. Invariant: own <= told, but after an unclean election only once the new leader was heard.
    """

    leader_epoch: int
    own: int
    told: int

    @classmethod
    def start(cls, leader_epoch: int, high_watermark: int) -> FollowerWatermarks:
        """Begin to follow in `leader_epoch` with the own high watermark that is known.

        What an earlier leader told is forgotten: after an unclean election nobody might ever reach it.
        """
        return cls(leader_epoch, high_watermark, high_watermark)

    def heard(self, leader_high_watermark: int, log_end_offset: int) -> FollowerWatermarks:
        """An answer of the leader was applied, after which the log ends at `log_end_offset`."""
        told = max(self.told, leader_high_watermark)
        own = follower_high_watermark(told, log_end_offset, self.own)
        return self if told == self.told and own == self.own else FollowerWatermarks(self.leader_epoch, own, told)

    def truncated(self, log_end_offset: int) -> FollowerWatermarks:
        """The log was cut: what is gone is not readable; below the own high watermark, it was not committed at all."""
        if log_end_offset >= self.own:
            return self
        return FollowerWatermarks(self.leader_epoch, log_end_offset, log_end_offset)

    def restarted(self, leader_log_start: int) -> FollowerWatermarks:
        """The log begins anew at the leader's log start."""
        return FollowerWatermarks(self.leader_epoch, leader_log_start, max(self.told, leader_log_start))


class Throttle:
    """How many bytes replicas that are being added may fetch: a token bucket (KIP-73, KIP-455).

    The bucket fills with `rate` bytes a second, up to what comes in one second. A fetch may begin while there is
    something in it, and what comes is taken out of it, even below zero: a batch cannot be split. So over any time the
    bytes are at most the rate times that time, one second's worth, and the last responses that were under way. Times
    are ms of a clock that never jumps.
    """

    __slots__ = ("_bytes", "_filled_ms", "_rate")

    def __init__(self, now_ms: int) -> None:
        """Without a limit at first."""
        self._rate: int | None = None
        self._bytes = 0.0
        self._filled_ms = now_ms

    @property
    def rate(self) -> int | None:
        """Bytes a second; None for no limit."""
        return self._rate

    def limit(self, rate: int | None, now_ms: int) -> None:
        """Let through `rate` (above 0) bytes a second from now on; what was let through too much is owed no more."""
        if rate != self._rate:
            self._rate = rate
            self._filled_ms = now_ms
            self._bytes = 0.0 if rate is None else rate * BURST_MS / 1000

    def available(self, now_ms: int) -> float:
        """Bytes that may be asked for now: infinitely many without a limit, and none while it is not above 0."""
        if self._rate is None:
            return float("inf")
        self._fill(self._rate, now_ms)
        return self._bytes

    def took(self, size_bytes: int, now_ms: int) -> None:
        """So many bytes came."""
        if self._rate is not None:
            self._fill(self._rate, now_ms)
            self._bytes -= size_bytes

    def wait_ms(self, now_ms: int) -> int:
        """How long until something is available."""
        if self._rate is None:
            return 0
        self._fill(self._rate, now_ms)
        return 0 if self._bytes > 0 else int(-self._bytes * 1000 / self._rate) + 1

    def _fill(self, rate: int, now_ms: int) -> None:
        passed_ms = max(now_ms - self._filled_ms, 0)
        self._filled_ms = max(now_ms, self._filled_ms)
        self._bytes = min(self._bytes + rate * passed_ms / 1000, rate * BURST_MS / 1000)
