"""What is common to jobs: how one is described, how it is run, what it leaves.

A job's options are a frozen dataclass whose fields are annotated as arguments of a typer command; its function takes a
`JobRun` and the options and returns an `Outcome`. The frame makes the folder, starts Spark when it is first asked for
and stops it, writes ``report.html`` and ``summary.json`` beside ``parquet/``, and leaves nothing half made.

A run works in ``work/`` and puts its results in place at its end, each by a rename. What an interrupted run left there,
however it ended, the next one removes. A lock that the system releases with its process keeps two runs apart.

A run shows steps with their seconds, progress bars, PASS and FAIL lines. On a terminal the bars move; elsewhere each
step is a plain line. With ``--json`` all of it goes to standard error, and standard output holds the summary alone.
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
_REFUSED: Final = re.compile(r"(?:InvalidOptionError|DataLossError|KafkaError): (.+)")

O = TypeVar("O")  # noqa: E741 (the options of a job)


class JobError(Exception):
    """A job cannot be done; the message is one clear line that names the option or the file."""


class FolderBusyError(Exception):
    """Another run holds the folder; the message is one clear line."""


class JobFolder:
    """Paths of a run in `root`; `results` are the folders that `publish` puts in place."""

    def __init__(self, root: Path, job: str, results: tuple[str, ...] = (PARQUET,)) -> None:
        self.root = root.resolve()
        self.work = self.root / "work"
        self.parquet = self.work / PARQUET
        self.spark = self.work / "spark"
        self.left = "nothing of this run is left"
        """What an interrupt now would leave, for people."""
        self._job = job
        self._results = results

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises `FolderBusyError` when another run does, OSError where it cannot be made."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().strip() or "unknown"
                told = f"another job {self._job} (pid {owner}) is running in {self.root}; give another folder"
                raise FolderBusyError(told) from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield

    def begin(self) -> None:
        """Remove what a run that did not end left, and make the folders of this one."""
        self.drop()
        for folder in (self.spark, *(self.work / name for name in self._results)):
            folder.mkdir(parents=True)

    def drop(self) -> None:
        """Remove what is not published."""
        shutil.rmtree(self.work, ignore_errors=True)

    def publish(self, texts: Mapping[str, str]) -> None:
        """Put the results in place of those of an earlier run, each at once and not bit by bit."""
        self.left = f"it was about to put its results into {self.root}: those there may be of two runs"
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
        self.left = f"its results are whole, in {self.root}"
        self.drop()


class Screen:
    """The console of one run, and the seconds of its steps."""

    def __init__(self, *, to_stderr: bool) -> None:
        from rich.console import Console  # as each command's help imports this module

        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.stages: list[Stage] = []

    def line(self, text: str = "") -> None:
        """A line as it is."""
        self._console.print(text, markup=False)

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A step of the run; `total` gives it a bar, which the function that comes out moves to a number."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        begin = time.monotonic()
        columns: list[ProgressColumn] = [SpinnerColumn(finished_text=" "), TextColumn("{task.description:<30}")]
        if total is not None:
            columns += [BarColumn(bar_width=30), MofNCompleteColumn()]
        hidden = not self._console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True, disable=hidden) as progress:
            task = progress.add_task(name, total=total)
            yield lambda done: progress.update(task, completed=done)
        seconds = time.monotonic() - begin
        self.stages.append(Stage(name, seconds))
        self._console.print(f"  {name:<32}{seconds:6.1f} s", markup=False)

    def check(self, check: Check) -> None:
        """A proof."""
        mark = "[green]PASS[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        self._console.print(f"  {mark}  ", end="")
        self._console.print(f"{check.name}: {check.detail}", markup=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out. `summary` becomes summary.json, `checks` and `lines` are shown, `passed` decides the exit code."""

    summary: Mapping[str, Any]
    page: Page
    lines: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    passed: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """What every job takes. `spark` are settings of Spark; they win over the frame's.

    `client` is how a mesh that an option names is reached, beside its addresses: certificates, mostly.
    """

    out: Path
    master: str = DEFAULT_MASTER
    memory: str = DEFAULT_MEMORY
    spark: Mapping[str, str] = field(default_factory=dict)
    as_json: bool = False
    client: Mapping[str, str] = field(default_factory=dict)


