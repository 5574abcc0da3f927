"""Fixture of end-to-end tests: a cluster of processes that is stopped after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli_of_tests import ClusterCli


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterCli]:
    """A cluster that is not started yet."""
    cli = ClusterCli(tmp_path / "cluster")
    yield cli
    if (cli.directory / "cluster.json").exists():
        cli.run("local", "down", "--timeout", "0")
        assert cli.running_nodes() == []
