"""Values that the chart does not take, and what a person is told."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.unit.kube.chart_of_tests import CHART, helm, needs_helm, of_kind, refused, render

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
    ("kafka.external.nodePorts.leaders=80", "kafka.external.nodePorts.leaders", "1,024"),
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
@pytest.mark.parametrize(("assignment", "place", "told"), BAD, ids=[one[0] for one in BAD])
def test_bad_values_are_refused_by_name(assignment: str, place: str, told: str) -> None:
    text = refused("--set", assignment).replace("/", ".")
    assert place in text
    assert told in text


@needs_helm
@pytest.mark.parametrize("release", ["1mesh", "my.mesh"])
def test_a_release_name_that_makes_no_service_is_refused(release: str) -> None:
    done = helm("template", release, str(CHART))
    assert done.returncode
    assert f"{release}-kipmesh is not a valid Service name" in done.stderr
    render("--set", "fullnameOverride=mesh", release=release)


@needs_helm
def test_ports_of_nodes_next_to_each_other_are_taken() -> None:
    ports = "nodePorts.bootstrap=30099,kafka.external.nodePorts.leaders=30100,kafka.external.nodePorts.followers=30102"
    manifests = render("--set", f"leaders.replicas=2,kafka.external.enabled=true,kafka.external.{ports}")
    external = [one for name, one in of_kind(manifests, "Service").items() if name.endswith("-external")]
    assert sorted(one["spec"]["ports"][0]["nodePort"] for one in external) == list(range(30099, 30104))


@needs_helm
def test_ids_next_to_each_other_do_not_overlap() -> None:
    render("--set", "leaders.replicas=3,followers.firstNodeId=4,followers.replicas=3,controllers.firstNodeId=7")


def test_the_schema_knows_every_value() -> None:
    """And has no more than there are; objects without fixed keys are their users' business."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(place: str, part: dict[str, object], given: object) -> None:
        reference = part.get("$ref")
        if isinstance(reference, str):
            part = schema["definitions"][reference.rpartition("/")[2]]
        properties = part.get("properties")
        if not isinstance(properties, dict) or not isinstance(given, dict) or part.get("additionalProperties", True):
            return
        assert set(given) <= set(properties), place
        for key, value in given.items():
            compare(f"{place}.{key}", properties[key], value)

    compare("", schema, values)
    missing = set(schema["properties"]) - set(values) - {"global"}
    assert not missing
