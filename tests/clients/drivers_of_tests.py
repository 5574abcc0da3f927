"""Driver processes of third-party clients, which all implement the same verbs (`drivers/serving.py`, docs/clients.md).

`CLIENTS` has every client. Those of `SHORT` need only packages of `make install`. Tests of a client are skipped, with
the reason, if the machine lacks a program for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.kafka_tools import download_kafka_tools

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "clients"
JARS = BUILD / "java"
RESPONSE_TIMEOUT_S = 90.0
BUILD_TIMEOUT_S = 500


class MissingError(Exception):
    """The client cannot run on this machine; the text has the reason."""


class NoVerbError(Exception):
    """The client does not implement the verb."""


class ClientError(Exception):
    """An error of a client; `code` is Kafka's error code, or negative for an error of the library."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Client(NamedTuple):
    """A client library and its driver.

    Args:
        command: installs requirements and returns the command of the driver; raises MissingError.
        features: what the client can write (binary values, timestamps, headers), and topic administration.
        codec: a compression that the client supports.
    """

    name: str
    command: Callable[[], Sequence[str]]
    features: Sequence[str] = ("binary", "timestamp", "headers", "topics")
    codec: str = "lz4"


class Driver:
    """One process of a client. Responses arrive in the order of the requests."""

    def __init__(self, client: Client, bootstrap: str, log: Path, options: Mapping[str, Any]) -> None:
        self.client = client
        self._log = log
        self._buffer = b""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*client.command(), bootstrap, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                cwd=log.parent,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                start_new_session=True,
            )

    def __call__(self, verb: str, **arguments: Any) -> Any:
        self.begin(verb, **arguments)
        return self.result()

    def begin(self, verb: str, **arguments: Any) -> None:
        """Send a request; `result` returns its response."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")

    def result(self, timeout_s: float = RESPONSE_TIMEOUT_S) -> Any:
        """Return the result of the oldest pending request. Raises ClientError, NoVerbError."""
        response = json.loads(self._line(timeout_s))
        if "ok" in response:
            return response["ok"]
        if response["text"].startswith("no verb "):
            raise NoVerbError(f"{self.client.name} has {response['text']}")
        raise ClientError(response["error"], response["text"])

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0))
            part = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not part:
                problem = "exited" if ready else f"did not respond within {timeout_s:g} s"
                raise AssertionError(f"driver of {self.client.name} {problem}:\n{self.log()[-3000:]}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def log(self) -> str:
        """Return the driver's standard error."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL to the driver and its child processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Stop the driver; idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()


def _run(name: str, command: Sequence[str], **more: Any) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, **more)
    except subprocess.TimeoutExpired:
        raise MissingError(f"{name}: not finished within {BUILD_TIMEOUT_S} s") from None
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
        raise MissingError(f"{name}: {lines[-1][:300]}")


def _needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise MissingError(f"{program} is not installed")


def _python(name: str, *modules: str) -> Callable[[], Sequence[str]]:
    def command() -> Sequence[str]:
        for module in modules:
            done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False)
            if done.returncode:
                raise MissingError(f"the Python module {module} is not installed")
        return [sys.executable, str(HERE / "drivers" / f"{name}_driver.py")]

    return functools.cache(command)


@functools.cache
def java_classes() -> str:
    """Compile the driver and return the class path with Apache Kafka's client and tools."""
    problem = download_kafka_tools(HERE / "java" / "pom.xml", JARS)
    if problem:
        raise MissingError(problem)
    _needs("javac")
    classes = BUILD / "java-classes"
    source = HERE / "java" / "Driver.java"
    if not (classes / "Driver.class").exists() or (classes / "Driver.class").stat().st_mtime < source.stat().st_mtime:
        _run("javac", ["javac", "-nowarn", "-cp", f"{JARS}/*", "-d", str(classes), str(source)])
    return f"{classes}:{JARS}/*"


JAVA = ("java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
LOGGED = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.FetchSessionHandler=debug",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.NetworkClient=debug",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.consumer.internals=debug",
)


def _java() -> Sequence[str]:
    return [*JAVA, *LOGGED, "-cp", java_classes(), "Driver"]


@functools.cache
def _franz() -> Sequence[str]:
    _needs("go")
    program = BUILD / "franz"
    BUILD.mkdir(parents=True, exist_ok=True)
    _run("go build", ["go", "build", "-o", str(program), "."], cwd=HERE / "franz")
    return [str(program)]


@functools.cache
def _kafkajs() -> Sequence[str]:
    _needs("node", "npm")
    directory = BUILD / "kafkajs"
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "driver.js"):
        shutil.copy(HERE / "kafkajs" / name, directory / name)
    if not (directory / "node_modules" / "kafkajs").exists():
        _run("npm ci", ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=directory)
    return ["node", str(directory / "driver.js")]


@functools.cache
def _kcat() -> Sequence[str]:
    _needs("kcat")
    return _python("kcat", "confluent_kafka")()


CLIENTS: Mapping[str, Client] = {
    client.name: client
    for client in (
        Client("confluent-kafka", _python("confluent", "confluent_kafka")),
        Client("kafka-python", _python("kafka_python", "kafka", "lz4", "snappy", "zstandard")),
        Client("aiokafka", _python("aiokafka", "aiokafka")),
        Client("kcat", _kcat, features=()),
        Client("java", _java),
        Client("franz-go", _franz),
        Client("kafkajs", _kafkajs, codec="gzip"),
    )
}
SPARK = "spark"
"""Spark's connector has separate tests and no driver."""
SHORT = ("confluent-kafka", "kafka-python", "aiokafka")


def is_long() -> bool:
    """Return whether all clients are tested (`make clients`), not only the installed ones."""
    return bool(os.environ.get("CLIENTS_LONG"))


def is_wanted(name: str) -> bool:
    """Return whether separate tests of one client (`java`, `spark`) are selected."""
    selected = os.environ.get("CLIENTS", "").split()
    return is_long() and (not selected or name in selected)


def wanted() -> Sequence[str]:
    """Return the clients of the environment variable `CLIENTS`, or all, or the installed ones."""
    selected = os.environ.get("CLIENTS", "").split()
    if unknown := set(selected) - {*CLIENTS, SPARK}:
        raise ValueError(f"CLIENTS has unknown clients: {' '.join(sorted(unknown))}")
    return [name for name in selected if name != SPARK] if selected else (list(CLIENTS) if is_long() else SHORT)
