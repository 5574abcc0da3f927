"""Common frame of jobs: description, run, results.

A job's options are a frozen dataclass whose fields are annotated for typer. Its function takes a `JobRun` and the
options and returns an `Outcome`. The frame creates the output directory, starts and stops Spark, and writes
`report.html` and `summary.json` beside `parquet/`.

A run works in `work/` and publishes its results at the end, each by a rename. The next run removes what an interrupted
run left. A file lock, which ends with its process, excludes concurrent runs.

A run shows steps with durations, progress bars, PASS and FAIL lines. Bars appear only on a terminal. With `--json` all
this goes to standard error, and standard output has only the summary.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kipmesh_jobs.report import Check, Page, Stage, render

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPORT: Final = "report.html"
SUMMARY: Final = "summary.json"
PARQUET: Final = "parquet"
DEFAULT_MASTER: Final = "local[*]"
DEFAULT_MEMORY: Final = "1g"
_NEEDED: Final = ("pyspark", "pyarrow", "pandas", "jinja2", "matplotlib")
_POLL_SECONDS: Final = 0.25
_SOURCE_ERROR: Final = re.compile(r"(?:InvalidOptionError|DataLossError|KafkaError): (.+)")

O = TypeVar("O")  # noqa: E741 (the options of a job)


class JobError(Exception):
    """A job cannot run or has no usable input. The message is one line that names the option, file or topic."""


class OutputBusyError(Exception):
    """Another run uses the output directory. The message is one line."""


class JobDirectory:
    """Output directory `root` of a run. The run writes to `work`; `publish` then moves the directories named in
    `results` to `root`.
    """

    def __init__(self, root: Path, job: str, results: tuple[str, ...] = (PARQUET,)) -> None:
        self.root = root.resolve()
        self.work = self.root / "work"
        self.parquet = self.work / PARQUET
        self.spark = self.work / "spark"
        self.left = "this run left no results"
        """State of the results if interrupted now, for the message to the user."""
        self._job = job
        self._results = results

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock on the directory, which is created if necessary. Raises OutputBusyError if another run
        holds the lock, or OSError if the directory cannot be created.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().strip() or "unknown"
                text = f"another job {self._job} (pid {owner}) is running in {self.root}; choose another directory"
                raise OutputBusyError(text) from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield

    def begin(self) -> None:
        """Remove the remains of an interrupted run and create the working directories. Raises OSError."""
        self.drop()
        for directory in (self.spark, *(self.work / name for name in self._results)):
            directory.mkdir(parents=True)

    def drop(self) -> None:
        """Delete `work` with all unpublished files. Ignores errors."""
        shutil.rmtree(self.work, ignore_errors=True)

    def publish(self, texts: Mapping[str, str]) -> None:
        """Replace the results of an earlier run, each directory and file with a rename, then delete `work`. `texts` has
        the contents of the files by name. Raises OSError.
        """
        self.left = f"results in {self.root} may be mixed with those of an earlier run"
        for name in self._results:
            target, old = self.root / name, self.work / f"old-{name}"
            if target.exists():
                target.rename(old)
            (self.work / name).rename(target)
            shutil.rmtree(old, ignore_errors=True)
        for name, text in texts.items():
            fresh = self.work / name
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.root / name)
        self.left = f"its results are complete in {self.root}"
        self.drop()


class Screen:
    """Console output of one run. `stages` has the durations of the steps that have completed."""

    def __init__(self, *, to_stderr: bool) -> None:
        from rich.console import Console  # imported late: every command's help imports this module

        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.stages: list[Stage] = []

    def line(self, text: str = "") -> None:
        """Print a line without markup."""
        self._console.print(text, markup=False)

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show a step and, at its end, its duration. A step that raises is not recorded in `stages`.

        With `total`, the step has a progress bar. The yielded function takes the amount completed so far, not an
        increment.
        """
        from rich import progress as bars

        begin = time.monotonic()
        columns: list[bars.ProgressColumn] = [
            bars.SpinnerColumn(finished_text=" "),
            bars.TextColumn("{task.description:<30}"),
        ]
        if total is not None:
            columns += [bars.BarColumn(bar_width=30), bars.MofNCompleteColumn()]
        hidden = not self._console.is_terminal
        with bars.Progress(
            *columns, bars.TimeElapsedColumn(), console=self._console, transient=True, disable=hidden
        ) as progress:
            task = progress.add_task(name, total=total)
            yield lambda done: progress.update(task, completed=done)
        seconds = time.monotonic() - begin
        self.stages.append(Stage(name, seconds))
        self._console.print(f"  {name:<32}{seconds:6.1f} s", markup=False)

    def check(self, check: Check) -> None:
        """Print a check as PASS or FAIL with its name and detail."""
        mark = "[green]PASS[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        self._console.print(f"  {mark}  ", end="")
        self._console.print(f"{check.name}: {check.detail}", markup=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run: contents of summary.json, page, and lines and checks to print. If `passed` is False, the command
    exits with 1.
    """

    summary: Mapping[str, Any]
    page: Page
    lines: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    passed: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that all jobs take.

    `out` is the output directory, `memory` that of the Spark driver, such as `1g`. `spark` are further Spark settings,
    which take precedence. `client` is client configuration besides the addresses, such as TLS, for a cluster that an
    option names.
    """

    out: Path
    master: str = DEFAULT_MASTER
    memory: str = DEFAULT_MEMORY
    spark: Mapping[str, str] = field(default_factory=dict)
    as_json: bool = False
    client: Mapping[str, str] = field(default_factory=dict)


class JobRun:
    """One run of a job: its output directory, screen and Spark session."""

    def __init__(self, name: str, settings: Settings, results: tuple[str, ...] = (PARQUET,)) -> None:
        self.name = name
        self.directory = JobDirectory(settings.out, name, results)
        self.screen = Screen(to_stderr=settings.as_json)
        self.client = settings.client
        """Client configuration for a cluster that an option names."""
        self.parquet = self.directory.parquet
        """Directory for tables during the run, one subdirectory each."""
        self.step = self.screen.step
        self._settings = settings
        self._spark: SparkSession | None = None
        self._is_borrowed = False

    @property
    def spark(self) -> SparkSession:
        """The Spark session, started at the first use. Raises JavaMissingError."""
        if self._spark is None:
            with self.step("Start Spark"):
                return self.start_spark()
        return self._spark

    def start_spark(self) -> SparkSession:
        """Start a Spark session, without showing a step, and return it. Raises JavaMissingError."""
        from kipmesh.spark.session import local_session

        chosen = {"spark.master": self._settings.master, **self._settings.spark}
        name, memory = f"kipmesh {self.name}", self._settings.memory
        self._spark = local_session(name, self.directory.spark, memory=memory, settings=chosen)
        return self._spark

    def use(self, spark: SparkSession) -> None:
        """Use an existing session instead of starting one. `stop` leaves it running."""
        self._spark, self._is_borrowed = spark, True

    @contextmanager
    def spark_step(self, name: str, tasks: int) -> Iterator[None]:
        """Run the block as a step whose progress bar counts completed Spark tasks. `tasks` is their expected number.
        Starts Spark if necessary. Raises JavaMissingError.
        """
        spark = self.spark
        with self.step(name, tasks) as done, _watching(spark, done):
            yield
            done(tasks)

    def stop(self) -> None:
        """Stop the Spark session that this run has started, if any. Never raises."""
        if self._spark is not None and not self._is_borrowed:
            from kipmesh.spark.session import stop_session

            with suppress(Exception):  # py4j may be inconsistent after an interrupt; the JVM ends with its input
                stop_session(self._spark)
        self._spark = None


@dataclass(frozen=True, slots=True)
class Job(Generic[O]):
    """A job of `kipmesh job`. `summary` is its line in the list of jobs, `text` its help, `options` the dataclass of
    its options.
    """

    name: str
    summary: str
    text: str
    examples: str
    options: type[O]
    run: Callable[[JobRun, O], Outcome]
    results: tuple[str, ...] = (PARQUET,)
    """Directories of the run that are published."""


def run_job(job: Job[O], options: O, settings: Settings) -> Outcome:
    """Run a job, print its outcome and return it.

    Raises JobError, OutputBusyError, JavaMissingError, OSError and errors of the job. Unpublished files are deleted. A
    KeyboardInterrupt carries a note with the state of the results.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise JobError(f"job {job.name} needs {', '.join(missing)}: pip install 'kipmesh[spark]'")
    run = JobRun(job.name, settings, job.results)
    try:
        with run.directory.locked(), _quiet_interrupts():
            run.directory.begin()
            try:
                outcome = job.run(run, options)
                page = render(outcome.page, generated=datetime.now(UTC), stages=run.screen.stages)
                run.stop()
                run.directory.publish({REPORT: page, SUMMARY: json.dumps(outcome.summary, indent=2) + "\n"})
            finally:
                run.stop()
                run.directory.drop()
        _print_outcome(run, outcome)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(run.directory.left)
        raise
    return outcome


@contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Suppress log records after a KeyboardInterrupt, because py4j would log every interrupted call with a stack trace.

    Logging is restored at the end of the block.
    """

    def is_other(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        if error is not None:
            logging.disable(logging.CRITICAL)
        return error is None

    before = logging.root.manager.disable
    loggers = [logging.getLogger(name) for name in (None, "py4j.java_gateway", "py4j.clientserver")]
    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        logging.disable(before)
        for logger in loggers:
            logger.removeFilter(is_other)


def _print_outcome(run: JobRun, outcome: Outcome) -> None:
    screen = run.screen
    screen.line()
    for check in outcome.checks:
        screen.check(check)
    for line in outcome.lines:
        screen.line(f"  {line}")
    for name, content in ((REPORT, "report, opens in any browser"), (PARQUET, "tables"), (SUMMARY, "figures")):
        screen.line(f"  {run.directory.root / name}  ({content})")


@contextmanager
def _watching(spark: SparkSession, done: Callable[[int], None]) -> Iterator[None]:
    """Call `done` every 0.25 s in a thread with the number of Spark tasks completed so far, over all stages."""
    tracker = spark.sparkContext.statusTracker()
    ended = threading.Event()

    def watch() -> None:
        counted: dict[int, int] = {}
        while not ended.wait(_POLL_SECONDS):
            # Spark forgets completed stages, so their last counts are kept.
            with suppress(Exception):
                for stage in tracker.getActiveStageIds():
                    info = tracker.getStageInfo(stage)
                    if info is not None:
                        counted[stage] = max(counted.get(stage, 0), info.numCompletedTasks)
                done(sum(counted.values()))

    thread = threading.Thread(target=watch, name="kipmesh-job-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * _POLL_SECONDS + 1)


@contextmanager
def spark_errors_as_job_errors() -> Iterator[None]:
    """Convert a Spark error that contains an InvalidOptionError, DataLossError or KafkaError to a JobError with the
    same message. Other errors are raised unchanged.
    """
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        found = _SOURCE_ERROR.findall(str(error))
        if not found:
            raise
        raise JobError(found[-1].strip()) from None
