"""The folders of replicas that the demo compares."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kipmesh_jobs.demo import proofs


def test_a_folder_that_comes_later_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("a", "b", "c")}
    for name in ("a", "b"):
        folders[name].mkdir()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            folders["c"].mkdir()

    monkeypatch.setattr(time, "sleep", nap)
    assert proofs.existing_log_dirs(folders, 2, 0) == {name: folders[name] for name in ("a", "b")}
    assert proofs.existing_log_dirs(folders, 3, 600) == folders
    assert len(naps) == 3


def test_one_that_does_not_come_is_left_out(tmp_path: Path) -> None:
    assert proofs.existing_log_dirs({"a": tmp_path, "b": tmp_path / "none"}, 2, -1) == {"a": tmp_path}
