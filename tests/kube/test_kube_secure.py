"""A release with TLS: helm's test, chaos, certificates that are replaced; and faults that need small volumes."""

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
# Whether a listener answers a request that it knows, or hangs up, at most after an alert of TLS (21).
ANSWERS = """\
import socket, ssl, sys
name, port, how, protocol = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
request = {
    "http": b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n",
    "grpc": b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
    "kafka": bytes([0, 0, 0, 10, 0, 18, 0, 0, 0, 0, 0, 1, 255, 255]),  # ApiVersions
}[protocol]
tls = ssl.create_default_context(cafile="/etc/kipmesh-tls/ca.crt")
if protocol == "grpc":
    tls.set_alpn_protocols(["h2"])
if how == "certificate":
    tls.load_cert_chain("/etc/kipmesh-tls/tls.crt", "/etc/kipmesh-tls/tls.key")
answer = b""
with socket.create_connection((name, port), 20) as plain:
    try:
        one = plain if how == "plaintext" else tls.wrap_socket(plain, server_hostname=name)
        one.sendall(request)
        answer = one.recv(100)
    except ssl.SSLCertVerificationError:
        raise
    except (ConnectionError, ssl.SSLError):
        pass
print(answer != b"" and not (how == "plaintext" and answer[0] == 21))
"""
PROTOCOLS = {19092: "grpc", 9092: "kafka", 9404: "http", 8080: "http"}
CONSUMERS_PORT = 8080


def run_python(release: Release, code: str, *arguments: str) -> str:
    pod = f"{release.full}-chaos"
    return release.kubectl("exec", "-i", pod, "--", "python", "-", *arguments, stdin=code, timeout_s=60).strip()


def places(release: Release) -> list[tuple[str, int]]:
    """Every listener of a broker, of a controller and of the consumers, by the names of their certificates."""
    domain = f"{release.namespace}.svc.cluster.local"
    leader = f"{release.full}-leaders-0.{release.full}-leaders.{domain}"
    controller = f"{release.full}-controllers-1.{release.full}-controllers.{domain}"
    consumers = f"{release.full}-consumers.{domain}", CONSUMERS_PORT
    return [(leader, 19092), (leader, 9092), (leader, 9404), (controller, 19092), (controller, 9404), consumers]


def test_helm_test_succeeds_with_tls(secure: Release) -> None:
    assert "Phase:          Succeeded" in secure.helm("test", "--timeout", "300s")


def test_the_command_works_in_a_brokers_pod(secure: Release) -> None:
    out = secure.kipmesh("broker", "list", pod=f"{secure.full}-leaders-0")
    assert all(f"{secure.full}-{one}." in out for one in ("leaders-0", "followers-0", "followers-1"))


@pytest.mark.parametrize("how", ["plaintext", "TLS", "certificate"])
def test_only_who_has_a_certificate_gets_an_answer(secure: Release, how: str) -> None:
    """And everybody by TLS at the HTTP ports of nodes, since probes have none."""
    for name, port in places(secure):
        answers = run_python(secure, ANSWERS, name, str(port), how, PROTOCOLS[port])
        expected = how == "certificate" or (how == "TLS" and port == 9404)
        assert answers == str(expected), (name, port)


@pytest.mark.parametrize("name", ["kill-leader", "pause-leader", "pressure", "full-volume"])
def test_an_experiment_under_tls_finds_nothing(secure: Release, name: str) -> None:
    document = experiment(name)
    told = secure.chaos(secure.write_experiment(document))
    assert "no anomaly" in told
    faults = [one for one in secure.history(document["name"]) if isinstance(one, FaultBegan)]
    assert len(faults) == len(document["faults"])
    wait_for("pods that are ready", lambda: all_ready(secure))


def test_a_volume_without_an_end_of_its_own_is_not_filled(release: Release) -> None:
    """A provisioner that enforces no sizes gives what the disk of the node has: its other pods would go with it."""
    room = release.kubectl("exec", f"{release.full}-followers-0", "--", "df", "-P", "-k", "/var/lib/kipmesh")
    if int(room.splitlines()[-1].split()[3]) < 4 << 20:
        pytest.skip("volumes have an end of their own here")
    document = {**experiment("full-volume"), "name": "endless-volume"}
    with pytest.raises(Exception, match="must have at most .* GiB free to be filled"):
        release.chaos(release.write_experiment(document))


def test_replaced_certificates_are_used_without_a_restart(secure: Release, certificates: Path) -> None:
    """By the same authority, as when they are renewed; nodes read them at different times."""
    runs = {name: restarts(pod) for name, pod in secure.pods().items()}
    before = {place: run_python(secure, FINGERPRINT, place[0], str(place[1])) for place in places(secure)}
    consumers = {one for (_, port), one in before.items() if port == CONSUMERS_PORT}
    assert len(consumers) == len(set(before.values()) - consumers) == 1
    make_secrets(secure, certificates)

    def is_new(place: tuple[str, int]) -> bool:
        try:  # until the files of this pod and of that one are new
            return run_python(secure, FINGERPRINT, place[0], str(place[1])) != before[place]
        except Exception:
            return False

    for place in places(secure):
        wait_for(f"the new certificate at {place}", partial(is_new, place))
    assert "Phase:          Succeeded" in secure.helm("test", "--timeout", "300s")
    wait_for("replicas in sync", lambda: not any(one["out_of_sync"] for one in secure.lines("broker", "list")))
    assert {name: restarts(pod) for name, pod in secure.pods().items()} == runs


def restarts(pod: dict[str, object]) -> tuple[object, ...]:
    metadata, status = pod["metadata"], pod["status"]
    assert isinstance(metadata, dict)
    assert isinstance(status, dict)
    return metadata["uid"], *(one["restartCount"] for one in status["containerStatuses"])


def all_ready(release: Release) -> bool:
    pods = [pod for name, pod in release.pods().items() if not name.endswith("-test")]
    return all(one["ready"] for pod in pods for one in pod["status"].get("containerStatuses", [{"ready": False}]))
