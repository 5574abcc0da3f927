"""Fixtures that several test folders share."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from bench.kafka_tools import download_kafka_tools
from kipmesh.cluster import ports
from kipmesh.transport.grpc import is_poller_error

# Spark starts its process by fork: what gRPC would do in that child, about threads that are not there, may end it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported: no notes of its own between the tests

ROOT = Path(__file__).resolve().parent.parent
POM = ROOT / "tests" / "golden" / "kafka-tools" / "pom.xml"
JARS = ROOT / "build" / "kafka-tools"

KafkaDump = Callable[..., str]

# An example may take as long as the machine wants, which a limit of 200 ms by itself would not allow; and each run has
# the same examples. `--hypothesis-profile explore` looks for others.
_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _UNHURRIED)
settings.register_profile("kipmesh", _UNHURRIED, derandomize=True, database=None, print_blob=True)
settings.load_profile("kipmesh")


def _concerns_its_loop(record: logging.LogRecord) -> bool:
    """Not what grpc tells a test's loop about the loop of a test before, or about that of a cluster's thread."""
    return not is_poller_error(record.getMessage(), record.exc_info[1] if record.exc_info else None)


logging.getLogger("asyncio").addFilter(_concerns_its_loop)

for _renderer in structlog.get_config()["processors"]:
    if isinstance(_renderer, structlog.dev.ConsoleRenderer):
        _renderer.exception_formatter = structlog.dev.plain_traceback  # its own prints locals: whole clusters


def pytest_configure(config: pytest.Config) -> None:
    """What chance, other workers and earlier files of the same worker must not decide."""
    if config.getoption("--hypothesis-profile") is None:
        # Hypothesis tries constants of all modules that are loaded, which are other ones in each order of the files.
        providers._get_local_constants = Constants
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # A port that is free while its node is down would be another worker's by the time the node is back.
    own = (ports._last_port() + 1 - ports.FIRST) // workers
    ports.FIRST += int(worker) * own
    last = ports.FIRST + own - 1
    ports._last_port = lambda: last


@contextmanager
def _left_as_found() -> Iterator[None]:
    """A command that runs in this process sets up logs and signals for all of it, and variables."""
    was_configured, config = structlog.is_configured(), structlog.get_config()
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    variables = _own_variables()
    handled = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handled.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if was_configured:
        structlog.configure(**config)
    else:
        structlog.reset_defaults()
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.disable(disabled)
    logging.captureWarnings(capture=False)
    for name in _own_variables():
        del os.environ[name]
    os.environ.update(variables)


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("KIPMESH_")}


@pytest.fixture(autouse=True, scope="module")
def _file_leaves_no_settings() -> Iterator[None]:
    """What fixtures of a file set; which file comes next in this process depends on the workers' pace."""
    with _left_as_found():
        yield


@pytest.fixture(autouse=True)
def _test_leaves_no_settings(_file_leaves_no_settings: None) -> Iterator[None]:
    with _left_as_found():
        yield


@pytest.fixture
def logs_that_can_be_read(_test_leaves_no_settings: None) -> None:
    """As they are by themselves: a cluster of a fixture of this file has configured them for the whole process."""
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def kafka_dump() -> KafkaDump:
    """`dump(files, *options)`: what Apache Kafka's DumpLogSegments prints; a complaint fails the test.

    With `compacted=True` records may be missing between others: it says so of compacted segments of Kafka's, too.
    """
    problem = download_kafka_tools(POM, JARS)
    if problem:
        pytest.skip(problem)

    def dump(files: Sequence[Path | str], *options: str, compacted: bool = False) -> str:
        command = ["java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*", "kafka.tools.DumpLogSegments"]
        command += ["--files", ",".join(map(str, files)), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        missing = ("Non-consecutive offsets in ", " is followed by ")
        complaints = [line for line in done.stderr.splitlines() if not any(each in line for each in missing)]
        assert not complaints if compacted else done.stderr == ""
        assert "isvalid: false" not in done.stdout
        assert "invalid bytes" not in done.stdout
        return done.stdout

    return dump
