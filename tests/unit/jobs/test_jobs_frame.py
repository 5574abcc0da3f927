"""Framework of jobs: options from a dataclass, the output directory, interrupts, and imports of the command line."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import kipmesh_jobs as jobs
from kipmesh.cli import job_commands
from kipmesh.cluster.signals import Terminated
from kipmesh_jobs import frame
from kipmesh_jobs.frame import Job, JobDirectory, JobError, JobRun, Outcome, OutputBusyError, Settings, run_job
from kipmesh_jobs.report import Page

COUNTS = ("passed", "batches", "bytes", "segments", "logs", "errors", "warnings", "pairs", "pairs_agreed", "snapshots")
NOTHING_FOUND: dict[str, Any] = {
    "summary": {**dict.fromkeys(COUNTS, 0), "replicas": [], "first_divergence": None, "findings": {}},
    **dict.fromkeys(("divergence", "findings", "kinds", "agreement", "logs", "sizes"), ()),
}
AGREEMENT = dict.fromkeys(
    ("partition", "a", "b", "from", "to", "agrees_to", "must_agree_to", "equal", "differences", "is_violated"), 0
)


@dataclass(frozen=True, slots=True)
class Options:
    word: Annotated[str, typer.Option(help="A word.")]
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 2
    names: Annotated[list[str] | None, typer.Option("--name", help="May be repeated.")] = None
    fail: Annotated[bool, typer.Option("--fail", help="Not passed.")] = False


def run_words(run: JobRun, options: Options) -> Outcome:
    (run.parquet / "words").mkdir()
    with run.step("Say it", options.times) as done:
        done(options.times)
    page = Page("audit.html", NOTHING_FOUND | {"agreement": [AGREEMENT | {"topic": options.word}]})
    summary = {"word": options.word, "times": options.times, "names": options.names}
    return Outcome(summary, page, ("text",), passed=not options.fail)


JOB = Job("say", "Say a word.", "Say a word, some times.", "kipmesh job say --word hello", Options, run_words)


def make_app(job: Job[Options]) -> typer.Typer:
    app = typer.Typer()
    app.command("say", help=job.text)(job_commands._command(job))
    app.command("other")(lambda: None)
    return app


def test_options_fields_become_command_line_arguments(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["say", "--word", "hi", "--times", "3", "--name", "a", "--name", "b", "--out", str(out), "--json"]
    result = CliRunner().invoke(make_app(JOB), arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"word": "hi", "times": 3, "names": ["a", "b"]}
    assert json.loads((out / "summary.json").read_text()) == {"word": "hi", "times": 3, "names": ["a", "b"]}
    assert '<td class="text">hi</td>' in (out / "report.html").read_text()
    assert "Say it" in (out / "report.html").read_text()
    assert (out / "parquet" / "words").is_dir()
    assert not (out / "work").exists()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--times", "3"], "--word"),
        (["--word", "x", "--times", "0"], "--times"),
        (["--word", "x", "--nme", "y"], "--nme"),
    ],
)
def test_usage_error_names_the_option(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(make_app(JOB), ["say", *arguments])
    assert result.exit_code == 2
    assert option in result.output


def test_failed_checks_exit_with_1_and_keep_results(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(JOB), ["say", "--word", "x", "--fail", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert (tmp_path / "report.html").exists()


def test_failed_run_keeps_results_of_previous_run(tmp_path: Path) -> None:
    run_job(JOB, Options("first"), Settings(tmp_path, as_json=True))

    def fail_run(run: JobRun, options: Options) -> Outcome:
        (run.parquet / "half").mkdir()
        raise JobError("no")

    with pytest.raises(JobError):
        run_job(Job("say", "", "", "", Options, fail_run), Options("second"), Settings(tmp_path, as_json=True))
    assert json.loads((tmp_path / "summary.json").read_text())["word"] == "first"
    assert (tmp_path / "parquet" / "words").is_dir()
    assert not (tmp_path / "work").exists()


def test_interrupt_suppresses_log_messages_of_spark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # an earlier command may have disabled logging

    def interrupt_run(run: JobRun, options: Options) -> Outcome:
        logging.warning("message before")
        try:
            raise Terminated(signal.SIGTERM)
        except KeyboardInterrupt:  # like py4j
            logging.exception("KeyboardInterrupt while sending command.")
            logging.getLogger("py4j.clientserver").error("Exception occurred while shutting down connection")
            raise

    with pytest.raises(Terminated):
        run_job(Job("say", "", "", "", Options, interrupt_run), Options("x"), Settings(tmp_path, as_json=True))
    logging.warning("message after")
    assert [record.message for record in caplog.records] == ["message before", "message after"]
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        ("run", "this run left no results"),
        ("publish", "may be mixed with those of an earlier run"),
        ("tell", "its results are complete in"),
    ],
)
def test_interrupt_message_states_which_results_exist(
    moment: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if moment == "run":
        monkeypatch.setattr(frame, "render", lambda *_, **__: interrupt())
    elif moment == "publish":
        monkeypatch.setattr(Path, "replace", interrupt)
    else:
        monkeypatch.setattr(frame, "_print_outcome", interrupt)
    result = CliRunner().invoke(make_app(JOB), ["say", "--word", "x", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert f"interrupted; Spark is stopped and {'results in' if moment == 'publish' else text}" in result.output
    assert text in result.output
    assert (tmp_path / "report.html").exists() == (moment == "tell")
    assert not (tmp_path / "work").exists()


def test_second_run_in_one_directory_is_rejected(tmp_path: Path) -> None:
    with JobDirectory(tmp_path, "say").locked(), pytest.raises(OutputBusyError, match="another job say"):
        run_job(JOB, Options("x"), Settings(tmp_path, as_json=True))


def test_missing_pyspark_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec_without_pyspark(name: str) -> object:
        return None if name == "pyspark" else object()

    monkeypatch.setattr(frame, "find_spec", find_spec_without_pyspark)
    with pytest.raises(JobError, match=r"pip install 'kipmesh\[spark\]'"):
        run_job(JOB, Options("x"), Settings(tmp_path))


def test_command_line_imports_no_spark_modules() -> None:
    heavy_modules = {"pyspark", "pyarrow", "pandas", "jinja2", "matplotlib"}
    code = f"import sys, kipmesh.cli.main; print({heavy_modules}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_help_of_each_job_has_an_example() -> None:
    for name in jobs.MODULES:
        job = jobs.load(name)
        assert job.name == name
        result = CliRunner().invoke(job_commands.app, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert f"kipmesh job {name}" in result.output
        assert "--out" in result.output
