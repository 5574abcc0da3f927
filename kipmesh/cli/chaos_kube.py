"""A release on Kubernetes (`kipmesh.kube.mesh`) as a run of `kipmesh.chaos` wants its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh.chaos.calls import Calls, counted
from kipmesh.chaos.experiment import CpuPressure, Cut, Fault, FullDisk, Kill, MemoryPressure, Pause, Restart
from kipmesh.chaos.mesh import ChaosError
from kipmesh.kube.api import RUN_TIMEOUT_S
from kipmesh.kube.mesh import READY_TIMEOUT_S, KubeMesh, PodNode

CALLS_TIMEOUT_S = READY_TIMEOUT_S + RUN_TIMEOUT_S
"""The longest that undoes a fault, and its last command."""


class KubeCluster:
    """Somebody else's cluster: nothing of it is started or stopped for good."""

    def __init__(self, namespace: str, release: str) -> None:
        self._mesh = KubeMesh(namespace, release)
        self.calls = Calls()
        self.is_running = self._mesh.is_running

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

    @counted
    def up(self) -> None:
        """Wait until all pods are ready, without what an earlier run left."""
        self._mesh.up()

    @counted
    def kill(self, name: str) -> None:
        """The pod is deleted without grace."""
        self._mesh.kill(name)

    @counted
    def stop(self, name: str) -> None:
        """The pod is evicted."""
        self._mesh.stop(name)

    @counted
    def start(self, name: str) -> None:
        """Wait until it is ready."""
        self._mesh.start(name)

    @counted
    def disconnect(self, name: str) -> None:
        """Nobody hears it, and it hears nobody."""
        self._mesh.disconnect(name)

    @counted
    def reconnect(self, name: str) -> None:
        """An end to that."""
        self._mesh.reconnect(name)

    @counted
    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._mesh.pause(name)

    @counted
    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._mesh.resume(name)

    @counted
    def empty(self, name: str) -> None:
        """There is room again on its volume."""
        self._mesh.empty(name)

    @counted
    def relieve(self, name: str) -> None:
        """An end to pressure."""
        self._mesh.relieve(name)

    @counted
    def mend_all(self) -> None:
        """An end to all that is left of faults."""
        self._mesh.mend_all()

    @counted
    def fill(self, name: str) -> None:
        """Take what is free on the node's volume."""
        self._mesh.fill(name)

    @counted
    def press(self, name: str, fault: CpuPressure | MemoryPressure) -> None:
        """Others take the processor or the memory of its container."""
        if isinstance(fault, CpuPressure):
            self._mesh.press(name, workers=fault.workers)
        else:
            self._mesh.press(name, memory_share=fault.share)

    def down(self) -> None:
        """It goes on."""

    def destroy(self) -> None:
        """Nothing that was done to it is left, nor by calls that are under way. Raises ChaosError, KubeError."""
        self._mesh.give_up()
        have_ended = self.calls.end(CALLS_TIMEOUT_S)
        self._mesh.mend_all()
        if not have_ended:
            raise ChaosError(f"a fault was still being done after {CALLS_TIMEOUT_S:g} s, and may be left")
