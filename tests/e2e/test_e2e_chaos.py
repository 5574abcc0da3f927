"""Short runs of `kipmesh chaos`: faults on live processes, detection of lost records, interrupted runs.

`make chaos` runs the longer experiments of `deploy/chaos`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from kipmesh_chaos.experiment import load
from kipmesh_chaos.history import FaultBegan, Note, read_history

pytestmark = pytest.mark.slow
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links between nodes need /proc")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "chaos"
CONFIG = {"broker.session.timeout.ms": 1500, "broker.heartbeat.interval.ms": 250}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KIPMESH_")}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", "kipmesh.cli.main", "chaos", *map(str, arguments)]


def experiment(directory: Path, faults: list[dict[str, Any]], duration_s: float, **changes: Any) -> Path:
    file = directory / "experiment.yaml"
    # Loose limits: the machine may be busy, and these tests do not measure speed.
    steady = {"write_gap_s": 20, "read_delay_s": 25, "recovered_within_s": 60}
    document = {
        "name": "in-a-test",
        "hypothesis": "Nothing is lost.",
        "duration_s": duration_s,
        "cluster": {"config": CONFIG},
        "steady_state": steady,
        "faults": faults,
        **changes,
    }
    file.write_text(yaml.safe_dump(document))
    return file


def processes_in(directory: Path) -> list[psutil.Process]:
    """Processes whose command line names the directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in argument for argument in process.info["cmdline"] or ())
    ]


