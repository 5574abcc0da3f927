"""What the chart makes of values, by `helm template`; the real Kubernetes is tests/kube's."""

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
    return next(one.partition("=")[2] for one in command if one.startswith(f"--{name}="))


def configs(manifests: list[Manifest], folder: Path) -> dict[str, dict[str, str]]:
    """The properties of each pod of the StatefulSets, as its init container writes them."""
    (data,) = (one["data"] for one in of_kind(manifests, "ConfigMap").values() if "leader.properties" in one["data"])
    found = {}
    for name, owner in of_kind(manifests, "StatefulSet").items():
        kind = owner["metadata"]["labels"]["app.kubernetes.io/component"]
        base, out = folder / f"{kind}.properties", folder / "out"
        base.write_text(data[f"{SERVICES[kind][0]}.properties"])
        given = owner["spec"]["template"]["spec"]["initContainers"][0]["args"]
        # Nothing is asked of Kubernetes here.
        skipped = ("--base=", "--out=", "--node=", "--label=")
        arguments = [one for one in given if not one.startswith(skipped)]
        for number in range(owner["spec"]["replicas"]):
            mine = [one.replace("$(POD_NAME)", f"{name}-{number}") for one in arguments]
            assert not main(["prepare", f"--base={base}", f"--out={out}", *mine])
            found[f"{name}-{number}"] = read_properties(out)
    return found


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda file: file.stem)
def test_every_values_file_of_ci_is_rendered_and_linted(values: Path, tmp_path: Path) -> None:
    manifests = render("--values", str(values))
    assert of_kind(manifests, "StatefulSet")
    done = helm("lint", "--strict", str(CHART), "--values", str(values))
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda file: file.stem)
def test_every_service_takes_its_configuration(values: Path, tmp_path: Path) -> None:
    manifests = render("--values", str(values))
    ids = []
    for pod, properties in configs(manifests, tmp_path).items():
        kind = pod.rpartition("-")[0].rpartition("-")[2]
        parsed = SERVICES[kind][1].parse(properties)
        ids.append(parsed.model_dump()["node_id"])
    assert len(ids) == len(set(ids))
    (data,) = (one["data"] for one in of_kind(manifests, "ConfigMap").values() if "leader.properties" in one["data"])
    (tmp_path / "consumer").write_text(data["consumer.properties"])
    ConsumerServiceConfig.parse(read_properties(tmp_path / "consumer"))


def test_voters_are_the_controllers_under_names_that_exist(tmp_path: Path) -> None:
    manifests = render("--set", "controllers.replicas=5")
    found = configs(manifests, tmp_path)
    services = of_kind(manifests, "Service")
    controllers = {pod: one for pod, one in found.items() if "-controllers-" in pod}
    voters = [f"{one['node.id']}@{one['advertised.listeners'].removeprefix('MESH://')}" for one in controllers.values()]
    assert {one["controller.quorum.voters"] for one in found.values()} == {",".join(voters)}
    for owner in of_kind(manifests, "StatefulSet").values():
        service = services[owner["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert selects(service["spec"]["selector"], owner["spec"]["template"]["metadata"]["labels"])


def test_the_cluster_id_follows_from_namespace_and_release(tmp_path: Path) -> None:
    def cluster_id(release: str, namespace: str) -> str:
        found = configs(render(release=release, namespace=namespace), tmp_path)
        (one,) = {properties["cluster.id"] for properties in found.values()}
        return one

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
            mount for one in containers(pod) for mount in one["volumeMounts"] if "serviceaccount" in mount["mountPath"]
        ]
        for name, pod in pod_templates(manifests)
    }
    assert not mounted["mesh-kipmesh-controllers"]
    assert all(mount["readOnly"] for mounts in mounted.values() for mount in mounts)


def test_two_releases_in_one_namespace_do_not_collide() -> None:
    first, second = render(release="a"), render(release="b")
    names = [{(one["kind"], one["metadata"]["name"]) for one in manifests} for manifests in (first, second)]
    assert not names[0] & names[1]
    pods = [pod["metadata"]["labels"] for _, pod in pod_templates(second)]
    for one in first:
        selector = one.get("spec", {}).get("selector") or one.get("spec", {}).get("podSelector")
        if selector:
            assert not any(selects(selector, labels) for labels in pods), one["metadata"]["name"]


