"""Model test of TopicTracker: an oracle recomputes the sets T and U, the target and evictions at each step."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kipmesh.core.producer import RefreshMode, RefreshRequest, TopicTracker, TrackerConfig

MAX_AGE_MS = 100_000
RETRY_MS = 100
NAMES = [f"t{number:02}" for number in range(60)]
MANY = st.builds(lambda first, count: NAMES[first : first + count], st.integers(0, 59), st.sampled_from([1, 5, 60]))


@dataclass
class OracleTopic:
    """The oracle's state of one topic."""

    refreshed_ms: int | None = None
    holds: int = 0
    used_ms: int = 0
    is_changed: bool = False
    retry_ms: int = 0
    attempts: int = 0


class Oracle:
    """The rules, applied to all topics at each step."""

    def __init__(self, mode: RefreshMode, evict_ms: int) -> None:
        self.mode = mode
        self.evict_ms = evict_ms
        self.topics: dict[str, OracleTopic] = {}
        self.in_flight: RefreshRequest | None = None
        self.changed_before: set[str] = set()
        self.changed_in_flight: set[str] = set()
        self.evicted_in_flight: set[str] = set()
        """Evicted since the request in flight. A topic with that name counts as new."""
        self.not_before_ms = 0

    def cached(self) -> list[str]:
        return [name for name, topic in self.topics.items() if topic.refreshed_ms is not None]

    def target(self) -> int:
        return max(ceil(10 * len(self.cached()) / (MAX_AGE_MS / 1000)), 20)

    def urgent(self, now_ms: int) -> set[str]:
        """Return T without topics in backoff."""
        found = set()
        for name, topic in self.topics.items():
            without = topic.refreshed_ms is None and topic.holds > 0
            old = topic.refreshed_ms is not None and now_ms - topic.refreshed_ms >= MAX_AGE_MS
            if (without or topic.is_changed or old) and topic.retry_ms <= now_ms:
                found.add(name)
        return found

    def others(self, now_ms: int) -> set[str]:
        """Return U."""
        urgent = self.urgent(now_ms)
        found = set()
        for name, topic in self.topics.items():
            half_aged = topic.refreshed_ms is not None and now_ms - topic.refreshed_ms >= MAX_AGE_MS / 2
            if half_aged and name not in urgent and topic.retry_ms <= now_ms:
                found.add(name)
        return found

    def forgotten(self, now_ms: int) -> set[str]:
        in_flight = set(self.in_flight.topics) - self.evicted_in_flight if self.in_flight is not None else set()
        found = set()
        for name, topic in self.topics.items():
            if topic.holds:
                continue
            if topic.refreshed_ms is None:
                if topic.retry_ms <= now_ms and name not in in_flight:
                    found.add(name)
            elif now_ms - topic.used_ms >= self.evict_ms:
                found.add(name)
        return found

    def ages(self, names: set[str]) -> list[int]:
        return sorted(topic.refreshed_ms for name in names if (topic := self.topics[name]).refreshed_ms is not None)


