"""Values that the chart rejects, and their errors."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.unit.kube.chart_of_tests import CHART, error_of, helm, needs_helm, of_kind, render

BAD = [
    ("controllers.replicas=2", "controllers", "1, 3, 5"),
    ("controllers.replicas=three", "controllers", "1, 3, 5"),
    ("followers.replicas=-1", "followers.replicas", "0"),
    ("followers.replica=3", "followers", "replica"),
    ("follower.replicas=3", "", "follower"),
    ("ports.mesh=70000", "ports.mesh", "65"),
    ("ports.mesh=http", "ports.mesh", "integer"),
    ("image.pullPolicy=Sometimes", "image.pullPolicy", "Always"),
    ("leaders.persistence.size=lots", "leaders.persistence.size", "pattern"),
    ("clusterId=a b", "clusterId", "pattern"),
    (
        "tls.certManager.enabled=true,tls.enabled=true",
        "",
        "tls.certManager.enabled needs tls.certManager.issuerRef.name",
    ),
    ("tls.certManager.enabled=true,tls.certManager.issuerRef.name=a", "", "needs tls.enabled=true"),
    ("leaders.replicas=200", "leaders.replicas", "100"),
    ("probes.startup.failureThreshold=0", "probes.startup.failureThreshold", "1"),
    ("networkPolicy.clients=all", "networkPolicy.clients", "array"),
    ("leaders.replicas=0,followers.replicas=0", "", "at least one broker is needed"),
    ("followers.firstNodeId=1", "", "node ids of leaders (1 to 1) and of followers (1 to 2) overlap"),
    ("kafka.external.type=Ingress", "kafka.external.type", "NodePort"),
    # Not every version of helm names the bound of the port.
    ("kafka.external.nodePorts.leaders=80", "kafka.external.nodePorts.leaders", "leaders"),
    ("kafka.enabled=false,kafka.external.enabled=true", "", "kafka.external.enabled needs kafka.enabled=true"),
    ("kafka.external.host=a,kafka.external.domain=b", "", "kafka.external.host and kafka.external.domain are both set"),
    ("kafka.external.host=a,kafka.external.type=LoadBalancer", "", "where each broker has its own address"),
    (
        "kafka.external.enabled=true,leaders.replicas=2,kafka.external.nodePorts.leaders=30100,"
        "kafka.external.nodePorts.followers=30101",
        "",
        "kafka.external.nodePorts: port 30101 is used by leaders and by followers",
    ),
    (
        "kafka.external.enabled=true,kafka.external.nodePorts.bootstrap=30102,kafka.external.nodePorts.followers=30101",
        "",
        "kafka.external.nodePorts: port 30102 is used by bootstrap and by followers",
    ),
    ("tls.enabled=true,tls.clientAuth=maybe", "tls.clientAuth", "requested"),
    ("tls.clientAuth=required", "", "tls.clientAuth needs tls.enabled=true"),
    ("tls.enabled=true,tls.consumersClientAuth=requested", "tls.consumersClientAuth", "required"),
    ("tls.consumersClientAuth=required", "", "tls.consumersClientAuth needs tls.enabled=true"),
    ("consumers.config.http\\.ssl\\.client\\.auth=none", "", "http.ssl.client.auth is set by the chart"),
    ("config.ssl\\.client\\.auth=none", "", "config: ssl.client.auth is set by the chart"),
    ("kafka.sasl.enabled=true", "", "kafka.sasl.enabled needs kafka.sasl.secretName"),
    ("kafka.sasl.mechanisms={OAUTHBEARER}", "kafka.sasl.mechanisms", "SCRAM-SHA-256"),
    ("ports.kafka=19092", "", "ports.mesh and ports.kafka are both 19092"),
    ("config.node\\.id=7", "", "config: node.id is set by the chart"),
    ("controllers.config.Log\\.Level=7", "", "controllers.config: Log.Level is not a valid configuration key"),
]


@needs_helm
@pytest.mark.parametrize(("assignment", "path", "error"), BAD, ids=[case[0] for case in BAD])
def test_invalid_values_are_rejected_by_name(assignment: str, path: str, error: str) -> None:
    text = error_of("--set", assignment).replace("/", ".")
    assert path in text
    assert error in text


@needs_helm
@pytest.mark.parametrize("release", ["1mesh", "my.mesh"])
def test_release_name_invalid_for_service_is_rejected(release: str) -> None:
    result = helm("template", release, str(CHART))
    assert result.returncode
    assert f"{release}-kipmesh is not a valid Service name" in result.stderr
    render("--set", "fullnameOverride=mesh", release=release)


@needs_helm
def test_adjacent_node_ports_are_accepted() -> None:
    ports = "nodePorts.bootstrap=30099,kafka.external.nodePorts.leaders=30100,kafka.external.nodePorts.followers=30102"
    manifests = render("--set", f"leaders.replicas=2,kafka.external.enabled=true,kafka.external.{ports}")
    external = [service for name, service in of_kind(manifests, "Service").items() if name.endswith("-external")]
    assert sorted(service["spec"]["ports"][0]["nodePort"] for service in external) == list(range(30099, 30104))


@needs_helm
def test_adjacent_node_ids_are_accepted() -> None:
    render("--set", "leaders.replicas=3,followers.firstNodeId=4,followers.replicas=3,controllers.firstNodeId=7")


def test_schema_has_each_value() -> None:
    """The schema has no other values. Objects without fixed keys are not compared."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(path: str, part: dict[str, object], value_at_path: object) -> None:
        reference = part.get("$ref")
        if isinstance(reference, str):
            part = schema["definitions"][reference.rpartition("/")[2]]
        properties = part.get("properties")
        if (
            not isinstance(properties, dict)
            or not isinstance(value_at_path, dict)
            or part.get("additionalProperties", True)
        ):
            return
        assert set(value_at_path) <= set(properties), path
        for key, value in value_at_path.items():
            compare(f"{path}.{key}", properties[key], value)

    compare("", schema, values)
    missing = set(schema["properties"]) - set(values) - {"global"}
    assert not missing
