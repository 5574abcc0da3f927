"""The real file system, used by several threads."""

from __future__ import annotations

from pathlib import Path

from kipmesh.storage.fs import RealFileSystem


def test_list_dir_ignores_files_removed_meanwhile(tmp_path: Path) -> None:
    """Another thread may replace a checkpoint. A node must not fail because of that."""
    (tmp_path / "stays").write_bytes(b"abc")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # listed, but stat fails
    found = RealFileSystem().list_dir(str(tmp_path))
    assert {name: stat.size_bytes for name, stat in found.items()} == {"stays": 3}
