"""A mesh under TLS: nothing answers without it, only nodes are nodes, and every certificate is replaced under load."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.client.sync import AdminClient
from kipmesh.cluster import LocalCluster
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import KafkaError
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh.transport.tls.making import Authority
from tests.e2e.mesh_of_tests import Mesh, wait_for
from tests.e2e.writer_of_tests import Writer, read_all

TIMEOUT_S = 60.0


def client_config(mesh: Mesh) -> dict[str, str]:
    return {"security.protocol": "SSL", "ssl.certificate.dir": str(mesh.folder / "certs" / "client")}


def get(mesh: Mesh, address: str, path: str) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=str(mesh.folder / "certs" / "client" / "ca.crt"))
    try:
        with urllib.request.urlopen(f"https://{address}{path}", timeout=TIMEOUT_S, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(mesh: Mesh, node: Mapping[str, str], sample: str) -> float:
    lines = get(mesh, node["http"], "/metrics")[1].splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(sample + " ")))


def shows_its_certificate(node: Mapping[str, str]) -> bool:
    """Whether its listener has the certificate that is in its folder now."""
    host, _, port = node["http"].rpartition(":")
    shown = ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S)
    return ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert((Path(node["certs"]) / "tls.crt").read_text())


def answers_plaintext(address: str) -> bool:
    """Whether anything that looks like an answer comes to a request of HTTP in plaintext."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            answer = connection.recv(4096)
        except ConnectionError:
            return False
    return answer != b"" and answer[0] != 0x15  # an alert of TLS


def refusal(addresses: str, **config: str) -> str:
    """What a client says that cannot come in: why, once it had the time to hear that."""
    text = ""
    for timeout_ms in (1000, 10_000, 60_000):
        with pytest.raises(KafkaError) as refused:
            AdminClient(addresses, **config, request_timeout_ms=timeout_ms).start()
        text = str(refused.value)
        if "does it" in text:
            break
    return text


@pytest.fixture
def tls_mesh(mesh: Mesh) -> Iterator[Mesh]:
    mesh.local("up", "--tls", "--controllers", "3", "--consumers", "1")
    mesh.run("topic", "create", "flights", "--partitions", "3", "--replication-factor", "3")
    yield mesh
    for node in mesh.description["nodes"]:
        assert "Traceback" not in Path(node["log"]).read_text()


@pytest.mark.slow
def test_all_listeners_require_tls(tls_mesh: Mesh) -> None:
    mesh = tls_mesh
    lines = [f"record {number}" for number in range(1000)]
    mesh.run("produce", "flights", stdin="\n".join(lines))
    assert sorted(mesh.consume("flights", 1000)) == sorted(lines)
    nodes = mesh.description["nodes"]
    for node in nodes:
        assert get(mesh, node["http"], "/healthz")[0] == 200
        assert get(mesh, node["http"], "/readyz")[0] == 200
        assert metric(mesh, node, 'kipmesh_tls_certificate_expiry_timestamp_seconds{certificate="own"}') > 1.7e9
        assert metric(mesh, node, "kipmesh_tls_files_bad") == 0
        if node["role"] != "consumer":
            assert get(mesh, node["http"], "/")[0] == get(mesh, node["http"], "/v1/topics")[0] == 404
        for address in filter(None, (node["grpc"], node["kafka"], node["http"])):
            assert not answers_plaintext(address), (node["name"], address)
    consumer = mesh.node("consumer-1")
    status, body = get(mesh, consumer["http"], "/v1/topics/flights/records?from=earliest&limit=1000&timeout_ms=10000")
    assert status == 200
    assert sorted(json.loads(line)["value"] for line in body.splitlines() if line) == sorted(lines)
    _check_kafka_listener(mesh)
    _check_plaintext_clients_are_told(mesh)


def _check_kafka_listener(mesh: Mesh) -> None:
    host, _, port = mesh.node("leader-1")["kafka"].rpartition(":")
    context = ssl.create_default_context(cafile=str(mesh.folder / "certs" / "client" / "ca.crt"))
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        # ApiVersions v0, correlation id 7, no client id.
        connection.sendall(bytes.fromhex("0000000a 0012 0000 00000007 ffff"))
        assert connection.recv(4096)[4:10] == bytes.fromhex("00000007 0000")


