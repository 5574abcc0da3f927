"""A run that is interrupted while a fault is being done: the cluster's end waits for it, and undoes it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest

from kipmesh.cli import chaos_clusters
from kipmesh.cli.chaos_clusters import KubeCluster
from kipmesh.kube import release
from kipmesh_chaos.containers import ContainerCluster
from kipmesh_chaos.experiment import ClusterPart
from kipmesh_chaos.target_cluster import Calls, ChaosError, RemoteCluster, Separable, TargetCluster

WAIT_S = 100


class Slow:
    """What is asked for first is not done before it is let go."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def do(self, what: str) -> None:
        if not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_end.wait(WAIT_S)
        self.done.append(what)


class Pods(Slow):
    """A Kubernetes with one pod."""

    def pods(self, namespace: str, selector: str) -> list[Any]:
        labels = {release.COMPONENT: "leaders"}
        return [
            Some(
                metadata=Some(name="m-leaders-0", labels=labels, uid="u", deletion_timestamp=None),
                spec=Some(
                    init_containers=[Some(args=["--first-id=1", "--service=s", "--port=1"])],
                    node_name="n1",
                    share_process_namespace=True,
                ),
                status=Some(container_statuses=[Some(container_id="c", state=Some(running=Some()))], conditions=[]),
            )
        ]

    def run(self, namespace: str, pod: str, command: list[str]) -> str:
        self.do(command[-1])
        return ""

    def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        self.do(f"{label}={value}")

    def evict_pod(self, namespace: str, name: str) -> None:
        self.do("evict")


class Containers(Slow):
    """An engine with one container."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False

    def containers(self, **_: object) -> list[dict[str, Any]]:
        return [{"Id": "c", "Labels": {"com.docker.compose.service": "leader-1"}}]

    def inspect_container(self, container: str) -> dict[str, Any]:
        return {
            "Id": "c",
            "Config": {"Env": ["KIPMESH_CONFIG_NODE_ID=1"]},
            "HostConfig": {"PortBindings": {}},
            "State": {"Running": True, "Paused": self.paused, "Pid": 1, "Status": "running"},
        }

    def pause(self, container: str) -> None:
        self.do("pause")
        self.paused = True

    def unpause(self, container: str) -> None:
        self.do("unpause")
        self.paused = False


def until_over(calls: Calls) -> None:
    deadline = time.monotonic() + WAIT_S
    while not calls.are_over:
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def interrupted(fault: Callable[[str], object], cluster: Any, slow: Slow) -> None:
    """Cancel a fault that is being done, as a run does, and destroy the cluster."""
    doing = asyncio.create_task(cluster.calls.run(fault, "leader-1"))
    assert await asyncio.to_thread(slow.has_begun.wait, WAIT_S)
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    ending = asyncio.create_task(asyncio.to_thread(cluster.destroy))
    try:
        await asyncio.to_thread(until_over, cluster.calls)
        assert not slow.done
        with pytest.raises(ChaosError, match="the run is over"):
            await cluster.calls.run(fault, "leader-1")
    finally:
        slow.may_end.set()
    await ending


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    it = Pods()
    monkeypatch.setattr(release, "KubeApi", lambda: it)
    return it


async def test_a_pod_that_is_being_held_goes_on(pods: Pods) -> None:
    cluster = KubeCluster("ns", "m")
    await interrupted(cluster.pause, cluster, pods)
    assert pods.done == ["hold", "resume"]


async def test_a_pod_that_is_being_cut_off_is_reached_again(pods: Pods) -> None:
    cluster = KubeCluster("ns", "m")
    assert isinstance(cluster, Separable)
    assert isinstance(cluster, RemoteCluster)
    await interrupted(cluster.disconnect, cluster, pods)
    assert pods.done == [f"{release.CUT_LABEL}=true", f"{release.CUT_LABEL}=None"]


async def test_nobody_waits_for_a_pod_to_end_any_more(pods: Pods) -> None:
    cluster = KubeCluster("ns", "m")
    await interrupted(cluster.stop, cluster, pods)  # it never ends: by itself, this would wait for ten minutes
    assert pods.done == ["evict"]


async def test_a_container_that_is_being_paused_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    engine = Containers()
    cluster = ContainerCluster(engine, "mesh", tmp_path, "chaos")
    cluster.up()
    await interrupted(cluster.pause, cluster, engine)
    assert engine.done == ["pause", "unpause"]


async def test_processes_that_are_being_started_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    commands = dict.fromkeys(("kill", "stop", "start", "pause", "resume", "down"), slow.do)
    processes = Some(directory=tmp_path, close=lambda: slow.done.append("close"), **commands)
    monkeypatch.setattr(chaos_clusters, "ProcessCluster", lambda *_, **__: processes)
    cluster: TargetCluster = chaos_clusters.LocalCluster(tmp_path, ClusterPart(), Some())
    await interrupted(cluster.start, cluster, slow)
    assert slow.done == ["leader-1", "close"]
    cluster.destroy()
    assert slow.done == ["leader-1", "close"]


def test_what_does_not_end_in_time_is_told(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kipmesh.cli.chaos_clusters.KUBE_CALLS_TIMEOUT_S", 0.0)
    cluster = KubeCluster("ns", "m")
    with cluster.calls.under_way(), pytest.raises(ChaosError, match="a fault was still being injected after 0 s"):
        cluster.destroy()
    cluster.destroy()


def test_calls_that_fail_have_ended() -> None:
    calls = Calls()
    with pytest.raises(OSError, match="it broke"), calls.under_way():
        raise OSError("it broke")
    assert calls.end(0)
    assert calls.are_over
