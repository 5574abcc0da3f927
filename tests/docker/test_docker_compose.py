"""The cluster of docker-compose.yml: clients, profiles, and faults of containers."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, Producer
from tests.docker.compose_of_tests import NODES, ComposedCluster, check_prometheus
from tests.docker.docker_of_tests import docker
from tests.docker.kafka_client_of_tests import check_inside, check_outside

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def cluster(image: Callable[[str], str]) -> Iterator[ComposedCluster]:
    with ComposedCluster("tests").running() as running:
        yield running


def test_clients_on_this_machine_write_and_read(cluster: ComposedCluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topics([NewTopic("greetings", 3, 3)])
    with Producer(cluster.bootstrap) as producer:
        for number in range(30):
            producer.send("greetings", b"%d" % number, partition=number % 3).result()
    with Consumer(cluster.bootstrap, group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["greetings"])
        values: list[bytes] = []
        while len(values) < 30:
            values += [record.value for record in consumer.poll(timeout_ms=5000) if record.value is not None]
    assert sorted(map(int, values)) == list(range(30))
    address = f"http://127.0.0.1:{cluster.ports['KIPMESH_CONSUMER_1_PORT']}/v1/topics/greetings/records?from=earliest&limit=30"
    with urllib.request.urlopen(address, timeout=60) as response:
        records = [json.loads(line) for line in response.read().decode().splitlines()]
    assert sorted(int(record["value"]) for record in records) == list(range(30))


def test_brokers_have_three_racks(cluster: ComposedCluster) -> None:
    listed = cluster.command("broker", "list", "--json", "--bootstrap", cluster.bootstrap)
    brokers = [json.loads(line) for line in listed.splitlines()]
    assert sorted(broker["rack"] for broker in brokers) == ["rack-a", "rack-b", "rack-c"]


def test_containers_have_no_privileges_and_publish_local_ports_only(cluster: ComposedCluster) -> None:
    for name in NODES:
        about = json.loads(docker("inspect", cluster.container(name)))[0]
        assert about["HostConfig"]["ReadonlyRootfs"], name
        assert about["HostConfig"]["CapDrop"] == ["ALL"], name
        assert about["Config"]["User"] == "10001:10001", name
        assert all(binding[0]["HostIp"] == "127.0.0.1" for binding in about["HostConfig"]["PortBindings"].values()), (
            name
        )


def test_kafka_clients_write_and_read_on_this_machine_and_in_a_container(
    cluster: ComposedCluster, image: Callable[[str], str]
) -> None:
    check_outside(cluster)
    check_inside(cluster, image("leader"))


def test_no_record_is_lost_when_the_leader_container_is_killed(cluster: ComposedCluster, tmp_path: Path) -> None:
    experiment = tmp_path / "kill-leader.yaml"
    experiment.write_text(
        """
name: compose-kill-leader
hypothesis: No acknowledged record is lost when a leader's container is killed.
duration_s: 15
workload: {partitions: 2, producers: 2, racks: [rack-a, rack-b]}
faults: [{kind: kill, target: "leader:0", at_s: 2, for_s: 4}]
steady_state: {write_gap_s: 60, read_delay_s: 60, recovered_within_s: 120}
"""
    )
    assert "no anomaly; 1 faults" in cluster.chaos(str(experiment), tmp_path)


@pytest.mark.slow
def test_no_record_is_lost_when_a_container_of_each_kind_is_killed(cluster: ComposedCluster, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in cluster.chaos("deploy/chaos/compose/kill-each.yaml", tmp_path)


@pytest.mark.slow
def test_no_record_is_lost_when_containers_are_paused_isolated_and_restarted(
    cluster: ComposedCluster, tmp_path: Path
) -> None:
    assert "no anomaly; 4 faults" in cluster.chaos("deploy/chaos/compose/faults.yaml", tmp_path)


@pytest.mark.slow
def test_profile_chaos_finds_no_anomaly(cluster: ComposedCluster) -> None:
    output = cluster.compose("--profile", "chaos", "run", "--rm", "chaos", timeout_s=900)
    assert "compose-kill-each" in output
    assert "no anomaly; 4 faults" in output


@pytest.mark.slow
def test_profile_spark_passes_the_flights_job(cluster: ComposedCluster, spark_image: str) -> None:
    summary = cluster.flights(spark_image)
    assert summary["passed"]
    assert summary["records"] == 2060


@pytest.mark.slow
def test_prometheus_scrapes_every_node(
    cluster: ComposedCluster, prometheus_image: str, until: Callable[..., None]
) -> None:
    check_prometheus(cluster, prometheus_image, until)


def test_stopped_containers_exit_with_0_and_log_no_errors(cluster: ComposedCluster) -> None:
    """Must be the last test of this module: it stops the cluster."""
    for name in reversed(NODES):
        container = cluster.container(name)
        begin = docker("inspect", "--format", "{{.State.StartedAt}}", container)
        docker("stop", "--time", "30", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0", name
        logs = subprocess.run(
            ["docker", "logs", "--since", begin, container], capture_output=True, text=True, timeout=60, check=True
        )
        lines = [json.loads(line) for line in (logs.stdout + logs.stderr).strip().splitlines()]
        assert lines[-1]["event"] == "stopped", name
        assert not [line for line in lines if line["level"] == "error"], name
