from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.replica.follower import BURST_MS, Throttle


def test_throttle_without_limit_never_waits() -> None:
    throttle = Throttle(0)
    throttle.consume(10**12, 5)
    assert throttle.rate is None
    assert throttle.available(5) == float("inf")
    assert throttle.wait_ms(5) == 0


def test_throttle_allows_overdraft_and_waits_for_it() -> None:
    throttle = Throttle(0)
    throttle.set_limit(1000, 0)
    assert throttle.available(0) == 1000
    throttle.consume(3000, 0)
    assert throttle.available(0) == -2000
    assert throttle.wait_ms(0) == 2001
    assert throttle.available(2000) == 0
    assert throttle.available(2001) > 0
    assert throttle.wait_ms(2001) == 0


def test_throttle_accumulates_one_burst_at_most() -> None:
    throttle = Throttle(0)
    throttle.set_limit(1000, 0)
    assert throttle.available(3_600_000) == 1000 * BURST_MS / 1000


def test_throttle_restarts_on_changed_limit_only() -> None:
    throttle = Throttle(0)
    throttle.set_limit(1000, 0)
    throttle.consume(5000, 0)
    throttle.set_limit(1000, 0)
    assert throttle.available(0) == -4000
    throttle.set_limit(10, 0)
    assert throttle.available(0) == 10
    throttle.consume(1000, 0)
    throttle.set_limit(None, 0)
    assert throttle.available(0) == float("inf")


def test_throttle_ignores_clock_that_does_not_advance() -> None:
    throttle = Throttle(1000)
    throttle.set_limit(1000, 1000)
    throttle.consume(1500, 1000)
    assert throttle.available(10) == -500
    assert throttle.available(1000) == -500


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 10**6)), max_size=50))
def test_throttle_enforces_rate_over_any_interval(rate: int, steps: list[tuple[int, int]]) -> None:
    """A caller that waits for `wait_ms` gets at least the rate, and at most a burst and the last batch more."""
    throttle = Throttle(0)
    throttle.set_limit(rate, 0)
    now_ms = taken = last = 0
    for pause_ms, size in steps:
        now_ms += pause_ms
        wait_ms = throttle.wait_ms(now_ms)
        assert (wait_ms == 0) == (throttle.available(now_ms) > 0)
        now_ms += wait_ms
        assert throttle.available(now_ms) > -1e-3
        assert taken - last <= rate * (now_ms + BURST_MS) / 1000 + 1
        throttle.consume(size, now_ms)
        taken, last = taken + size, size
