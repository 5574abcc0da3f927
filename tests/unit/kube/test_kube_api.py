"""Requests to the API of Kubernetes and their results: `kipmesh.kube.api` over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kipmesh.kube import leave
from kipmesh.kube.api import ForbiddenError, KubeApi, KubeError, Lease, NotFoundError, ServiceEndpoint

STATEFUL_SET = "/apis/apps/v1/namespaces/ns/statefulsets/m-followers"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/m-leaving"
NODE = "/api/v1/nodes/n1"
META = {"name": "m-leaving", "namespace": "ns", "resourceVersion": "7"}
SELECTOR = {"matchLabels": {"a": "b"}}


class FakeApiServer(ThreadingHTTPServer):
    """Returns the configured response of each path and records requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.responses: dict[tuple[str, str], tuple[int, Any]] = {}
        self.requests: list[tuple[str, str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: FakeApiServer

    def _respond(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.command, self.path, body))
        status, document = self.server.responses.get((self.command, self.path), (404, {"kind": "Status"}))
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PATCH = _respond  # noqa: N815 - the standard library's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    """Start a server and configure the client with its address."""
    api_server = FakeApiServer()
    thread = threading.Thread(target=api_server.serve_forever)
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api_server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    yield api_server
    api_server.shutdown()
    api_server.server_close()
    thread.join()


def stateful_set(replicas: int, **meta: str) -> dict[str, Any]:
    template = {"metadata": {}, "spec": {"containers": [{"name": "x"}]}}
    spec = {"replicas": replicas, "selector": SELECTOR, "serviceName": "m", "template": template}
    return {"metadata": {"name": "m-followers", **meta}, "spec": spec}


def test_replicas_wanted_is_read_from_the_statefulset(server: FakeApiServer) -> None:
    api = KubeApi()
    server.responses["GET", STATEFUL_SET] = (200, stateful_set(3))
    assert api.replicas_wanted("ns", "m-followers") == 3
    server.responses["GET", STATEFUL_SET] = (200, stateful_set(3, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert api.replicas_wanted("ns", "m-followers") is None
    del server.responses["GET", STATEFUL_SET]
    assert api.replicas_wanted("ns", "m-followers") is None
    server.responses["GET", STATEFUL_SET] = (403, {})
    with pytest.raises(ForbiddenError, match="cannot get statefulset m-followers: 403"):
        api.replicas_wanted("ns", "m-followers")


def test_node_labels_are_read(server: FakeApiServer) -> None:
    server.responses["GET", NODE] = (200, {"metadata": {"name": "n1", "labels": {"zone": "z"}}})
    assert KubeApi().node_labels("n1") == {"zone": "z"}
    with pytest.raises(NotFoundError):
        KubeApi().node_labels("n2")


SERVICE = "/api/v1/namespaces/ns/services/m-followers-0-external"


def service(kind: str, node_port: int | None = None, **ingress: str) -> dict[str, Any]:
    port = {"port": 9094, **({"nodePort": node_port} if node_port else {})}
    status = {"loadBalancer": {"ingress": [ingress]} if ingress else {}}
    return {"metadata": {"name": "m-followers-0-external"}, "spec": {"type": kind, "ports": [port]}, "status": status}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (service("NodePort", 31000), ServiceEndpoint(True, 31000, None)),
        (service("LoadBalancer", 31000), ServiceEndpoint(False, 9094, None)),
        (service("LoadBalancer", 31000, ip="192.0.2.1"), ServiceEndpoint(False, 9094, "192.0.2.1")),
        (service("LoadBalancer", hostname="a.example", ip="192.0.2.1"), ServiceEndpoint(False, 9094, "a.example")),
    ],
)
def test_external_service_has_its_address_and_port(
    server: FakeApiServer, response: Any, expected: ServiceEndpoint
) -> None:
    server.responses["GET", SERVICE] = (200, response)
    assert KubeApi().service_endpoint("ns", "m-followers-0-external") == expected


def test_internal_service_is_rejected(server: FakeApiServer) -> None:
    server.responses["GET", SERVICE] = (200, service("ClusterIP"))
    with pytest.raises(KubeError, match="must be of type NodePort or LoadBalancer, got ClusterIP"):
        KubeApi().service_endpoint("ns", "m-followers-0-external")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ({"Hostname": "n1", "InternalIP": "10.0.0.1"}, "10.0.0.1"),
        ({"InternalIP": "10.0.0.1", "ExternalIP": "192.0.2.1"}, "192.0.2.1"),
    ],
)
def test_node_address_prefers_external_address(server: FakeApiServer, addresses: dict[str, str], expected: str) -> None:
    entries = [{"type": kind, "address": address} for kind, address in addresses.items()]
    server.responses["GET", NODE] = (200, {"metadata": {"name": "n1"}, "status": {"addresses": entries}})
    assert KubeApi().node_address("n1") == expected


def test_lease_write_requires_the_version_that_was_read(server: FakeApiServer) -> None:
    api = KubeApi()
    server.responses["GET", LEASE] = (200, {"metadata": META})
    assert api.read_lease("ns", "m-leaving") == Lease("", 0, "7")
    server.responses["GET", LEASE] = (
        200,
        {"metadata": META, "spec": {"holderIdentity": "p/1", "leaseDurationSeconds": 20}},
    )
    assert api.read_lease("ns", "m-leaving") == Lease("p/1", 20, "7")
    server.responses["PATCH", LEASE] = (200, {"metadata": META})
    assert api.write_lease("ns", "m-leaving", "me/2", 20, "7")
    body = server.requests[-1][2]
    assert body["metadata"] == {"resourceVersion": "7"}
    assert (body["spec"]["holderIdentity"], body["spec"]["leaseDurationSeconds"]) == ("me/2", 20)
    assert body["spec"]["renewTime"]
    server.responses["PATCH", LEASE] = (409, {})
    assert not api.write_lease("ns", "m-leaving", "me/2", 20, "7")


def test_failed_request_raises_one_line(server: FakeApiServer) -> None:
    api = KubeApi()
    server.responses["GET", NODE] = (500, {})
    with pytest.raises(KubeError, match="cannot get node n1: 500"):
        api.node_labels("n1")


@pytest.mark.parametrize(
    "response", [(403, {}), (404, {}), (200, stateful_set(2, deletionTimestamp="2026-01-01T00:00:00Z"))]
)
def test_leave_does_not_wait_when_release_is_uninstalled(
    server: FakeApiServer, response: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(leave, "log_line", lines.append)
    monkeypatch.setattr(leave, "FORBIDDEN_FOR_S", 0.0)
    server.responses["GET", STATEFUL_SET] = response
    pod_ref = leave.PodRef("ns", "m-followers", "m-followers-0", "m-leaving")
    assert leave.main(pod_ref, 101, {"bootstrap.servers": "127.0.0.1:1"}, 60) == 0
    assert lines[0].endswith("stopping without waiting")
