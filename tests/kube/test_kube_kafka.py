"""A client of Apache Kafka's protocol, in a pod and outside of the cluster of Kubernetes."""

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


def test_a_kafka_client_outside_comes_by_ports_of_nodes(release: Release) -> None:
    nodes = [
        next(one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP")
        for node in release.json("get", "nodes")["items"]
    ]
    for address in nodes:
        if not is_reached(address, KUBELET_PORT):
            pytest.skip(f"the nodes' network is not reached from this machine: {address}")
    port = release.json("get", "service", f"{release.full}-external")["spec"]["ports"][0]["nodePort"]
    # Any node's port leads to a broker, which names the ports of all: each at the node that it runs on.
    done = subprocess.run(
        [sys.executable, str(ROUNDTRIP), f"{nodes[-1]}:{port}", "from-outside", str(COUNT)],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert f"{COUNT} records written and read" in done.stdout, done.stderr
    ports = {
        one["spec"]["ports"][0]["nodePort"]
        for one in release.json("get", "services", "-l", "app.kubernetes.io/component=external")["items"]
    }
    assert len(ports) == 4


def test_pods_of_other_namespaces_do_not_reach_brokers(release: Release) -> None:
    """By the default of `networkPolicy.clients`; /metrics is for all."""
    pod = f"{release.full}-leaders-0"
    address = release.json("get", "pod", pod)["status"]["podIP"]
    elsewhere = f"{release.namespace}-other"
    command("kubectl", "create", "namespace", elsewhere)
    try:
        source = release.json("get", "pod", pod)["spec"]["containers"][0]["image"]
        code = (
            "import socket,sys\n"
            "def tried(host, port):\n"
            "    try:\n"
            "        socket.create_connection((host, port), 5).close()\n"
            "        return 'open'\n"
            "    except OSError:\n"
            "        return 'closed'\n"
            f"print(*(tried('{address}', port) for port in (19092, 9092, 9404)))"
        )
        out = command(
            "kubectl", "--namespace", elsewhere, "run", "stranger", "--rm", "-i", "--restart=Never", "--quiet",
            f"--image={source}", "--image-pull-policy=IfNotPresent", "--command", "--", "python", "-c", code,
        )  # fmt: skip
    finally:
        command("kubectl", "delete", "namespace", elsewhere, "--wait=false")
    mesh, kafka, metrics = out.split()[:3]
    assert (mesh, kafka, metrics) == ("closed", "closed", "open")


def is_reached(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), 5):
        return True
    return False
