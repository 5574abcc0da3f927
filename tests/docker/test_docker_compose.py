"""The mesh of docker-compose.yml: healthy, reached from this machine; nothing is lost whichever container is killed."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, Producer
from tests.docker.compose_of_tests import NODES, ComposedMesh, check_prometheus
from tests.docker.docker_of_tests import docker
from tests.docker.kafka_client_of_tests import check_inside, check_outside

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def mesh(image: Callable[[str], str]) -> Iterator[ComposedMesh]:
    with ComposedMesh("tests").running() as it:
        yield it


def test_clients_of_this_machine_write_and_read(mesh: ComposedMesh) -> None:
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
    address = (
        f"http://127.0.0.1:{mesh.ports['KIPMESH_CONSUMER_1_PORT']}/v1/topics/greetings/records?from=earliest&limit=30"
    )
    with urllib.request.urlopen(address, timeout=60) as answer:
        records = [json.loads(line) for line in answer.read().decode().splitlines()]
    assert sorted(int(record["value"]) for record in records) == list(range(30))


def test_racks_are_three(mesh: ComposedMesh) -> None:
    listed = mesh.command("broker", "list", "--json", "--bootstrap", mesh.bootstrap)
    brokers = [json.loads(line) for line in listed.splitlines()]
    assert sorted(broker["rack"] for broker in brokers) == ["rack-a", "rack-b", "rack-c"]


def test_containers_are_confined(mesh: ComposedMesh) -> None:
    for name in NODES:
        about = json.loads(docker("inspect", mesh.container(name)))[0]
        assert about["HostConfig"]["ReadonlyRootfs"], name
        assert about["HostConfig"]["CapDrop"] == ["ALL"], name
        assert about["Config"]["User"] == "10001:10001", name
        assert all(one[0]["HostIp"] == "127.0.0.1" for one in about["HostConfig"]["PortBindings"].values()), name


def test_kafka_clients_write_and_read_on_this_machine_and_in_the_network(
    mesh: ComposedMesh, image: Callable[[str], str]
) -> None:
    check_outside(mesh)
    check_inside(mesh, image("leader"))


def test_killed_leader_loses_nothing(mesh: ComposedMesh, tmp_path: Path) -> None:
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
def test_each_kind_of_container_killed_loses_nothing(mesh: ComposedMesh, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in mesh.chaos("deploy/chaos/compose/kill-each.yaml", tmp_path)


@pytest.mark.slow
def test_held_cut_off_and_restarted_containers_lose_nothing(mesh: ComposedMesh, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in mesh.chaos("deploy/chaos/compose/faults.yaml", tmp_path)


@pytest.mark.slow
def test_experiments_by_the_profile_chaos_find_no_anomaly(mesh: ComposedMesh) -> None:
    told = mesh.compose("--profile", "chaos", "run", "--rm", "chaos", timeout_s=900)
    assert "compose-kill-each" in told
    assert "no anomaly; 4 faults" in told


@pytest.mark.slow
def test_flights_job_passes_by_the_profile_spark(mesh: ComposedMesh, spark_image: str) -> None:
    summary = mesh.flights(spark_image)
    assert summary["passed"]
    assert summary["records"] == 2060


@pytest.mark.slow
def test_prometheus_sees_every_node(mesh: ComposedMesh, prometheus_image: str, until: Callable[..., None]) -> None:
    check_prometheus(mesh, prometheus_image, until)


def test_stopped_mesh_has_exit_codes_of_0_and_no_errors_in_its_logs(mesh: ComposedMesh) -> None:
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
