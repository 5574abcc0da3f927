"""The real file system, where it is used by several threads."""

from __future__ import annotations

from pathlib import Path

from kipmesh.storage.fs import RealFileSystem


def test_what_goes_while_a_folder_is_listed_is_not_in_it(tmp_path: Path) -> None:
    """Another thread replaces a checkpoint: the metadata quorum's node must not end for that."""
    (tmp_path / "stays").write_bytes(b"abc")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # is listed, and not found when it is looked at
    found = RealFileSystem().list_dir(str(tmp_path))
    assert {name: stat.size_bytes for name, stat in found.items()} == {"stays": 3}
