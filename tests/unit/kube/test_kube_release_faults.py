"""A release as chaos sees it: `kipmesh.kube.release`, over pods as the API tells of them."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest

from kipmesh.kube import release as kube_release
from kipmesh.kube.api import KubeError, NotFoundError


class ApiOfTests:
    def __init__(self) -> None:
        self.listed = [pod("m-followers-0", "followers"), pod("m-followers-1", "followers")]
        self.asked: list[str] = []
        self.fails: dict[str, int] = {}
        """How often what is asked fails yet."""

    def pods(self, namespace: str, selector: str) -> list[Any]:
        return self.listed

    def delete_pod(self, namespace: str, name: str, *, grace_s: int) -> None:
        assert grace_s == 0
        self.listed = [one for one in self.listed if one.metadata.name != name]

    def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        self._ask(f"{name} {label}={value}")
        (it,) = [one for one in self.listed if one.metadata.name == name]
        it.metadata.labels = {**it.metadata.labels, label: value}

    def run(self, namespace: str, pod: str, command: list[str]) -> str:
        self._ask(f"{pod} {command[-1]}")
        return ""

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if left := self.fails.get(what, 0):
            self.fails[what] = left - 1
            raise KubeError(f"cannot do {what}")

    def labels(self, name: str) -> list[str | None]:
        return [one.metadata.labels.get(kube_release.CUT_LABEL) for one in self.listed if one.metadata.name == name]


def pod(name: str, component: str) -> Any:
    args = ["--first-id=101", "--service=m-followers.ns.svc.cluster.local", "--port=19092", "--pod=$(POD_NAME)"]
    return Some(
        metadata=Some(name=name, labels={kube_release.COMPONENT: component}, uid=name, deletion_timestamp=None),
        spec=Some(init_containers=[Some(args=args)], node_name="n1", share_process_namespace=None),
        status=Some(
            container_statuses=[Some(container_id=f"containerd://{name}-0", state=Some(running=Some()))],
            conditions=[Some(type="Ready", status="True")],
        ),
    )


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ApiOfTests:
    it = ApiOfTests()
    monkeypatch.setattr(kube_release, "KubeApi", lambda: it)
    monkeypatch.setattr(kube_release, "POLL_INTERVAL_S", 0.0)
    return it


def test_a_killed_node_is_expected_back_and_one_that_was_scaled_away_is_not(api: ApiOfTests) -> None:
    release = kube_release.KubeRelease("ns", "m")
    assert [(one.name, one.node_id) for one in release.nodes()] == [("follower-1", 101), ("follower-2", 102)]
    assert release.nodes()[0].grpc == "m-followers-0.m-followers.ns.svc.cluster.local:19092"
    release.kill("follower-1")
    assert not release.is_running("follower-1")
    api.listed = []
    assert [one.name for one in release.nodes()] == ["follower-1"]


def test_a_container_that_kubernetes_started_again_is_another_process(api: ApiOfTests) -> None:
    release = kube_release.KubeRelease("ns", "m")
    first, other = (one.pid for one in release.nodes())
    assert None not in (first, other)
    assert first != other
    (status,) = api.listed[0].status.container_statuses
    status.state = Some(running=None)
    assert [one.pid for one in release.nodes()] == [None, other]
    status.container_id, status.state = "containerd://m-followers-0-1", Some(running=Some())
    assert release.nodes()[0].pid not in (None, first, other)


END_OF_CUT = f"m-followers-0 {kube_release.CUT_LABEL}=None"


def test_the_end_of_a_cut_is_asked_for_until_it_is_there(api: ApiOfTests) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")
    assert api.labels("m-followers-0") == ["true"]
    api.fails[END_OF_CUT] = 2
    release.reconnect("follower-1")
    assert api.labels("m-followers-0") == [None]
    assert api.asked.count(END_OF_CUT) == 3
    release.undo_faults()
    assert api.asked.count(END_OF_CUT) == 3


def test_a_cut_that_did_not_end_in_time_is_still_known(api: ApiOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")
    api.fails[END_OF_CUT] = 1
    with monkeypatch.context() as at_once:
        at_once.setattr(kube_release, "READY_TIMEOUT_S", -1.0)
        with pytest.raises(KubeError, match="for follower-1 to be reconnected: cannot"):
            release.reconnect("follower-1")
    assert api.labels("m-followers-0") == ["true"]
    release.undo_faults()
    assert api.labels("m-followers-0") == [None]


def test_a_pod_that_is_gone_has_no_cut(api: ApiOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")

    def label_pod(*_: object) -> None:
        raise NotFoundError("no such pod")

    with monkeypatch.context() as gone:
        gone.setattr(api, "label_pod", label_pod)
        release.undo_faults()
    release.undo_faults()
    assert END_OF_CUT not in api.asked


def test_everything_is_mended_though_something_cannot_be(api: ApiOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    release = kube_release.KubeRelease("ns", "m")
    release.disconnect("follower-1")
    release.pause("follower-1")
    release.pause("follower-2")
    release.press("follower-2", workers=1)
    api.fails |= {END_OF_CUT: 1, "m-followers-0 resume": 1}
    with monkeypatch.context() as at_once:
        at_once.setattr(kube_release, "READY_TIMEOUT_S", -1.0)
        with pytest.raises(
            KubeError, match=r"follower-1: cannot .*cut=None; follower-1: cannot do m-followers-0 resume"
        ):
            release.undo_faults()
    assert api.asked[-2:] == ["m-followers-1 resume", "m-followers-1 relieve"]
    api.asked.clear()
    release.undo_faults()
    assert api.asked == [END_OF_CUT, "m-followers-0 resume"]
    assert api.labels("m-followers-0") == [None]


def test_a_run_takes_away_what_another_left(api: ApiOfTests) -> None:
    another = kube_release.KubeRelease("ns", "m")
    another.disconnect("follower-1")
    api.asked.clear()
    api.fails = {END_OF_CUT: 1, f"m-followers-1 {kube_release.FILLING}": 1}
    kube_release.KubeRelease("ns", "m").up()
    assert api.labels("m-followers-0") == [None]
    empties = [f"m-followers-{number} {kube_release.FILLING}" for number in (0, 1)]
    assert api.asked == [END_OF_CUT, *empties, END_OF_CUT, empties[1]]
    api.asked.clear()
    kube_release.KubeRelease("ns", "m").up()
    assert api.asked == empties
