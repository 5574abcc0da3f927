"""The mesh of docker-compose.yml: healthy, reached from this machine; nothing is lost whichever container is killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from docker_of_tests import ROOT, TAG, docker

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, Producer

pytestmark = pytest.mark.timeout(1800)

NODES = ("controller-1", "controller-2", "controller-3", "leader-1", "follower-1", "follower-2", "consumer-1")
BROKERS = ("LEADER_1", "FOLLOWER_1", "FOLLOWER_2")
UP_TIMEOUT_S = 600


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class _Mesh:
    """A project of docker-compose with a name and ports of its own."""

    def __init__(self) -> None:
        self.project = f"kipmesh-tests-{os.getpid()}"
        names = [f"{name}{kind}_PORT" for name in BROKERS for kind in ("", "_KAFKA")]
        names += [f"{name.upper().replace('-', '_')}_PORT" for name in NODES if not name.startswith(("l", "f"))]
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.environment = os.environ | {f"KIPMESH_{name}": str(port) for name, port in self.ports.items()}
        self.environment |= {"IMAGE_TAG": TAG, "IMAGE_PREFIX": "kipmesh/", "PROFILES": "", "TIMEOUT_S": "400"}
        # Several test runs share machines: what is slow is not dead.
        self.environment |= {"KIPMESH_QUORUM_FETCH_TIMEOUT_MS": "4000", "KIPMESH_BROKER_SESSION_TIMEOUT_MS": "9000"}

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{self.ports[f'{name}_PORT']}" for name in BROKERS)

    def compose(self, what: str, *more: str) -> None:
        command = ["sh", "tools/compose.sh", what, self.project, *more]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def container(self, service: str) -> str:
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        found = docker("ps", "--all", "--quiet", *(word for one in labels for word in ("--filter", f"label={one}")))
        assert found, f"there is no {service}"
        return found

    def chaos(self, experiment: str, folder: Path) -> str:
        command = [sys.executable, "-m", "kipmesh.cli.main", "chaos", "run", experiment, "--compose", self.project]
        done = subprocess.run(
            [*command, "--dir", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def mesh(image: Callable[[str], str]) -> Iterator[_Mesh]:
    mesh = _Mesh()
    try:
        mesh.compose("up")
        yield mesh
    finally:
        mesh.compose("down", "remove")
    assert not docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={mesh.project}")
    assert not docker("volume", "ls", "--quiet", "--filter", f"label=com.docker.compose.project={mesh.project}")


def test_clients_of_this_machine_write_and_read(mesh: _Mesh) -> None:
    with AdminClient(mesh.bootstrap) as admin:
        admin.create_topics([NewTopic("greetings", 3, 3)])
    with Producer(mesh.bootstrap) as producer:
        for number in range(30):
            producer.send("greetings", b"%d" % number, partition=number % 3).result()
    with Consumer(mesh.bootstrap, group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["greetings"])
        values: list[bytes] = []
        while len(values) < 30:
            values += [record.value for record in consumer.poll(timeout_ms=5000) if record.value is not None]
    assert sorted(map(int, values)) == list(range(30))
    address = f"http://127.0.0.1:{mesh.ports['CONSUMER_1_PORT']}/v1/topics/greetings/records?from=earliest&limit=30"
    with urllib.request.urlopen(address, timeout=60) as answer:
        records = [json.loads(line) for line in answer.read().decode().splitlines()]
    assert sorted(int(record["value"]) for record in records) == list(range(30))


def test_racks_are_three(mesh: _Mesh) -> None:
    command = [sys.executable, "-m", "kipmesh.cli.main", "broker", "list", "--json", "--bootstrap", mesh.bootstrap]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    brokers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(broker["rack"] for broker in brokers) == ["rack-a", "rack-b", "rack-c"]


def test_containers_are_confined(mesh: _Mesh) -> None:
    for name in NODES:
        about = json.loads(docker("inspect", mesh.container(name)))[0]
        assert about["HostConfig"]["ReadonlyRootfs"], name
        assert about["HostConfig"]["CapDrop"] == ["ALL"], name
        assert about["Config"]["User"] == "10001:10001", name
        assert all(one[0]["HostIp"] == "127.0.0.1" for one in about["HostConfig"]["PortBindings"].values()), name


def test_killed_leader_loses_nothing(mesh: _Mesh, tmp_path: Path) -> None:
    experiment = tmp_path / "kill-leader.yaml"
    experiment.write_text(
        """
name: compose-kill-leader
hypothesis: A leader's container that is killed costs no acknowledged record.
duration_s: 15
workload: {partitions: 2, producers: 2, racks: [rack-a, rack-b]}
faults: [{kind: kill, target: "leader:0", at_s: 2, for_s: 4}]
steady_state: {write_gap_s: 60, read_delay_s: 60, recovered_within_s: 120}
"""
    )
    assert "no anomaly; 1 faults" in mesh.chaos(str(experiment), tmp_path)


@pytest.mark.slow
def test_each_kind_of_container_killed_loses_nothing(mesh: _Mesh, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in mesh.chaos("deploy/chaos/compose/kill-each.yaml", tmp_path)


@pytest.mark.slow
def test_held_cut_off_and_restarted_containers_lose_nothing(mesh: _Mesh, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in mesh.chaos("deploy/chaos/compose/faults.yaml", tmp_path)


def test_stopped_mesh_has_exit_codes_of_0_and_no_errors_in_its_logs(mesh: _Mesh) -> None:
    """The last test of this module: it leaves the mesh stopped."""
    for name in reversed(NODES):
        container = mesh.container(name)
        begin = docker("inspect", "--format", "{{.State.StartedAt}}", container)
        docker("stop", "--time", "30", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0", name
        logs = subprocess.run(
            ["docker", "logs", "--since", begin, container], capture_output=True, text=True, timeout=60, check=True
        )
        lines = [json.loads(line) for line in (logs.stdout + logs.stderr).strip().splitlines()]
        assert lines[-1]["event"] == "stopped", name
        assert not [line for line in lines if line["level"] == "error"], name
