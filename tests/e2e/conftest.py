"""Clusters for the end-to-end tests; whatever a test does, none of its processes is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.mesh_of_tests import Mesh


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """A cluster that is not up yet."""
    it = Mesh(tmp_path / "mesh")
    yield it
    if (it.folder / "cluster.json").exists():
        it.run("local", "down", "--timeout", "0")
        assert it.alive() == []
