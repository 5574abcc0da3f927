"""TLS of a process: configuration, probes and health check."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kipmesh.core.config import AdminConfig, BrokerConfig, ControllerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node import health
from kipmesh.node.http import Conditions, ProbeServer
from kipmesh.node.tls import ProcessTls
from kipmesh.testing import until
from kipmesh.transport.tls.making import Authority

pytestmark = pytest.mark.usefixtures("long_timeouts")

BROKER = {
    "node.id": "1",
    "cluster.id": "c",
    "controller.quorum.voters": "1001@127.0.0.1:9093",
    "log.dirs": "data",
}
TLS = {"listener.security.protocol.map": "MESH:SSL", "ssl.certificate.dir": "certs", "ssl.node.names": "node"}
STORES = {"ssl.keystore.location": "k", "ssl.truststore.location": "t"}


def broker(**values: Any) -> BrokerConfig:
    return BrokerConfig.parse(BROKER | {key.replace("_", "."): value for key, value in values.items()})


def test_security_protocol_map_sets_protocol_of_listener() -> None:
    listeners = "MESH://127.0.0.1:0,KAFKA://127.0.0.1:0,SSL://127.0.0.1:0"
    plain = BrokerConfig.parse(BROKER | {"listeners": "MESH://127.0.0.1:0"})
    assert not plain.mesh_has_tls
    assert plain.protocol_of("SSL") == "SSL"
    protocols = {"listener.security.protocol.map": "MESH:SSL,KAFKA:PLAINTEXT,SSL:SSL"}
    config = BrokerConfig.parse(BROKER | TLS | protocols | {"listeners": listeners})
    assert config.mesh_has_tls
    assert [config.protocol_of(name) for name in ("MESH", "KAFKA", "SSL")] == ["SSL", "PLAINTEXT", "SSL"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            TLS | {"listener.security.protocol.map": "MESH:SASL_SSL"},
            "listener MESH is gRPC, which does not support SASL",
        ),
        (TLS | {"listener.security.protocol.map": "MESH:TLS"}, "MESH:TLS"),
        (TLS | {"listener.security.protocol.map": "MESH:SSL,MESH:SSL"}, "listener MESH appears more than once"),
        (TLS | {"listener.security.protocol.map": "KAFKA:SSL"}, "listener.security.protocol.map lacks listener MESH"),
        (TLS | {"ssl.node.names": ""}, "listener MESH with SSL needs ssl.node.names"),
        (TLS | {"ssl.certificate.dir": ""}, "needs ssl.certificate.dir, or ssl.keystore.location and ssl.truststore"),
        (TLS | STORES, "ssl.certificate.dir excludes ssl.keystore.location"),
        (TLS | {"ssl.client.auth": "perhaps"}, "none, requested or required"),
        ({"http.listener": "https://127.0.0.1:0"}, "http.listener with https needs ssl.certificate.dir"),
        ({"http.listener": "ftp://127.0.0.1:0"}, "is not host:port, http://host:port or https://host:port"),
        ({"ssl.keystore.type": "JKS"}, "ssl.keystore.type must be 'PEM', got 'JKS'"),
    ],
)
def test_invalid_tls_settings_are_refused_with_one_line_error(values: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        BrokerConfig.parse(BROKER | values)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_client_auth_requested_is_refused_for_grpc_listeners() -> None:
    values = TLS | {
        "listeners": "MESH://127.0.0.1:0,MESH_HOST://127.0.0.1:0",
        "listener.security.protocol.map": "MESH:SSL,MESH_HOST:SSL",
    }
    BrokerConfig.parse(BROKER | values | {"ssl.client.auth": "none"})
    with pytest.raises(InvalidConfigError, match="listener MESH_HOST is gRPC"):
        BrokerConfig.parse(BROKER | values | {"ssl.client.auth": "requested"})


def test_tls_settings_of_controllers_and_clients_are_validated() -> None:
    controller = {key: value for key, value in BROKER.items() if key != "log.dirs"} | {"metadata.log.dir": "m"}
    with pytest.raises(InvalidConfigError, match=r"needs ssl\.node\.names"):
        ControllerConfig.parse(controller | TLS | {"ssl.node.names": ""})
    for config_type, values in ((AdminConfig, {}), (ConsumerServiceConfig, {"bootstrap.servers": "h:1"})):
        config_type.parse(values | {"security.protocol": "SSL", "ssl.truststore.location": "t"})
        with pytest.raises(InvalidConfigError, match=r"security\.protocol=SSL needs ssl\.certificate\.dir, or ssl\.tr"):
            config_type.parse(values | {"security.protocol": "SSL"})
        with pytest.raises(InvalidConfigError, match=r"ssl\.endpoint\.identification\.algorithm"):
            config_type.parse(values | {"ssl.endpoint.identification.algorithm": ""})


def fetch(port: int, path: str, directory: Path | None, *, with_certificate: bool = False) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=None if directory is None else str(directory / "ca.crt"))
    if with_certificate and directory is not None:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}{path}", timeout=30, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("client_auth", ["none", "required"])
async def test_https_listener_serves_probes_and_metrics_only_over_tls(tmp_path: Path, client_auth: str) -> None:
    certs, authority = tmp_path / "certs", Authority.make("kipmesh")
    authority.issue("leader-1", ["127.0.0.1"]).write(certs)
    registry = CollectorRegistry()
    values = {
        "ssl.certificate.dir": str(certs),
        "http.listener": "https://127.0.0.1:0",
        "http.ssl.client.auth": client_auth,
    }
    tls = ProcessTls(BrokerConfig.parse(BROKER | values), registry)
    assert tls.mesh_client() is None
    assert tls.mesh_server("MESH") is None
    server = ProbeServer(
        registry, Conditions(lambda: True, lambda: True, lambda: True), asyncio.get_running_loop(), tls.http()
    )
    port = server.start("127.0.0.1", 0)
    try:
        has_certificate = client_auth == "required"
        assert await asyncio.to_thread(fetch, port, "/healthz", certs, with_certificate=has_certificate) == (
            200,
            "alive\n",
        )
        assert (await asyncio.to_thread(fetch, port, "/else", certs, with_certificate=has_certificate))[0] == 404
        metrics = (await asyncio.to_thread(fetch, port, "/metrics", certs, with_certificate=has_certificate))[1]
        assert 'kipmesh_tls_certificate_expiry_timestamp_seconds{certificate="own"}' in metrics
        if has_certificate:
            with pytest.raises(OSError, match=r"(?i)certificate.required|reset|EOF|closed|TLSV13"):
                await asyncio.to_thread(fetch, port, "/metrics", certs)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(fetch, port, "/metrics", None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        environment = {health.VARIABLE: f"https://0.0.0.0:{port}", health.CERTIFICATES: str(certs)}
        assert await asyncio.to_thread(health.main, [], environment) == 0
        assert await asyncio.to_thread(health.main, [], {health.VARIABLE: f"0.0.0.0:{port}"}) == 1
        Authority.make("other").issue("leader-1", ["127.0.0.1"]).write(certs)
        assert tls.files is not None
        files, written = tls.files, [(certs / name).read_bytes() for name in ("tls.crt", "ca.crt")]
        await until(
            lambda: [files.current.certificate_chain, files.current.authorities] == written, "both new files are in use"
        )
        assert await asyncio.to_thread(fetch, port, "/readyz", certs, with_certificate=has_certificate) == (
            200,
            "ready\n",
        )
    finally:
        server.stop()
        tls.close()
    # Two reloads if a check ran between the replacement of the certificate and of the authority.
    assert registry.get_sample_value("kipmesh_tls_reloads_total", {"result": "used"}) in (1, 2)


def test_process_without_tls_has_no_contexts_or_metrics(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    tls = ProcessTls(broker(), registry)
    assert (tls.files, tls.http(), tls.mesh_client(), tls.mesh_server("MESH")) == (None, None, None, None)
    assert generate_latest(registry) == b""


def test_missing_tls_files_are_refused_at_start() -> None:
    with pytest.raises(InvalidConfigError, match=r"TLS: certs/tls\.crt: No such file"):
        ProcessTls(BrokerConfig.parse(BROKER | TLS), CollectorRegistry())
