"""Cancelled fault injections: destroying the cluster waits for the injection and reverts the fault."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kipmesh.cli import chaos_clusters
from kipmesh.cli.chaos_clusters import KubeCluster
from kipmesh.kube import release
from kipmesh_chaos.containers import ContainerCluster
from kipmesh_chaos.experiment import ClusterPart
from kipmesh_chaos.target_cluster import Calls, ChaosError, RemoteCluster, Separable, TargetCluster

WAIT_S = 100


class BlockingCalls:
    """Records calls. The first call blocks until `first_may_end` is set."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.first_has_started = threading.Event()
        self.first_may_end = threading.Event()

    def do(self, action: str) -> None:
        if not self.first_has_started.is_set():
            self.first_has_started.set()
            assert self.first_may_end.wait(WAIT_S)
        self.done.append(action)


class Pods(BlockingCalls):
    """A Kubernetes API with one pod."""

    def pods(self, namespace: str, selector: str) -> list[Any]:
        labels = {release.COMPONENT: "leaders"}
        return [
            SimpleNamespace(
                metadata=SimpleNamespace(name="m-leaders-0", labels=labels, uid="u", deletion_timestamp=None),
                spec=SimpleNamespace(
                    init_containers=[SimpleNamespace(args=["--first-id=1", "--service=s", "--port=1"])],
                    node_name="n1",
                    share_process_namespace=True,
                ),
                status=SimpleNamespace(
                    container_statuses=[
                        SimpleNamespace(container_id="c", state=SimpleNamespace(running=SimpleNamespace()))
                    ],
                    conditions=[],
                ),
            )
        ]

    def run(self, namespace: str, pod: str, command: list[str]) -> str:
        self.do(command[-1])
        return ""

    def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        self.do(f"{label}={value}")

    def evict_pod(self, namespace: str, name: str) -> None:
        self.do("evict")


class Containers(BlockingCalls):
    """A Docker engine with one container."""

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


def wait_until_closed(calls: Calls) -> None:
    deadline = time.monotonic() + WAIT_S
    while not calls.are_over:
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def cancel_and_destroy(fault: Callable[[str], object], cluster: Any, calls: BlockingCalls) -> None:
    """Cancel a fault during its injection, as a run does, and destroy the cluster."""
    injection = asyncio.create_task(cluster.calls.run(fault, "leader-1"))
    assert await asyncio.to_thread(calls.first_has_started.wait, WAIT_S)
    injection.cancel()
    with pytest.raises(asyncio.CancelledError):
        await injection
    destruction = asyncio.create_task(asyncio.to_thread(cluster.destroy))
    try:
        await asyncio.to_thread(wait_until_closed, cluster.calls)
        assert not calls.done
        with pytest.raises(ChaosError, match="the run is over"):
            await cluster.calls.run(fault, "leader-1")
    finally:
        calls.first_may_end.set()
    await destruction


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    api = Pods()
    monkeypatch.setattr(release, "KubeApi", lambda: api)
    return api


async def test_destroy_resumes_pod_whose_pause_was_cancelled(pods: Pods) -> None:
    cluster = KubeCluster("ns", "m")
    await cancel_and_destroy(cluster.pause, cluster, pods)
    assert pods.done == ["hold", "resume"]


async def test_destroy_reconnects_pod_whose_disconnect_was_cancelled(pods: Pods) -> None:
    cluster = KubeCluster("ns", "m")
    assert isinstance(cluster, Separable)
    assert isinstance(cluster, RemoteCluster)
    await cancel_and_destroy(cluster.disconnect, cluster, pods)
    assert pods.done == [f"{release.CUT_LABEL}=true", f"{release.CUT_LABEL}=None"]


async def test_destroy_stops_waiting_for_evicted_pod(pods: Pods) -> None:
    cluster = KubeCluster("ns", "m")
    await cancel_and_destroy(cluster.stop, cluster, pods)  # the pod never ends: stop() alone would wait ten minutes
    assert pods.done == ["evict"]


async def test_destroy_unpauses_container_whose_pause_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    engine = Containers()
    cluster = ContainerCluster(engine, "mesh", tmp_path, "chaos")
    cluster.up()
    await cancel_and_destroy(cluster.pause, cluster, engine)
    assert engine.done == ["pause", "unpause"]


async def test_destroy_waits_for_process_that_is_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = BlockingCalls()
    commands = dict.fromkeys(("kill", "stop", "start", "pause", "resume", "down"), calls.do)
    processes = SimpleNamespace(directory=tmp_path, close=lambda: calls.done.append("close"), **commands)
    monkeypatch.setattr(chaos_clusters, "ProcessCluster", lambda *_, **__: processes)
    cluster: TargetCluster = chaos_clusters.LocalCluster(tmp_path, ClusterPart(), SimpleNamespace())
    await cancel_and_destroy(cluster.start, cluster, calls)
    assert calls.done == ["leader-1", "close"]
    cluster.destroy()
    assert calls.done == ["leader-1", "close"]


def test_destroy_reports_fault_that_exceeds_timeout(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kipmesh.cli.chaos_clusters.KUBE_CALLS_TIMEOUT_S", 0.0)
    cluster = KubeCluster("ns", "m")
    with cluster.calls.under_way(), pytest.raises(ChaosError, match="a fault was still being injected after 0 s"):
        cluster.destroy()
    cluster.destroy()


def test_failed_call_counts_as_ended() -> None:
    calls = Calls()
    with pytest.raises(OSError, match="it broke"), calls.under_way():
        raise OSError("it broke")
    assert calls.end(0)
    assert calls.are_over
