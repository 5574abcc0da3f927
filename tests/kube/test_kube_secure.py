"""A release with TLS: helm test, chaos experiments, renewed certificates, and faults that need small volumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kipmesh_chaos.history import FaultBegan
from tests.kube.kube_of_tests import Release, experiment, make_secrets, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FINGERPRINT = """\
import hashlib, socket, ssl, sys
tls = ssl.create_default_context(cafile="/etc/kipmesh-tls/ca.crt")
tls.load_cert_chain("/etc/kipmesh-tls/tls.crt", "/etc/kipmesh-tls/tls.key")
name, port = sys.argv[1], int(sys.argv[2])
with socket.create_connection((name, port), 5) as plain, tls.wrap_socket(plain, server_hostname=name) as secure:
    print(hashlib.sha256(secure.getpeercert(True)).hexdigest())
"""
# Prints whether a listener responds to a valid request. A TLS alert (21) is no response.
RESPONDS = """\
import socket, ssl, sys
name, port, security, protocol = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
request = {
    "http": b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n",
    "grpc": b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
    "kafka": bytes([0, 0, 0, 10, 0, 18, 0, 0, 0, 0, 0, 1, 255, 255]),  # ApiVersions
}[protocol]
tls = ssl.create_default_context(cafile="/etc/kipmesh-tls/ca.crt")
if protocol == "grpc":
    tls.set_alpn_protocols(["h2"])
if security == "certificate":
    tls.load_cert_chain("/etc/kipmesh-tls/tls.crt", "/etc/kipmesh-tls/tls.key")
response = b""
with socket.create_connection((name, port), 20) as plain:
    try:
        connection = plain if security == "plaintext" else tls.wrap_socket(plain, server_hostname=name)
        connection.sendall(request)
        response = connection.recv(100)
    except ssl.SSLCertVerificationError:
        raise
    except (ConnectionError, ssl.SSLError):
        pass
print(response != b"" and not (security == "plaintext" and response[0] == 21))
"""
PROTOCOLS = {19092: "grpc", 9092: "kafka", 9404: "http", 8080: "http"}
CONSUMERS_PORT = 8080


def run_python(release: Release, code: str, *arguments: str) -> str:
    pod = f"{release.full}-chaos"
    return release.kubectl("exec", "-i", pod, "--", "python", "-", *arguments, stdin=code, timeout_s=60).strip()


def listeners(release: Release) -> list[tuple[str, int]]:
    """Return host and port of all listeners of a broker, a controller and the consumers."""
    domain = f"{release.namespace}.svc.cluster.local"
    leader = f"{release.full}-leaders-0.{release.full}-leaders.{domain}"
    controller = f"{release.full}-controllers-1.{release.full}-controllers.{domain}"
    consumers = f"{release.full}-consumers.{domain}", CONSUMERS_PORT
    return [(leader, 19092), (leader, 9092), (leader, 9404), (controller, 19092), (controller, 9404), consumers]


def test_helm_test_succeeds_with_tls(secure: Release) -> None:
    assert "Phase:          Succeeded" in secure.helm("test", "--timeout", "300s")


def test_kipmesh_command_runs_in_a_broker_pod(secure: Release) -> None:
    out = secure.kipmesh("broker", "list", pod=f"{secure.full}-leaders-0")
    assert all(f"{secure.full}-{name}." in out for name in ("leaders-0", "followers-0", "followers-1"))


@pytest.mark.parametrize("security", ["plaintext", "TLS", "certificate"])
def test_listeners_respond_only_to_clients_with_a_certificate(secure: Release, security: str) -> None:
    """HTTP ports of nodes need TLS but no client certificate, because probes have none."""
    for name, port in listeners(secure):
        responds = run_python(secure, RESPONDS, name, str(port), security, PROTOCOLS[port])
        expected = security == "certificate" or (security == "TLS" and port == 9404)
        assert responds == str(expected), (name, port)


@pytest.mark.parametrize("name", ["kill-leader", "pause-leader", "pressure", "full-volume"])
def test_experiment_with_tls_finds_no_anomaly(secure: Release, name: str) -> None:
    document = experiment(name)
    output = secure.chaos(secure.write_experiment(document))
    assert "no anomaly" in output
    faults = [event for event in secure.history(document["name"]) if isinstance(event, FaultBegan)]
    assert len(faults) == len(document["faults"])
    wait_for("ready pods", lambda: all_ready(secure))


def test_full_volume_fault_refuses_a_volume_without_a_size_limit(release: Release) -> None:
    """Without a limit the fault would fill the disk of the node and affect its other pods."""
    room = release.kubectl("exec", f"{release.full}-followers-0", "--", "df", "-P", "-k", "/var/lib/kipmesh")
    if int(room.splitlines()[-1].split()[3]) < 4 << 20:
        pytest.skip("volumes have a size limit on this cluster")
    document = {**experiment("full-volume"), "name": "unlimited-volume"}
    with pytest.raises(Exception, match=r"must have at most .* GiB free to be filled"):
        release.chaos(release.write_experiment(document))


def test_replaced_certificates_are_used_without_a_restart(secure: Release, certificates: Path) -> None:
    """The same authority renews the certificates, and nodes read them at different times."""
    before_renewal = {name: restarts(pod) for name, pod in secure.pods().items()}
    before = {
        listener: run_python(secure, FINGERPRINT, listener[0], str(listener[1])) for listener in listeners(secure)
    }
    consumers = {fingerprint for (_, port), fingerprint in before.items() if port == CONSUMERS_PORT}
    assert len(consumers) == len(set(before.values()) - consumers) == 1
    make_secrets(secure, certificates)

    def is_new(listener: tuple[str, int]) -> bool:
        try:  # fails while only one of both pods has the new files
            return run_python(secure, FINGERPRINT, listener[0], str(listener[1])) != before[listener]
        except Exception:
            return False

    for listener in listeners(secure):
        wait_for(f"the new certificate at {listener}", partial(is_new, listener))
    assert "Phase:          Succeeded" in secure.helm("test", "--timeout", "300s")
    wait_for("replicas in sync", lambda: not any(broker["out_of_sync"] for broker in secure.lines("broker", "list")))
    assert {name: restarts(pod) for name, pod in secure.pods().items()} == before_renewal


def restarts(pod: dict[str, object]) -> tuple[object, ...]:
    metadata, status = pod["metadata"], pod["status"]
    assert isinstance(metadata, dict)
    assert isinstance(status, dict)
    return metadata["uid"], *(container["restartCount"] for container in status["containerStatuses"])


def all_ready(release: Release) -> bool:
    pods = [pod for name, pod in release.pods().items() if not name.endswith("-test")]
    return all(
        container["ready"] for pod in pods for container in pod["status"].get("containerStatuses", [{"ready": False}])
    )
