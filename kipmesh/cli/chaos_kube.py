"""A release on Kubernetes (`kipmesh.kube.mesh`) as a run of `kipmesh.chaos` wants its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh.chaos.experiment import CpuPressure, Cut, Fault, FullDisk, Kill, MemoryPressure, Pause, Restart
from kipmesh.kube.mesh import KubeMesh, PodNode


class KubeCluster:
    """Somebody else's cluster: nothing of it is started or stopped for good."""

    def __init__(self, namespace: str, release: str) -> None:
        self._mesh = KubeMesh(namespace, release)
        self.up = self._mesh.up
        self.is_running = self._mesh.is_running
        self.kill = self._mesh.kill
        self.stop = self._mesh.stop
        self.start = self._mesh.start
        self.disconnect = self._mesh.disconnect
        self.reconnect = self._mesh.reconnect
        self.pause = self._mesh.pause
        self.resume = self._mesh.resume
        self.empty = self._mesh.empty
        self.relieve = self._mesh.relieve
        self.mend_all = self._mesh.mend_all

    def unable(self, fault: Fault) -> str | None:
        """Why a fault cannot be had on Kubernetes."""
        if isinstance(fault, Pause) and not self._mesh.can_pause():
            return "no process of a pod can be held unless the chart's chaos.pause is true"
        if not isinstance(fault, Kill | Restart | Pause | Cut | FullDisk | CpuPressure | MemoryPressure):
            return "not on Kubernetes"
        if isinstance(fault, Cut) and not fault.is_total:
            return "on Kubernetes a pod is cut off from everybody, in both directions"
        return None

    def nodes(self) -> Sequence[PodNode]:
        """The pods."""
        return self._mesh.nodes()

    def fill(self, name: str) -> None:
        """Take what is free on the node's volume."""
        self._mesh.fill(name)

    def press(self, name: str, fault: CpuPressure | MemoryPressure) -> None:
        """Others take the processor or the memory of its container."""
        if isinstance(fault, CpuPressure):
            self._mesh.press(name, workers=fault.workers)
        else:
            self._mesh.press(name, memory_share=fault.share)

    def down(self) -> None:
        """It goes on."""

    def destroy(self) -> None:
        """Nothing that was done to it is left."""
        self._mesh.mend_all()
