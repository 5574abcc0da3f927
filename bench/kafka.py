"""Apache Kafka for comparisons: brokers, each in its own JVM, and Java programs.

The jars are those of the golden tests. Each broker is a controller as well, listens on the loopback address only, and
keeps its logs in a temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from bench.harness import BenchError
from bench.kafka_tools import download_kafka_tools
from kipmesh.cluster import ports

ROOT = Path(__file__).resolve().parent.parent
POM = ROOT / "tests" / "golden" / "kafka-tools" / "pom.xml"
JARS = ROOT / "build" / "kafka-tools"

CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"
READY_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
PROGRAM_TIMEOUT_S = 3600
HEAP = ("-Xms512m", "-Xmx1g")
"""Options of the JVM. Kafka's own start script gives a broker 1 GiB."""

_PROPERTIES = """\
process.roles=broker,controller
node.id={node_id}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={directory}/data
offsets.topic.replication.factor={replicas}
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr=1
"""


class KafkaMissingError(BenchError):
    """Apache Kafka or one of its Java programs cannot be run on this machine. The message states the reason."""


def prepare() -> None:
    """Download Apache Kafka's jars unless they are there. Raises KafkaMissingError if that fails or there is no JDK."""
    problem = download_kafka_tools(POM, JARS)
    if not problem and shutil.which("javac") is None:
        problem = "javac is not on the PATH: install a JDK"
    if problem:
        raise KafkaMissingError(problem)


def version() -> str:
    """Return the version of Apache Kafka in the POM; an empty string if it has none."""
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    found = ET.parse(POM).find(".//m:dependency/m:version", space)
    return "" if found is None else str(found.text)


