"""The wheel: its packages, and a cluster run from an installation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(command: list[str | Path], cwd: Path, text: str | None = None) -> str:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KIPMESH", "VIRTUAL"))
    }
    result = subprocess.run(
        command, cwd=cwd, input=text, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy of the repository's sources."""
    source = tmp_path_factory.mktemp("clean") / "source"
    # Tests may leave or delete these files while the tree is copied.
    generated = ("spark-warehouse", "metastore_db", "derby.log")
    left_out = shutil.ignore_patterns(".*", "build", "dist", "docs", "__pycache__", "tests", "*.egg-info", *generated)
    shutil.copytree(ROOT, source, ignore=left_out)
    target = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target], source)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel and the dependencies of the running venv, without downloads."""
    venv = tmp_path_factory.mktemp("elsewhere") / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", venv], venv.parent)
    python = venv / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], venv.parent)
    (site,) = venv.glob("lib/python*/site-packages")
    # Directories from .pth files are searched last, and .pth files in them (the editable install) are ignored.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


@pytest.fixture
def cluster_directory(installed: Path, tmp_path: Path) -> Iterator[Path]:
    """Directory of a cluster that is stopped after the test."""
    directory = tmp_path / "cluster"
    yield directory
    if (directory / "cluster.json").exists():
        _run([installed / "bin" / "kipmesh", "local", "down", "--dir", directory], tmp_path)


def test_wheel_contains_only_the_shipped_packages(wheel: Path, installed: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    assert (site / "kipmesh" / "messages" / "apis" / "fetch.py").exists()
    assert (site / "kipmesh" / "py.typed").exists()
    for package in [
        "kipmesh_leader",
        "kipmesh_follower",
        "kipmesh_consumer",
        "kipmesh_metadata_controller",
        "pyspark_kipmesh",
    ]:
        assert (site / package / "__init__.py").exists(), package
    for other in ["tests", "bench", "tools", "services", "protos"]:
        assert not (site / other).exists(), other
    location = _run([installed / "bin" / "python", "-c", "import kipmesh; print(kipmesh.__file__)"], installed)
    assert Path(location.strip()).is_relative_to(installed)


def test_installed_wheel_runs_a_cluster(installed: Path, cluster_directory: Path, tmp_path: Path) -> None:
    kipmesh = installed / "bin" / "kipmesh"
    _run([kipmesh, "local", "up", "--controllers", "1", "--dir", cluster_directory], tmp_path)
    cluster = json.loads((cluster_directory / "cluster.json").read_text())
    assert [node["role"] for node in cluster["nodes"]] == ["controller", "leader", "follower", "follower"]
    bootstrap = ["--bootstrap", cluster["bootstrap"]]
    _run(
        [kipmesh, "topic", "create", "greetings", "--partitions", "3", "--replication-factor", "3", *bootstrap],
        tmp_path,
    )
    sent = [f"greeting {number}" for number in range(100)]
    _run([kipmesh, "produce", "greetings", *bootstrap], tmp_path, text="".join(f"{line}\n" for line in sent))
    read = _run([kipmesh, "consume", "greetings", "--from-beginning", "--max-messages", "100", *bootstrap], tmp_path)
    assert sorted(read.splitlines()) == sorted(sent)
