"""The clusters of `kipmesh chaos run`: processes on this machine, and a release on Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kipmesh.cluster import processes
from kipmesh.cluster.layout import Counts, NodeInfo
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh.kube.api import RUN_TIMEOUT_S
from kipmesh.kube.release import READY_TIMEOUT_S, KubeRelease
from kipmesh_chaos.experiment import (
    ClusterPart,
    CpuPressure,
    Cut,
    Fault,
    FullDisk,
    Kill,
    MemoryPressure,
    Pause,
    Restart,
)
from kipmesh_chaos.target_cluster import Calls, ChaosError, Hook

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
LOCAL_CALLS_TIMEOUT_S = START_TIMEOUT_S + STOP_TIMEOUT_S
KUBE_CALLS_TIMEOUT_S = READY_TIMEOUT_S + RUN_TIMEOUT_S
"""The longest that undoes a fault, and its last command."""


class LocalCluster:
    """A cluster of processes that is the run's own."""

    def __init__(self, folder: Path, part: ClusterPart, hook: Hook) -> None:
        self._counts = Counts(part.controllers, part.leaders, part.followers, 0)
        self._config = dict(part.config)
        self._cluster = ProcessCluster(
            folder, owned=True, start_timeout_s=START_TIMEOUT_S, stop_timeout_s=STOP_TIMEOUT_S, hook=hook
        )
        self.calls = Calls()
        self.kill = self._cluster.kill
        self.stop = self._cluster.stop
        self.start = self._cluster.start
        self.pause = self._cluster.pause
        self.resume = self._cluster.resume
        self.down = self._cluster.down

    def unable(self, fault: Fault) -> str | None:
        """Processes here have no container whose processor or memory could be taken from them."""
        return "only on Kubernetes" if fault.kind in ("cpu-pressure", "memory-pressure") else None

    def up(self) -> None:
        """Start everything, and return when it is ready."""
        self._cluster.up(self._counts, self._config)

    def nodes(self) -> Sequence[NodeInfo]:
        """As `cluster.json` has them."""
        return self._cluster.state().nodes

    def is_running(self, name: str) -> bool:
        """Whether its process is there, held or not."""
        node = self._cluster.state().node(name)
        return processes.state_of(node.pid, node.process) is not processes.ProcessState.GONE

    def destroy(self) -> None:
        """Kill what runs, whether it is held or broken, when no other call is under way."""
        if self.calls.are_over:
            return
        self.calls.end(LOCAL_CALLS_TIMEOUT_S)
        try:
            if (self._cluster.folder / "cluster.json").exists():
                for node in self.nodes():
                    with suppress(Exception):  # it does not run
                        self._cluster.kill(node.name)
        finally:
            self._cluster.close()


class KubeCluster(KubeRelease):
    """Somebody else's cluster: nothing of it is started or stopped for good."""

    def __init__(self, namespace: str, release: str) -> None:
        super().__init__(namespace, release)
        self.calls = Calls()

    def unable(self, fault: Fault) -> str | None:
        """Why a fault cannot be had on Kubernetes."""
        if isinstance(fault, Pause) and not self.can_pause():
            return "no process of a pod can be held unless the chart's chaos.pause is true"
        if not isinstance(fault, Kill | Restart | Pause | Cut | FullDisk | CpuPressure | MemoryPressure):
            return "not on Kubernetes"
        if isinstance(fault, Cut) and not fault.is_total:
            return "on Kubernetes a pod is cut off from everybody, in both directions"
        return None

    def down(self) -> None:
        """It goes on."""

    def destroy(self) -> None:
        """Nothing that was done to it is left, nor by calls that are under way. Raises ChaosError, KubeError."""
        self.given_up.set()
        have_ended = self.calls.end(KUBE_CALLS_TIMEOUT_S)
        self.mend_all()
        if not have_ended:
            raise ChaosError(f"a fault was still being done after {KUBE_CALLS_TIMEOUT_S:g} s, and may be left")
