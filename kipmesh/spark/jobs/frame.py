"""What is common to jobs: how one is described, how it is run, what it leaves.

A job's options are a frozen dataclass whose fields are annotated as arguments of a typer command; its function takes a
`JobRun` and the options and returns an `Outcome`. The frame makes the folder, starts Spark when it is first asked for
and stops it, writes ``report.html`` and ``summary.json`` beside ``parquet/``, and leaves nothing half made.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kipmesh.spark.jobs.folder import JobFolder
from kipmesh.spark.jobs.report import Page, render
from kipmesh.spark.jobs.screen import Screen

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPORT: Final = "report.html"
SUMMARY: Final = "summary.json"
DEFAULT_MASTER: Final = "local[*]"
DEFAULT_MEMORY: Final = "1g"
_NEEDED: Final = ("pyspark", "pyarrow", "pandas")
_POLL_SECONDS: Final = 0.25

O = TypeVar("O")  # noqa: E741 (the options of a job)


class JobError(Exception):
    """A job cannot be done; the message is one clear line that names the option or the file."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out. `summary` becomes summary.json, `lines` are shown, `passed` decides the exit code (0 or 1)."""

    summary: Mapping[str, Any]
    page: Page | str
    """A string is HTML that the job has made by itself."""
    lines: tuple[str, ...] = ()
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

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.folder = JobFolder(settings.out, f"job {name}")
        self.screen = Screen(to_stderr=settings.as_json)
        self._settings = settings
        self._spark: SparkSession | None = None
        self._is_lent = False

    @property
    def client(self) -> Mapping[str, str]:
        """Configuration of clients of a mesh that an option names."""
        return self._settings.client

    @property
    def parquet(self) -> Path:
        """Where tables go while the run lasts, a folder each."""
        return self.folder.parquet

    @property
    def spark(self) -> SparkSession:
        """Spark, started when it is first asked for. Raises `JavaMissingError`."""
        if self._spark is None:
            from kipmesh.spark.session import local_session

            chosen = {"spark.master": self._settings.master, **self._settings.spark}
            with self.step("Start Spark"):
                self._spark = local_session(
                    f"kipmesh {self.name}", self.folder.spark, memory=self._settings.memory, settings=chosen
                )
        return self._spark

    def use(self, spark: SparkSession) -> None:
        """Run on a session that somebody else starts and stops."""
        self._spark, self._is_lent = spark, True

    def step(self, name: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """A step with its seconds; `total` gives it a bar, which the function that comes out moves to a number."""
        return self.screen.step(name, total)

    @contextmanager
    def spark_step(self, name: str, tasks: int) -> Iterator[None]:
        """A step whose bar follows the tasks of the Spark actions within; `tasks` is how many they will be."""
        spark = self.spark
        with self.step(name, tasks) as done, _watching(spark, done):
            yield
            done(tasks)

    def line(self, text: str = "") -> None:
        """Say something; with --json on standard error."""
        self.screen.line(text)

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


def run_job(job: Job[O], options: O, settings: Settings) -> Outcome:
    """Run a job to its end. Raises `JobError`, `FolderBusyError`, `JavaMissingError` and what the job raises.

    A KeyboardInterrupt has a note that says what is left of the run.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise JobError(f"job {job.name} needs {', '.join(missing)}: pip install 'kipmesh[spark]'")
    run = JobRun(job.name, settings)
    try:
        with run.folder.locked(), _quiet_interrupts():
            run.folder.begin()
            try:
                outcome = job.run(run, options)
                page = outcome.page
                if isinstance(page, Page):
                    page = render(page, generated=datetime.now(UTC), stages=run.screen.stages)
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
    run.line()
    for line in outcome.lines:
        run.line(f"  {line}")
    for name, what in (
        (REPORT, "the report, opens in any browser"),
        ("parquet", "the tables"),
        (SUMMARY, "the figures"),
    ):
        run.line(f"  {run.folder.root / name}  ({what})")


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
