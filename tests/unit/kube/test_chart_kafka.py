"""Kafka listeners of the chart, inside and outside of Kubernetes, and clients with TLS."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kipmesh.core.config import BrokerConfig, ControllerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.kube import prepare
from kipmesh.kube.__main__ import main
from kipmesh.kube.api import ServiceEndpoint
from kipmesh.node.settings import read_properties
from kipmesh.transport.tls.making import Authority
from tests.unit.kube.chart_of_tests import Manifest, containers, needs_helm, of_kind, pod_templates, render, selects

pytestmark = needs_helm

EXTERNAL = ("--set", "kafka.external.enabled=true")
TLS = ("--set", "tls.enabled=true,tls.secretName=nodes,tls.clientSecretName=clients,chaos.enabled=true")
PROBES = ("startup", "readiness", "liveness")


class FakeApi:
    """A Kubernetes API. The port of a Service depends on the ordinal in its name."""

    endpoint = ServiceEndpoint(is_node_port=True, port=31000, address=None)

    def node_labels(self, name: str) -> dict[str, str]:
        return {"topology.kubernetes.io/zone": f"zone-of-{name}"}

    def node_address(self, name: str) -> str:
        assert name == "n7"
        return "192.0.2.7"

    def service_endpoint(self, namespace: str, name: str) -> ServiceEndpoint:
        assert namespace == "ns"
        return self.endpoint._replace(port=self.endpoint.port + int(name.split("-")[-2]))


def data(manifests: list[Manifest]) -> dict[str, str]:
    config: dict[str, str] = of_kind(manifests, "ConfigMap")["mesh-kipmesh"]["data"]
    return config


def prepare_properties(manifests: list[Manifest], kind: str, ordinal: int, directory: Path) -> dict[str, str]:
    """Return the properties that the init container writes for a broker."""
    base, out = directory / "base", directory / "out"
    base.write_text(data(manifests)[f"{kind.removesuffix('s')}.properties"])
    pod = of_kind(manifests, "StatefulSet")[f"mesh-kipmesh-{kind}"]["spec"]["template"]
    names = {"$(POD_NAME)": f"mesh-kipmesh-{kind}-{ordinal}", "$(NODE_NAME)": "n7"}
    arguments = []
    for argument in pod["spec"]["initContainers"][0]["args"]:
        for name, value in names.items():
            argument = argument.replace(name, value)
        if not argument.startswith(("--base=", "--out=")):
            arguments.append(argument)
    assert not main(["prepare", f"--base={base}", f"--out={out}", *arguments])
    return read_properties(out)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake_api = FakeApi()
    monkeypatch.setattr(prepare, "KubeApi", lambda: fake_api)
    monkeypatch.setattr(prepare, "RETRY_TIMEOUT_S", 0.0)
    return fake_api


def advertised(config: BrokerConfig) -> dict[str, str]:
    return {name: address for name, _, address in (text.partition("://") for text in config.advertised_listeners)}


def test_brokers_have_a_listener_within_the_cluster(api: FakeApi, tmp_path: Path) -> None:
    manifests = render()
    config = BrokerConfig.parse(prepare_properties(manifests, "followers", 1, tmp_path))
    pod = "mesh-kipmesh-followers-1.mesh-kipmesh-followers.ns.svc.cluster.local"
    assert advertised(config) == {"MESH": f"{pod}:19092", "KAFKA": f"{pod}:9092"}
    services = of_kind(manifests, "Service")
    assert {item["name"]: item["port"] for item in services["mesh-kipmesh-brokers"]["spec"]["ports"]}["kafka"] == 9092
    assert "kafka" not in {item["name"] for item in services["mesh-kipmesh-controllers"]["spec"]["ports"]}
    assert not [name for name in services if name.endswith("-external")]
    assert "KAFKA" not in data(manifests)["controller.properties"]


def test_disabled_kafka_listener_is_not_rendered() -> None:
    manifests = render("--set", "kafka.enabled=false")
    assert "kafka" not in str(of_kind(manifests, "Service")).lower()
    assert "KAFKA" not in str(data(manifests))
    assert "kafka" not in str(of_kind(manifests, "NetworkPolicy"))


def test_broker_advertises_node_port_of_its_service(api: FakeApi, tmp_path: Path) -> None:
    manifests = render(*EXTERNAL)
    addresses = [
        advertised(BrokerConfig.parse(prepare_properties(manifests, kind, number, tmp_path)))["KAFKA_EXTERNAL"]
        for kind, number in (("leaders", 0), ("followers", 0), ("followers", 1))
    ]
    assert addresses == ["192.0.2.7:31000", "192.0.2.7:31000", "192.0.2.7:31001"]


@pytest.mark.parametrize(
    ("values", "endpoint", "expected"),
    [
        ("host=kafka.example", ServiceEndpoint(True, 31000, None), "kafka.example:31001"),
        ("domain=kafka.example", ServiceEndpoint(True, 31000, None), "mesh-kipmesh-followers-1.kafka.example:31001"),
        ("type=LoadBalancer", ServiceEndpoint(False, 9094, "203.0.113.9"), "203.0.113.9:9095"),
        ("type=LoadBalancer", ServiceEndpoint(False, 9094, "2001:db8::9"), "[2001:db8::9]:9095"),
    ],
)
def test_external_listener_advertises_address_of_its_service(
    values: str, endpoint: ServiceEndpoint, expected: str, api: FakeApi, tmp_path: Path
) -> None:
    api.endpoint = endpoint
    manifests = render(*EXTERNAL, "--set", f"kafka.external.{values}")
    properties = prepare_properties(manifests, "followers", 1, tmp_path)
    BrokerConfig.parse(properties)
    assert properties["advertised.listeners"].endswith(f",KAFKA_EXTERNAL://{expected}")


def test_prepare_fails_while_load_balancer_has_no_address(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.endpoint = ServiceEndpoint(False, 9094, None)
    manifests = render(*EXTERNAL, "--set", "kafka.external.type=LoadBalancer")
    with pytest.raises(AssertionError):
        prepare_properties(manifests, "leaders", 0, tmp_path)
    assert "service mesh-kipmesh-leaders-0-external has no address yet" in capsys.readouterr().err


def test_external_service_selects_its_broker() -> None:
    ports = "kafka.external.nodePorts.bootstrap=31090,kafka.external.nodePorts.followers=31200"
    manifests = render(*EXTERNAL, "--set", ports)
    services = {
        name.removeprefix("mesh-kipmesh-").removesuffix("-external"): item["spec"]
        for name, item in of_kind(manifests, "Service").items()
        if name.endswith("-external")
    }
    assert set(services) == {"external", "leaders-0", "followers-0", "followers-1"}
    node_ports = {name: item["ports"][0].get("nodePort") for name, item in services.items()}
    assert node_ports == {"external": 31090, "leaders-0": None, "followers-0": 31200, "followers-1": 31201}
    for name, pod in pod_templates(manifests):
        pod_labels = pod["metadata"]["labels"]
        for service, spec in services.items():
            if service == "external":
                assert selects(spec["selector"], pod_labels) == name.endswith(("-leaders", "-followers"))
                continue
            labels = {**pod_labels, "statefulset.kubernetes.io/pod-name": f"mesh-kipmesh-{service}"}
            is_of_component = service.startswith(name.removeprefix("mesh-kipmesh-"))
            assert not is_of_component or selects(spec["selector"], labels)
            assert spec["publishNotReadyAddresses"]
    (role,) = of_kind(manifests, "Role").values()
    port_names = [rule["resourceNames"] for rule in role["rules"] if rule["resources"] == ["services"]]
    assert port_names == [[f"mesh-kipmesh-{broker}-external" for broker in ("leaders-0", "followers-0", "followers-1")]]


def test_network_policy_ports_are_ports_of_pods() -> None:
    """A policy with an unknown port name would block all clients."""
    manifests = render(*EXTERNAL)
    port_names: dict[str, set[str]] = {}
    for name, pod in pod_templates(manifests):
        ports = [port["name"] for item in containers(pod) for port in item.get("ports", [])]
        port_names[name] = set(ports)
        assert all(len(item) <= 15 for item in ports)
    policy = of_kind(manifests, "NetworkPolicy")["mesh-kipmesh-clients"]["spec"]
    sources_by_port = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert set(sources_by_port) == {"mesh", "kafka", "kafka-external"}
    assert set(sources_by_port) <= port_names["mesh-kipmesh-leaders"] & port_names["mesh-kipmesh-followers"]
    assert sources_by_port["kafka-external"] == [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
    assert sources_by_port["kafka"] == [{"podSelector": {}}]


@pytest.mark.parametrize(
    ("values", "protocol"),
    [
        ("tls.enabled=false", "PLAINTEXT"),
        ("tls.enabled=true", "SSL"),
        ("kafka.sasl.enabled=true,kafka.sasl.secretName=u", "SASL_PLAINTEXT"),
        ("tls.enabled=true,kafka.sasl.enabled=true,kafka.sasl.secretName=u", "SASL_SSL"),
    ],
)
def test_listeners_have_security_protocols_of_values(values: str, protocol: str, api: FakeApi, tmp_path: Path) -> None:
    manifests = render(*EXTERNAL, "--set", values)
    config = BrokerConfig.parse(prepare_properties(manifests, "leaders", 0, tmp_path))
    mesh = "SSL" if protocol.endswith("SSL") else "PLAINTEXT"
    expected = (f"MESH:{mesh}", f"KAFKA:{protocol}", f"KAFKA_EXTERNAL:{protocol}")
    assert config.listener_security_protocol_map == expected
    base = tmp_path / "controller"
    base.write_text(data(manifests)["controller.properties"])
    controller = ControllerConfig.parse({**read_properties(base), "node.id": "1001"})
    assert not [item for item in controller.listener_security_protocol_map if "KAFKA" in item]
    pod = of_kind(manifests, "StatefulSet")["mesh-kipmesh-leaders"]["spec"]["template"]["spec"]
    mounts = {item["name"]: item["mountPath"] for item in pod["containers"][0]["volumeMounts"]}
    if "SASL" in protocol:
        assert config.sasl_users_file == f"{mounts['users']}/users"
    else:
        assert "users" not in mounts


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("tls.enabled=true", "required"),
        ("tls.enabled=true,tls.clientAuth=requested", "requested"),
        ("tls.enabled=true,tls.clientAuth=none", "none"),
        ("tls.enabled=true,kafka.sasl.enabled=true,kafka.sasl.secretName=u", "none"),
        ("tls.enabled=true,kafka.sasl.enabled=true,kafka.sasl.secretName=u,tls.clientAuth=required", "required"),
    ],
)
def test_clients_without_password_need_certificate(values: str, expected: str, api: FakeApi, tmp_path: Path) -> None:
    manifests = render(*EXTERNAL, "--set", values)
    for kind in ("leaders", "followers"):
        properties = prepare_properties(manifests, kind, 0, tmp_path)
        config = BrokerConfig.parse(properties)
        assert config.ssl_client_auth == properties["ssl.client.auth"] == expected
        assert config.http_ssl_client_auth == "none"  # Kubernetes probes have no certificate
    assert "ssl.client.auth" not in data(manifests)["controller.properties"]


def test_client_auth_is_unset_without_tls() -> None:
    assert "ssl.client.auth" not in str(data(render(*EXTERNAL)))


def test_client_pods_have_tls_configuration(tmp_path: Path) -> None:
    manifests = render(*TLS)
    pods: dict[str, Any] = dict(pod_templates(manifests))
    for name, secret in (("test", "clients"), ("chaos", "clients"), ("leaders", "nodes"), ("controllers", "nodes")):
        spec = pods[f"mesh-kipmesh-{name}"]["spec"]
        (volume,) = [item for item in spec["volumes"] if item["name"] == "tls"]
        assert volume["projected"]["sources"][0]["secret"]["name"] == secret
        (item,) = spec["containers"]
        (variable,) = [entry for entry in item["env"] if entry["name"] == "KIPMESH_COMMAND_CONFIG"]
        (mount,) = [entry for entry in item["volumeMounts"] if entry["name"] == "tls"]
        assert variable["value"] == f"{mount['mountPath']}/client.properties"
    file = tmp_path / "client.properties"
    file.write_text(data(manifests)["client.properties"])
    assert read_properties(file) == {"security.protocol": "SSL", "ssl.certificate.dir": "/etc/kipmesh-tls"}
    assert "client.properties" not in data(render())


def consumers_pod(manifests: list[Manifest]) -> Manifest:
    (owner,) = of_kind(manifests, "Deployment").values()
    pod: Manifest = owner["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(("values", "secret"), [(TLS, "clients"), (("--set", "tls.enabled=true"), "mesh-kipmesh-tls")])
def test_consumers_use_client_certificate_if_available(values: tuple[str, ...], secret: str, tmp_path: Path) -> None:
    manifests = render(*values)
    pod = consumers_pod(manifests)
    (volume,) = [item for item in pod["volumes"] if item["name"] == "tls"]
    assert volume["projected"]["sources"][0] == {"secret": {"name": secret}}
    (tmp_path / "consumer").write_text(data(manifests)["consumer.properties"])
    config = ConsumerServiceConfig.parse(read_properties(tmp_path / "consumer"))
    (mount,) = [entry for entry in pod["containers"][0]["volumeMounts"] if entry["name"] == "tls"]
    assert (config.ssl_certificate_dir, config.http_ssl_client_auth) == (mount["mountPath"], "none")
    (container,) = pod["containers"]
    assert {container[f"{probe}Probe"]["httpGet"]["scheme"] for probe in PROBES} == {"HTTPS"}


class Health(BaseHTTPRequestHandler):
    """Responds as alive and not ready."""

    def do_GET(self) -> None:
        self.send_response({"/healthz": 200}.get(self.path, 503))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """Yield the port of a server that requires client certificates. Its files are in `tmp_path`."""
    Authority.make("test").issue("consumers", ["consumers.example"]).write(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_probes_of_consumers_that_require_certificates_present_one(tls_port: int, tmp_path: Path) -> None:
    """The container runs the probe, because the kubelet has no certificate."""
    required = f"tls.consumersClientAuth=required,tls.mountPath={tmp_path},ports.api={tls_port}"
    manifests = render(*TLS, "--set", required, "--set", "monitoring.serviceMonitor.enabled=true")
    assert "http.ssl.client.auth=required" in data(manifests)["consumer.properties"]
    assert "http.ssl.client.auth" not in data(manifests)["client.properties"]
    (container,) = consumers_pod(manifests)["containers"]
    probes = {name: container[f"{name}Probe"] for name in PROBES}
    assert {name: (item["periodSeconds"], item["timeoutSeconds"]) for name, item in probes.items()} == {
        "startup": (2, 5), "readiness": (3, 5), "liveness": (10, 5)
    }  # fmt: skip
    codes = {}
    for name, probe in probes.items():
        program, *arguments = probe["exec"]["command"]
        assert program == "python"
        codes[name] = subprocess.run([sys.executable, *arguments], check=False, timeout=60).returncode
    assert codes == {"startup": 0, "readiness": 1, "liveness": 0}
    monitors = of_kind(manifests, "ServiceMonitor")
    tls = {name: item["spec"]["endpoints"][0]["tlsConfig"] for name, item in monitors.items()}
    secret_reference = {"secret": {"name": "clients", "key": "tls.crt"}}
    assert [name for name, item in tls.items() if item.get("cert") == secret_reference] == ["mesh-kipmesh-consumers"]


def test_process_namespace_is_shared_only_for_chaos() -> None:
    def shared(*arguments: str) -> set[str]:
        return {name for name, pod in pod_templates(render(*arguments)) if pod["spec"].get("shareProcessNamespace")}

    assert not shared()
    assert not shared("--set", "chaos.pause=true")
    assert shared("--set", "chaos.enabled=true,chaos.pause=true") >= {
        "mesh-kipmesh-leaders",
        "mesh-kipmesh-controllers",
    }


def test_chaos_role_has_minimal_permissions() -> None:
    (rules,) = (
        item["rules"]
        for name, item in of_kind(render("--set", "chaos.enabled=true"), "Role").items()
        if "chaos" in name
    )
    assert {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    } == {
        ("", "pods"): {"get", "list", "delete", "patch"},
        ("", "pods/exec"): {"create", "get"},
        ("", "pods/eviction"): {"create"},
    }