class JobRun:
    """One run: its folder, its screen, its Spark."""

    def __init__(self, name: str, settings: Settings, results: tuple[str, ...] = (PARQUET,)) -> None:
        self.name = name
        self.folder = JobFolder(settings.out, name, results)
        self.screen = Screen(to_stderr=settings.as_json)
        self.client = settings.client
        """Configuration of clients of a mesh that an option names."""
        self.parquet = self.folder.parquet
        """Where tables go while the run lasts, a folder each."""
        self.step = self.screen.step
        self._settings = settings
        self._spark: SparkSession | None = None
        self._is_lent = False

    @property
    def spark(self) -> SparkSession:
        """Spark, started when it is first asked for. Raises `JavaMissingError`."""
        if self._spark is None:
            with self.step("Start Spark"):
                return self.start_spark()
        return self._spark

    def start_spark(self) -> SparkSession:
        """Start Spark, without a step. Raises `JavaMissingError`."""
        from kipmesh.spark.session import local_session

        chosen = {"spark.master": self._settings.master, **self._settings.spark}
        name, memory = f"kipmesh {self.name}", self._settings.memory
        self._spark = local_session(name, self.folder.spark, memory=memory, settings=chosen)
        return self._spark

    def use(self, spark: SparkSession) -> None:
        """Run on a session that somebody else starts and stops."""
        self._spark, self._is_lent = spark, True

    @contextmanager
    def spark_step(self, name: str, tasks: int) -> Iterator[None]:
        """A step whose bar follows the tasks of the Spark actions within; `tasks` is how many they will be."""
        spark = self.spark
        with self.step(name, tasks) as done, _watching(spark, done):
            yield
            done(tasks)

    def stop(self) -> None:
        """Stop Spark, if it was started here."""
        if self._spark is not None and not self._is_lent:
            from kipmesh.spark.session import stop_session

            with suppress(Exception):  # an interrupted call leaves py4j in any state; the JVM ends with its input
                stop_session(self._spark)
        self._spark = None


@dataclass(frozen=True, slots=True)
class Job(Generic[O]):
    """A job as ``kipmesh job`` shows it: `summary` is its line in the list, `text` its help."""

    name: str
    summary: str
    text: str
    examples: str
    options: type[O]
    run: Callable[[JobRun, O], Outcome]
    results: tuple[str, ...] = (PARQUET,)
    """Folders of the run's work that are published."""


def run_job(job: Job[O], options: O, settings: Settings) -> Outcome:
    """Run a job to its end. Raises `JobError`, `FolderBusyError`, `JavaMissingError` and what the job raises.

    A KeyboardInterrupt has a note that says what is left of the run.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise JobError(f"job {job.name} needs {', '.join(missing)}: pip install 'kipmesh[spark]'")
    run = JobRun(job.name, settings, job.results)
    try:
        with run.folder.locked(), _quiet_interrupts():
            run.folder.begin()
            try:
                outcome = job.run(run, options)
                page = render(outcome.page, generated=datetime.now(UTC), stages=run.screen.stages)
                run.stop()
                run.folder.publish({REPORT: page, SUMMARY: json.dumps(outcome.summary, indent=2) + "\n"})
            finally:
                run.stop()
                run.folder.drop()
        _tell(run, outcome)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(run.folder.left)
        raise
    return outcome


@contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """py4j logs every call that an interrupt cuts short, and what fails after it, with stacks; who interrupts knows.

    From the first of these records on nothing is logged until the run has cleaned up.
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


def _tell(run: JobRun, outcome: Outcome) -> None:
    screen = run.screen
    screen.line()
    for check in outcome.checks:
        screen.check(check)
    for line in outcome.lines:
        screen.line(f"  {line}")
    for name, what in (
        (REPORT, "the report, opens in any browser"),
        ("parquet", "the tables"),
        (SUMMARY, "the figures"),
    ):
        screen.line(f"  {run.folder.root / name}  ({what})")


@contextmanager
def _watching(spark: SparkSession, done: Callable[[int], None]) -> Iterator[None]:
    """Tell `done` how many tasks have ended since the beginning, over all stages."""
    tracker = spark.sparkContext.statusTracker()
    ended = threading.Event()

    def watch() -> None:
        counted: dict[int, int] = {}
        while not ended.wait(_POLL_SECONDS):
            # A stage that is over is forgotten by and by; what was counted stays.
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
def told_in_one_line() -> Iterator[None]:
    """Raise `JobError` with the source's own words for an error of Spark that holds them; others go through."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        found = _REFUSED.findall(str(error))
        if not found:
            raise
        raise JobError(found[-1].strip()) from None
