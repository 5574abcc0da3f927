"""Fixtures: a cluster in the event loop of the test, and the clock of its brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.broker.broker_clock import Clock
from tests.unit.broker.broker_cluster import BrokerCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    running = BrokerCluster(tmp_path)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The brokers' clock. Request it before `cluster`."""
    return Clock(monkeypatch)