def test_long_names_stay_within_the_limits_of_kubernetes() -> None:
    long = [render(release="r" * 52 + letter) for letter in "ab"]
    names = [set(of_kind(manifests, "StatefulSet")) for manifests in long]
    assert not names[0] & names[1]
    assert all(len(name) <= STATEFUL_SET_NAME_MAX for name in names[0])
    for one in long[0]:
        assert len(one["metadata"]["name"]) <= NAME_MAX or one["kind"].startswith("Cluster")
        assert all(len(value) <= NAME_MAX for value in one["metadata"].get("labels", {}).values())


def checksums(*arguments: str) -> dict[str, str]:
    return {
        name: owner["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for name, owner in of_kind(render(*arguments), "StatefulSet").items()
    }


def test_a_pod_is_restarted_by_a_change_of_its_own_configuration_alone() -> None:
    before = checksums()
    assert checksums("--set", "consumers.replicas=3") == before
    followers = checksums("--set-string", "followers.config.num\\.x=1")
    assert {name for name in before if followers[name] != before[name]} == {"mesh-kipmesh-followers"}
    everybody = checksums("--set", "config.log\\.level=debug")
    assert all(everybody[name] != before[name] for name in before)


def test_numbers_of_values_are_written_out(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("leaders: {config: {log.retention.ms: 604800000, log.cleaner.min.cleanable.ratio: 0.25}}\n")
    found = configs(render("--values", str(values)), tmp_path)["mesh-kipmesh-leaders-0"]
    assert found["log.retention.ms"] == "604800000"
    assert found["log.cleaner.min.cleanable.ratio"] == "0.25"


def test_network_policies_choose_the_pods_that_they_mean() -> None:
    manifests = render()
    labels = {name: pod["metadata"]["labels"] for name, pod in pod_templates(manifests)}
    policies = of_kind(manifests, "NetworkPolicy")

    def chosen(name: str, more: dict[str, str]) -> set[str]:
        selector = policies[f"mesh-kipmesh-{name}"]["spec"]["podSelector"]
        return {pod.removeprefix("mesh-kipmesh-") for pod in labels if selects(selector, {**labels[pod], **more})}

    assert chosen("nodes", {}) == {"controllers", "leaders", "followers", "consumers"}
    assert chosen("clients", {}) == {"leaders", "followers"}
    assert chosen("readers", {}) == {"consumers"}
    assert chosen("cut", {}) == set()
    cut = {"kipmesh.cut": "true"}
    assert chosen("nodes", cut) == chosen("clients", cut) == chosen("readers", cut) == set()
    assert chosen("cut", cut) >= {"controllers", "leaders", "followers", "consumers"}
    assert set(policies["mesh-kipmesh-cut"]["spec"]) == {"podSelector", "policyTypes"}


def test_disruption_budgets_let_one_go_at_a_time() -> None:
    manifests = render()
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for name, pod in pod_templates(manifests):
        matching = [
            budget for budget, one in budgets.items() if selects(one["spec"]["selector"], pod["metadata"]["labels"])
        ]
        expected = 0 if name.endswith("-test") else 1
        assert len(matching) == expected, name
    assert {one["spec"]["maxUnavailable"] for one in budgets.values()} == {1}


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    manifests = render("--values", str(CHART / "ci" / "full-values.yaml"))
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    expected = []
    for file in sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")):
        expected += yaml.safe_load(file.read_text())["groups"]
    assert rules["spec"]["groups"] == expected
    boards = of_kind(manifests, "ConfigMap")["mesh-kipmesh-dashboards"]["data"]
    files = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    assert boards == {file.name: file.read_text() for file in files}
    for monitor in of_kind(manifests, "ServiceMonitor").values():
        (endpoint,) = monitor["spec"]["endpoints"]
        assert {one["targetLabel"] for one in endpoint["relabelings"]} == {"job", "instance", "cluster", "node_rack"}


def test_default_values_render_nothing_of_prometheus_operator() -> None:
    assert not [one for one in render() if "monitoring.coreos.com" in one["apiVersion"]]


def test_the_prestop_hook_names_what_there_is() -> None:
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