@pytest.fixture
def run_directory(tmp_path: Path) -> Iterator[Path]:
    """Directory of runs. Asserts that no process of a run is left."""
    directory = tmp_path / "runs"
    yield directory
    deadline = time.monotonic() + 60
    while (left := processes_in(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def run_command(file: Path, run_directory: Path) -> subprocess.CompletedProcess[str]:
    arguments = command("run", file, "--dir", run_directory, "--seed", 5)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=220, env=ENVIRONMENT)


def run(file: Path, run_directory: Path, *, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the summary and the standard output."""
    done = run_command(file, run_directory)
    output = f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, output
    file = run_directory / "in-a-test-5" / "summary.json"
    assert file.exists(), output  # a failed run has the same exit code as a run with anomalies
    summary: dict[str, Any] = json.loads(file.read_text())
    return summary, done.stdout


def test_no_acknowledged_record_is_lost_when_nodes_are_killed_paused_or_damaged(
    tmp_path: Path, run_directory: Path
) -> None:
    faults = [
        {"kind": "kill", "target": "leader:0", "at_s": 1, "for_s": 3},
        {"kind": "pause", "target": "controller:active", "at_s": 5, "for_s": 3},
        {"kind": "torn-tail", "target": "follower:1", "at_s": 7, "for_s": 1},
    ]
    summary, printed = run(experiment(tmp_path, faults, 12), run_directory)
    assert "no anomaly" in printed
    assert summary["clean"] is True
    assert summary["faults_by_kind"] == {"kill": 1, "pause": 1, "torn-tail": 1}
    assert summary["acknowledged"] > 100
    assert summary["read"] >= 3 * summary["acknowledged"]
    home = run_directory / "in-a-test-5"
    assert sorted(file.name for file in home.iterdir()) == ["history.jsonl", "report.html", "summary.json"]
    again = subprocess.run(
        command("check", home / "history.jsonl", "--json"), capture_output=True, text=True, timeout=100, env=ENVIRONMENT
    )
    assert again.returncode == 0
    assert json.loads(again.stdout)["acknowledged"] == summary["acknowledged"]


def test_group_skips_no_record_when_its_coordinator_is_killed(tmp_path: Path, run_directory: Path) -> None:
    faults = [{"kind": "kill", "target": "coordinator", "at_s": 1, "for_s": 2}]
    workload = {"partitions": 3, "producers": 3, "racks": [], "group": {"members": 2, "churn_s": 3}}
    # The session of a killed member ends after 6 s.
    steady = {"write_gap_s": 20, "read_delay_s": 60, "recovered_within_s": 60}
    summary, printed = run(experiment(tmp_path, faults, 8, workload=workload, steady_state=steady), run_directory)
    assert summary["clean"] is True
    assert summary["faults_by_kind"] == {"kill": 1}
    assert summary["generations"] > 1
    assert summary["commits"] > 10
    assert f"{summary['commits']} commits" in printed


@linux
def test_no_record_is_lost_under_network_faults_and_clock_jumps(tmp_path: Path, run_directory: Path) -> None:
    faults = [
        {"kind": "clock-jump", "target": "all:nodes", "at_s": 0.5, "for_s": 2, "jump_s": 7200},
        {"kind": "cut", "target": "follower:0", "direction": "in", "at_s": 1, "for_s": 3},
        {"kind": "delay", "target": "controller:active", "at_s": 5, "for_s": 2, "delay_ms": 50},
        {"kind": "cut", "target": "leader:0", "at_s": 8, "for_s": 4},
    ]
    summary, _printed = run(experiment(tmp_path, faults, 14), run_directory)
    assert summary["clean"] is True
    assert summary["faults_by_kind"] == {"clock-jump": 1, "cut": 2, "delay": 1}


@linux
def test_broker_continues_without_a_failed_log_directory(tmp_path: Path, run_directory: Path) -> None:
    """The run reports an anomaly if the broker does not notice the failure or exits."""
    faults = [{"kind": "failed-folder", "target": "leader:0", "at_s": 1, "for_s": 6}]
    file = experiment(tmp_path, faults, 16, workload={"partitions": 4})
    tried = run_command(file, run_directory)
    if tried.returncode == 77:
        pytest.skip(tried.stdout)
    assert tried.returncode == 0, f"{tried.stdout}\n{tried.stderr}"
    summary = json.loads((run_directory / "in-a-test-5" / "summary.json").read_text())
    assert summary["clean"] is True
    assert summary["faults_by_kind"] == {"failed-folder": 1}
    assert summary["acknowledged"] > 0


@linux
@pytest.mark.timeout(600)
def test_no_record_is_lost_in_two_minutes_of_random_faults(tmp_path: Path, run_directory: Path) -> None:
    """Run `deploy/chaos/random.yaml` for a shorter time and with limits for a busy machine."""
    seed = 36  # the first eight faults have six kinds
    document = yaml.safe_load((DEPLOY / "random.yaml").read_text())
    document["steady_state"] = {"write_gap_s": 60, "read_delay_s": 75, "recovered_within_s": 120}
    file = tmp_path / "random.yaml"
    file.write_text(yaml.safe_dump(document))
    arguments = command("run", file, "--dir", run_directory, "--seed", seed, "--duration", 120)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=560, env=ENVIRONMENT)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "no anomaly" in done.stdout
    summary = json.loads((run_directory / f"random-{seed}" / "summary.json").read_text())
    assert (summary["clean"], summary["anomalies"]) == (True, {})
    assert summary["faults_s"] >= 120
    assert len(summary["faults_by_kind"]) >= 3
    assert summary["acknowledged"] > 100
    assert summary["read"] >= 3 * summary["acknowledged"]
    history = list(read_history(run_directory / f"random-{seed}" / "history.jsonl"))
    random_faults = load(file).random
    assert random_faults is not None
    if not any(isinstance(event, Note) and "did not happen" in event.text for event in history):  # without a target
        happened = [event.kind for event in history if isinstance(event, FaultBegan)]
        assert happened == [planned.fault.kind for planned in islice(random_faults.plan(seed), len(happened))]


@linux
def test_checker_finds_records_lost_with_acks_1(tmp_path: Path, run_directory: Path) -> None:
    """With acks=1 an isolated leader acknowledges records that no other replica has."""
    # Much longer than a session, so that another leader is elected before the cut ends.
    faults = [{"kind": "cut", "target": "leader:0", "at_s": 1, "for_s": 8}]
    workload = {"producer_config": {"acks": 1}, "records_per_s": 50}
    summary, printed = run(experiment(tmp_path, faults, 11, workload=workload), run_directory, code=1)
    assert summary["anomalies"]["lost acknowledged write"] > 0
    assert "lost acknowledged write" in printed
    home = run_directory / "in-a-test-5"
    assert (home / "cluster" / "cluster.json").exists()  # kept for inspection
    assert "lost acknowledged write" in (home / "report.html").read_text()


def test_interrupted_run_leaves_no_processes(tmp_path: Path, run_directory: Path) -> None:
    faults = [{"kind": "pause", "target": "all:nodes", "at_s": 0, "for_s": 60}]
    file = experiment(tmp_path, faults, 60)
    with subprocess.Popen(
        command("run", file, "--dir", run_directory, "--seed", 5), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        history = run_directory / "in-a-test-5" / "history.jsonl"
        deadline = time.monotonic() + 120
        while not history.exists() or '"fault-began"' not in history.read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert "interrupted" in errors
        assert "Traceback" not in errors
