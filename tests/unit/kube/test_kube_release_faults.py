"""Faults on the pods of a release: `kipmesh.kube.release` with a fake API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kipmesh.kube import release as kube_release
from kipmesh.kube.api import KubeError, NotFoundError


class FakeApi:
    def __init__(self) -> None:
        self.listed = [pod("m-followers-0", "followers"), pod("m-followers-1", "followers")]
        self.calls: list[str] = []
        self.failures: dict[str, int] = {}
        """Number of remaining failures by call."""

    def pods(self, namespace: str, selector: str) -> list[Any]:
        return self.listed

    def delete_pod(self, namespace: str, name: str, *, grace_s: int) -> None:
        assert grace_s == 0
        self.listed = [listed_pod for listed_pod in self.listed if listed_pod.metadata.name != name]

    def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        self._call(f"{name} {label}={value}")
        (pod_of_name,) = [listed_pod for listed_pod in self.listed if listed_pod.metadata.name == name]
        pod_of_name.metadata.labels = {**pod_of_name.metadata.labels, label: value}

    def run(self, namespace: str, pod: str, command: list[str]) -> str:
        self._call(f"{pod} {command[-1]}")
        return ""

    def _call(self, call: str) -> None:
        self.calls.append(call)
        if remaining := self.failures.get(call, 0):
            self.failures[call] = remaining - 1
            raise KubeError(f"cannot do {call}")

    def labels(self, name: str) -> list[str | None]:
        return [
            listed_pod.metadata.labels.get(kube_release.CUT_LABEL)
            for listed_pod in self.listed
            if listed_pod.metadata.name == name
        ]


def pod(name: str, component: str) -> Any:
    args = ["--first-id=101", "--service=m-followers.ns.svc.cluster.local", "--port=19092", "--pod=$(POD_NAME)"]
    return SimpleNamespace(
        metadata=SimpleNamespace(
            name=name, labels={kube_release.COMPONENT: component}, uid=name, deletion_timestamp=None
        ),
        spec=SimpleNamespace(
            init_containers=[SimpleNamespace(args=args)], node_name="n1", share_process_namespace=None
        ),
        status=SimpleNamespace(
            container_statuses=[
                SimpleNamespace(container_id=f"containerd://{name}-0", state=SimpleNamespace(running=SimpleNamespace()))
            ],
            conditions=[SimpleNamespace(type="Ready", status="True")],
        ),
    )


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    pod_of_name = FakeApi()
    monkeypatch.setattr(kube_release, "KubeApi", lambda: pod_of_name)
    monkeypatch.setattr(kube_release, "POLL_INTERVAL_S", 0.0)
    return pod_of_name


def test_killed_node_stays_listed_and_scaled_down_node_does_not(api: FakeApi) -> None:
    release = kube_release.KubeRelease("ns", "m")
    assert [(node.name, node.node_id) for node in release.nodes()] == [("follower-1", 101), ("follower-2", 102)]
    assert release.nodes()[0].grpc == "m-followers-0.m-followers.ns.svc.cluster.local:19092"
    release.kill("follower-1")
    assert not release.is_running("follower-1")
    api.listed = []
    assert [node.name for node in release.nodes()] == ["follower-1"]


def test_restarted_container_has_another_pid(api: FakeApi) -> None:
    release = kube_release.KubeRelease("ns", "m")
    first, second = (node.pid for node in release.nodes())
    assert None not in (first, second)
    assert first != second
    (status,) = api.listed[0].status.container_statuses
    status.state = SimpleNamespace(running=None)
    assert [node.pid for node in release.nodes()] == [None, second]
    status.container_id, status.state = "containerd://m-followers-0-1", SimpleNamespace(running=SimpleNamespace())
    assert release.nodes()[0].pid not in (None, first, second)


END_OF_CUT = f"m-followers-0 {kube_release.CUT_LABEL}=None"


def test_reconnect_is_retried_until_it_succeeds(api: FakeApi) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")
    assert api.labels("m-followers-0") == ["true"]
    api.failures[END_OF_CUT] = 2
    release.reconnect("follower-1")
    assert api.labels("m-followers-0") == [None]
    assert api.calls.count(END_OF_CUT) == 3
    release.undo_faults()
    assert api.calls.count(END_OF_CUT) == 3


def test_undo_faults_ends_cut_after_failed_reconnect(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")
    api.failures[END_OF_CUT] = 1
    with monkeypatch.context() as patch:
        patch.setattr(kube_release, "READY_TIMEOUT_S", -1.0)
        with pytest.raises(KubeError, match="for follower-1 to be reconnected: cannot"):
            release.reconnect("follower-1")
    assert api.labels("m-followers-0") == ["true"]
    release.undo_faults()
    assert api.labels("m-followers-0") == [None]


def test_cut_of_deleted_pod_is_dropped(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")

    def label_pod(*_: object) -> None:
        raise NotFoundError("pod not found")

    with monkeypatch.context() as patch:
        patch.setattr(api, "label_pod", label_pod)
        release.undo_faults()
    release.undo_faults()
    assert END_OF_CUT not in api.calls


def test_undo_faults_continues_after_errors_and_retries_them(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")
    release.pause("follower-1")
    release.pause("follower-2")
    release.press("follower-2", workers=1)
    api.failures |= {END_OF_CUT: 1, "m-followers-0 resume": 1}
    with monkeypatch.context() as patch:
        patch.setattr(kube_release, "READY_TIMEOUT_S", -1.0)
        with pytest.raises(
            KubeError, match=r"follower-1: cannot .*cut=None; follower-1: cannot do m-followers-0 resume"
        ):
            release.undo_faults()
    assert api.calls[-2:] == ["m-followers-1 resume", "m-followers-1 relieve"]
    api.calls.clear()
    release.undo_faults()
    assert api.calls == [END_OF_CUT, "m-followers-0 resume"]
    assert api.labels("m-followers-0") == [None]


def test_up_removes_faults_of_earlier_run(api: FakeApi) -> None:
    earlier_release = kube_release.KubeRelease("ns", "m")
    earlier_release.disconnect("follower-1")
    api.calls.clear()
    api.failures = {END_OF_CUT: 1, f"m-followers-1 {kube_release.FILLING}": 1}
    kube_release.KubeRelease("ns", "m").up()
    assert api.labels("m-followers-0") == [None]
    empty_calls = [f"m-followers-{number} {kube_release.FILLING}" for number in (0, 1)]
    assert api.calls == [END_OF_CUT, *empty_calls, END_OF_CUT, empty_calls[1]]
    api.calls.clear()
    kube_release.KubeRelease("ns", "m").up()
    assert api.calls == empty_calls
