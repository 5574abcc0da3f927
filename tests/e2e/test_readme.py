"""Runs the commands and the example test of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
KIPMESH = Path(sys.executable).with_name("kipmesh")

pytestmark = pytest.mark.slow


def _block(after: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", README[README.index(after) :], re.MULTILINE | re.DOTALL)
    assert found, f"no {language} block after {after!r}"
    return found.group(1)


@pytest.fixture
def cluster_directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "cluster"
    yield directory
    if (directory / "cluster.json").exists():
        subprocess.run([KIPMESH, "local", "down", "--dir", directory], check=False, capture_output=True)


def test_readme_quick_start_runs(cluster_directory: Path) -> None:
    lines = [line for line in _block("## Quick start", "").splitlines() if not line.startswith("make ")]
    assert len(lines) == 9
    printed = []
    for line in lines:
        command = line.replace(".venv/bin/kipmesh", str(KIPMESH)).replace("build/mesh", str(cluster_directory))
        result = subprocess.run(command, shell=True, check=False, capture_output=True, text=True, timeout=100)
        assert result.returncode == 0, f"{line}: {result.stdout}{result.stderr}"
        printed.append(result.stdout)
    assert printed[3] == "hello\n"


def test_readme_example_test_passes() -> None:
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(_block("In a test:", "python"), "README.md", "exec"), names)
    test = names["test_records_arrive"]
    assert callable(test)
    test()
