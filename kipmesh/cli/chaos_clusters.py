"""Target clusters of `kipmesh chaos run`: processes on this machine, or a release on Kubernetes."""

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
"""Longest time to undo a fault, and to run its last command."""


class LocalCluster:
    """A target cluster of processes on this machine that belongs to one run.

    Args: directory: its data; part: number of nodes and configuration; hook: changes how nodes start. `kill`, `stop`,
    `start`, `pause`, `resume` and `down` are those of ProcessCluster, which raise ClusterError.
    """

    def __init__(self, directory: Path, part: ClusterPart, hook: Hook) -> None:
        self._counts = Counts(part.controllers, part.leaders, part.followers, 0)
        self._config = dict(part.config)
        self._cluster = ProcessCluster(
            directory, owned=True, start_timeout_s=START_TIMEOUT_S, stop_timeout_s=STOP_TIMEOUT_S, hook=hook
        )
        self.calls = Calls()
        self.kill = self._cluster.kill
        self.stop = self._cluster.stop
        self.start = self._cluster.start
        self.pause = self._cluster.pause
        self.resume = self._cluster.resume
        self.down = self._cluster.down

    def unsupported_reason(self, fault: Fault) -> str | None:
        """Return why a fault cannot be injected here, or None. CPU and memory pressure need containers."""
        return "only on Kubernetes" if fault.kind in ("cpu-pressure", "memory-pressure") else None

    def up(self) -> None:
        """Start all nodes and return when they are ready.

        Raises ClusterError if one is not ready after START_TIMEOUT_S, InvalidConfigError for a bad setting.
        """
        self._cluster.up(self._counts, self._config)

    def nodes(self) -> Sequence[NodeInfo]:
        """Return the nodes listed in `cluster.json`. Raises ClusterError before `up`."""
        return self._cluster.state().nodes

    def is_running(self, name: str) -> bool:
        """Return whether the process of a node exists, paused or not. Raises ClusterError for an unknown node."""
        node = self._cluster.state().node(name)
        return processes.state_of(node.pid, node.process) is not processes.ProcessState.GONE

    def destroy(self) -> None:
        """Kill all nodes, paused ones too, once running calls have ended or after LOCAL_CALLS_TIMEOUT_S. Idempotent.

        The data stays.
        """
        if self.calls.are_over:
            return
        self.calls.end(LOCAL_CALLS_TIMEOUT_S)
        try:
            if (self._cluster.directory / "cluster.json").exists():
                for node in self.nodes():
                    with suppress(Exception):  # already stopped
                        self._cluster.kill(node.name)
        finally:
            self._cluster.close()


class KubeCluster(KubeRelease):
    """A target cluster that is a KubeRelease: it existed before the run and continues after it."""

    def __init__(self, namespace: str, release: str) -> None:
        super().__init__(namespace, release)
        self.calls = Calls()

    def unsupported_reason(self, fault: Fault) -> str | None:
        """Return why a fault cannot be injected on Kubernetes, or None."""
        if isinstance(fault, Pause) and not self.can_pause():
            return "pausing needs chaos.pause=true in the chart's values"
        if not isinstance(fault, Kill | Restart | Pause | Cut | FullDisk | CpuPressure | MemoryPressure):
            return "not possible on Kubernetes"
        if isinstance(fault, Cut) and not fault.is_total:
            return "on Kubernetes a pod can only be cut off from all peers, in both directions"
        return None

    def down(self) -> None:
        """Do nothing: the release keeps running."""

    def destroy(self) -> None:
        """Undo all faults, once running calls have ended or after KUBE_CALLS_TIMEOUT_S.

        Raises KubeError if a fault cannot be undone, or ChaosError if a call has not ended.
        """
        self.given_up.set()
        have_ended = self.calls.end(KUBE_CALLS_TIMEOUT_S)
        self.undo_faults()
        if not have_ended:
            raise ChaosError(f"a fault was still being injected after {KUBE_CALLS_TIMEOUT_S:g} s and may remain")
