from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.replica.follower import BURST_MS, Throttle


def test_without_a_limit_nobody_waits() -> None:
    throttle = Throttle(0)
    throttle.consume(10**12, 5)
    assert throttle.rate is None
    assert throttle.available(5) == float("inf")
    assert throttle.wait_ms(5) == 0


def test_a_batch_may_take_more_than_there_is_and_is_paid_for() -> None:
    throttle = Throttle(0)
    throttle.set_limit(1000, 0)
    assert throttle.available(0) == 1000
    throttle.consume(3000, 0)
    assert throttle.available(0) == -2000
    assert throttle.wait_ms(0) == 2001
    assert throttle.available(2000) == 0
    assert throttle.available(2001) > 0
    assert throttle.wait_ms(2001) == 0


def test_no_more_is_saved_than_a_burst() -> None:
    throttle = Throttle(0)
    throttle.set_limit(1000, 0)
    assert throttle.available(3_600_000) == 1000 * BURST_MS / 1000


def test_another_limit_begins_anew_and_the_same_does_not() -> None:
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


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    throttle = Throttle(1000)
    throttle.set_limit(1000, 1000)
    throttle.consume(1500, 1000)
    assert throttle.available(10) == -500
    assert throttle.available(1000) == -500


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 10**6)), max_size=50))
def test_over_any_time_the_rate_holds(rate: int, steps: list[tuple[int, int]]) -> None:
    """Whoever waits as told gets the rate, a burst, and the last batch, and never less than the rate."""
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
