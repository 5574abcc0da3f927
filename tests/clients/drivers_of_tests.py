"""Drivers: a process a client, which all know the same verbs (`drivers/serving.py`, docs/clients.md).

`CLIENTS` has every client; the ones of `SHORT` need only what `make install` brings. What a machine lacks for one skips
its tests and says so.
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
ANSWER_TIMEOUT_S = 90.0
BUILD_TIMEOUT_S = 500


class MissingError(Exception):
    """The client cannot be run here; the text says why."""


class NoVerbError(Exception):
    """The client has no such thing."""


class ClientError(Exception):
    """What a client said; `code` is Kafka's number, or less than 0 for what is its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Client(NamedTuple):
    """How to start its driver: `command` brings what it needs, and may raise MissingError.

    `keeps` is what of a record it can be told (the bytes of a value that is not a line of text, times, headers), and
    whether it administers; `codec` is one that it has.
    """

    name: str
    command: Callable[[], Sequence[str]]
    keeps: Sequence[str] = ("binary", "timestamp", "headers", "topics")
    codec: str = "lz4"


class Driver:
    """One process of a client; answers come in the order of the questions."""

    def __init__(self, client: Client, bootstrap: str, log: Path, options: Mapping[str, Any]) -> None:
        self.client = client
        self._log = log
        self._waiting = b""
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
        """Ask; `result` has the answer later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")

    def result(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Of the oldest question without an answer; ClientError, NoVerbError."""
        answer = json.loads(self._line(timeout_s))
        if "ok" in answer:
            return answer["ok"]
        if answer["text"].startswith("no verb "):
            raise NoVerbError(f"{self.client.name} has {answer['text']}")
        raise ClientError(answer["error"], answer["text"])

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._waiting:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0))
            part = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not part:
                how = "ended" if ready else f"gave no answer within {timeout_s:g} s"
                raise AssertionError(f"{self.client.name}'s driver {how}:\n{self.log()[-3000:]}")
            self._waiting += part
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line

    def log(self) -> str:
        """What it said on standard error."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Without a goodbye to anybody, and all that it started with it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it; may be called again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()


def _run(what: str, command: Sequence[str], **more: Any) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, **more)
    except subprocess.TimeoutExpired:
        raise MissingError(f"{what}: not done within {BUILD_TIMEOUT_S} s") from None
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
        raise MissingError(f"{what}: {lines[-1][:300]}")


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
    """The class path of Apache Kafka's client and tools, with the driver compiled."""
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
    folder = BUILD / "kafkajs"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "driver.js"):
        shutil.copy(HERE / "kafkajs" / name, folder / name)
    if not (folder / "node_modules" / "kafkajs").exists():
        _run("npm ci", ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder)
    return ["node", str(folder / "driver.js")]


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
        Client("kcat", _kcat, keeps=()),
        Client("java", _java),
        Client("franz-go", _franz),
        Client("kafkajs", _kafkajs, codec="gzip"),
    )
}
SPARK = "spark"
"""Spark's connector: tests of its own, no driver."""
SHORT = ("confluent-kafka", "kafka-python", "aiokafka")


def is_long() -> bool:
    """Whether all clients are wanted (`make clients`), and not only the ones that are installed anyway."""
    return bool(os.environ.get("CLIENTS_LONG"))


def is_wanted(name: str) -> bool:
    """Whether tests of the long form are wanted that are one client's alone: `java`, `spark` (which has no driver)."""
    asked = os.environ.get("CLIENTS", "").split()
    return is_long() and (not asked or name in asked)


def wanted() -> Sequence[str]:
    """Names of clients with a driver: those of the variable `CLIENTS`, or all, or the short ones."""
    asked = os.environ.get("CLIENTS", "").split()
    if unknown := set(asked) - {*CLIENTS, SPARK}:
        raise ValueError(f"CLIENTS names no client: {' '.join(sorted(unknown))}")
    return [name for name in asked if name != SPARK] if asked else (list(CLIENTS) if is_long() else SHORT)
