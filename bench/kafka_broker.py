"""A real Apache Kafka broker as a JVM of its own, for benchmarks that compare; and Java programs beside it.

The jars are those of the golden tests (`bench.kafka.prepare`). The broker is its own controller, listens on this
machine only, and keeps its logs in a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.kafka import JARS, ROOT, KafkaMissingError, prepare
from kipmesh.cluster import ports

CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"
READY_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
PROGRAM_TIMEOUT_S = 3600
HEAP = ("-Xms512m", "-Xmx1g")
"""Kafka's own start script gives a broker 1 GiB."""

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


class KafkaBroker:
    """One broker, ready inside `with`; raises KafkaMissingError where it cannot be run."""

    def __init__(self) -> None:
        prepare()
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self.port, self._controller_port, self.jmx_port = ports.choose(3)
        self.bootstrap = f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the JVM."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        properties = folder / "server.properties"
        properties.write_text(_PROPERTIES.format(broker=self.port, controller=self._controller_port, folder=folder))
        jars = ["-cp", f"{JARS}/*"]
        try:
            made = subprocess.run(
                ["java", *jars, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(properties)],
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode:
                raise KafkaMissingError(f"Apache Kafka's folder cannot be made: {made.stderr.strip()[:300]}")
            jmx = "-Dcom.sun.management.jmxremote"
            options = [f"{jmx}.port={self.jmx_port}", f"{jmx}.authenticate=false", f"{jmx}.ssl=false"]
            options += [f"{jmx}.host=127.0.0.1", "-Djava.rmi.server.hostname=127.0.0.1"]
            with open(folder / "server.log", "wb") as log:
                self._process = subprocess.Popen(
                    ["java", *HEAP, *options, *jars, "kafka.Kafka", str(properties)], stdout=log, stderr=log
                )
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            for port in (self.port, self.jmx_port):
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                except OSError:
                    break
            else:
                return
            time.sleep(0.2)
        text = (Path(self._folder.name) / "server.log").read_text(errors="replace").strip()
        raise KafkaMissingError(f"Apache Kafka's broker did not start: {text[-300:] or 'it says nothing'}")

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def compile_program(name: str, into: Path) -> None:
    """`bench/java/<name>.java`, so that compiling is not part of a figure; raises KafkaMissingError."""
    source = ROOT / "bench" / "java" / f"{name}.java"
    command = ["javac", "-nowarn", "-cp", f"{JARS}/*", "-d", str(into), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KafkaMissingError(f"{name}.java cannot be compiled: {done.stderr.strip()[:300]}")


def run_program(name: str, classes: Path, *given: str) -> dict[str, Any]:
    """The JSON object that a compiled program prints; raises KafkaMissingError."""
    command = ["java", "-cp", f"{classes}:{JARS}/*", name, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise KafkaMissingError(f"{name} failed: {lines[0][:300]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures
