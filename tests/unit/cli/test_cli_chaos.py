"""`kipmesh chaos`: what is wrong is told in one line; histories are checked again; runs that cannot be done."""

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


def history(folder: Path, *, lost: bool) -> Path:
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
    file = folder / "history.jsonl"
    write_history(file, events)
    return file


def test_a_clean_history(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["chaos", "check", str(history(tmp_path, lost=False))])
    assert done.exit_code == 0, done.output
    assert "no anomaly; 0 faults, 1 acknowledged" in done.output


def test_a_history_with_an_anomaly(tmp_path: Path) -> None:
    file = history(tmp_path, lost=True)
    done = CliRunner().invoke(app, ["chaos", "check", str(file)])
    assert done.exit_code == 1
    assert "lost acknowledged write: 1, first: partition 0, 2.00 s: '1' was acknowledged at offset 0" in done.output
    done = CliRunner().invoke(app, ["chaos", "check", str(file), "--json"])
    finding, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert finding["kind"] == "lost acknowledged write"
    assert summary["clean"] is False
    assert summary["anomalies"] == {"lost acknowledged write": 1}


@pytest.mark.parametrize(
    ("command", "text", "told"),
    [
        ("check", "{}\n", "history.jsonl:1: the line is not an event"),
        ("check", "name: x\n", "history.jsonl:1: the line is not JSON"),
        ("run", "name: x\n", "hypothesis: Field required; duration_s: Field required"),
        ("run", EXPERIMENT.replace("kill", "explode"), "faults.0: "),
    ],
)
def test_broken_files_are_told_in_one_line(tmp_path: Path, command: str, text: str, told: str) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(text)
    done = run_command("chaos", command, file, cwd=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_done_here_is_skipped_and_what_breaks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    errors: list[Exception] = [NotPossibleError("not here")]

    def run_one(*_arguments: object) -> None:
        raise errors[0]

    monkeypatch.setattr(chaos_commands, "_run_one", run_one)
    done = CliRunner().invoke(app, ["chaos", "run", str(file), "--runs", "3"])
    assert done.exit_code == chaos_commands.EXIT_SKIPPED
    assert "a-test: skipped: not here" in done.output
    errors[0] = OSError("no room")
    done = CliRunner().invoke(app, ["chaos", "run", str(file), "--runs", "2", "--seed", "4"])
    assert done.exit_code == 1
    assert "a-test (seed 5): could not be run" in done.output
    assert "0 runs, 0 without an anomaly; 2 could not be run, 0 skipped" in done.output


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    mine = tmp_path / "runs" / "a-test-4" / "history.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("of a run that is over, or goes on")
    homes: list[Path] = []

    async def run_once(_experiment: object, _make: object, home: Path, *_others: object) -> None:
        homes.append(home)
        raise ChaosError("not here")

    monkeypatch.setattr(runner, "run_once", run_once)
    for _ in range(2):
        done = CliRunner().invoke(app, ["chaos", "run", str(file), "--seed", "4", "--dir", str(tmp_path / "runs")])
        assert done.exit_code == 1
    assert [home.name for home in homes] == ["a-test-4-2", "a-test-4-3"]
    assert [list(home.iterdir()) for home in homes] == [[], []]
    assert mine.read_text() == "of a run that is over, or goes on"


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Tests go on, whatever they run under and whether the signal is handled or not."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


async def interrupted(number: signal.Signals, cleaned: list[str], error: Exception | None) -> Any:
    """A run that gets a signal, and cleans up."""
    try:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)
    finally:
        cleaned.append("cleaned")
        if error is not None:
            raise error
    return "not interrupted"


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_cleans_up(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned: list[str] = []
    with pytest.raises(typer.Exit) as caught:
        chaos_commands._interruptible(lambda: interrupted(number, cleaned, None))
    assert caught.value.exit_code == 128 + number
    assert cleaned == ["cleaned"]
    assert "interrupted; the cluster is stopped" in capsys.readouterr().err


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("is_group", [False, True])
def test_a_clean_up_that_fails_is_told_and_ends_all_runs(is_group: bool, capsys: pytest.CaptureFixture[str]) -> None:
    error: Exception = ChaosError("a label is left")
    error = ExceptionGroup("of tasks", [error]) if is_group else error
    with pytest.raises(typer.Exit) as caught:  # and no error, after which the next run would begin
        chaos_commands._interruptible(lambda: interrupted(signal.SIGTERM, [], error))
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "kipmesh: a label is left\nkipmesh: interrupted\n"


@pytest.mark.usefixtures("hang_up")
def test_a_run_goes_on_without_a_terminal_when_it_is_told_to() -> None:
    async def run() -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return "went on"

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    assert chaos_commands._interruptible(run) == "went on"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
