"""Pods are killed, cut off and evicted, and a node loses its power, under load: the checker finds nothing."""

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
def test_an_experiment_finds_nothing(release: Release, name: str) -> None:
    document = experiment(name)
    told = release.chaos(release.write_experiment(document))
    assert "no anomaly" in told
    history = release.history(document["name"])
    faults = [one for one in history if isinstance(one, FaultBegan)]
    assert len(faults) == len(document["faults"])
    if name == "evict-brokers":
        assert all(len(one.isr) >= 2 for one in history if isinstance(one, Led))


def test_faults_by_chance_find_nothing(release: Release) -> None:
    document = experiment("random", duration_s=RANDOM_S)
    assert "no anomaly" in release.chaos(release.write_experiment(document))
    assert any(isinstance(one, FaultBegan) for one in release.history(document["name"]))
    release.wait_rolled()


def test_drained_node_loses_nothing(release: Release) -> None:
    """Cordon and eviction: budgets and hooks decide when each pod goes, and it comes back on another node."""
    mine = release.pods("chaos")[f"{release.full}-chaos"]["spec"]["nodeName"]
    pods = {**release.pods("leaders"), **release.pods("followers"), **release.pods("controllers")}
    nodes = sorted({pod["spec"]["nodeName"] for pod in pods.values()} - {mine})
    if not nodes:
        pytest.skip("there is one node, and chaos runs there")
    node = nodes[-1]
    here = {name: pod["metadata"]["uid"] for name, pod in pods.items() if pod["spec"]["nodeName"] == node}
    with under_load(release, "drained-node", 60) as verdict:
        try:
            command("kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
            release.wait_rolled()
        finally:
            command("kubectl", "uncordon", node)
        history = verdict()
    led = [one for one in history if isinstance(one, Led)]
    assert led
    assert all(len(one.isr) >= 2 for one in led)
    after = {**release.pods("leaders"), **release.pods("followers"), **release.pods("controllers")}
    for name, uid in here.items():
        assert after[name]["metadata"]["uid"] != uid
        assert after[name]["spec"]["nodeName"] != node


def test_power_cut_of_a_node_loses_nothing(release: Release) -> None:
    cut, boot = os.environ.get("KIPMESH_KUBE_CUT_NODE"), os.environ.get("KIPMESH_KUBE_BOOT_NODE")
    if not (cut and boot):
        pytest.skip("KIPMESH_KUBE_CUT_NODE and KIPMESH_KUBE_BOOT_NODE say no commands")
    mine = release.pods("chaos")[f"{release.full}-chaos"]["spec"]["nodeName"]
    nodes = {pod["spec"]["nodeName"] for pod in release.pods("followers").values()} - {mine}
    node = sorted(nodes)[0]
    with under_load(release, "power-cut", 90) as verdict:
        subprocess.run(shlex.split(cut.format(node=node)), check=True, timeout=120)
        try:
            wait_for(f"{node} to be found dead", lambda: not is_ready(release, node))
        finally:
            subprocess.run(shlex.split(boot.format(node=node)), check=True, timeout=120)
        wait_for(f"{node} to be back", lambda: is_ready(release, node))
        verdict()
    release.wait_rolled()


def is_ready(release: Release, node: str) -> bool:
    conditions = release.json("get", "node", node)["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
