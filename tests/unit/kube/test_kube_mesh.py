"""A release as chaos sees it: `kipmesh.kube.mesh`, over pods as the API tells of them."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest

from kipmesh.kube import mesh


class ApiOfTests:
    def __init__(self) -> None:
        self.listed = [pod("m-followers-0", "followers"), pod("m-followers-1", "followers")]

    def pods(self, namespace: str, selector: str) -> list[Any]:
        return self.listed

    def delete_pod(self, namespace: str, name: str, *, grace_s: int) -> None:
        assert grace_s == 0
        self.listed = [one for one in self.listed if one.metadata.name != name]


def pod(name: str, component: str) -> Any:
    args = ["--first-id=101", "--service=m-followers.ns.svc.cluster.local", "--port=19092", "--pod=$(POD_NAME)"]
    return Some(
        metadata=Some(name=name, labels={mesh.COMPONENT: component}, uid=name, deletion_timestamp=None),
        spec=Some(init_containers=[Some(args=args)], node_name="n1", share_process_namespace=None),
        status=Some(
            container_statuses=[Some(state=Some(running=Some()))], conditions=[Some(type="Ready", status="True")]
        ),
    )


def test_a_killed_node_is_expected_back_and_one_that_was_scaled_away_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ApiOfTests()
    monkeypatch.setattr(mesh, "KubeApi", lambda: api)
    monkeypatch.setattr(mesh, "LOOK_AGAIN_S", 0.0)
    release = mesh.KubeMesh("ns", "m")
    assert [(one.name, one.node_id, one.pid) for one in release.nodes()] == [
        ("follower-1", 101, 1),
        ("follower-2", 102, 1),
    ]
    assert release.nodes()[0].grpc == "m-followers-0.m-followers.ns.svc.cluster.local:19092"
    release.kill("follower-1")
    assert not release.is_running("follower-1")
    api.listed = []
    assert [one.name for one in release.nodes()] == ["follower-1"]
