"""A monotonic clock for brokers in this process that tests advance."""

from __future__ import annotations

import time

import pytest

from kipmesh.broker.replication.replica import Replica
from kipmesh.testing import until


class Clock:
    """A clock that advances only when a test advances it, so that a slow machine changes nothing.

    Brokers use it for replication. Their part of the metadata quorum uses the real clock, as its retries need time to
    pass.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clock; call this before the brokers start."""
        self._now_ms = time.monotonic_ns() // 1_000_000
        monkeypatch.setattr("kipmesh.broker.parts.monotonic_ms", lambda: self._now_ms)

    def advance(self, ms: int) -> int:
        """Advance the clock and return the new time."""
        self._now_ms += ms
        return self._now_ms


async def wait_for_fetches(led: Replica, since_ms: int) -> None:
    """Wait until all members of the ISR have fetched from the leader `led` since `since_ms`."""

    def all_fetched() -> bool:
        return led.leader is not None and all(fetch_ms >= since_ms for fetch_ms in led.leader.members_last_fetch_ms())

    await until(all_fetched, "all followers have fetched")
