"""Manifests of the chart, rendered by `helm template`. Tests with Kubernetes are in tests/kube."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kipmesh.core.config import BrokerConfig, ControllerConfig
from kipmesh.core.config.base import Config
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.kube.__main__ import main
from kipmesh.node.settings import read_properties
from tests.unit.kube.chart_of_tests import (
    CHART,
    CI_VALUES,
    ROOT,
    Manifest,
    containers,
    helm,
    needs_helm,
    of_kind,
    pod_templates,
    render,
    selects,
)

pytestmark = needs_helm

SERVICES: dict[str, tuple[str, type[Config]]] = {
    "controllers": ("controller", ControllerConfig),
    "leaders": ("leader", BrokerConfig),
    "followers": ("follower", BrokerConfig),
}
NAME_MAX = 63
STATEFUL_SET_NAME_MAX = 52


def flag(command: list[str], name: str) -> str:
    return next(argument.partition("=")[2] for argument in command if argument.startswith(f"--{name}="))


def configs(manifests: list[Manifest], directory: Path) -> dict[str, dict[str, str]]:
    """Return the properties of each pod of the StatefulSets, as its init container writes them."""
    (data,) = (
        manifest["data"]
        for manifest in of_kind(manifests, "ConfigMap").values()
        if "leader.properties" in manifest["data"]
    )
    properties_by_pod = {}
    for name, owner in of_kind(manifests, "StatefulSet").items():
        kind = owner["metadata"]["labels"]["app.kubernetes.io/component"]
        base, out = directory / f"{kind}.properties", directory / "out"
        base.write_text(data[f"{SERVICES[kind][0]}.properties"])
        arguments_of_init = owner["spec"]["template"]["spec"]["initContainers"][0]["args"]
        # No requests to Kubernetes.
        skipped = ("--base=", "--out=", "--node=", "--label=")
        arguments = [argument for argument in arguments_of_init if not argument.startswith(skipped)]
        for number in range(owner["spec"]["replicas"]):
            own_arguments = [argument.replace("$(POD_NAME)", f"{name}-{number}") for argument in arguments]
            assert not main(["prepare", f"--base={base}", f"--out={out}", *own_arguments])
            properties_by_pod[f"{name}-{number}"] = read_properties(out)
    return properties_by_pod


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda file: file.stem)
def test_ci_values_render_and_pass_lint(values: Path, tmp_path: Path) -> None:
    manifests = render("--values", str(values))
    assert of_kind(manifests, "StatefulSet")
    result = helm("lint", "--strict", str(CHART), "--values", str(values))
    assert not result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda file: file.stem)
def test_rendered_configuration_is_valid_for_each_service(values: Path, tmp_path: Path) -> None:
    manifests = render("--values", str(values))
    ids = []
    for pod, properties in configs(manifests, tmp_path).items():
        kind = pod.rpartition("-")[0].rpartition("-")[2]
        parsed = SERVICES[kind][1].parse(properties)
        ids.append(parsed.model_dump()["node_id"])
    assert len(ids) == len(set(ids))
    (data,) = (
        manifest["data"]
        for manifest in of_kind(manifests, "ConfigMap").values()
        if "leader.properties" in manifest["data"]
    )
    (tmp_path / "consumer").write_text(data["consumer.properties"])
    ConsumerServiceConfig.parse(read_properties(tmp_path / "consumer"))


def test_quorum_voters_are_controllers_with_names_of_headless_service(tmp_path: Path) -> None:
    manifests = render("--set", "controllers.replicas=5")
    properties_by_pod = configs(manifests, tmp_path)
    services = of_kind(manifests, "Service")
    controllers = {pod: properties for pod, properties in properties_by_pod.items() if "-controllers-" in pod}
    voters = [
        f"{properties['node.id']}@{properties['advertised.listeners'].removeprefix('MESH://')}"
        for properties in controllers.values()
    ]
    assert {properties["controller.quorum.voters"] for properties in properties_by_pod.values()} == {",".join(voters)}
    for owner in of_kind(manifests, "StatefulSet").values():
        service = services[owner["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert selects(service["spec"]["selector"], owner["spec"]["template"]["metadata"]["labels"])


def test_cluster_id_depends_on_namespace_and_release(tmp_path: Path) -> None:
    def cluster_id(release: str, namespace: str) -> str:
        properties_by_pod = configs(render(release=release, namespace=namespace), tmp_path)
        (identifier,) = {properties["cluster.id"] for properties in properties_by_pod.values()}
        return identifier

    assert cluster_id("a", "x") == cluster_id("a", "x")
    assert len({cluster_id("a", "x"), cluster_id("a", "y"), cluster_id("b", "x")}) == 3
    assert len(cluster_id("a", "x")) == 22


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda file: file.stem)
def test_pods_meet_the_restricted_standard(values: Path) -> None:
    for name, pod in pod_templates(render("--values", str(values))):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(
            set(volume) - {"name"} <= {"configMap", "emptyDir", "projected", "secret", "persistentVolumeClaim"}
            for volume in spec["volumes"]
        )
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) >= {"requests", "limits"}, name
            assert not container["image"].endswith((":latest", ":"))
        assert spec["enableServiceLinks"] is False
        if "chaos" not in name:
            assert spec["automountServiceAccountToken"] is False


def test_nodes_have_startup_readiness_and_liveness_probes() -> None:
    for name, owner in of_kind(render(), "StatefulSet").items():
        (node,) = owner["spec"]["template"]["spec"]["containers"]
        assert node["startupProbe"]["httpGet"]["path"] == "/startedz"
        assert node["readinessProbe"]["httpGet"]["path"] == "/insyncz"
        assert node["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert node["startupProbe"]["failureThreshold"] * node["startupProbe"]["periodSeconds"] >= 1800
        assert ("lifecycle" in node) == ("controllers" not in name)


def test_roles_allow_named_resources_only() -> None:
    manifests = render()
    (cluster_role,) = of_kind(manifests, "ClusterRole").values()
    assert cluster_role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    (role,) = of_kind(manifests, "Role").values()
    for rule in role["rules"]:
        assert rule["resourceNames"]
        assert set(rule["verbs"]) <= {"get", "patch"}
    (lease,) = of_kind(manifests, "Lease")
    assert [lease] in [rule["resourceNames"] for rule in role["rules"]]
    assert not of_kind(render("--set", "rack.fromNode=false"), "ClusterRole")
    mounted = {
        name: [
            mount
            for container in containers(pod)
            for mount in container["volumeMounts"]
            if "serviceaccount" in mount["mountPath"]
        ]
        for name, pod in pod_templates(manifests)
    }
    assert not mounted["mesh-kipmesh-controllers"]
    assert all(mount["readOnly"] for mounts in mounted.values() for mount in mounts)


def test_releases_in_one_namespace_do_not_collide() -> None:
    first, second = render(release="a"), render(release="b")
    names = [
        {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests} for manifests in (first, second)
    ]
    assert not names[0] & names[1]
    pods = [pod["metadata"]["labels"] for _, pod in pod_templates(second)]
    for manifest in first:
        selector = manifest.get("spec", {}).get("selector") or manifest.get("spec", {}).get("podSelector")
        if selector:
            assert not any(selects(selector, labels) for labels in pods), manifest["metadata"]["name"]


def test_long_names_stay_within_the_limits_of_kubernetes() -> None:
    renderings = [render(release="r" * 52 + letter) for letter in "ab"]
    names = [set(of_kind(manifests, "StatefulSet")) for manifests in renderings]
    assert not names[0] & names[1]
    assert all(len(name) <= STATEFUL_SET_NAME_MAX for name in names[0])
    for manifest in renderings[0]:
        assert len(manifest["metadata"]["name"]) <= NAME_MAX or manifest["kind"].startswith("Cluster")
        assert all(len(value) <= NAME_MAX for value in manifest["metadata"].get("labels", {}).values())


def checksums(*arguments: str) -> dict[str, str]:
    return {
        name: owner["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for name, owner in of_kind(render(*arguments), "StatefulSet").items()
    }


def test_pod_restarts_only_on_change_of_its_own_configuration() -> None:
    before = checksums()
    assert checksums("--set", "consumers.replicas=3") == before
    followers = checksums("--set-string", "followers.config.num\\.x=1")
    assert {name for name in before if followers[name] != before[name]} == {"mesh-kipmesh-followers"}
    all_changed = checksums("--set", "config.log\\.level=debug")
    assert all(all_changed[name] != before[name] for name in before)


def test_numbers_in_values_render_without_exponent(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("leaders: {config: {log.retention.ms: 604800000, log.cleaner.min.cleanable.ratio: 0.25}}\n")
    properties = configs(render("--values", str(values)), tmp_path)["mesh-kipmesh-leaders-0"]
    assert properties["log.retention.ms"] == "604800000"
    assert properties["log.cleaner.min.cleanable.ratio"] == "0.25"


def test_network_policies_select_the_intended_pods() -> None:
    manifests = render()
    labels = {name: pod["metadata"]["labels"] for name, pod in pod_templates(manifests)}
    policies = of_kind(manifests, "NetworkPolicy")

    def chosen(name: str, extra_labels: dict[str, str]) -> set[str]:
        selector = policies[f"mesh-kipmesh-{name}"]["spec"]["podSelector"]
        return {
            pod.removeprefix("mesh-kipmesh-") for pod in labels if selects(selector, {**labels[pod], **extra_labels})
        }

    assert chosen("nodes", {}) == {"controllers", "leaders", "followers", "consumers"}
    assert chosen("clients", {}) == {"leaders", "followers"}
    assert chosen("readers", {}) == {"consumers"}
    assert chosen("cut", {}) == set()
    cut = {"kipmesh.cut": "true"}
    assert chosen("nodes", cut) == chosen("clients", cut) == chosen("readers", cut) == set()
    assert chosen("cut", cut) >= {"controllers", "leaders", "followers", "consumers"}
    assert set(policies["mesh-kipmesh-cut"]["spec"]) == {"podSelector", "policyTypes"}


def test_disruption_budgets_allow_one_unavailable_pod() -> None:
    manifests = render()
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for name, pod in pod_templates(manifests):
        matching = [
            name_of_budget
            for name_of_budget, budget in budgets.items()
            if selects(budget["spec"]["selector"], pod["metadata"]["labels"])
        ]
        expected = 0 if name.endswith("-test") else 1
        assert len(matching) == expected, name
    assert {budget["spec"]["maxUnavailable"] for budget in budgets.values()} == {1}


def test_rules_and_dashboards_match_the_repository() -> None:
    manifests = render("--values", str(CHART / "ci" / "full-values.yaml"))
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    expected = []
    for file in sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")):
        expected += yaml.safe_load(file.read_text())["groups"]
    assert rules["spec"]["groups"] == expected
    dashboards = of_kind(manifests, "ConfigMap")["mesh-kipmesh-dashboards"]["data"]
    files = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    assert dashboards == {file.name: file.read_text() for file in files}
    for monitor in of_kind(manifests, "ServiceMonitor").values():
        (endpoint,) = monitor["spec"]["endpoints"]
        assert {relabeling["targetLabel"] for relabeling in endpoint["relabelings"]} == {
            "job",
            "instance",
            "cluster",
            "node_rack",
        }


def test_default_values_render_no_prometheus_operator_resources() -> None:
    assert not [manifest for manifest in render() if "monitoring.coreos.com" in manifest["apiVersion"]]


def test_prestop_hook_names_existing_resources() -> None:
    manifests = render()
    for name in ("mesh-kipmesh-leaders", "mesh-kipmesh-followers"):
        pod = of_kind(manifests, "StatefulSet")[name]["spec"]["template"]["spec"]
        (node,) = pod["containers"]
        text = node["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert re.search(rf"--stateful-set={name}\b", text)
        (lease,) = of_kind(manifests, "Lease")
        assert f"--lease={lease} " in text
        first_id = flag(pod["initContainers"][0]["args"], "first-id")
        assert f"--first-id={first_id} " in text
        assert pod["terminationGracePeriodSeconds"] > 600
