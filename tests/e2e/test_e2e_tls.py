"""TLS on all listeners: plaintext and untrusted clients are refused, and certificates are replaced under load."""

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
from tests.e2e.cli_of_tests import ClusterCli, wait_for
from tests.e2e.writer_of_tests import Writer, read_all

TIMEOUT_S = 60.0


def client_config(cluster: ClusterCli) -> dict[str, str]:
    return {"security.protocol": "SSL", "ssl.certificate.dir": str(cluster.directory / "certs" / "client")}


def get(cluster: ClusterCli, address: str, path: str) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=str(cluster.directory / "certs" / "client" / "ca.crt"))
    try:
        with urllib.request.urlopen(f"https://{address}{path}", timeout=TIMEOUT_S, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(cluster: ClusterCli, node: Mapping[str, str], sample: str) -> float:
    lines = get(cluster, node["http"], "/metrics")[1].splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(sample + " ")))


def serves_current_certificate(node: Mapping[str, str]) -> bool:
    """Return whether the HTTP listener uses the certificate in the node's directory."""
    host, _, port = node["http"].rpartition(":")
    served = ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S)
    return ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert((Path(node["certs"]) / "tls.crt").read_text())


def responds_to_plaintext(address: str) -> bool:
    """Return whether the listener responds to a plaintext HTTP request with anything but a TLS alert."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            response = connection.recv(4096)
        except ConnectionError:
            return False
    return response != b"" and response[0] != 0x15  # a TLS alert


def refusal(addresses: str, **config: str) -> str:
    """Return the error of a client that must fail to connect; retries with longer timeouts until it names a cause."""
    text = ""
    for timeout_ms in (1000, 10_000, 60_000):
        with pytest.raises(KafkaError) as refused:
            AdminClient(addresses, **config, request_timeout_ms=timeout_ms).start()
        text = str(refused.value)
        if "does it" in text:
            break
    return text


@pytest.fixture
def tls_cluster(cluster: ClusterCli) -> Iterator[ClusterCli]:
    cluster.local("up", "--tls", "--controllers", "3", "--consumers", "1")
    cluster.run("topic", "create", "flights", "--partitions", "3", "--replication-factor", "3")
    yield cluster
    for node in cluster.description["nodes"]:
        assert "Traceback" not in Path(node["log"]).read_text()


@pytest.mark.slow
def test_all_listeners_require_tls(tls_cluster: ClusterCli) -> None:
    cluster = tls_cluster
    lines = [f"record {number}" for number in range(1000)]
    cluster.run("produce", "flights", stdin="\n".join(lines))
    assert sorted(cluster.consume("flights", 1000)) == sorted(lines)
    nodes = cluster.description["nodes"]
    for node in nodes:
        assert get(cluster, node["http"], "/healthz")[0] == 200
        assert get(cluster, node["http"], "/readyz")[0] == 200
        assert metric(cluster, node, 'kipmesh_tls_certificate_expiry_timestamp_seconds{certificate="own"}') > 1.7e9
        assert metric(cluster, node, "kipmesh_tls_files_bad") == 0
        if node["role"] != "consumer":
            assert get(cluster, node["http"], "/")[0] == get(cluster, node["http"], "/v1/topics")[0] == 404
        for address in filter(None, (node["grpc"], node["kafka"], node["http"])):
            assert not responds_to_plaintext(address), (node["name"], address)
    consumer = cluster.node("consumer-1")
    status, body = get(
        cluster, consumer["http"], "/v1/topics/flights/records?from=earliest&limit=1000&timeout_ms=10000"
    )
    assert status == 200
    assert sorted(json.loads(line)["value"] for line in body.splitlines() if line) == sorted(lines)
    _check_kafka_listener(cluster)
    _check_plaintext_client_error(cluster)


def _check_kafka_listener(cluster: ClusterCli) -> None:
    host, _, port = cluster.node("leader-1")["kafka"].rpartition(":")
    context = ssl.create_default_context(cafile=str(cluster.directory / "certs" / "client" / "ca.crt"))
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        # ApiVersions v0, correlation id 7, no client id.
        connection.sendall(bytes.fromhex("0000000a 0012 0000 00000007 ffff"))
        assert connection.recv(4096)[4:10] == bytes.fromhex("00000007 0000")


def _check_plaintext_client_error(cluster: ClusterCli) -> None:
    addresses = cluster.bootstrap
    assert re.search(r"no broker responds at .*does it want security\.protocol=SSL\?", refusal(addresses))
    done = cluster.run("topic", "list", "--bootstrap", addresses, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "does it want security.protocol=SSL?" in done.stderr
    file = str(cluster.directory / "client.properties")
    done = cluster.run("topic", "list", "--bootstrap", addresses, env={"KIPMESH_COMMAND_CONFIG": file})
    assert "flights" in done.stdout


@pytest.mark.slow
async def test_node_requests_with_untrusted_or_client_certificates_are_refused(tls_cluster: ClusterCli) -> None:
    cluster = tls_cluster
    stranger = Authority.make("kipmesh test")
    trusted = (cluster.directory / "certs" / "client" / "ca.crt").read_bytes()
    stranger.issue("leader-1", ["leader-1", "kipmesh://node"], trust=[trusted]).write(cluster.directory / "stranger")
    config = {"security.protocol": "SSL", "ssl.certificate.dir": str(cluster.directory / "stranger")}
    assert "does it trust this side's certificate" in await asyncio.to_thread(refusal, cluster.bootstrap, **config)
    pool = ConnectionPool.of("false-node", ClientSslConfig.parse(client_config(cluster)))
    leader, controller = pool.get(cluster.node("leader-1")["grpc"]), pool.get(cluster.node("controller-1")["grpc"])
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
        response = await leader.call("Broker", "Metadata", m.MetadataRequest(), TIMEOUT_S)
        assert len(response.brokers) == 3
    finally:
        await pool.close()
    assert metric(cluster, cluster.node("leader-1"), "kipmesh_tls_requests_refused_total") == 1


def _issue_all(cluster: ClusterCli, authority: Authority, trust: list[bytes]) -> None:
    for node in cluster.description["nodes"]:
        names = [node["name"], "localhost", "127.0.0.1"]
        names += [] if node["role"] == "consumer" else ["kipmesh://node"]
        authority.issue(node["name"], names, trust=trust).write(Path(node["certs"]))
    authority.issue("client", ["client"], trust=trust).write(cluster.directory / "certs" / "client")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_all_certificates_and_the_authority_are_replaced_under_load(tls_cluster: ClusterCli) -> None:
    cluster = tls_cluster
    nodes = cluster.description["nodes"]
    old, new = Authority.read(cluster.directory / "certs" / "authority"), Authority.make("kipmesh test")
    old.issue("client", ["client"], trust=[new.pem]).write(cluster.directory / "late-client")

    def reloaded(times: int) -> bool:
        # The counter alone does not suffice: a node that reloads between two files of a renewal counts twice.
        if not all(map(serves_current_certificate, nodes)):
            return False
        used = [metric(cluster, node, 'kipmesh_tls_reloads_total{result="used"}') for node in nodes]
        return min(used) >= times

    async with Writer(cluster.bootstrap, "flights", **client_config(cluster)) as writer:
        await writer.until(500)
        for step, (authority, trust) in enumerate([(old, [new.pem]), (new, [old.pem]), (new, [])], 1):
            _issue_all(cluster, authority, trust)
            await asyncio.to_thread(wait_for, partial(reloaded, step), f"certificates of step {step}")
            await writer.until(500)
        # Restarted nodes reconnect with certificates of the new authority.
        for name in ("follower-1", "leader-1", "controller-2"):
            await asyncio.to_thread(cluster.local, "kill", name)
            await asyncio.to_thread(cluster.local, "start", name)
            await writer.until(500)
        await writer.finish()
    assert await read_all(cluster.bootstrap, "flights", **client_config(cluster)) == writer.acknowledged
    late = {"security.protocol": "SSL", "ssl.certificate.dir": str(cluster.directory / "late-client")}
    assert "does it trust this side's certificate" in await asyncio.to_thread(refusal, cluster.bootstrap, **late)
    for node in nodes:
        assert metric(cluster, node, "kipmesh_tls_files_bad") == 0
        assert (
            metric(cluster, node, 'kipmesh_tls_reloads_total{result="refused"}') <= 3
        )  # reloads between two files of a renewal


@pytest.mark.slow
def test_invalid_certificates_fail_startup_and_are_ignored_on_reload(tls_cluster: ClusterCli) -> None:
    cluster = tls_cluster
    node = cluster.node("follower-1")
    certs, bad = Path(node["certs"]), cluster.directory / "bad"
    bad.mkdir()
    for name in ("tls.crt", "ca.crt"):
        (bad / name).write_bytes((certs / name).read_bytes())
    (bad / "tls.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    cluster.local("stop", "follower-1")
    command = [sys.executable, "-m", "kipmesh_follower", "--config-file", str(Path(node["dir"]) / "node.properties")]
    command += ["--config", f"ssl.certificate.dir={bad}", "--config", "log.level=error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    error = f"kipmesh_follower: cannot start: TLS: {bad}/tls.key: must contain a complete PEM private key"
    assert done.stderr.splitlines() == [error]
    cluster.local("start", "follower-1")
    node, key = cluster.node("follower-1"), (certs / "tls.key").read_bytes()
    (certs / "tls.key").write_bytes(key[:100])
    wait_for(lambda: metric(cluster, node, "kipmesh_tls_files_bad") == 1, "count of the invalid key")
    event = "changed certificates are invalid, previous ones stay in use"
    wait_for(lambda: event in Path(node["log"]).read_text(), "warning about the invalid key")
    cluster.run("produce", "flights", stdin="still here")
    assert cluster.consume("flights", 1) == ["still here"]
    (certs / "tls.key").write_bytes(key)
    wait_for(lambda: metric(cluster, node, "kipmesh_tls_files_bad") == 0, "recovery of the key")


def test_single_process_cluster_requires_tls() -> None:
    with LocalCluster(mode="single", tls=True, followers=1, consumers=1) as cluster:
        assert cluster.client_config["security.protocol"] == "SSL"
        with AdminClient(cluster.bootstrap, **cluster.client_config) as admin:
            # Brokers observe registrations at different times.
            wait_for(lambda: len(admin.describe_cluster().brokers) == 2, "two brokers")
        assert not responds_to_plaintext(str(cluster.node("leader-1").grpc))
        assert "security.protocol=SSL" in refusal(cluster.bootstrap)
