"""Log directories of the replicas that the demo compares."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kipmesh_jobs.demo import proofs


def test_demo_waits_for_missing_log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = {name: tmp_path / name for name in ("a", "b", "c")}
    for name in ("a", "b"):
        directories[name].mkdir()
    delays: list[float] = []

    def sleep(seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == 3:
            directories["c"].mkdir()

    monkeypatch.setattr(time, "sleep", sleep)
    assert proofs.existing_log_dirs(directories, 2, 0) == {name: directories[name] for name in ("a", "b")}
    assert proofs.existing_log_dirs(directories, 3, 600) == directories
    assert len(delays) == 3


def test_demo_omits_log_directory_missing_at_deadline(tmp_path: Path) -> None:
    assert proofs.existing_log_dirs({"a": tmp_path, "b": tmp_path / "none"}, 2, -1) == {"a": tmp_path}
