"""A producer's day in simulated time: records for many topics, brokers that answer metadata, and a second bookkeeping.

`Day` drives a `TopicTracker` (KIP-526) as a producer would and keeps its own plain books, from which it works out T, U
and the target as the rules say them, and compares: each request when it is made, everything at each scan. A broken
invariant raises `DayError`, which names the seed. What it checks:

- 526-01: nothing that was used within `metadata.evict.ms` or that waits is forgotten; everything else is.
- 526-02, 526-11: no metadata gets older than `metadata.max.age.ms` plus one round trip, unless requests fail.
- 526-04 to 526-08: an urgent request has all of T that is not backing off, and no more of U than the target leaves
  room for; another has at most the target; each takes the least recently refreshed of U; nothing is outside T and U.
- 526-09: one request is under way; none is empty; a topic that was not resolved waits by itself, and all wait after a
  request that failed.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from kipmesh.core.producer import RefreshMode, RefreshRequest, TopicTracker, TrackerConfig, TrackerMetrics

Pattern = Literal["uniform", "zipf", "bursts", "idle", "steady"]

WINDOW_MS = 10_000


class DayError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class DayConfig:
    """What happens. Rates are a second of simulated time; shares are of requests and of topics."""

    pattern: Pattern = "uniform"
    mode: RefreshMode = "paced"
    topics: int = 1000
    duration_s: int = 3600
    quiet_s: int = 0
    """The last of it, without records."""
    records_per_s: float = 100.0
    seed: int = 1
    rtt_ms: tuple[int, int] = (2, 30)
    max_age_ms: int = 300_000
    evict_ms: int = 300_000
    max_block_ms: int = 60_000
    failing_share: float = 0.0
    missing_share: float = 0.0
    moves_per_s: float = 0.0
    scan_every_ms: int = 60_000


@dataclass(slots=True)
class DayResult:
    """Counts, of requests and their topics by window of ten seconds, and the oldest metadata that was refreshed."""

    requests: Counter[int] = field(default_factory=Counter)
    topics: Counter[int] = field(default_factory=Counter)
    oldest_ms: float = 0.0
    records: int = 0
    polls: int = 0
    cached_most: int = 0
    idle_shortest_ms: float = 0.0
    """Of topics that were evicted, from their last use on; 0 when none was."""
    idle_longest_ms: float = 0.0
    metrics: TrackerMetrics = field(default_factory=TrackerMetrics)


def uses(config: DayConfig, rng: random.Random) -> Iterator[tuple[float, int]]:
    """(ms, topic) of each record, in order of time."""
    end_ms = (config.duration_s - config.quiet_s) * 1000
    many = config.topics
    match config.pattern:
        case "uniform" | "zipf":
            heavy = list(accumulate(1 / (rank + 1) ** 1.1 for rank in range(many)))
            now_ms = 0.0
            while (now_ms := now_ms + rng.expovariate(config.records_per_s / 1000)) < end_ms:
                if config.pattern == "uniform":
                    yield now_ms, rng.randrange(many)
                else:
                    yield now_ms, min(bisect_left(heavy, rng.random() * heavy[-1]), many - 1)
        case "bursts":
            for begin_ms in range(0, end_ms, 600_000):
                first, count = (0, many) if begin_ms == 0 else (rng.randrange(many), max(many // 10, 1))
                for number in range(count):
                    yield begin_ms + number * 5000 / count, (first + number) % many
        case "idle":
            for number in range(many):
                yield number * 5000 / many, number
        case "steady":
            # All at once at the start, then each in turn.
            for number in range(many):
                yield number / many, number
            for turn in range(int((end_ms - 1000) * config.records_per_s / 1000)):
                yield 1000 + turn * 1000 / config.records_per_s, turn % many


class _Books:
    """The second bookkeeping, in plain dictionaries."""

    def __init__(self) -> None:
        self.refreshed: dict[str, float] = {}
        self.used: dict[str, float] = {}
        self.waiting: set[str] = set()
        self.told: set[str] = set()
        self.retry: dict[str, float] = {}

    def urgent_now(self, name: str, now_ms: float, max_age_ms: float) -> bool:
        """526-04, of a topic that is not backing off."""
        if self.retry.get(name, 0.0) > now_ms:
            return False
        if name not in self.refreshed:
            return name in self.waiting
        return name in self.told or self.refreshed[name] + max_age_ms <= now_ms

    def aged(self, name: str, now_ms: float, max_age_ms: float) -> bool:
        """526-05, of a topic that is not backing off either."""
        refreshed_ms = self.refreshed.get(name)
        if refreshed_ms is None or name in self.told or self.retry.get(name, 0.0) > now_ms:
            return False
        return refreshed_ms + max_age_ms / 2 <= now_ms < refreshed_ms + max_age_ms


class Day:
    """See the module; `run` once."""

    def __init__(self, config: DayConfig) -> None:
        self.config = config
        self.result = DayResult()
        self._rng = random.Random(config.seed)
        tracker_config = TrackerConfig(
            config.max_age_ms, config.evict_ms, 100, lambda attempts: min(100 * 2 ** (attempts - 1), 1000), config.mode
        )
        self._tracker_config = tracker_config
        self._tracker = TopicTracker(tracker_config)
        self._books = _Books()
        self._names = [f"t{number}" for number in range(config.topics)]
        self._missing = set(self._rng.sample(self._names, int(config.topics * config.missing_share)))
        self._request: RefreshRequest | None = None
        self._told_meanwhile: set[str] = set()
        self._rtt_ms = 0.0
        self._not_before_ms = 0.0
        self._wake_ms: float | None = None
        self._events: list[tuple[float, int, str]] = []
        self._number = 0

    def run(self) -> DayResult:
        """Live through it; raises DayError."""
        end_ms = self.config.duration_s * 1000.0
        records = uses(self.config, self._rng)
        record = next(records, None)
        self._at(self.config.scan_every_ms, "scan")
        if self.config.moves_per_s:
            self._at(1000 / self.config.moves_per_s, "move")
        while True:
            times = [self._events[0][0]] if self._events else []
            if record is not None:
                times.append(record[0])
            if self._wake_ms is not None:
                times.append(self._wake_ms)
            now_ms = min(times, default=end_ms)
            if now_ms >= end_ms:
                break
            if record is not None and record[0] == now_ms:
                self._use(now_ms, self._names[record[1]])
                record = next(records, None)
            elif self._events and self._events[0][0] == now_ms:
                self._event(now_ms, heapq.heappop(self._events)[2])
            else:
                self._poll(now_ms)
        self._scan(end_ms)
        self.result.metrics = self._tracker.metrics()
        return self.result

    def _at(self, when_ms: float, event: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_ms, self._number, event))

    def _event(self, now_ms: float, event: str) -> None:
        match event:
            case "answer":
                self._answer(now_ms)
            case "scan":
                self._scan(now_ms)
                self._at(now_ms + self.config.scan_every_ms, "scan")
            case "move":
                self._move(now_ms)
                self._at(now_ms + 1000 / self.config.moves_per_s, "move")
            case name:
                self._give_up(now_ms, name)

    # -- the producer

    def _use(self, now_ms: float, name: str) -> None:
        """A record: delivered at once if the metadata is there, otherwise it waits."""
        self.result.records += 1
        books = self._books
        if name in books.refreshed:
            books.used[name] = now_ms
            self._tracker.hold(name, now_ms)
            self._tracker.release(name, now_ms)
            if books.refreshed[name] + self.config.max_age_ms + self._slack_ms() < now_ms:
                raise self._broken(f"{name} is used {now_ms - books.refreshed[name]:.0f} ms after its refresh")
        elif name not in books.waiting:
            books.waiting.add(name)
            self._tracker.hold(name, now_ms)
            self._poll(now_ms)
            if name in self._missing:
                self._at(now_ms + self.config.max_block_ms, name)

    def _give_up(self, now_ms: float, name: str) -> None:
        """A record has waited for `max.block.ms`."""
        self._books.waiting.discard(name)
        self._tracker.release(name, now_ms)
        self._poll(now_ms)

    def _move(self, now_ms: float) -> None:
        """A leader moves, and a record finds out."""
        name = self._rng.choice(self._names)
        if name in self._books.refreshed:
            self._tell(now_ms, name)
            self._poll(now_ms)

    def _tell(self, now_ms: float, name: str) -> None:
        books = self._books
        self._tracker.changed(name, now_ms)
        if self._request is not None and name in self._request.topics:
            self._told_meanwhile.add(name)
        elif name not in books.told:
            if books.refreshed[name] + self.config.max_age_ms > now_ms:
                books.retry[name] = max(books.retry.get(name, 0.0), books.refreshed[name] + 100)
            books.told.add(name)

    def _poll(self, now_ms: float) -> None:
        step = self._tracker.poll(now_ms)
        self.result.polls += 1
        self._wake_ms = step.wait_until_ms
        for name in step.forgotten:
            self._forget(now_ms, name)
        if step.request is not None:
            self._check_request(now_ms, step.request)
            self._request = step.request
            self._told_meanwhile = set()
            self._rtt_ms = self._rng.uniform(*self.config.rtt_ms)
            self._at(now_ms + self._rtt_ms, "answer")
            window = int(now_ms // WINDOW_MS)
            self.result.requests[window] += 1
            self.result.topics[window] += len(step.request.topics)
        elif self._wake_ms is not None and self._wake_ms <= now_ms:
            raise self._broken(f"nothing to do at {now_ms}, and to be woken at {self._wake_ms}")

    def _forget(self, now_ms: float, name: str) -> None:
        books = self._books
        if name in books.waiting:
            raise self._broken(f"{name} is forgotten while a record waits for it")
        if name in books.refreshed and books.used[name] + self.config.evict_ms > now_ms:
            raise self._broken(f"{name} is evicted {now_ms - books.used[name]:.0f} ms after its last use")
        if name in books.refreshed:
            idle_ms, result = now_ms - books.used[name], self.result
            result.idle_shortest_ms = min(result.idle_shortest_ms or idle_ms, idle_ms)
            result.idle_longest_ms = max(result.idle_longest_ms, idle_ms)
        for known in (books.refreshed, books.used, books.retry):
            known.pop(name, None)
        books.told.discard(name)

    def _answer(self, now_ms: float) -> None:
        request, books = self._request, self._books
        assert request is not None
        self._request = None
        if self._rng.random() < self.config.failing_share:
            self._tracker.failed(now_ms)
            self._not_before_ms = now_ms + 100
            books.told |= {name for name in self._told_meanwhile if name in books.refreshed}
            self._poll(now_ms)
            return
        resolved = {name for name in request.topics if name not in self._missing}
        self._tracker.completed(now_ms, resolved, set(request.topics) - resolved)
        for name in request.topics:
            if name not in resolved:
                attempts = max(self._tracker.attempts(name), 1)
                books.retry[name] = now_ms + min(100 * 2 ** (attempts - 1), 1000)
            elif self._tracker.place(name) is not None:
                self._refreshed(now_ms, name)
        self.result.cached_most = max(self.result.cached_most, len(books.refreshed))
        self._poll(now_ms)

    def _refreshed(self, now_ms: float, name: str) -> None:
        books = self._books
        if name in books.refreshed:
            age_ms = now_ms - books.refreshed[name]
            self.result.oldest_ms = max(self.result.oldest_ms, age_ms)
            if not self.config.failing_share and age_ms > self.config.max_age_ms + self._slack_ms():
                raise self._broken(f"{name} was {age_ms:.0f} ms old")
        books.refreshed[name] = now_ms
        books.retry.pop(name, None)
        books.told.discard(name)
        if name in self._told_meanwhile:
            books.told.add(name)
            books.retry[name] = now_ms + 100
        if name in books.waiting:
            books.waiting.discard(name)
            books.used[name] = now_ms
            self._tracker.release(name, now_ms)

    def _slack_ms(self) -> float:
        """One round trip under pacing. Literally, what turns urgent during a request waits for that one, too."""
        if self.config.failing_share:
            return float("inf")
        return self._rtt_ms if self.config.mode == "paced" else 2 * self.config.rtt_ms[1]

    # -- checks

    def _broken(self, what: str) -> DayError:
        return DayError(f"{what}; {self.config}")

    def _check_request(self, now_ms: float, request: RefreshRequest) -> None:
        books, config = self._books, self.config
        if self._request is not None:
            raise self._broken(f"two requests are under way at {now_ms:.0f}")
        if now_ms < self._not_before_ms:
            raise self._broken(f"a request at {now_ms:.0f}, too soon after one that failed")
        if not request.topics or len(set(request.topics)) < len(request.topics):
            raise self._broken(f"no topic, or one twice, at {now_ms:.0f}")
        urgent, others = request.topics[: request.urgent_topics], request.topics[request.urgent_topics :]
        if config.mode == "all":
            if not urgent or set(request.topics) < books.refreshed.keys():
                raise self._broken("mode all asks for all")
            return
        for name in urgent:
            if not books.urgent_now(name, now_ms, config.max_age_ms):
                raise self._broken(f"{name} is asked for at {now_ms:.0f} and is not in T")
        for name in others:
            if not books.aged(name, now_ms, config.max_age_ms):
                raise self._broken(f"{name} is asked for at {now_ms:.0f} and is not in U")
        target = self._tracker_config.target_topics(len(books.refreshed))
        if len(others) > max(target - len(urgent), 0):
            raise self._broken(f"{len(urgent)} urgent and {len(others)} other topics, and the target is {target}")
        if config.mode == "literal" and not urgent and len(others) != target:
            raise self._broken(f"{len(others)} topics at {now_ms:.0f}, and the target is {target}")
        if urgent and not books.waiting <= set(urgent):
            late = {name for name in books.waiting - set(urgent) if books.urgent_now(name, now_ms, config.max_age_ms)}
            if late:
                raise self._broken(f"{sorted(late)[:3]} are in T and not asked for at {now_ms:.0f}")

    def _scan(self, now_ms: float) -> None:
        """Everything, by the books."""
        books, config = self._books, self.config
        self._poll(now_ms)  # what is due now is done now
        asked = set(self._request.topics) if self._request is not None else set()
        for name, used_ms in books.used.items():
            if name not in books.waiting and name in books.refreshed and used_ms + config.evict_ms <= now_ms:
                raise self._broken(f"{name} is not evicted at {now_ms:.0f}, {now_ms - used_ms:.0f} ms after its use")
        if self._request is None and now_ms >= self._not_before_ms:
            every = books.waiting | books.refreshed.keys()
            late = [name for name in every if books.urgent_now(name, now_ms, config.max_age_ms)]
            if late:
                raise self._broken(f"{sorted(late)[:3]} are in T at {now_ms:.0f}, and no request goes")
        if asked and config.mode != "all":
            self._check_oldest(now_ms, asked)
        metrics = self._tracker.metrics()
        if metrics.cached_topics != len(books.refreshed):
            raise self._broken(f"{metrics.cached_topics} topics are cached, and by the books {len(books.refreshed)}")

    def _check_oldest(self, now_ms: float, asked: set[str]) -> None:
        """Of U the least recently refreshed were asked for; what turned U since then is younger."""
        assert self._request is not None
        others = self._request.topics[self._request.urgent_topics :]
        youngest_ms = max((self._books.refreshed.get(name, 0.0) for name in others), default=None)
        if youngest_ms is None:
            return
        for name, refreshed_ms in self._books.refreshed.items():
            if (
                refreshed_ms < youngest_ms
                and name not in asked
                and self._books.aged(name, now_ms, self.config.max_age_ms)
            ):
                raise self._broken(f"{name} is older than what was asked for, at {now_ms:.0f}")
