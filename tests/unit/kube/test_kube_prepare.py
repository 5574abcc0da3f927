"""Configuration of a single pod: `kipmesh.kube.prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kipmesh.core.config import BrokerConfig
from kipmesh.kube import prepare
from kipmesh.kube.__main__ import main
from kipmesh.node.settings import read_properties

BASE = """\
cluster.id=c
controller.quorum.voters=1001@m-controllers-0.m-controllers.ns.svc.cluster.local:19092
listeners=MESH://0.0.0.0:19092
log.dirs=/data
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.properties"
    file.write_text(BASE)
    return file


def run(base: Path, out: Path, *options: str) -> int:
    return main(["prepare", f"--base={base}", f"--out={out}", *options])


def test_ordinal_determines_node_id_and_host_name(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "node.properties"
    service = "m-followers.ns.svc.cluster.local"
    assert not run(base, out, "--pod=m-followers-12", "--first-id=101", f"--service={service}", "--port=19092")
    config = BrokerConfig.parse(read_properties(out))
    assert config.node_id == 113
    assert config.advertised_listeners == (f"MESH://m-followers-12.{service}:19092",)
    assert config.cluster_id == "c"
    assert config.broker_rack is None
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("node")] == ["node.properties"]


@pytest.mark.parametrize(("pod", "expected"), [("a-0", 0), ("a-b-10", 10), ("a-1-2", 2)])
def test_ordinal_is_the_last_number_of_the_pod_name(pod: str, expected: int) -> None:
    assert prepare.ordinal(pod) == expected


@pytest.mark.parametrize("pod", ["a", "a-", "a-x", "-"])
def test_pod_name_without_ordinal_is_rejected(
    pod: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, tmp_path / "out", f"--pod={pod}") == 1
    assert f"the name of a StatefulSet's pod must end with -NUMBER, got {pod!r}" in capsys.readouterr().err


def test_rack_is_read_from_node_label(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, str]] = []

    def rack_of(node: str, label: str) -> str:
        requests.append((node, label))
        return "zone-2"

    monkeypatch.setattr(prepare, "rack_of", rack_of)
    out = tmp_path / "out"
    assert not run(base, out, "--node=n2", "--label=topology.kubernetes.io/zone", "--rack-key=client.rack")
    assert requests == [("n2", "topology.kubernetes.io/zone")]
    assert read_properties(out)["client.rack"] == "zone-2"


def test_configured_rack_overrides_node_label(base: Path, tmp_path: Path) -> None:
    base.write_text(BASE + "broker.rack=mine\n")
    prepare.write(base, tmp_path / "out", None, "broker.rack", "zone-2")
    assert read_properties(tmp_path / "out")["broker.rack"] == "mine"


def test_node_without_label_has_no_rack(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "rack_of", lambda node, label: None)
    assert not run(base, tmp_path / "out", "--node=n2", "--label=topology.kubernetes.io/zone")
    assert "node n2 has no label topology.kubernetes.io/zone" in capsys.readouterr().err
    assert "broker.rack" not in read_properties(tmp_path / "out")


def test_prepare_without_kubernetes_exits_with_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "RETRY_TIMEOUT_S", 0.0)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    assert run(base, tmp_path / "out", "--node=n2", "--label=zone") == 1
    assert "cannot prepare: cannot configure the Kubernetes client: " in capsys.readouterr().err