def _check_plaintext_clients_are_told(mesh: Mesh) -> None:
    addresses = mesh.bootstrap
    assert re.search(r"no broker responds at .*does it want security\.protocol=SSL\?", refusal(addresses))
    done = mesh.run("topic", "list", "--bootstrap", addresses, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "does it want security.protocol=SSL?" in done.stderr
    file = str(mesh.folder / "client.properties")
    done = mesh.run("topic", "list", "--bootstrap", addresses, env={"KIPMESH_COMMAND_CONFIG": file})
    assert "flights" in done.stdout


@pytest.mark.slow
async def test_strangers_and_clients_that_play_nodes_are_refused(tls_mesh: Mesh) -> None:
    mesh = tls_mesh
    stranger = Authority.make("kipmesh mesh")
    trusted = (mesh.folder / "certs" / "client" / "ca.crt").read_bytes()
    stranger.issue("leader-1", ["leader-1", "kipmesh://node"], trust=[trusted]).write(mesh.folder / "stranger")
    config = {"security.protocol": "SSL", "ssl.certificate.dir": str(mesh.folder / "stranger")}
    assert "does it trust this side's certificate" in await asyncio.to_thread(refusal, mesh.bootstrap, **config)
    pool = ConnectionPool.of("false-node", ClientSslConfig.parse(client_config(mesh)))
    leader, controller = pool.get(mesh.node("leader-1")["grpc"]), pool.get(mesh.node("controller-1")["grpc"])
    calls = [
        (controller, "Quorum", "Vote", m.VoteRequest()),
        (controller, "Quorum", "Fetch", m.FetchRequest(replica_id=1002)),
        (controller, "Quorum", "FetchSnapshot", m.FetchSnapshotRequest(replica_id=2)),
        (controller, "Controller", "BrokerRegistration", m.BrokerRegistrationRequest(broker_id=2)),
        (controller, "Controller", "AlterPartition", m.AlterPartitionRequest(broker_id=2)),
        (leader, "Broker", "Fetch", m.FetchRequest(replica_id=2)),
    ]
    try:
        for connection, service, method, request in calls:
            with pytest.raises(TransportError, match="is for nodes") as refused:
                await connection.call(service, method, request, TIMEOUT_S)
            assert refused.value.denied
        answer = await leader.call("Broker", "Metadata", m.MetadataRequest(), TIMEOUT_S)
        assert len(answer.brokers) == 3
    finally:
        await pool.close()
    assert metric(mesh, mesh.node("leader-1"), "kipmesh_tls_requests_refused_total") == 1


def _issue_all(mesh: Mesh, authority: Authority, trust: list[bytes]) -> None:
    for node in mesh.description["nodes"]:
        names = [node["name"], "localhost", "127.0.0.1"]
        names += [] if node["role"] == "consumer" else ["kipmesh://node"]
        authority.issue(node["name"], names, trust=trust).write(Path(node["certs"]))
    authority.issue("client", ["client"], trust=trust).write(mesh.folder / "certs" / "client")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_all_certificates_and_the_authority_are_replaced_under_load(tls_mesh: Mesh) -> None:
    mesh = tls_mesh
    nodes = mesh.description["nodes"]
    old, new = Authority.read(mesh.folder / "certs" / "authority"), Authority.make("kipmesh mesh")
    old.issue("client", ["client"], trust=[new.pem]).write(mesh.folder / "late-client")

    def reloaded(times: int) -> bool:
        """By what it shows, too: a node counts twice when it looks while the last of its files is not there yet."""
        if not all(map(shows_its_certificate, nodes)):
            return False
        used = [metric(mesh, node, 'kipmesh_tls_reloads_total{result="used"}') for node in nodes]
        return min(used) >= times

    async with Writer(mesh.bootstrap, "flights", **client_config(mesh)) as writer:
        await writer.until(500)
        for step, (by, trust) in enumerate([(old, [new.pem]), (new, [old.pem]), (new, [])], 1):
            _issue_all(mesh, by, trust)
            await asyncio.to_thread(wait_for, partial(reloaded, step), f"certificates of step {step}")
            await writer.until(500)
        # Every connection to and from a node that died is made anew, by certificates of the new authority alone.
        for name in ("follower-1", "leader-1", "controller-2"):
            await asyncio.to_thread(mesh.local, "kill", name)
            await asyncio.to_thread(mesh.local, "start", name)
            await writer.until(500)
        await writer.finish()
    assert await read_all(mesh.bootstrap, "flights", **client_config(mesh)) == writer.acknowledged
    late = {"security.protocol": "SSL", "ssl.certificate.dir": str(mesh.folder / "late-client")}
    assert "does it trust this side's certificate" in await asyncio.to_thread(refusal, mesh.bootstrap, **late)
    for node in nodes:
        assert metric(mesh, node, "kipmesh_tls_files_bad") == 0
        assert metric(mesh, node, 'kipmesh_tls_reloads_total{result="refused"}') <= 3  # between two of the files


@pytest.mark.slow
def test_bad_certificates_stop_a_start_and_are_ignored_on_reload(tls_mesh: Mesh) -> None:
    mesh = tls_mesh
    node = mesh.node("follower-1")
    certs, bad = Path(node["certs"]), mesh.folder / "bad"
    bad.mkdir()
    for name in ("tls.crt", "ca.crt"):
        (bad / name).write_bytes((certs / name).read_bytes())
    (bad / "tls.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    mesh.local("stop", "follower-1")
    command = [sys.executable, "-m", "kipmesh_follower", "--config-file", str(Path(node["dir"]) / "node.properties")]
    command += ["--config", f"ssl.certificate.dir={bad}", "--config", "log.level=error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    said = f"kipmesh_follower: cannot start: TLS: {bad}/tls.key: must contain a complete PEM private key"
    assert done.stderr.splitlines() == [said]
    mesh.local("start", "follower-1")
    node, key = mesh.node("follower-1"), (certs / "tls.key").read_bytes()
    (certs / "tls.key").write_bytes(key[:100])
    wait_for(lambda: metric(mesh, node, "kipmesh_tls_files_bad") == 1, "the bad key is noticed")
    said = "changed certificates are invalid, previous ones stay in use"
    wait_for(lambda: said in Path(node["log"]).read_text(), "it says so")  # after it has counted it
    mesh.run("produce", "flights", stdin="still here")
    assert mesh.consume("flights", 1) == ["still here"]
    (certs / "tls.key").write_bytes(key)
    wait_for(lambda: metric(mesh, node, "kipmesh_tls_files_bad") == 0, "the good key is back")


def test_a_cluster_in_this_process_has_tls_too() -> None:
    with LocalCluster(mode="single", tls=True, followers=1, consumers=1) as cluster:
        assert cluster.client_config["security.protocol"] == "SSL"
        with AdminClient(cluster.bootstrap, **cluster.client_config) as admin:
            # Each hears of the other's coming in its own time.
            wait_for(lambda: len(admin.describe_cluster().brokers) == 2, "two brokers")
        assert not answers_plaintext(str(cluster.node("leader-1").grpc))
        assert "security.protocol=SSL" in refusal(cluster.bootstrap)
