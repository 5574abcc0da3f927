"""Fixtures for tests of probes."""

from __future__ import annotations

import pytest

from kipmesh.node import health, http


@pytest.fixture
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts of probes, so that a slow machine still responds in time."""
    monkeypatch.setattr(health, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(http, "LOOP_RESPONSE_TIMEOUT_S", 60.0)