def run_java(name: str, command: Sequence[str], timeout_s: float = READY_TIMEOUT_S, classes: Path = JARS) -> str:
    """Run a command with the jars and the directory `classes` on the class path, and return its standard output.

    Raises KafkaMissingError if the command fails or does not end within `timeout_s`. `name` is the command's name in
    the error message.
    """
    program, *arguments = command
    command = [program, "-cp", f"{classes}:{JARS}/*", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise KafkaMissingError(f"{name} did not end within {timeout_s} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise KafkaMissingError(f"{name} failed: {lines[0][:300]}")
    return done.stdout


class KafkaBroker:
    """One broker of Apache Kafka, which is started and ready inside `with`.

    Args:
        node_id: number of the broker, from 1.
        controller_ports: ports of all controllers, in the order of their ids; empty for a cluster of one broker.
        heap: options of the JVM.
        properties: returns properties of the broker that replace or extend the common ones.

    The constructor raises KafkaMissingError if the jars or a JDK are missing.
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
        self._temporary = tempfile.TemporaryDirectory()
        self._directory = Path(self._temporary.name)
        self._properties_file = self._directory / "server.properties"
        self._process: subprocess.Popen[bytes] | None = None
        self.node_id = node_id
        self.port, controller_port, self.jmx_port = ports.choose(3)
        self._controller_ports = controller_ports or [controller_port]
        self.bootstrap = f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the JVM, even after it has ended. Raises AssertionError before the first start."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the JVM was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _properties(self) -> str:
        own = self._own_properties(self) if self._own_properties else {}
        common = _PROPERTIES.format(
            node_id=self.node_id,
            broker=self.port,
            controller=self._controller_ports[self.node_id - 1],
            voters=",".join(f"{number}@127.0.0.1:{port}" for number, port in enumerate(self._controller_ports, 1)),
            replicas=min(3, len(self._controller_ports)),
            directory=self._directory,
        )
        return common + "".join(f"{key}={value}\n" for key, value in own.items())  # the last of duplicates counts

    def format(self) -> None:
        """Format the log directory, unless it is formatted. Raises KafkaMissingError."""
        if not self._properties_file.exists():
            self._properties_file.write_text(self._properties())
            tool = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(self._properties_file)]
            run_java("StorageTool", ["java", *tool])

    def start(self) -> None:
        """Format the log directory if necessary and start the JVM; does not wait until it is ready.

        If that fails, stops the broker and raises KafkaMissingError or OSError.
        """
        try:
            self.format()
            jmx = "-Dcom.sun.management.jmxremote"
            options = [f"{jmx}.port={self.jmx_port}", f"{jmx}.authenticate=false", f"{jmx}.ssl=false"]
            options += [f"{jmx}.host=127.0.0.1", "-Djava.rmi.server.hostname=127.0.0.1", "-cp", f"{JARS}/*"]
            with open(self._directory / "server.log", "ab") as log:
                command = ["java", *self._heap, *options, "kafka.Kafka", str(self._properties_file)]
                self._process = subprocess.Popen(command, stdout=log, stderr=log)
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self) -> None:
        """Wait until the broker and its JMX port accept connections.

        If the JVM ends or is not ready within 300 s, stops the broker and raises KafkaMissingError.
        """
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.is_running:
            with contextlib.suppress(OSError):
                for port in (self.port, self.jmx_port):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            time.sleep(0.2)
        text = (self._directory / "server.log").read_text(errors="replace").strip()
        raise KafkaMissingError(f"Apache Kafka's broker did not start: {text[-300:] or 'its log is empty'}")

    def kill(self) -> None:
        """Send SIGKILL to the JVM and wait for it to exit. The data stays for the next `start`."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM to the JVM, then SIGKILL after 60 s, and delete the broker's data. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        with contextlib.suppress(OSError):
            self._temporary.cleanup()


def jmx_values(broker: KafkaBroker, names: Sequence[str]) -> dict[str, float]:
    """Return the numeric attributes of a broker's MBeans by `object:attribute`. Raises KafkaMissingError.

    The names of the MBeans may be patterns.
    """
    command = ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "org.apache.kafka.tools.JmxTool"]
    command += ["--jmx-url", f"service:jmx:rmi:///jndi/rmi://127.0.0.1:{broker.jmx_port}/jmxrmi", "--one-time"]
    command += ["--report-format", "properties"]
    for name in names:
        command += ["--object-name", name]
    found = {}
    for line in run_java("JmxTool", command, 60).splitlines():
        name, _, value = line.rpartition("=")
        with contextlib.suppress(ValueError):
            found[name] = float(value)
    return found


class KafkaCluster:
    """A cluster of Apache Kafka brokers, which are started and ready inside `with`. See `KafkaBroker` for `heap` and
    `properties`, and for errors.
    """

    def __init__(
        self,
        brokers: int,
        heap: Sequence[str] = HEAP,
        properties: Callable[[KafkaBroker], Mapping[str, str]] | None = None,
    ) -> None:
        controller_ports = ports.choose(brokers)
        self.brokers = [KafkaBroker(number, controller_ports, heap, properties) for number in range(1, brokers + 1)]
        """In the order of their numbers, which begin at 1."""
        self.bootstrap = ",".join(broker.bootstrap for broker in self.brokers)

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(len(self.brokers)) as pool:
                for done in [pool.submit(broker.format) for broker in self.brokers]:
                    done.result()
            for broker in self.brokers:  # a broker is not ready before a quorum runs
                broker.start()
            for broker in self.brokers:
                broker.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all brokers and delete their data; idempotent."""
        for broker in self.brokers:
            broker.stop()

    def create_topic(self, name: str, partitions: int, replicas: int) -> None:
        """Create a topic with Kafka's own tool. Raises KafkaMissingError if that fails, for example because the topic
        exists.
        """
        command = ["java", "org.apache.kafka.tools.TopicCommand", "--create", "--topic", name]
        command += ["--bootstrap-server", self.bootstrap, "--partitions", str(partitions)]
        run_java("TopicCommand", [*command, "--replication-factor", str(replicas)])


def compile_program(name: str, into: Path) -> None:
    """Compile `bench/java/NAME.java` into a directory. Raises KafkaMissingError."""
    source = ROOT / "bench" / "java" / f"{name}.java"
    run_java(f"javac {name}.java", ["javac", "-nowarn", "-d", str(into), str(source)])


def run_program(name: str, classes: Path, *given: str) -> dict[str, Any]:
    """Run a program compiled into `classes` with the given arguments, and return the JSON object that it prints. Raises
    KafkaMissingError.
    """
    figures: dict[str, Any] = json.loads(run_java(name, ["java", name, *given], PROGRAM_TIMEOUT_S, classes))
    return figures
