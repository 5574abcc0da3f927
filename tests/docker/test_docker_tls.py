"""The cluster of docker-compose.tls.yml: mutual TLS on all listeners.

Runs only in `make docker`, because it starts a second cluster of seven containers.
"""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, Producer
from kipmesh.core.errors import KafkaError
from tests.docker.compose_of_tests import BROKERS, NODES, ComposedCluster, check_prometheus, make_certs
from tests.docker.docker_of_tests import docker
from tests.docker.kafka_client_of_tests import check_inside, check_outside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PUBLISHED = [f"KIPMESH_{name}{kind}_PORT" for name in BROKERS for kind in ("", "_KAFKA")]
PUBLISHED += ["KIPMESH_CONTROLLER_1_PORT", "KIPMESH_CONSUMER_1_PORT"]
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def cluster(image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedCluster]:
    certs = tmp_path_factory.mktemp("tls") / "certs"
    make_certs(certs)
    with ComposedCluster("tls", certs).running() as running:
        yield running


def _context(cluster: ComposedCluster, *, with_certificate: bool) -> ssl.SSLContext:
    assert cluster.certs is not None
    context = ssl.create_default_context(cafile=str(cluster.certs / "client" / "ca.crt"))
    if with_certificate:
        context.load_cert_chain(cluster.certs / "client" / "tls.crt", cluster.certs / "client" / "tls.key")
    return context


def _response(port: int, context: ssl.SSLContext | None) -> bytes:
    """Send an HTTP request to a listener and return its response; empty if it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        with connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(100)


@pytest.mark.parametrize("name", PUBLISHED)
def test_listeners_do_not_respond_to_plaintext(cluster: ComposedCluster, name: str) -> None:
    try:
        response = _response(cluster.ports[name], None)
    except ConnectionError:
        return
    # A TLS alert (21) is allowed.
    assert not response or response[0] == 21


@pytest.mark.parametrize("name", PUBLISHED)
def test_client_without_a_certificate_is_refused(cluster: ComposedCluster, name: str) -> None:
    try:
        response = _response(cluster.ports[name], _context(cluster, with_certificate=False))
    except (ConnectionError, ssl.SSLError):
        return
    assert not response


def test_clients_with_a_certificate_write_and_read(cluster: ComposedCluster) -> None:
    with AdminClient(cluster.bootstrap, **cluster.client) as admin:
        admin.create_topics([NewTopic("greetings", 3, 3)])
    with Producer(cluster.bootstrap, **cluster.client) as producer:
        for number in range(30):
            producer.send("greetings", b"%d" % number, partition=number % 3).result()
    with Consumer(cluster.bootstrap, **cluster.client, group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["greetings"])
        values: list[bytes] = []
        while len(values) < 30:
            values += [record.value for record in consumer.poll(timeout_ms=5000) if record.value is not None]
    assert sorted(map(int, values)) == list(range(30))
    port = cluster.ports["KIPMESH_CONSUMER_1_PORT"]
    address = f"https://127.0.0.1:{port}/v1/topics/greetings/records?from=earliest&limit=30"
    with urllib.request.urlopen(address, timeout=60, context=_context(cluster, with_certificate=True)) as response:
        records = [json.loads(line) for line in response.read().decode().splitlines()]
    assert sorted(int(record["value"]) for record in records) == list(range(30))
    with (
        pytest.raises(KafkaError, match=r"does it want security\.protocol=SSL\?"),
        AdminClient(cluster.bootstrap, **{"default.api.timeout.ms": 5000}) as plain,
    ):
        plain.describe_topics(["greetings"])


def test_kafka_clients_write_and_read_over_tls(cluster: ComposedCluster, image: Callable[[str], str]) -> None:
    check_outside(cluster)
    check_inside(cluster, image("leader"))


def test_commands_use_the_client_properties_of_make_certs(cluster: ComposedCluster) -> None:
    listed = cluster.command("broker", "list", "--json", "--bootstrap", cluster.bootstrap).splitlines()
    assert len(listed) == 3
    controllers = ",".join(f"127.0.0.1:{cluster.ports[f'KIPMESH_CONTROLLER_{number}_PORT']}" for number in (1, 2, 3))
    assert "led" in cluster.command("quorum", "describe", "--json", "--bootstrap-controller", controllers)


@pytest.mark.parametrize("name", NODES)
def test_only_the_node_user_can_read_its_key(cluster: ComposedCluster, name: str) -> None:
    script = (
        "import os, json; d = '/etc/kipmesh-tls/'; s = os.stat(d + 'tls.key'); f = os.stat(d);"
        "print(json.dumps([s.st_uid, s.st_gid, oct(s.st_mode & 0o7777), f.st_uid, oct(f.st_mode & 0o7777)]));"
        "open(d + 'tls.key').read(1)"
    )
    found = docker("exec", cluster.container(name), "python", "-c", script)
    assert json.loads(found) == [10001, 10001, "0o400", 10001, "0o700"]
    mounts = json.loads(docker("inspect", "--format", "{{json .Mounts}}", cluster.container(name)))
    (mount,) = [mount for mount in mounts if mount["Destination"] == "/etc/kipmesh-tls"]
    assert mount["Name"] == f"{cluster.project}_tls-{name}"
    assert not mount["RW"]


def test_prometheus_scrapes_every_node_over_tls(
    cluster: ComposedCluster, prometheus_image: str, until: Callable[..., None]
) -> None:
    check_prometheus(cluster, prometheus_image, until)


def test_no_record_is_lost_when_containers_with_tls_are_killed(cluster: ComposedCluster, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in cluster.chaos("deploy/chaos/compose/kill-each.yaml", tmp_path)


def test_profile_chaos_over_tls_finds_no_anomaly(cluster: ComposedCluster) -> None:
    output = cluster.compose("--profile", "chaos", "run", "--rm", "chaos", timeout_s=900)
    assert "no anomaly; 4 faults" in output


def test_flights_job_passes_over_tls(cluster: ComposedCluster, spark_image: str) -> None:
    summary = cluster.flights(spark_image)
    assert summary["passed"]
    assert summary["records"] == 2060


def test_renewed_certificates_are_loaded_without_a_restart(
    cluster: ComposedCluster, until: Callable[..., None]
) -> None:
    """Renew by `make certs` and `make up TLS=1` (docs/docker.md)."""
    assert cluster.certs is not None
    leader = cluster.container("leader-1")
    begin = docker("inspect", "--format", "{{.State.StartedAt}}", leader)
    shutil.rmtree(cluster.certs / "leader-1")
    make_certs(cluster.certs)
    cluster.script("up")
    assert docker("inspect", "--format", "{{.State.StartedAt}}", leader) == begin
    wanted = ssl.PEM_cert_to_DER_cert((cluster.certs / "leader-1" / "tls.crt").read_text())

    def served() -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", cluster.ports["KIPMESH_LEADER_1_PORT"]), TIMEOUT_S) as plain,
            _context(cluster, with_certificate=True).wrap_socket(plain, server_hostname="leader-1") as connection,
        ):
            return connection.getpeercert(binary_form=True)

    until(served, wanted)
