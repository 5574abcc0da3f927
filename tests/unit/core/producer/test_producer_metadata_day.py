"""Producer metadata over simulated hours, checked against an independent model."""

from __future__ import annotations

import pytest

from kipmesh.core.producer import RefreshMode, TopicTracker, TrackerConfig
from kipmesh_jobs.plan.producer_day import Day, DayConfig, Pattern

FAULTS = {"failing_share": 0.05, "missing_share": 0.02, "moves_per_s": 0.2}


@pytest.mark.parametrize("pattern", ["uniform", "zipf", "bursts", "idle", "steady"])
@pytest.mark.parametrize("mode", ["paced", "literal"])
@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["no faults", "faults"])
def test_simulated_hours_satisfy_metadata_rules(pattern: Pattern, mode: RefreshMode, faults: dict[str, float]) -> None:
    config = DayConfig(pattern, mode, topics=400, duration_s=1800, records_per_s=6, **faults)  # type: ignore[arg-type]
    result = Day(config).run()
    assert result.metrics.urgent_topics >= 380
    if pattern == "idle":
        assert result.metrics.cached_topics == 0
        assert result.metrics.evictions >= 392


def test_all_mode_requests_all_topics() -> None:
    result = Day(DayConfig("bursts", "all", topics=100, duration_s=1500)).run()
    assert result.metrics.non_urgent_topics > 10 * result.metrics.urgent_topics


def test_paced_mode_sends_fewer_and_more_even_requests_than_literal() -> None:
    config = {"topics": 2000, "duration_s": 7200, "records_per_s": 10.0, "scan_every_ms": 600_000}
    paced = Day(DayConfig("steady", "paced", **config)).run()  # type: ignore[arg-type]
    literal = Day(DayConfig("steady", "literal", **config)).run()  # type: ignore[arg-type]
    begin = 60  # in windows of ten seconds: the first refreshes have spread the topics
    assert max(paced.requests[window] for window in range(begin, 720)) <= 3
    assert max(literal.requests[window] for window in range(begin, 720)) >= 25
    assert max(paced.topics[window] for window in range(begin, 720)) <= 3 * -(-2000 // 30)
    assert paced.metrics.non_urgent_requests < 0.7 * literal.metrics.non_urgent_requests
    assert paced.oldest_ms < 300_000


def test_refresh_target_is_rounded_up_and_at_least_20() -> None:
    config = TrackerConfig(300_000, 300_000, 100, lambda _: 100.0)
    assert [config.target_topics(count) for count in (0, 600, 601, 630, 631, 10_000)] == [20, 20, 21, 21, 22, 334]


def test_poll_cost_depends_on_due_topics_only() -> None:
    """The function calls of a poll that requests one topic do not grow with the number of cached topics."""
    import gc
    import sys

    def count_calls(topics: int) -> int:
        tracker = TopicTracker(TrackerConfig(300_000, 300_000, 100, lambda _: 100.0))
        names = [f"t{number}" for number in range(topics)]
        for name in names:
            tracker.hold(name, 0)
        assert tracker.poll(0).request is not None
        tracker.completed(1, set(names))
        count = 0

        def profile(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        gc.disable()  # Hypothesis registers callbacks for each collection.
        sys.setprofile(profile)
        try:
            tracker.hold("new", 2)
            step = tracker.poll(2)
            tracker.completed(3, {"new"})
            tracker.release(names[0], 3)
            tracker.poll(3)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert step.request is not None
        assert step.request.topics == ("new",)
        return count

    assert count_calls(50_000) <= count_calls(500) + 5
