"""A mesh in one event loop, for each test its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.broker.broker_clock import Clock
from tests.unit.broker.conftest_broker import Mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    it = Mesh(tmp_path)
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The nodes' clock; name it before the mesh."""
    return Clock(monkeypatch)
