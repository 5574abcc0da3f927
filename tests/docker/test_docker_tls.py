"""The mesh of docker-compose.tls.yml: everything by TLS with certificates on both sides, and nothing without.

Whole only in `make docker`: it is a second mesh of seven containers.
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
from tests.docker.compose_of_tests import BROKERS, NODES, ComposedMesh, check_prometheus, make_certs
from tests.docker.docker_of_tests import docker
from tests.docker.kafka_client_of_tests import check_inside, check_outside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PUBLISHED = [f"KIPMESH_{name}{kind}_PORT" for name in BROKERS for kind in ("", "_KAFKA")]
PUBLISHED += ["KIPMESH_CONTROLLER_1_PORT", "KIPMESH_CONSUMER_1_PORT"]
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def mesh(image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedMesh]:
    certs = tmp_path_factory.mktemp("tls") / "certs"
    make_certs(certs)
    with ComposedMesh("tls", certs).running() as it:
        yield it


def _context(mesh: ComposedMesh, *, own: bool) -> ssl.SSLContext:
    assert mesh.certs is not None
    context = ssl.create_default_context(cafile=str(mesh.certs / "client" / "ca.crt"))
    if own:
        context.load_cert_chain(mesh.certs / "client" / "tls.crt", mesh.certs / "client" / "tls.key")
    return context


def _answer(port: int, context: ssl.SSLContext | None) -> bytes:
    """What a listener says to an HTTP request, be it gRPC or Kafka's; nothing when it hangs up."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        with connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(100)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plaintext_gets_nothing(mesh: ComposedMesh, name: str) -> None:
    try:
        answer = _answer(mesh.ports[name], None)
    except ConnectionError:
        return
    # At most a TLS alert (21), which says nothing of the mesh.
    assert not answer or answer[0] == 21


@pytest.mark.parametrize("name", PUBLISHED)
def test_client_without_a_certificate_is_refused(mesh: ComposedMesh, name: str) -> None:
    try:
        answer = _answer(mesh.ports[name], _context(mesh, own=False))
    except (ConnectionError, ssl.SSLError):
        return
    assert not answer


def test_clients_of_this_machine_write_and_read(mesh: ComposedMesh) -> None:
    with AdminClient(mesh.bootstrap, **mesh.client) as admin:
        admin.create_topics([NewTopic("greetings", 3, 3)])
    with Producer(mesh.bootstrap, **mesh.client) as producer:
        for number in range(30):
            producer.send("greetings", b"%d" % number, partition=number % 3).result()
    with Consumer(mesh.bootstrap, **mesh.client, group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["greetings"])
        values: list[bytes] = []
        while len(values) < 30:
            values += [record.value for record in consumer.poll(timeout_ms=5000) if record.value is not None]
    assert sorted(map(int, values)) == list(range(30))
    port = mesh.ports["KIPMESH_CONSUMER_1_PORT"]
    address = f"https://127.0.0.1:{port}/v1/topics/greetings/records?from=earliest&limit=30"
    with urllib.request.urlopen(address, timeout=60, context=_context(mesh, own=True)) as answer:
        records = [json.loads(line) for line in answer.read().decode().splitlines()]
    assert sorted(int(record["value"]) for record in records) == list(range(30))
    with (
        pytest.raises(KafkaError, match=r"does it want security\.protocol=SSL\?"),
        AdminClient(mesh.bootstrap, **{"default.api.timeout.ms": 5000}) as plain,
    ):
        plain.describe_topics(["greetings"])


def test_kafka_clients_write_and_read_over_tls(mesh: ComposedMesh, image: Callable[[str], str]) -> None:
    check_outside(mesh)
    check_inside(mesh, image("leader"))


def test_commands_take_the_file_of_make_certs(mesh: ComposedMesh) -> None:
    listed = mesh.command("broker", "list", "--json", "--bootstrap", mesh.bootstrap).splitlines()
    assert len(listed) == 3
    controllers = ",".join(f"127.0.0.1:{mesh.ports[f'KIPMESH_CONTROLLER_{number}_PORT']}" for number in (1, 2, 3))
    assert "led" in mesh.command("quorum", "describe", "--json", "--bootstrap-controller", controllers)


@pytest.mark.parametrize("name", NODES)
def test_keys_are_readable_by_the_node_user_alone(mesh: ComposedMesh, name: str) -> None:
    script = (
        "import os, json; d = '/etc/kipmesh-tls/'; s = os.stat(d + 'tls.key'); f = os.stat(d);"
        "print(json.dumps([s.st_uid, s.st_gid, oct(s.st_mode & 0o7777), f.st_uid, oct(f.st_mode & 0o7777)]));"
        "open(d + 'tls.key').read(1)"
    )
    found = docker("exec", mesh.container(name), "python", "-c", script)
    assert json.loads(found) == [10001, 10001, "0o400", 10001, "0o700"]
    mounts = json.loads(docker("inspect", "--format", "{{json .Mounts}}", mesh.container(name)))
    (mine,) = [one for one in mounts if one["Destination"] == "/etc/kipmesh-tls"]
    assert mine["Name"] == f"{mesh.project}_tls-{name}"
    assert not mine["RW"]


def test_prometheus_sees_every_node(mesh: ComposedMesh, prometheus_image: str, until: Callable[..., None]) -> None:
    check_prometheus(mesh, prometheus_image, until)


def test_faults_by_tls_lose_nothing(mesh: ComposedMesh, tmp_path: Path) -> None:
    assert "no anomaly; 4 faults" in mesh.chaos("deploy/chaos/compose/kill-each.yaml", tmp_path)


def test_experiments_over_tls_find_no_anomaly(mesh: ComposedMesh) -> None:
    told = mesh.compose("--profile", "chaos", "run", "--rm", "chaos", timeout_s=900)
    assert "no anomaly; 4 faults" in told


def test_flights_job_passes_over_tls(mesh: ComposedMesh, spark_image: str) -> None:
    summary = mesh.flights(spark_image)
    assert summary["passed"]
    assert summary["records"] == 2060


def test_renewed_certificates_are_taken_without_a_restart(mesh: ComposedMesh, until: Callable[..., None]) -> None:
    """`make certs` and `make up TLS=1`, as docs/docker.md says."""
    assert mesh.certs is not None
    leader = mesh.container("leader-1")
    begin = docker("inspect", "--format", "{{.State.StartedAt}}", leader)
    shutil.rmtree(mesh.certs / "leader-1")
    make_certs(mesh.certs)
    mesh.script("up")
    assert docker("inspect", "--format", "{{.State.StartedAt}}", leader) == begin
    wanted = ssl.PEM_cert_to_DER_cert((mesh.certs / "leader-1" / "tls.crt").read_text())

    def shown() -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", mesh.ports["KIPMESH_LEADER_1_PORT"]), TIMEOUT_S) as plain,
            _context(mesh, own=True).wrap_socket(plain, server_hostname="leader-1") as connection,
        ):
            return connection.getpeercert(binary_form=True)

    until(shown, wanted)
