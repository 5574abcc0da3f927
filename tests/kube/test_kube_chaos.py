"""Chaos experiments on Kubernetes: faults of pods, drained nodes and power cuts under load."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from kipmesh_chaos.history import FaultBegan, Led
from tests.kube.kube_of_tests import Release, command, experiment, under_load, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


EXPERIMENTS = ["kill-controller", "kill-leader", "cut-leader", "cut-controller", "evict-brokers", "pressure"]
RANDOM_S = 120


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_finds_no_anomaly(release: Release, name: str) -> None:
    document = experiment(name)
    output = release.chaos(release.write_experiment(document))
    assert "no anomaly" in output
    history = release.history(document["name"])
    faults = [event for event in history if isinstance(event, FaultBegan)]
    assert len(faults) == len(document["faults"])
    if name == "evict-brokers":
        assert all(len(event.isr) >= 2 for event in history if isinstance(event, Led))


def test_random_faults_cause_no_anomaly(release: Release) -> None:
    document = experiment("random", duration_s=RANDOM_S)
    assert "no anomaly" in release.chaos(release.write_experiment(document))
    assert any(isinstance(event, FaultBegan) for event in release.history(document["name"]))
    release.wait_rolled()


def test_no_record_is_lost_when_a_node_is_drained(release: Release) -> None:
    """Disruption budgets and hooks delay the eviction of pods, which restart on other nodes."""
    chaos_node = release.pods("chaos")[f"{release.full}-chaos"]["spec"]["nodeName"]
    pods = {**release.pods("leaders"), **release.pods("followers"), **release.pods("controllers")}
    nodes = sorted({pod["spec"]["nodeName"] for pod in pods.values()} - {chaos_node})
    if not nodes:
        pytest.skip("the only node runs the chaos pod")
    node = nodes[-1]
    drained = {name: pod["metadata"]["uid"] for name, pod in pods.items() if pod["spec"]["nodeName"] == node}
    with under_load(release, "drained-node", 60) as verdict:
        try:
            command("kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
            release.wait_rolled()
        finally:
            command("kubectl", "uncordon", node)
        history = verdict()
    led = [event for event in history if isinstance(event, Led)]
    assert led
    assert all(len(event.isr) >= 2 for event in led)
    after = {**release.pods("leaders"), **release.pods("followers"), **release.pods("controllers")}
    for name, uid in drained.items():
        assert after[name]["metadata"]["uid"] != uid
        assert after[name]["spec"]["nodeName"] != node


def test_no_record_is_lost_when_a_node_loses_power(release: Release) -> None:
    cut, boot = os.environ.get("KIPMESH_KUBE_CUT_NODE"), os.environ.get("KIPMESH_KUBE_BOOT_NODE")
    if not (cut and boot):
        pytest.skip("KIPMESH_KUBE_CUT_NODE and KIPMESH_KUBE_BOOT_NODE are not set")
    chaos_node = release.pods("chaos")[f"{release.full}-chaos"]["spec"]["nodeName"]
    nodes = {pod["spec"]["nodeName"] for pod in release.pods("followers").values()} - {chaos_node}
    node = sorted(nodes)[0]
    with under_load(release, "power-cut", 90) as verdict:
        subprocess.run(shlex.split(cut.format(node=node)), check=True, timeout=120)
        try:
            wait_for(f"{node} to be not ready", lambda: not is_ready(release, node))
        finally:
            subprocess.run(shlex.split(boot.format(node=node)), check=True, timeout=120)
        wait_for(f"{node} to be ready", lambda: is_ready(release, node))
        verdict()
    release.wait_rolled()


def is_ready(release: Release, node: str) -> bool:
    conditions = release.json("get", "node", node)["status"]["conditions"]
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