class Model(RuleBasedStateMachine):
    """Random events. The tracker is polled after each, as by the producer."""

    @initialize(
        mode=st.sampled_from(["paced", "literal", "all"]),
        evict_ms=st.sampled_from([30_000, 250_000]),
        groups=st.sampled_from([0, 1, 3]),
        held=st.booleans(),
    )
    def begin(self, mode: RefreshMode, evict_ms: int, groups: int, held: bool) -> None:
        self.now_ms = 1
        self.oracle = Oracle(mode, evict_ms)
        self.tracker = TopicTracker(TrackerConfig(MAX_AGE_MS, evict_ms, RETRY_MS, lambda count: RETRY_MS * count, mode))
        self.wait_until_ms: float | None = None
        for first in range(groups):
            names = NAMES[first::3]
            self.hold(names)
            self.complete(set(), False, 3)
            if not held:
                self.release(names)
            self.advance(5_000, 5)

    def poll(self) -> None:
        oracle, now_ms = self.oracle, self.now_ms
        forgotten = oracle.forgotten(now_ms)
        for name in forgotten:
            del oracle.topics[name]
        oracle.evicted_in_flight |= forgotten
        step = self.tracker.poll(now_ms)
        assert set(step.forgotten) == forgotten
        if step.request is not None:
            assert oracle.in_flight is None
            assert now_ms >= oracle.not_before_ms
        if oracle.in_flight is None and now_ms >= oracle.not_before_ms:
            self.compare(step.request)
        if step.request is not None:
            oracle.in_flight = step.request
            oracle.changed_in_flight = set()
            oracle.evicted_in_flight = set()
            oracle.changed_before = {name for name in step.request.topics if oracle.topics[name].is_changed}
            for name in step.request.topics:
                oracle.topics[name].is_changed = False
        else:
            assert step.wait_until_ms is None or step.wait_until_ms > now_ms
        self.wait_until_ms = step.wait_until_ms

    def compare(self, request: RefreshRequest | None) -> None:
        oracle, now_ms = self.oracle, self.now_ms
        urgent, others, target = oracle.urgent(now_ms), oracle.others(now_ms), oracle.target()
        if not urgent and oracle.mode == "all":
            assert request is None
        elif oracle.mode == "all":
            assert request is not None
            wanted = {name for name, topic in oracle.topics.items() if topic.refreshed_ms is not None or topic.holds}
            assert set(request.topics) == wanted
        elif urgent:
            assert request is not None
            assert set(request.topics[: request.urgent_topics]) == urgent
            self.compare_others(request, others, min(len(others), max(target - len(urgent), 0)))
        elif request is not None:
            assert request.urgent_topics == 0
            self.compare_others(request, others, min(len(others), target))
            assert oracle.mode == "paced" or len(others) >= target
        else:
            assert oracle.mode == "paced" or len(others) < target

    def compare_others(self, request: RefreshRequest, others: set[str], count: int) -> None:
        """Check that the request contains the `count` least recently refreshed topics of U."""
        in_flight = request.topics[request.urgent_topics :]
        assert len(in_flight) == len(set(in_flight)) == count
        assert set(in_flight) <= others
        assert self.oracle.ages(set(in_flight)) == self.oracle.ages(others)[:count]

    @rule(names=MANY)
    def hold(self, names: list[str]) -> None:
        for name in names:
            topic = self.oracle.topics.setdefault(name, OracleTopic())
            topic.holds += 1
            topic.used_ms = self.now_ms
            self.tracker.hold(name, self.now_ms)
        self.poll()

    @rule(names=MANY)
    def release(self, names: list[str]) -> None:
        for name in names:
            topic = self.oracle.topics.get(name)
            if topic is not None and topic.holds:
                topic.holds -= 1
                topic.used_ms = self.now_ms
                self.tracker.release(name, self.now_ms)
        self.poll()

    @rule(name=st.sampled_from(NAMES))
    def changed(self, name: str) -> None:
        oracle, topic = self.oracle, self.oracle.topics.get(name)
        if topic is not None and topic.refreshed_ms is not None and not topic.is_changed:
            topic.is_changed = True
            if oracle.in_flight is not None and name in oracle.in_flight.topics:
                oracle.changed_in_flight.add(name)
            if self.now_ms - topic.refreshed_ms < MAX_AGE_MS:
                topic.retry_ms = max(topic.retry_ms, topic.refreshed_ms + RETRY_MS)
        self.tracker.changed(name, self.now_ms)
        self.poll()

    @rule(ms=st.sampled_from([1, 50, 100, 700, 5_000, 20_000, 40_000, 50_000, 99_999]), part=st.integers(1, 9))
    def advance(self, ms: int, part: int) -> None:
        before = self.now_ms + ms * part // 10
        due = float("inf") if self.wait_until_ms is None else self.wait_until_ms
        if self.now_ms < before < due:
            # No topic is due before the tracker's wait_until_ms.
            oracle = self.oracle
            assert not any(oracle.topics[name].refreshed_ms is not None for name in oracle.forgotten(before))
            if oracle.in_flight is None and before >= oracle.not_before_ms:
                assert not oracle.urgent(before)
                assert oracle.mode != "literal" or len(oracle.others(before)) < oracle.target()
        self.now_ms += ms
        self.poll()

    @precondition(lambda self: self.oracle.in_flight is not None)
    @rule(missing=st.one_of(st.just(set()), st.builds(set, MANY)), lost=st.booleans(), ms=st.sampled_from([0, 3, 40]))
    def complete(self, missing: set[str], lost: bool, ms: int) -> None:
        self.now_ms += ms
        oracle, request = self.oracle, self.oracle.in_flight
        assert request is not None
        oracle.in_flight = None
        for name in request.topics:
            topic = oracle.topics.get(name)
            if topic is None:
                continue
            if name in missing:
                topic.attempts += 1
                topic.retry_ms = self.now_ms + RETRY_MS * topic.attempts
                if lost:
                    topic.refreshed_ms = None
                topic.is_changed = topic.refreshed_ms is not None
                continue
            if topic.refreshed_ms is None and not topic.holds:
                topic.used_ms = self.now_ms
            topic.is_changed = name in oracle.changed_in_flight and topic.refreshed_ms is not None
            topic.retry_ms = self.now_ms + RETRY_MS if topic.is_changed else 0
            topic.refreshed_ms, topic.attempts = self.now_ms, 0
        resolved = set(request.topics) - missing
        self.tracker.completed(self.now_ms, resolved, missing if lost else set())
        self.poll()

    @precondition(lambda self: self.oracle.in_flight is not None)
    @rule()
    def fail(self) -> None:
        oracle = self.oracle
        assert oracle.in_flight is not None
        oracle.in_flight = None
        for name in oracle.changed_before & oracle.topics.keys():
            topic = oracle.topics[name]
            topic.is_changed = topic.refreshed_ms is not None
        oracle.not_before_ms = self.now_ms + RETRY_MS
        self.tracker.failed(self.now_ms)
        self.poll()

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "tracker"):
            assert self.tracker.metrics().cached_topics == len(self.oracle.cached())
            assert self.tracker.target_topics() == self.oracle.target()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
