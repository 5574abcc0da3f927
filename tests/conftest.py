"""Fixtures and settings of all tests."""

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

# Spark forks. gRPC's fork handlers expect threads that the child does not have and may crash it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at the import of grpc: keeps its log lines out of the output

ROOT = Path(__file__).resolve().parent.parent
POM = ROOT / "tests" / "golden" / "kafka-tools" / "pom.xml"
JARS = ROOT / "build" / "kafka-tools"

KafkaDump = Callable[..., str]

# No deadline for an example, because machines are slow at times. Each run has the same examples;
# `--hypothesis-profile explore` generates others.
_NO_DEADLINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _NO_DEADLINE)
settings.register_profile("kipmesh", _NO_DEADLINE, derandomize=True, database=None, print_blob=True)
settings.load_profile("kipmesh")


def _is_not_poller_error(record: logging.LogRecord) -> bool:
    """Drop errors that grpc reports to a test's event loop about another loop."""
    return not is_poller_error(record.getMessage(), record.exc_info[1] if record.exc_info else None)


logging.getLogger("asyncio").addFilter(_is_not_poller_error)

for _renderer in structlog.get_config()["processors"]:
    if isinstance(_renderer, structlog.dev.ConsoleRenderer):
        _renderer.exception_formatter = structlog.dev.plain_traceback  # without local variables


def pytest_configure(config: pytest.Config) -> None:
    """Make examples and ports independent of chance, other workers and the order of files."""
    if config.getoption("--hypothesis-profile") is None:
        # Hypothesis draws constants from all loaded modules, which depend on the order of the files.
        providers._get_local_constants = Constants
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # Each worker has its range: another worker must not take the port of a stopped node.
    range_size = (ports._last_port() + 1 - ports.FIRST) // workers
    ports.FIRST += int(worker) * range_size
    last = ports.FIRST + range_size - 1
    ports._last_port = lambda: last


@contextmanager
def _restored_settings() -> Iterator[None]:
    """Restore logging, signal handlers and KIPMESH_ variables, which commands in this process change."""
    was_configured, config = structlog.is_configured(), structlog.get_config()
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    variables = _kipmesh_variables()
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
    for name in _kipmesh_variables():
        del os.environ[name]
    os.environ.update(variables)


def _kipmesh_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("KIPMESH_")}


@pytest.fixture(autouse=True, scope="module")
def _restore_settings_after_module() -> Iterator[None]:
    with _restored_settings():
        yield


@pytest.fixture(autouse=True)
def _restore_settings_after_test(_restore_settings_after_module: None) -> Iterator[None]:
    with _restored_settings():
        yield


@pytest.fixture
def default_structlog(_restore_settings_after_test: None) -> None:
    """Default structlog configuration, which pytest captures: a cluster fixture configures the whole process."""
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def kafka_dump() -> KafkaDump:
    """`dump(files, *options)`: output of Apache Kafka's DumpLogSegments. A warning fails the test.

    With `compacted=True`, warnings about missing offsets are ignored. Apache Kafka's own compacted segments cause them.
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
        warnings = [line for line in done.stderr.splitlines() if not any(text in line for text in missing)]
        assert not warnings if compacted else done.stderr == ""
        assert "isvalid: false" not in done.stdout
        assert "invalid bytes" not in done.stdout
        return done.stdout

    return dump
