"""Fixtures that tests of processes' probes share."""

from __future__ import annotations

import pytest

from kipmesh.node import health, http


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is slow is not who does not answer."""
    monkeypatch.setattr(health, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(http, "LOOP_RESPONSE_TIMEOUT_S", 60.0)
