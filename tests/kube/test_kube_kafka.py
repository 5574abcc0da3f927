"""Kafka clients in a pod and outside the Kubernetes cluster, and network policies."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kube.kube_of_tests import Release, command, put_kafka_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDTRIP = Path(__file__).with_name("kafka_roundtrip.py")
KUBELET_PORT = 10250
COUNT = 300


def test_kafka_client_in_a_pod_writes_and_reads(release: Release) -> None:
    put_kafka_python(release)
    out = release.kubectl(
        "exec", "-i", f"{release.full}-chaos", "--",
        "env", "PYTHONPATH=/tmp", "python", "-", f"{release.full}-brokers:9092", "from-a-pod", str(COUNT),
        stdin=ROUNDTRIP.read_text(),
    )  # fmt: skip
    assert f"{COUNT} records written and read" in out


def test_kafka_client_outside_the_cluster_uses_node_ports(release: Release) -> None:
    nodes = [
        next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")
        for node in release.json("get", "nodes")["items"]
    ]
    for address in nodes:
        if not is_reachable(address, KUBELET_PORT):
            pytest.skip(f"node {address} is not reachable from this machine")
    port = release.json("get", "service", f"{release.full}-external")["spec"]["ports"][0]["nodePort"]
    # The broker behind any node port advertises the node ports of all brokers, each at the broker's node.
    done = subprocess.run(
        [sys.executable, str(ROUNDTRIP), f"{nodes[-1]}:{port}", "from-outside", str(COUNT)],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert f"{COUNT} records written and read" in done.stdout, done.stderr
    ports = {
        service["spec"]["ports"][0]["nodePort"]
        for service in release.json("get", "services", "-l", "app.kubernetes.io/component=external")["items"]
    }
    assert len(ports) == 4


def test_pods_of_other_namespaces_cannot_connect_to_brokers(release: Release) -> None:
    """The default of `networkPolicy.clients` allows access to /metrics only."""
    pod = f"{release.full}-leaders-0"
    address = release.json("get", "pod", pod)["status"]["podIP"]
    other_namespace = f"{release.namespace}-other"
    command("kubectl", "create", "namespace", other_namespace)
    try:
        source = release.json("get", "pod", pod)["spec"]["containers"][0]["image"]
        code = (
            "import socket,sys\n"
            "def state(host, port):\n"
            "    try:\n"
            "        socket.create_connection((host, port), 5).close()\n"
            "        return 'open'\n"
            "    except OSError:\n"
            "        return 'closed'\n"
            f"print(*(state('{address}', port) for port in (19092, 9092, 9404)))"
        )
        out = command(
            "kubectl", "--namespace", other_namespace, "run", "stranger", "--rm", "-i", "--restart=Never", "--quiet",
            f"--image={source}", "--image-pull-policy=IfNotPresent", "--command", "--", "python", "-c", code,
        )  # fmt: skip
    finally:
        command("kubectl", "delete", "namespace", other_namespace, "--wait=false")
    grpc, kafka, metrics = out.split()[:3]
    assert (grpc, kafka, metrics) == ("closed", "closed", "open")


def is_reachable(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), 5):
        return True
    return False
