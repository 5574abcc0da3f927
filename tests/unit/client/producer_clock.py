"""The clock of a producer's waits for metadata, in the hands of a test."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kipmesh.client.producer import producer_metadata


def pass_by(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """It is later at once for who waits for metadata, however long anything takes; the next answer shows it."""
    monkeypatch.setattr(producer_metadata, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
