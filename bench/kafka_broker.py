"""Real Apache Kafka brokers, each a JVM of its own, for benchmarks that compare; and Java programs beside them.

The jars are those of the golden tests (`bench.kafka.prepare`). Each broker is a controller as well, listens on this
machine only, and keeps its logs in a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
node.id={node_id}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor={replicas}
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr=1
"""


class KafkaBroker:
    """One broker, ready inside `with`; raises KafkaMissingError where it cannot be run.

    By itself, or number `node_id` of those whose controllers listen on `controller_ports`. `heap` are options of the
    JVM; `properties` gives what a broker has beyond or instead of the usual properties.
    """

    def __init__(
        self,
        node_id: int = 1,
        controller_ports: Sequence[int] = (),
        heap: Sequence[str] = HEAP,
        properties: Callable[[KafkaBroker], Mapping[str, str]] | None = None,
    ) -> None:
        prepare()
        self._heap = list(heap)
        self._own_properties = properties
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self.node_id = node_id
        self.port, own, self.jmx_port = ports.choose(3)
        self._controller_ports = controller_ports or [own]
        self.bootstrap = f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the JVM."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its JVM is."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def _properties(self) -> str:
        own = self._own_properties(self) if self._own_properties else {}
        usual = _PROPERTIES.format(
            node_id=self.node_id,
            broker=self.port,
            controller=self._controller_ports[self.node_id - 1],
            voters=",".join(f"{number}@127.0.0.1:{port}" for number, port in enumerate(self._controller_ports, 1)),
            replicas=min(3, len(self._controller_ports)),
            folder=self._folder.name,
        )
        return usual + "".join(f"{key}={value}\n" for key, value in own.items())  # the last of a name holds

    def format(self) -> None:
        """Make its folder, if that is not done."""
        properties = Path(self._folder.name) / "server.properties"
        if properties.exists():
            return
        properties.write_text(self._properties())
        made = subprocess.run(
            ["java", "-cp", f"{JARS}/*", "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(properties)],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise KafkaMissingError(f"Apache Kafka's folder cannot be made: {made.stderr.strip()[:300]}")

    def start(self) -> None:
        """Make its folder if it has none and begin; after an exception nothing runs."""
        folder = Path(self._folder.name)
        properties = folder / "server.properties"
        jars = ["-cp", f"{JARS}/*"]
        try:
            self.format()
            jmx = "-Dcom.sun.management.jmxremote"
            options = [f"{jmx}.port={self.jmx_port}", f"{jmx}.authenticate=false", f"{jmx}.ssl=false"]
            options += [f"{jmx}.host=127.0.0.1", "-Djava.rmi.server.hostname=127.0.0.1"]
            with open(folder / "server.log", "ab") as log:
                self._process = subprocess.Popen(
                    ["java", *self._heap, *options, *jars, "kafka.Kafka", str(properties)], stdout=log, stderr=log
                )
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Until it answers; after an exception it is stopped."""
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
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

    def kill(self) -> None:
        """SIGKILL; what it kept stays, and `start` begins it again."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, and forget what it kept; may be called again."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def jmx_values(broker: KafkaBroker, names: Sequence[str]) -> dict[str, float]:
    """The numbers of a broker's beans, `object:attribute` to value, by Kafka's own tool; names may be patterns."""
    command = ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*", "org.apache.kafka.tools.JmxTool"]
    command += ["--jmx-url", f"service:jmx:rmi:///jndi/rmi://127.0.0.1:{broker.jmx_port}/jmxrmi", "--one-time"]
    command += ["--report-format", "properties"]
    for name in names:
        command += ["--object-name", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise KafkaMissingError(f"JmxTool failed: {(done.stderr or done.stdout).strip()[:300]}")
    found = {}
    for line in done.stdout.splitlines():
        name, _, value = line.rpartition("=")
        with contextlib.suppress(ValueError):
            found[name] = float(value)
    return found


class KafkaCluster:
    """Several brokers, ready inside `with`."""

    def __init__(
        self,
        brokers: int,
        heap: Sequence[str] = HEAP,
        properties: Callable[[KafkaBroker], Mapping[str, str]] | None = None,
    ) -> None:
        controller_ports = ports.choose(brokers)
        self._brokers = [KafkaBroker(number, controller_ports, heap, properties) for number in range(1, brokers + 1)]
        self.bootstrap = ",".join(broker.bootstrap for broker in self._brokers)

    @property
    def brokers(self) -> Sequence[KafkaBroker]:
        """By their number, which is from 1 up."""
        return self._brokers

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(len(self._brokers)) as pool:
                for done in [pool.submit(broker.format) for broker in self._brokers]:
                    done.result()
            for broker in self._brokers:  # one alone is no quorum, and never ready
                broker.start()
            for broker in self._brokers:
                broker.wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for broker in self._brokers:
            broker.stop()

    def create_topic(self, name: str, partitions: int, replicas: int) -> None:
        """By Kafka's own tool; raises KafkaMissingError."""
        command = ["java", "-cp", f"{JARS}/*", "org.apache.kafka.tools.TopicCommand", "--create", "--topic", name]
        command += ["--bootstrap-server", self.bootstrap, "--partitions", str(partitions)]
        command += ["--replication-factor", str(replicas)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=READY_TIMEOUT_S, check=False)
        if done.returncode:
            raise KafkaMissingError(f"Apache Kafka made no topic: {(done.stdout + done.stderr).strip()[:300]}")


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
