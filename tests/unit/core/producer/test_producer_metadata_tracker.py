"""TopicTracker, rule by rule."""

from __future__ import annotations

from kipmesh.core.producer import RefreshMode, RefreshRequest, TopicTracker, TrackerConfig

HALF_MS, MAX_AGE_MS = 150_000, 300_000


def tracker_of(topics: int, mode: RefreshMode = "literal") -> TopicTracker:
    """Return a tracker that holds topics t0, t1, ..., refreshed at 0 ms, 1 ms, ..."""
    tracker = TopicTracker(TrackerConfig(MAX_AGE_MS, MAX_AGE_MS, 100, lambda attempts: 100.0 * attempts, mode))
    for number in range(topics):
        tracker.hold(f"t{number}", number)
        assert tracker.poll(number).request == ((f"t{number}",), 1)
        tracker.completed(number, {f"t{number}"})
    return tracker


def names(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"t{number}" for number in range(first, last))


def test_refresh_starts_at_half_age_and_target_size() -> None:
    tracker = tracker_of(30)
    assert tracker.poll(HALF_MS + 18).request is None
    assert tracker.poll(HALF_MS + 19).request == (names(0, 20), 0)


def test_urgent_request_includes_oldest_refreshable_topics_up_to_target() -> None:
    tracker = tracker_of(30)
    tracker.hold("new", HALF_MS + 10)
    assert tracker.poll(HALF_MS + 10).request == (("new", *names(0, 11)), 1)
    tracker = tracker_of(30)
    for number in range(25):
        tracker.hold(f"new{number}", HALF_MS + 10)
    request = tracker.poll(HALF_MS + 10).request
    assert request == (tuple(f"new{number}" for number in range(25)), 25)


def test_failed_request_is_retried_after_backoff_oldest_first() -> None:
    tracker = tracker_of(60)
    assert tracker.poll(HALF_MS + 50).request == (names(0, 20), 0)
    tracker.failed(HALF_MS + 60)
    step = tracker.poll(HALF_MS + 70)
    assert step.request is None
    assert step.wait_until_ms == HALF_MS + 160
    assert tracker.poll(HALF_MS + 160).request == (names(0, 20), 0)
    assert tracker.metrics().failed_requests == 1


def test_unresolved_topics_back_off_without_delaying_new_topics() -> None:
    tracker = tracker_of(0)
    tracker.hold("missing", 0)
    assert tracker.poll(0).request == (("missing",), 1)
    tracker.completed(10, set(), {"missing"})
    assert tracker.poll(10).wait_until_ms == 110
    tracker.hold("new", 20)
    assert tracker.poll(20).request == (("new",), 1)
    tracker.completed(30, {"new"})
    assert tracker.poll(110).request == (("missing",), 1)
    tracker.completed(120, set(), {"missing"})
    assert tracker.attempts("missing") == 2
    assert tracker.poll(319).request is None
    assert tracker.poll(320).request == (("missing",), 1)


def test_released_unresolved_topic_is_forgotten() -> None:
    tracker = tracker_of(0)
    tracker.hold("missing", 0)
    tracker.poll(0)
    tracker.completed(10, set(), {"missing"})
    tracker.release("missing", 20)
    step = tracker.poll(110)
    assert step == (None, ("missing",), None)


def test_change_during_refresh_requests_topic_again() -> None:
    tracker = tracker_of(1)
    tracker.changed("t0", 1000)
    assert tracker.poll(1000).request == (("t0",), 1)
    tracker.changed("t0", 1005)
    tracker.completed(1010, {"t0"})
    assert tracker.poll(1010).wait_until_ms == 1110
    assert tracker.poll(1110).request == (("t0",), 1)
    tracker.completed(1120, {"t0"})
    assert tracker.poll(2000).request is None


def test_idle_topics_are_evicted_and_held_topics_stay() -> None:
    tracker = tracker_of(2, "paced")
    tracker.release("t0", 1000)
    assert tracker.poll(1000 + MAX_AGE_MS - 1).forgotten == ()
    tracker.completed(1000 + MAX_AGE_MS - 1, {"t0", "t1"})
    assert tracker.poll(1000 + MAX_AGE_MS).forgotten == ("t0",)
    assert tracker.metrics().evictions == 1
    assert tracker.poll(10 * MAX_AGE_MS).request == RefreshRequest(("t1",), 1)
