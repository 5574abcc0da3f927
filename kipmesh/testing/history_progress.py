"""Progress in a history: how long nothing was acknowledged, and how long consumers waited for what was.

Both count while faults happen, too, but not in a halting window: from the beginning of a fault under which the
mesh may stand still (two of three replicas are gone, say) until some seconds after its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """A fault's time in s; `settle_s` is None where progress must go on, `until` while it lasts."""

    since: float
    until: float | None
    settle_s: float | None

    @property
    def end(self) -> float:
        """Until when nothing is asked for."""
        return float("inf") if self.until is None else self.until + (self.settle_s or 0.0)


class Acknowledged(NamedTuple):
    """One acknowledgement."""

    t: float
    offset: int


class Delay(NamedTuple):
    """The longest time from an acknowledgement at `t` to a read; `offset_unread` when there was none at all."""

    delay_s: float
    t: float
    offset_unread: int | None = None


class Progress:
    """Collects acknowledgements and reads."""

    def __init__(self) -> None:
        self._acknowledged: dict[int, list[Acknowledged]] = {}
        self._read: dict[tuple[str, int], dict[int, float]] = {}

    def acknowledged(self, partition: int, one: Acknowledged) -> None:
        """A write was acknowledged."""
        self._acknowledged.setdefault(partition, []).append(one)

    def read(self, reader: str, partition: int, t: float, offsets: Iterable[int]) -> None:
        """A consumer read these."""
        times = self._read.setdefault((reader, partition), {})
        for offset in offsets:
            times.setdefault(offset, t)

    def write_gaps(
        self, partitions: Iterable[int], since: float, until: float, windows: Sequence[Window]
    ) -> list[tuple[float, float]]:
        """For each partition the longest gap between `since` and `until` in s, and where it begins."""
        halts = _merged([(one.since, one.end) for one in windows if one.settle_s is not None])
        found = []
        for partition in partitions:
            times = [one.t for one in self._acknowledged.get(partition, ()) if since <= one.t <= until]
            edges = [since, *times, until]
            gaps = [
                (end - begin, begin) for left, right in pairwise(edges) for begin, end in _without(left, right, halts)
            ]
            found.append(max(gaps, key=lambda gap: gap[0], default=(0.0, since)))
        return found

    def read_delays(
        self,
        consumers: Iterable[str],
        partitions: Sequence[int],
        since: float,
        windows: Sequence[Window],
        end: float,
    ) -> list[tuple[str, int, Delay]]:
        """The longest delay of each consumer in each partition, of what was acknowledged after `since`."""
        halts = _merged([(one.since, one.end) for one in windows if one.settle_s is not None])
        found = []
        for reader in consumers:
            for partition in partitions:
                times = self._read.get((reader, partition), {})
                longest = Delay(0.0, since)
                for one in self._acknowledged.get(partition, ()):
                    seen = times.get(one.offset)
                    if seen is None:
                        longest = Delay(end - one.t, one.t, one.offset)
                        break
                    if one.t < since:
                        continue
                    waited = max((b - a for a, b in _without(one.t, seen, halts)), default=0.0)
                    if waited > longest.delay_s:
                        longest = Delay(waited, one.t)
                found.append((reader, partition, longest))
        return found


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((since, until))
    return merged


def _without(since: float, until: float, halts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of a span outside of these."""
    left = []
    for begin, end in halts:
        if end <= since:
            continue
        if begin >= until:
            break
        if begin > since:
            left.append((since, begin))
        since = max(since, end)
    if since < until:
        left.append((since, until))
    return left
