"""`kipmesh chaos`: checks of histories, errors, skipped runs and interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kipmesh.cli import chaos_commands
from kipmesh.cli.main import app
from kipmesh_chaos import runner
from kipmesh_chaos.disk import NotPossibleError
from kipmesh_chaos.history import (
    Begin,
    End,
    Event,
    Invoke,
    Limits,
    Ok,
    Phase,
    PhaseBegan,
    Read,
    ReaderKind,
    write_history,
)
from kipmesh_chaos.target_cluster import ChaosError
from tests.command import run_command

EXPERIMENT = 'name: a-test\nhypothesis: It holds.\nduration_s: 5\nfaults: [{kind: kill, target: "leader:0"}]\n'


def write_small_history(directory: Path, *, lost: bool) -> Path:
    records = [] if lost else [(0, "1")]
    events: list[Event] = [
        Begin(0, "a-test", 1, 1, Limits()),
        PhaseBegan(0, Phase.FAULTS),
        Invoke(1, 1, "producer-1", 0, "1"),
        Ok(2, 1, 0),
        PhaseBegan(3, Phase.RECOVERY),
        Read(4, "final", ReaderKind.FINAL, 0, records),
        End(4, 0, len(records), [], []),
        PhaseBegan(5, Phase.END),
    ]
    file = directory / "history.jsonl"
    write_history(file, events)
    return file


def test_check_of_clean_history_exits_with_0(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["chaos", "check", str(write_small_history(tmp_path, lost=False))])
    assert result.exit_code == 0, result.output
    assert "no anomaly; 0 faults, 1 acknowledged" in result.output


def test_check_reports_anomaly_and_exits_with_1(tmp_path: Path) -> None:
    file = write_small_history(tmp_path, lost=True)
    result = CliRunner().invoke(app, ["chaos", "check", str(file)])
    assert result.exit_code == 1
    assert "lost acknowledged write: 1, first: partition 0, 2.00 s: '1' was acknowledged at offset 0" in result.output
    result = CliRunner().invoke(app, ["chaos", "check", str(file), "--json"])
    finding, summary = [json.loads(line) for line in result.stdout.splitlines()]
    assert finding["kind"] == "lost acknowledged write"
    assert summary["clean"] is False
    assert summary["anomalies"] == {"lost acknowledged write": 1}


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("check", "{}\n", "history.jsonl:1: the line is not an event"),
        ("check", "name: x\n", "history.jsonl:1: the line is not JSON"),
        ("run", "name: x\n", "hypothesis is missing; duration_s is missing"),
        ("run", EXPERIMENT.replace("kill", "explode"), "faults.0.kind must be one of bit-flip, "),
    ],
)
def test_malformed_files_are_reported_in_one_line(tmp_path: Path, command: str, text: str, message: str) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(text)
    result = run_command("chaos", command, file, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_unsupported_run_is_skipped_and_failed_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    errors: list[Exception] = [NotPossibleError("not here")]

    def run_one(*_arguments: object) -> None:
        raise errors[0]

    monkeypatch.setattr(chaos_commands, "_run_one", run_one)
    result = CliRunner().invoke(app, ["chaos", "run", str(file), "--runs", "3"])
    assert result.exit_code == chaos_commands.EXIT_SKIPPED
    assert "a-test: skipped: not here" in result.output
    errors[0] = OSError("no room")
    result = CliRunner().invoke(app, ["chaos", "run", str(file), "--runs", "2", "--seed", "4"])
    assert result.exit_code == 1
    assert "a-test (seed 5): could not be run" in result.output
    assert "0 runs, 0 without an anomaly; 2 could not be run, 0 skipped" in result.output


def test_each_run_has_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    earlier_history = tmp_path / "runs" / "a-test-4" / "history.jsonl"
    earlier_history.parent.mkdir(parents=True)
    earlier_history.write_text("history of an earlier run")
    directories: list[Path] = []

    async def run_once(_experiment: object, _make: object, run_directory: Path, *_others: object) -> None:
        directories.append(run_directory)
        raise ChaosError("not here")

    monkeypatch.setattr(runner, "run_once", run_once)
    for _ in range(2):
        result = CliRunner().invoke(app, ["chaos", "run", str(file), "--seed", "4", "--dir", str(tmp_path / "runs")])
        assert result.exit_code == 1
    assert [run_directory.name for run_directory in directories] == ["a-test-4-2", "a-test-4-3"]
    assert [list(run_directory.iterdir()) for run_directory in directories] == [[], []]
    assert earlier_history.read_text() == "history of an earlier run"


@pytest.fixture
def ignore_hangup() -> Iterator[None]:
    """Prevent SIGHUP from ending the tests, and restore its handler."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


async def interrupt_run(signal_number: signal.Signals, cleaned: list[str], error: Exception | None) -> Any:
    """A run that receives a signal and cleans up."""
    try:
        os.kill(os.getpid(), signal_number)
        await asyncio.sleep(60)
    finally:
        cleaned.append("cleaned")
        if error is not None:
            raise error
    return "not interrupted"


@pytest.mark.usefixtures("ignore_hangup")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_run_cleans_up(signal_number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned: list[str] = []
    with pytest.raises(typer.Exit) as caught:
        chaos_commands._interruptible(lambda: interrupt_run(signal_number, cleaned, None))
    assert caught.value.exit_code == 128 + signal_number
    assert cleaned == ["cleaned"]
    assert "interrupted; the cluster is stopped" in capsys.readouterr().err


@pytest.mark.usefixtures("ignore_hangup")
@pytest.mark.parametrize("is_group", [False, True])
def test_failed_clean_up_is_reported_and_ends_all_runs(is_group: bool, capsys: pytest.CaptureFixture[str]) -> None:
    error: Exception = ChaosError("a label is left")
    error = ExceptionGroup("of tasks", [error]) if is_group else error
    with pytest.raises(typer.Exit) as caught:  # an error would let the next run start
        chaos_commands._interruptible(lambda: interrupt_run(signal.SIGTERM, [], error))
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "kipmesh: a label is left\nkipmesh: interrupted\n"


@pytest.mark.usefixtures("ignore_hangup")
def test_run_continues_after_hangup_if_the_signal_is_ignored() -> None:
    async def run() -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return "continued"

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # like `nohup`
    assert chaos_commands._interruptible(run) == "continued"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
