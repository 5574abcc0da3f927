"""Manipulates the clock of a producer's metadata waits."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kipmesh.client.producer import producer_metadata


def advance_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the clock of metadata waits. Waiters see it at the next response."""
    monkeypatch.setattr(producer_metadata, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
