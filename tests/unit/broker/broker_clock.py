"""The monotonic clock of brokers in this process, in the hands of a test."""

from __future__ import annotations

import time

import pytest

from kipmesh.broker.replication.replica import Replica
from kipmesh.testing import until


class Clock:
    """It stands still until a test lets time pass; how long the machine takes for that does not count.

    It is that of what brokers do for each other. Their parts of the metadata quorum, which try again after a while of
    that clock, have the machine's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it before the brokers."""
        self._now_ms = time.monotonic_ns() // 1_000_000
        monkeypatch.setattr("kipmesh.broker.parts.monotonic_ms", lambda: self._now_ms)

    def go_on(self, ms: int) -> int:
        """Let time pass; says what it is now."""
        self._now_ms += ms
        return self._now_ms


async def all_have_fetched(led: Replica, since_ms: int) -> None:
    """Wait until all members of the ISR have fetched from the partition's leader since then."""

    def have() -> bool:
        return led.leader is not None and all(heard_ms >= since_ms for heard_ms in led.leader.members_last_fetch_ms())

    await until(have, "all followers have fetched")
