"""Small runs of the demo: results, killed runs, killed nodes and concurrent runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kipmesh.spark.java import find_java

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_java() is None, reason="Spark needs Java 17 or newer"),
]
LIMIT = 4_000


def command(directory: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kipmesh_jobs.demo", "--dir", str(directory), "--limit", str(LIMIT), "--json", *more]


def processes_in(directory: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if str(directory) in _command_line(process)]


def _command_line(process: psutil.Process) -> str:
    """Return the command line, or an empty string if the process has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(condition: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None, "the demo exited early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_next_run_cleans_up_after_a_killed_run(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    with (tmp_path / "killed.log").open("wb") as log:
        killed = subprocess.Popen(command(directory), stdout=log, stderr=log)
        cluster = directory / "cluster" / "cluster.json"
        wait_until(lambda: cluster.exists() and '"pid": null' not in cluster.read_text(), killed)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    done = subprocess.run(command(directory), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["passed"]
    assert summary["records"] == LIMIT
    assert len(summary["checks"]) >= 6
    assert all(check["passed"] for check in summary["checks"])
    assert json.loads((directory / "summary.json").read_text()) == summary
    report = (directory / "report.html").read_text()
    assert "<script src" not in report
    assert "default-src 'none'" in report
    assert list((directory / "parquet" / "flights").glob("batch=*/*.parquet"))
    assert list((directory / "checkpoint" / "flights" / "offsets").iterdir())
    assert not (directory / "work").exists()
    assert processes_in(directory) == []


def test_demo_restarts_a_killed_follower_and_passes(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    state = directory / "cluster" / "cluster.json"
    with (tmp_path / "out").open("w") as out, (tmp_path / "log").open("w") as log:
        demo = subprocess.Popen(command(directory), stdout=out, stderr=log)
        try:
            wait_until(lambda: "Start the mesh" in (tmp_path / "log").read_text(), demo)
            nodes = {node["name"]: node for node in json.loads(state.read_text())["nodes"]}
            os.kill(nodes["follower-1"]["pid"], signal.SIGKILL)
            assert demo.wait(600) == 0
        finally:
            demo.terminate()
            demo.wait(60)
    assert "follower-1 has ended; restarting it" in (tmp_path / "log").read_text()
    summary = json.loads((tmp_path / "out").read_text())
    assert summary["passed"]
    assert all(len(partition["replicas"]) == 3 and partition["identical"] for partition in summary["partitions"])


def test_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command(directory), stdout=subprocess.DEVNULL, stderr=log)
    try:
        wait_until((directory / "cluster").exists, first)
        second = subprocess.run(command(directory), capture_output=True, text=True, timeout=120)
        assert second.returncode == 1
        assert "another job demo" in second.stderr
    finally:
        first.terminate()
        assert first.wait(120) in (143, -signal.SIGTERM)
    assert "interrupted, cluster and Spark are stopped" in (tmp_path / "log").read_text()
    assert processes_in(directory) == []
