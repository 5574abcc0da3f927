"""A mesh in one event loop, for each test its own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_clock import Clock
from conftest_broker import Mesh


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
