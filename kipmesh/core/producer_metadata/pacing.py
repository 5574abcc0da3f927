"""When the next request goes that is not urgent (526-11).

Topics that started together become half aged together, and 526-07 taken literally asks for them in requests back to
back. Here the requests are spread: the next one goes as late as the slowest even pace allows at which every topic is
asked before it is `metadata.max.age.ms` old. The pace is found from a histogram of the times of refresh, so it costs
the same for any number of topics.

Invariant: the buckets count exactly the topics that `entered` and did not leave; there are at most `_BUCKETS` + 2 with
topics in use, because older topics are urgent and leave.
"""

from __future__ import annotations

_BUCKETS = 64
"""Of `metadata.max.age.ms`. A topic counts as old as the oldest of its bucket may be."""
_MARGIN_SHARE = 32
"""Requests are planned to go `metadata.max.age.ms` / 32 before the oldest topic is urgent: room for round trips."""


class Pace:
    """The pace of requests that are not urgent."""

    def __init__(self, max_age_ms: int) -> None:
        self._max_age_ms = max_age_ms
        self._width_ms = max_age_ms / _BUCKETS
        self._margin_ms = max_age_ms / _MARGIN_SHARE
        self._counts: dict[int, int] = {}  # in order: times of refresh never go back, but for a topic that comes back
        self._in_order = True
        self._last_ms = float("-inf")

    def entered(self, refreshed_ms: float) -> None:
        """A topic waits for its next refresh."""
        bucket = int(refreshed_ms // self._width_ms)
        if bucket not in self._counts:
            self._in_order = self._in_order and (not self._counts or bucket > next(reversed(self._counts)))
            self._counts[bucket] = 0
        self._counts[bucket] += 1

    def left(self, refreshed_ms: float) -> None:
        """It does not any more: it is asked for, is urgent or is gone."""
        bucket = int(refreshed_ms // self._width_ms)
        self._counts[bucket] -= 1
        if not self._counts[bucket]:
            del self._counts[bucket]

    def asked(self, now_ms: float) -> None:
        """A request goes that is not urgent."""
        self._last_ms = now_ms

    def next_ms(self, target_topics: int, oldest_refreshed_ms: float) -> float:
        """When the next request of at most `target_topics` goes; in the past if it is late.

        With a request every d ms from the last one on (or from when the oldest topic is half aged), the one that asks
        for the last topic of each bucket has to go before that bucket's time is over: the largest such d is the pace.
        """
        if not self._in_order:
            self._counts = dict(sorted(self._counts.items()))
            self._in_order = True
        half_aged_ms = oldest_refreshed_ms + self._max_age_ms / 2
        begin_ms = max(self._last_ms, half_aged_ms)
        interval_ms = float("inf")
        topics = 0
        for bucket, count in self._counts.items():
            topics += count
            latest_ms = bucket * self._width_ms + self._max_age_ms - self._margin_ms
            interval_ms = min(interval_ms, (latest_ms - begin_ms) / -(-topics // target_topics))
        return max(begin_ms + interval_ms, half_aged_ms)
