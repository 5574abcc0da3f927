"""A cluster of processes on this machine (`kipmesh.cluster`) as a run of `kipmesh.chaos` wants its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kipmesh.chaos.calls import Calls, counted
from kipmesh.chaos.experiment import ClusterPart, Fault
from kipmesh.chaos.mesh import Hook
from kipmesh.cluster import processes
from kipmesh.cluster.layout import Counts, NodeInfo
from kipmesh.cluster.process_cluster import ProcessCluster

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
CALLS_TIMEOUT_S = START_TIMEOUT_S + STOP_TIMEOUT_S


class LocalCluster:
    """`kipmesh.cluster` as `kipmesh.chaos` wants it.

    Calls come from several threads, and an interrupted run does not end them: `destroy` waits for them.
    """

    def __init__(self, folder: Path, part: ClusterPart, hook: Hook) -> None:
        self._counts = Counts(part.controllers, part.leaders, part.followers, 0)
        self._config = dict(part.config)
        self._cluster = ProcessCluster(
            folder, owned=True, start_timeout_s=START_TIMEOUT_S, stop_timeout_s=STOP_TIMEOUT_S, hook=hook
        )
        self.calls = Calls()

    def unable(self, fault: Fault) -> str | None:
        """Processes here have no container whose processor or memory could be taken from them."""
        return "only on Kubernetes" if fault.kind in ("cpu-pressure", "memory-pressure") else None

    @counted
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

    @counted
    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._cluster.kill(name)

    @counted
    def stop(self, name: str) -> None:
        """SIGTERM, and wait until it is gone."""
        self._cluster.stop(name)

    @counted
    def start(self, name: str) -> None:
        """Start it, and return when it is ready."""
        self._cluster.start(name)

    @counted
    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._cluster.pause(name)

    @counted
    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._cluster.resume(name)

    @counted
    def down(self) -> None:
        """Stop everything cleanly, what is held too."""
        self._cluster.down()

    def destroy(self) -> None:
        """Kill what runs, whether it is held or broken, when no other call is under way."""
        if self.calls.are_over:
            return
        self.calls.end(CALLS_TIMEOUT_S)
        try:
            if (self._cluster.folder / "cluster.json").exists():
                for node in self.nodes():
                    with suppress(Exception):  # it does not run
                        self._cluster.kill(node.name)
        finally:
            self._cluster.close()
