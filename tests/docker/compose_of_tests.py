"""A docker-compose project with a unique name and free ports, for the tests of containers."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.docker.docker_of_tests import ROOT, TAG, docker, succeeds

NODES = ("controller-1", "controller-2", "controller-3", "leader-1", "follower-1", "follower-2", "consumer-1")
BROKERS = ("LEADER_1", "FOLLOWER_1", "FOLLOWER_2")
UP_TIMEOUT_S = 600
CERTS_TIMEOUT_S = 120
FLIGHTS_TIMEOUT_S = 1200


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in sockets]


def _run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


class ComposedCluster:
    """The cluster of docker-compose.yml or, with a directory of certificates, of docker-compose.tls.yml."""

    def __init__(self, name: str, certs: Path | None = None) -> None:
        self.project = f"kipmesh-{name}-{os.getpid()}"
        self.certs = certs
        names = [f"KIPMESH_{name}{kind}_PORT" for name in BROKERS for kind in ("", "_KAFKA")]
        names += [f"KIPMESH_{name}_PORT" for name in ("CONTROLLER_1", "CONTROLLER_2", "CONTROLLER_3", "CONSUMER_1")]
        names += ["PROMETHEUS_PORT"]
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.environment = os.environ | {name: str(port) for name, port in self.ports.items()}
        self.environment |= {"IMAGE_TAG": TAG, "IMAGE_PREFIX": "kipmesh/", "PROFILES": "", "TIMEOUT_S": "400"}
        self.environment |= {"KIPMESH_IMAGE_TAG": TAG, "COMPOSE_PROJECT_NAME": self.project}
        # Long timeouts, because several test runs share a machine.
        self.environment |= {"KIPMESH_QUORUM_FETCH_TIMEOUT_MS": "4000", "KIPMESH_BROKER_SESSION_TIMEOUT_MS": "9000"}
        if certs is not None:
            self.environment |= {"TLS": "1", "KIPMESH_CERTS": str(certs)}

    @property
    def bootstrap(self) -> str:
        """Addresses of the brokers for kipmesh's clients on this machine."""
        return ",".join(f"127.0.0.1:{self.ports[f'KIPMESH_{name}_PORT']}" for name in BROKERS)

    @property
    def kafka_bootstrap(self) -> str:
        """Addresses of the brokers for Kafka clients on this machine."""
        return ",".join(f"127.0.0.1:{self.ports[f'KIPMESH_{name}_KAFKA_PORT']}" for name in BROKERS)

    @property
    def client(self) -> dict[str, str]:
        """Security configuration of kipmesh's clients."""
        if self.certs is None:
            return {}
        return {"security.protocol": "SSL", "ssl.certificate.dir": str(self.certs / "client")}

    @property
    def network(self) -> str:
        return f"{self.project}_mesh"

    @contextmanager
    def running(self) -> Iterator[ComposedCluster]:
        """Start the cluster. Afterwards stop it and assert that no container, volume or network is left."""
        try:
            self.script("up")
            yield self
        finally:
            self.script("down", "remove")
        of_project = ("--quiet", "--filter", f"label=com.docker.compose.project={self.project}")
        assert not docker("ps", "--all", *of_project)
        assert not docker("volume", "ls", *of_project)
        assert not docker("network", "ls", *of_project)

    def script(self, action: str, *more: str) -> str:
        """Run tools/compose.sh as `make up` and `make down` do."""
        return _run(["sh", "tools/compose.sh", action, self.project, *more], self.environment, UP_TIMEOUT_S)

    def compose(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S, **environment: str) -> str:
        """Run a docker-compose command of the project."""
        command = shlex.split(os.environ.get("COMPOSE", ""))
        if not command:
            command = ["docker", "compose"] if succeeds("docker", "compose", "version") else ["docker-compose"]
        files = ["docker-compose.yml", *(["docker-compose.tls.yml"] if self.certs else [])]
        command += [word for file in files for word in ("--file", file)]
        return _run([*command, "--project-name", self.project, *arguments], self.environment | environment, timeout_s)

    def container(self, service: str) -> str:
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        found = docker("ps", "--all", "--quiet", *(word for label in labels for word in ("--filter", f"label={label}")))
        assert found, f"no container of {service}"
        return found

    def command(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run a kipmesh command on this machine."""
        secure = ["--command-config", str(self.certs / "client.properties")] if self.certs else []
        return _run([sys.executable, "-m", "kipmesh.cli.main", *secure, *arguments], os.environ, timeout_s)

    def chaos(self, experiment: str, directory: Path) -> str:
        return self.command(
            "chaos", "run", experiment, "--compose", self.project, "--dir", str(directory), timeout_s=900
        )

    def flights(self, spark_image: str) -> dict[str, Any]:
        """Run a short flights job by the profile spark and return its summary."""
        name = f"{self.project}-flights"
        brokers = "leader-1:9092,follower-1:9092,follower-2:9092"
        words = ["job", "flights", "--fill", f"--bootstrap={brokers}", "--limit=2000", "--topic=flights-compose"]
        words += ["--out=/var/lib/kipmesh/jobs/flights"]
        self.compose("--profile", "spark", "run", "--name", name, "flights", *words, timeout_s=FLIGHTS_TIMEOUT_S)
        try:
            assert docker("inspect", "--format", "{{.Config.Image}}", name) == spark_image
            with tempfile.TemporaryDirectory() as directory:
                docker("cp", f"{name}:/var/lib/kipmesh/jobs/flights/.", directory)
                assert "<html" in (Path(directory) / "report.html").read_text()
                summary: dict[str, Any] = json.loads((Path(directory) / "summary.json").read_text())
                return summary
        finally:
            docker("rm", "--force", name)


def make_certs(directory: Path) -> None:
    """Run `make certs` for another directory."""
    _run(["make", "certs", f"CERTS={directory}"], os.environ, CERTS_TIMEOUT_S)


class Prometheus:
    """Queries to the Prometheus of a cluster."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **query: str) -> Any:
        """Return the data of a response, or None if Prometheus does not respond."""
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as response:
                return json.load(response)["data"]
        except (urllib.error.URLError, OSError):
            return None

    def targets(self) -> dict[str, str]:
        """Return the last error, or else the health, of each instance."""
        found = (self.get("targets") or {}).get("activeTargets", ())
        return {target["labels"]["instance"]: target["lastError"] or target["health"] for target in found}

    def rules(self) -> list[Mapping[str, Any]]:
        return [rule for group in (self.get("rules") or {}).get("groups", ()) for rule in group["rules"]]

    def values(self, expression: str) -> list[float]:
        found = (self.get("query", query=expression) or {}).get("result", ())
        return [float(sample["value"][1]) for sample in found]


def check_prometheus(cluster: ComposedCluster, image: str, until: Callable[..., None]) -> None:
    """Assert that Prometheus loads all rules, scrapes every node and has data of recording rules."""
    cluster.compose("--profile", "monitoring", "up", "-d", "prometheus", PROMETHEUS_IMAGE=image)
    prometheus = Prometheus(cluster.ports["PROMETHEUS_PORT"])
    until(prometheus.targets, dict.fromkeys(NODES, "up"))
    rules = prometheus.rules()
    kinds = [rule["type"] for rule in rules]
    committed = [(ROOT / "deploy/prometheus/rules" / name).read_text() for name in ("alerts.yml", "recording.yml")]
    assert kinds.count("alerting") == committed[0].count("- alert: ") > 0
    assert kinds.count("recording") == committed[1].count("- record: ") > 0
    until(lambda: {rule["health"] for rule in prometheus.rules()}, {"ok"})
    assert not [rule["name"] for rule in prometheus.rules() if rule.get("lastError")]
    until(lambda: prometheus.values("cluster:kafka_controller_kafkacontroller_activecontrollercount:sum"), [1.0])
    until(lambda: prometheus.values("cluster:kafka_server_replicamanager_underreplicatedpartitions:sum"), [0.0])
    # One log directory per controller and broker; a consumer service has none.
    until(lambda: len(prometheus.values("logdirectory:kipmesh_disk_free:ratio")), len(NODES) - 1)
