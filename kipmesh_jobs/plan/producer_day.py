"""Simulates a producer's metadata requests and checks its topic tracker (KIP-526).

`Day` drives a `TopicTracker` like a producer, with brokers that respond to metadata requests. It keeps a separate
model, derives T, U and the target from the rules, and compares them at each request and each scan. A violation raises
`DayError`, which has the seed.

- 526-01: a topic that was used within `metadata.evict.ms` or is pending is kept; all others are evicted.
- 526-02, 526-11: metadata is at most `metadata.max.age.ms` plus one round trip old, unless requests fail.
- 526-04 to 526-08: an urgent request has all of T that is not backing off, and as much of U as the target allows.
  Others have at most the target. The least recently refreshed of U come first. No other topic is requested.
- 526-09: at most one request is in flight, none is empty. An unresolved topic backs off alone, all topics after a
  failed request.
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
    """A rule of the topic tracker is violated. The message has the whole configuration, including the seed."""


@dataclass(frozen=True, slots=True)
class DayConfig:
    """Parameters of the simulation of one producer.

    `failing_share` is the share of metadata requests that fail, `missing_share` the share of topics that do not exist.
    `moves_per_s` is the rate of leader changes, `rtt_ms` the range of round trips. `pattern` is the order of topics:
    see `uses`.
    """

    pattern: Pattern = "uniform"
    mode: RefreshMode = "paced"
    topics: int = 1000
    duration_s: int = 3600
    quiet_s: int = 0
    """Time without records at the end."""
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
    """Metadata requests, and topics in them, by index of the 10 s window, and other statistics of a simulation.

    `oldest_ms` is the greatest age of metadata at a refresh, `cached_most` the greatest number of topics with metadata.
    """

    requests: Counter[int] = field(default_factory=Counter)
    topics: Counter[int] = field(default_factory=Counter)
    oldest_ms: float = 0.0
    records: int = 0
    polls: int = 0
    cached_most: int = 0
    idle_shortest_ms: float = 0.0
    """Shortest time from last use to eviction; 0 without evictions."""
    idle_longest_ms: float = 0.0
    metrics: TrackerMetrics = field(default_factory=TrackerMetrics)


def uses(config: DayConfig, rng: random.Random) -> Iterator[tuple[float, int]]:
    """Yield (time in ms, topic number) of each record in order of time, without the `quiet_s` at the end.

    - `uniform`, `zipf`: random times, topics equally likely or with weight 1 / rank^1.1.
    - `bursts`: all topics in the first 5 s, then a tenth of them in 5 s every ten minutes.
    - `idle`: one record to each topic in the first 5 s.
    - `steady`: all topics in the first millisecond, then round robin.
    """
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
            # All topics at the start, then round robin.
            for number in range(many):
                yield number / many, number
            for round_ in range(int((end_ms - 1000) * config.records_per_s / 1000)):
                yield 1000 + round_ * 1000 / config.records_per_s, round_ % many


class _Model:
    """Independent model of the tracker's state, by topic: last refresh and use, pending records, stale metadata, and
    the end of the backoff.
    """

    def __init__(self) -> None:
        self.refreshed: dict[str, float] = {}
        self.used: dict[str, float] = {}
        self.waiting: set[str] = set()
        self.stale: set[str] = set()
        self.retry: dict[str, float] = {}

    def urgent_now(self, name: str, now_ms: float, max_age_ms: float) -> bool:
        """Whether a topic must be refreshed now (set T of 526-04) and is not backing off."""
        if self.retry.get(name, 0.0) > now_ms:
            return False
        if name not in self.refreshed:
            return name in self.waiting
        return name in self.stale or self.refreshed[name] + max_age_ms <= now_ms

    def aged(self, name: str, now_ms: float, max_age_ms: float) -> bool:
        """Whether a topic may be refreshed now (set U of 526-05: older than half the maximum age) and is not backing
        off.
        """
        refreshed_ms = self.refreshed.get(name)
        if refreshed_ms is None or name in self.stale or self.retry.get(name, 0.0) > now_ms:
            return False
        return refreshed_ms + max_age_ms / 2 <= now_ms < refreshed_ms + max_age_ms


class Day:
    """Simulation of one producer. `run` may be called once."""

    def __init__(self, config: DayConfig) -> None:
        self.config = config
        self.result = DayResult()
        self._rng = random.Random(config.seed)
        tracker_config = TrackerConfig(
            config.max_age_ms, config.evict_ms, 100, lambda attempts: min(100 * 2 ** (attempts - 1), 1000), config.mode
        )
        self._tracker_config = tracker_config
        self._tracker = TopicTracker(tracker_config)
        self._model = _Model()
        self._names = [f"t{number}" for number in range(config.topics)]
        self._missing = set(self._rng.sample(self._names, int(config.topics * config.missing_share)))
        self._request: RefreshRequest | None = None
        self._stale_since_request: set[str] = set()
        self._rtt_ms = 0.0
        self._not_before_ms = 0.0
        self._wake_ms: float | None = None
        self._events: list[tuple[float, int, str]] = []
        self._number = 0

    def run(self) -> DayResult:
        """Run the simulation and return its statistics. Raises DayError at the first violated rule."""
        end_ms = self.config.duration_s * 1000.0
        records = uses(self.config, self._rng)
        record = next(records, None)
        self._schedule(self.config.scan_every_ms, "scan")
        if self.config.moves_per_s:
            self._schedule(1000 / self.config.moves_per_s, "move")
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

    def _schedule(self, when_ms: float, event: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_ms, self._number, event))

    def _event(self, now_ms: float, event: str) -> None:
        match event:
            case "response":
                self._respond(now_ms)
            case "scan":
                self._scan(now_ms)
                self._schedule(now_ms + self.config.scan_every_ms, "scan")
            case "move":
                self._move(now_ms)
                self._schedule(now_ms + 1000 / self.config.moves_per_s, "move")
            case name:
                self._give_up(now_ms, name)

    # -- the producer

    def _use(self, now_ms: float, name: str) -> None:
        """Send a record to a topic. It counts as delivered immediately if the topic has metadata, otherwise it is
        pending. Raises DayError if the metadata is too old.
        """
        self.result.records += 1
        model = self._model
        if name in model.refreshed:
            model.used[name] = now_ms
            self._tracker.hold(name, now_ms)
            self._tracker.release(name, now_ms)
            if model.refreshed[name] + self.config.max_age_ms + self._slack_ms() < now_ms:
                raise self._broken(f"{name} is used {now_ms - model.refreshed[name]:.0f} ms after its refresh")
        elif name not in model.waiting:
            model.waiting.add(name)
            self._tracker.hold(name, now_ms)
            self._poll(now_ms)
            if name in self._missing:
                self._schedule(now_ms + self.config.max_block_ms, name)

    def _give_up(self, now_ms: float, name: str) -> None:
        """Expire the record of a missing topic that was pending for `max.block.ms`."""
        self._model.waiting.discard(name)
        self._tracker.release(name, now_ms)
        self._poll(now_ms)

    def _move(self, now_ms: float) -> None:
        """Mark the metadata of a random topic as stale, as if a record found that its leader has moved. Does nothing if
        the topic has no metadata.
        """
        name = self._rng.choice(self._names)
        if name in self._model.refreshed:
            self._mark_stale(now_ms, name)
            self._poll(now_ms)

    def _mark_stale(self, now_ms: float, name: str) -> None:
        model = self._model
        self._tracker.changed(name, now_ms)
        if self._request is not None and name in self._request.topics:
            self._stale_since_request.add(name)
        elif name not in model.stale:
            if model.refreshed[name] + self.config.max_age_ms > now_ms:
                model.retry[name] = max(model.retry.get(name, 0.0), model.refreshed[name] + 100)
            model.stale.add(name)

    def _poll(self, now_ms: float) -> None:
        step = self._tracker.poll(now_ms)
        self.result.polls += 1
        self._wake_ms = step.wait_until_ms
        for name in step.forgotten:
            self._forget(now_ms, name)
        if step.request is not None:
            self._check_request(now_ms, step.request)
            self._request = step.request
            self._stale_since_request = set()
            self._rtt_ms = self._rng.uniform(*self.config.rtt_ms)
            self._schedule(now_ms + self._rtt_ms, "response")
            window = int(now_ms // WINDOW_MS)
            self.result.requests[window] += 1
            self.result.topics[window] += len(step.request.topics)
        elif self._wake_ms is not None and self._wake_ms <= now_ms:
            raise self._broken(f"no work at {now_ms}, but the wake-up time is {self._wake_ms}")

    def _forget(self, now_ms: float, name: str) -> None:
        model = self._model
        if name in model.waiting:
            raise self._broken(f"{name} is evicted while a record is pending")
        if name in model.refreshed and model.used[name] + self.config.evict_ms > now_ms:
            raise self._broken(f"{name} is evicted {now_ms - model.used[name]:.0f} ms after its last use")
        if name in model.refreshed:
            idle_ms, result = now_ms - model.used[name], self.result
            result.idle_shortest_ms = min(result.idle_shortest_ms or idle_ms, idle_ms)
            result.idle_longest_ms = max(result.idle_longest_ms, idle_ms)
        for known in (model.refreshed, model.used, model.retry):
            known.pop(name, None)
        model.stale.discard(name)

    def _respond(self, now_ms: float) -> None:
        request, model = self._request, self._model
        assert request is not None
        self._request = None
        if self._rng.random() < self.config.failing_share:
            self._tracker.failed(now_ms)
            self._not_before_ms = now_ms + 100
            model.stale |= {name for name in self._stale_since_request if name in model.refreshed}
            self._poll(now_ms)
            return
        resolved = {name for name in request.topics if name not in self._missing}
        self._tracker.completed(now_ms, resolved, set(request.topics) - resolved)
        for name in request.topics:
            if name not in resolved:
                attempts = max(self._tracker.attempts(name), 1)
                model.retry[name] = now_ms + min(100 * 2 ** (attempts - 1), 1000)
            elif self._tracker.place(name) is not None:
                self._refreshed(now_ms, name)
        self.result.cached_most = max(self.result.cached_most, len(model.refreshed))
        self._poll(now_ms)

    def _refreshed(self, now_ms: float, name: str) -> None:
        model = self._model
        if name in model.refreshed:
            age_ms = now_ms - model.refreshed[name]
            self.result.oldest_ms = max(self.result.oldest_ms, age_ms)
            if not self.config.failing_share and age_ms > self.config.max_age_ms + self._slack_ms():
                raise self._broken(f"{name} was {age_ms:.0f} ms old")
        model.refreshed[name] = now_ms
        model.retry.pop(name, None)
        model.stale.discard(name)
        if name in self._stale_since_request:
            model.stale.add(name)
            model.retry[name] = now_ms + 100
        if name in model.waiting:
            model.waiting.discard(name)
            model.used[name] = now_ms
            self._tracker.release(name, now_ms)

    def _slack_ms(self) -> float:
        """Return by how many ms metadata may exceed its maximum age: one round trip in mode `paced`, two in other
        modes, where an urgent topic also waits for the current request. Infinity if requests may fail.
        """
        if self.config.failing_share:
            return float("inf")
        return self._rtt_ms if self.config.mode == "paced" else 2 * self.config.rtt_ms[1]

    # -- checks

    def _broken(self, what: str) -> DayError:
        return DayError(f"{what}; {self.config}")

    def _check_request(self, now_ms: float, request: RefreshRequest) -> None:
        model, config = self._model, self.config
        if self._request is not None:
            raise self._broken(f"two requests are in flight at {now_ms:.0f}")
        if now_ms < self._not_before_ms:
            raise self._broken(f"a request at {now_ms:.0f} ignores the backoff after a failed request")
        if not request.topics or len(set(request.topics)) < len(request.topics):
            raise self._broken(f"a request at {now_ms:.0f} has no topic or a duplicate topic")
        urgent, others = request.topics[: request.urgent_topics], request.topics[request.urgent_topics :]
        if config.mode == "all":
            if not urgent or set(request.topics) < model.refreshed.keys():
                raise self._broken("a request in mode all must have all topics")
            return
        for name in urgent:
            if not model.urgent_now(name, now_ms, config.max_age_ms):
                raise self._broken(f"{name} is requested at {now_ms:.0f} but not in T")
        for name in others:
            if not model.aged(name, now_ms, config.max_age_ms):
                raise self._broken(f"{name} is requested at {now_ms:.0f} but not in U")
        target = self._tracker_config.target_topics(len(model.refreshed))
        if len(others) > max(target - len(urgent), 0):
            raise self._broken(f"{len(urgent)} urgent and {len(others)} other topics exceed the target {target}")
        if config.mode == "literal" and not urgent and len(others) != target:
            raise self._broken(f"{len(others)} topics at {now_ms:.0f}, but the target is {target}")
        if urgent and not model.waiting <= set(urgent):
            late = {name for name in model.waiting - set(urgent) if model.urgent_now(name, now_ms, config.max_age_ms)}
            if late:
                raise self._broken(f"{sorted(late)[:3]} are in T but not requested at {now_ms:.0f}")

    def _scan(self, now_ms: float) -> None:
        """Run due work of the tracker, then compare its whole state with the model. Raises DayError if they differ."""
        model, config = self._model, self.config
        self._poll(now_ms)  # run the work that is due
        requested = set(self._request.topics) if self._request is not None else set()
        for name, used_ms in model.used.items():
            if name not in model.waiting and name in model.refreshed and used_ms + config.evict_ms <= now_ms:
                raise self._broken(f"{name} is not evicted at {now_ms:.0f}, {now_ms - used_ms:.0f} ms after its use")
        if self._request is None and now_ms >= self._not_before_ms:
            every = model.waiting | model.refreshed.keys()
            late = [name for name in every if model.urgent_now(name, now_ms, config.max_age_ms)]
            if late:
                raise self._broken(f"{sorted(late)[:3]} are in T at {now_ms:.0f}, but there is no request")
        if requested and config.mode != "all":
            self._check_oldest(now_ms, requested)
        metrics = self._tracker.metrics()
        if metrics.cached_topics != len(model.refreshed):
            raise self._broken(f"{metrics.cached_topics} topics are cached, the model has {len(model.refreshed)}")

    def _check_oldest(self, now_ms: float, requested: set[str]) -> None:
        """Raise DayError if a topic of set U was not requested although its last refresh is older than a requested
        topic's.
        """
        assert self._request is not None
        others = self._request.topics[self._request.urgent_topics :]
        youngest_ms = max((self._model.refreshed.get(name, 0.0) for name in others), default=None)
        if youngest_ms is None:
            return
        for name, refreshed_ms in self._model.refreshed.items():
            if (
                refreshed_ms < youngest_ms
                and name not in requested
                and self._model.aged(name, now_ms, self.config.max_age_ms)
            ):
                raise self._broken(f"{name} is older than the requested topics at {now_ms:.0f}")
