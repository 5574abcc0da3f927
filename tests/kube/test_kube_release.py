"""Releases of the chart: install, test, permissions, rolling upgrade and scaling."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

import pytest

from kipmesh_chaos.history import Event, Led
from tests.kube.kube_of_tests import CHART, JOB_CHART, Release, command, image_values, under_load, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MIN_ISR = 2
UNINSTALL_MAX_S = 300
"""Limit for an idle release. A blocked preStop hook would take 600 s."""


def assert_min_isr(history: list[Event]) -> None:
    """Assert that no partition of the workload was below MIN_ISR at any observation (every 0.25 s)."""
    led = [event for event in history if isinstance(event, Led)]
    assert led
    below = [event for event in led if len(event.isr) < MIN_ISR]
    assert not below


def test_both_charts_can_be_packaged_and_linted(tmp_path: Path) -> None:
    for chart in (CHART, JOB_CHART):
        command("helm", "package", str(chart), "--destination", str(tmp_path))
        (archive,) = tmp_path.glob(f"{chart.name}-[0-9]*.tgz")
        with tarfile.open(archive) as packed:
            names = packed.getnames()
            assert f"{chart.name}/values.schema.json" in names
            assert not [member for member in packed.getmembers() if member.issym()]
        if chart == CHART:
            assert [name for name in names if name.startswith("kipmesh/files/rules/")]
            assert [name for name in names if name.startswith("kipmesh/files/dashboards/")]
        for values in (chart / "ci").glob("*-values.yaml"):
            command("helm", "lint", "--strict", str(archive), "--values", str(values))


@pytest.mark.parametrize("values", ["default", "small"])
def test_api_server_accepts_every_manifest(namespace: str, values: str) -> None:
    rendered = command(
        "helm", "template", f"dry-{values}", str(CHART), "--namespace", namespace,
        "--values", str(CHART / "ci" / f"{values}-values.yaml"),
    )  # fmt: skip
    out = command(
        "kubectl", "apply", "--namespace", namespace, "--dry-run=server", "--validate=strict", "-f", "-", stdin=rendered
    )
    assert "violate" not in out


def test_helm_test_succeeds(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", "--timeout", "300s")


def test_broker_rack_is_the_zone_of_its_node(release: Release) -> None:
    racks = {broker["host"].partition(".")[0]: broker["rack"] for broker in release.lines("broker", "list")}
    pods = {**release.pods("leaders"), **release.pods("followers")}
    assert set(racks) == set(pods)
    for name, pod in pods.items():
        node = release.json("get", "node", pod["spec"]["nodeName"])
        assert racks[name] == node["metadata"]["labels"].get("topology.kubernetes.io/zone")


def test_brokers_are_spread_over_nodes(release: Release) -> None:
    nodes = len(release.json("get", "nodes")["items"])
    pods = {**release.pods("leaders"), **release.pods("followers")}
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == min(nodes, len(pods))


def test_broker_service_account_has_minimal_permissions(release: Release) -> None:
    account = f"system:serviceaccount:{release.namespace}:{release.full}"

    def may(*request: str) -> bool:
        return release.kubectl("auth", "can-i", *request, f"--as={account}", check=False).strip() == "yes"

    assert may("get", "nodes")
    assert may("get", f"statefulsets/{release.full}-followers")
    assert may("patch", f"leases/{release.full}-leaving")
    refused = [
        ("list", "nodes"),
        ("get", "secrets"),
        ("list", "pods"),
        ("patch", f"statefulsets/{release.full}-followers"),
    ]
    for request in refused:
        assert not may(*request), request


FIELDS = """\
from importlib.metadata import version
from kipmesh import messages
from kipmesh.messages import proto
print(version("kipmesh"), proto.encode(messages.FetchRequest()).hex())
print(*messages.BrokerHeartbeatResponse._fields)
"""


def test_no_record_is_lost_during_a_rolling_restart(release: Release) -> None:
    """Roll to the same build, as after a change of values."""
    roll_under_load(release, os.environ["KIPMESH_KUBE_IMAGE"], "roll")


@pytest.mark.skipif(
    "KIPMESH_KUBE_IMAGE_NEXT" not in os.environ,
    reason="KIPMESH_KUBE_IMAGE_NEXT is not set to an image of another build (make image-next)",
)
def test_no_record_is_lost_during_an_upgrade_and_a_downgrade(release: Release) -> None:
    """Upgrade to a build with another version and other messages, which reads records of the previous build."""
    old, image = os.environ["KIPMESH_KUBE_IMAGE"], os.environ["KIPMESH_KUBE_IMAGE_NEXT"]
    release.kipmesh("topic", "create", "kept", "--partitions", "3", "--replication-factor", "3")
    release.kipmesh("produce", "kept", stdin="\n".join(map(str, range(500))) + "\n")
    first = messages_of(release)
    roll_under_load(release, image, "upgrade")
    second = messages_of(release)
    assert second != first, "both images have the same build"
    release.kipmesh("produce", "kept", stdin="\n".join(map(str, range(500, 1000))) + "\n")
    roll_under_load(release, old, "back")
    assert messages_of(release) == first
    found = release.kipmesh("consume", "kept", "--from-beginning", "--max-messages", "1000").split()
    assert sorted(map(int, found)) == list(range(1000))
    release.kipmesh("topic", "delete", "kept")


def messages_of(release: Release) -> set[str]:
    """Return the version and two message formats of the build, which must be the same on all nodes."""
    pods = [name for name in release.pods() if name.rpartition("-")[2].isdigit()]
    outputs = {release.kubectl("exec", "-i", name, "--", "python", "-", stdin=FIELDS) for name in pods}
    assert len(outputs) == 1
    return outputs


def roll_under_load(release: Release, image: str, name: str) -> None:
    before = {name: pod["metadata"]["uid"] for name, pod in release.pods().items() if "-chaos" not in name}
    labels = ",".join(f"{kind}.podLabels.build={name}" for kind in ("controllers", "leaders", "followers"))
    with under_load(release, name, 120) as verdict:
        # Keep the image of the chaos pod: it would be replaced while it runs the workload.
        release.upgrade(
            *image_values(image), "--set", labels, "--set", "chaos.image=" + os.environ["KIPMESH_KUBE_IMAGE"]
        )
        history = verdict()
    assert_min_isr(history)
    after = {name: pod["metadata"]["uid"] for name, pod in release.pods().items() if name in before}
    assert not [name for name in after if after[name] == before[name] and "consumers" not in name]


def test_followers_are_drained_before_a_scale_down(release: Release) -> None:
    with under_load(release, "scale", 120) as verdict:
        release.upgrade("--set", "followers.replicas=3")
        release.kipmesh("topic", "create", "wide", "--partitions", "12", "--replication-factor", "3")
        release.kipmesh("produce", "wide", stdin="\n".join(map(str, range(1000))) + "\n")
        brokers = {broker["node_id"]: broker for broker in release.lines("broker", "list")}
        assert brokers[103]["replicas"] > 0
        release.upgrade("--set", "followers.replicas=2", wait=False)
        wait_for("deletion of the drained pod", lambda: f"{release.full}-followers-2" not in release.pods("followers"))
        history = verdict()
    assert_min_isr(history)
    brokers = {broker["node_id"]: broker for broker in release.lines("broker", "list")}
    assert set(brokers) == {1, 101, 102}
    wait_for("replicas in sync", lambda: not any(broker["out_of_sync"] for broker in release.lines("broker", "list")))
    found = release.kipmesh("consume", "wide", "--from-beginning", "--max-messages", "1000").split()
    assert sorted(map(int, found)) == list(range(1000))
    release.kipmesh("topic", "delete", "wide")


def test_two_releases_in_one_namespace_are_separate_clusters(release: Release) -> None:
    small = ["--values", str(CHART / "ci" / "small-values.yaml")]
    other = Release(release.namespace, "other", *image_values(os.environ["KIPMESH_KUBE_IMAGE"]), *small)
    other.install()
    try:
        assert "Phase:          Succeeded" in other.helm("test", "--timeout", "300s")
        assert {broker["node_id"] for broker in release.lines("broker", "list")} == {1, 101, 102}
        assert "Phase:          Succeeded" in release.helm("test", "--timeout", "300s")
    finally:
        began = time.monotonic()
        other.uninstall()
        took_s = time.monotonic() - began
    # Uninstall leaves only volume claims, which this release does not have, and is not delayed by hooks.
    kinds = "pods,services,statefulsets,deployments,configmaps,serviceaccounts,roles,rolebindings,leases,pvc,pdb,netpol"
    left = release.json("get", kinds, "-l", "app.kubernetes.io/instance=other")["items"]
    assert not [each for each in left if each["metadata"].get("deletionTimestamp") is None]
    assert not [each for each in left if each["kind"] == "PersistentVolumeClaim"]
    assert took_s < UNINSTALL_MAX_S
