"""`LocalCluster`: a cluster as a context manager.

    with LocalCluster(mode="single") as cluster:
        producer = Producer(cluster.bootstrap)

`mode="single"` runs all nodes in this process and is ready within a second. `mode="processes"` starts one process per
node, as `kipmesh local up` does. With `tls=True` all listeners use TLS, and clients need `client_config`. `down`
removes all processes, threads and, unless `dir` was given, the data.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from kipmesh.cluster.certificates import client_config
from kipmesh.cluster.layout import ClusterError, ClusterState, Counts, NodeInfo
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh.cluster.single import SingleCluster


class LocalCluster:
    """A cluster on this machine, running from `up()` (or `with`) to `down()`.

    `mode` is "single" (all nodes in this process) or "processes". `controllers`, `leaders`, `followers` and `consumers`
    are numbers of nodes. Their defaults are 1, 1, 2 and 0 or, with mode="processes", the numbers of an existing cluster
    in `dir`. `dir` is the data directory, which `down` keeps. Without `dir`, a temporary directory is used. `config`
    contains settings by dotted key, which apply to all nodes that know the key. `tls` enables TLS on all listeners.
    `start_timeout_s` limits the time for starting.

    Raises ValueError for an unknown mode. All properties and methods except `up` and `down` raise ClusterError while
    the cluster is not up, and those that take a name also for an unknown node.
    """

    def __init__(
        self,
        mode: Literal["processes", "single"] = "processes",
        controllers: int | None = None,
        leaders: int | None = None,
        followers: int | None = None,
        consumers: int | None = None,
        dir: str | Path | None = None,  # noqa: A002 - the contract's name
        config: Mapping[str, Any] | None = None,
        *,
        tls: bool = False,
        start_timeout_s: float = 60.0,
    ) -> None:
        if mode not in ("processes", "single"):
            raise ValueError(f"mode must be 'processes' or 'single', got {mode!r}")
        self.mode = mode
        self._tls = tls
        self._counts = Counts(controllers, leaders, followers, consumers)
        self._config = {key: _text(value) for key, value in (config or {}).items()}
        self._given_dir = Path(dir) if dir is not None else None
        self._start_timeout_s = start_timeout_s
        self._dir: Path | None = None
        self._backend: ProcessCluster | SingleCluster | None = None

    def up(self) -> Self:
        """Start all nodes and return the cluster when every node is ready. After an error, the cluster is down again.

        Raises InvalidConfigError for a bad setting, and ClusterError if the cluster is already up, the numbers of nodes
        are impossible, or a node does not start in time. In mode="single" also raises the error of a node that fails to
        start.
        """
        if self._backend is not None:
            raise ClusterError("the cluster is already up")
        self._dir = self._given_dir or Path(tempfile.mkdtemp(prefix="kipmesh-"))
        self._dir.mkdir(parents=True, exist_ok=True)
        backend: ProcessCluster | SingleCluster
        if self.mode == "single":
            backend = SingleCluster(self._dir, start_timeout_s=self._start_timeout_s)
        else:
            backend = ProcessCluster(self._dir, owned=True, start_timeout_s=self._start_timeout_s)
        self._backend = backend
        atexit.register(self.down)
        try:
            backend.up(self._counts, self._config, tls=self._tls or None)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Stop all nodes and remove the data directory unless `dir` was given. Idempotent.

        Raises ClusterError if the nodes cannot be stopped; a temporary directory is removed even then.
        """
        atexit.unregister(self.down)
        backend, self._backend = self._backend, None
        try:
            if isinstance(backend, ProcessCluster):
                try:
                    if (backend.directory / "cluster.json").exists():
                        backend.down()
                finally:
                    backend.close()
            elif backend is not None:
                backend.down()
        finally:
            if self._dir is not None and self._given_dir is None:
                shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def _running(self) -> ProcessCluster | SingleCluster:
        if self._backend is None:
            raise ClusterError("the cluster is not up: call up() first")
        return self._backend

    @property
    def state(self) -> ClusterState:
        """Cluster id, configuration and nodes."""
        return self._running.state()

    @property
    def bootstrap(self) -> str:
        """Bootstrap addresses for kipmesh clients: comma-separated host:port of all brokers, running or not."""
        return self.state.bootstrap

    @property
    def kafka_bootstrap(self) -> str | None:
        """Bootstrap addresses for Kafka clients, or None if no broker has a Kafka listener."""
        return self.state.kafka_bootstrap

    @property
    def client_config(self) -> dict[str, str]:
        """Client settings for TLS, to pass as `Producer(bootstrap, **client_config)`; empty without TLS."""
        return dict(client_config(self.nodes))

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self.state.cluster_id

    @property
    def dir(self) -> Path:
        """Data directory of the cluster."""
        if self._dir is None:
            raise ClusterError("the cluster is not up: call up() first")
        return self._dir

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes, running or not."""
        return self.state.nodes

    def node(self, name: str) -> NodeInfo:
        """Return the node of that name, for example `leader-1`. Raises ClusterError for an unknown name."""
        return self.state.node(name)

    def start(self, name: str) -> None:
        """Start a stopped node and wait until it is ready.

        Does not wait for a controller if too few controllers are running to elect a quorum leader. Raises ClusterError
        if the node is already running or does not start in time. In mode="single" also raises the error of a node that
        fails to start.
        """
        self._running.start(name)

    def stop(self, name: str) -> None:
        """Shut down a node gracefully and wait until it has ended.

        A process receives SIGTERM and, if it has not ended after 15 s, SIGKILL. Raises ClusterError if the node is not
        running.
        """
        self._running.stop(name)

    def kill(self, name: str) -> None:
        """Stop a node as if it crashed: with SIGKILL, or without shutdown steps in mode="single".

        Consumers in mode="single" are shut down gracefully. Raises ClusterError if the node is not running.
        """
        self._running.kill(name)

    def pause(self, name: str) -> None:
        """Pause a node's process (SIGSTOP) and wait until it is paused.

        Raises ClusterError in mode="single", if the node is not running, or if it is not paused after 15 s.
        """
        self._processes("pause").pause(name)

    def resume(self, name: str) -> None:
        """Resume a paused process (SIGCONT).

        Raises ClusterError in mode="single", or if the node is not paused.
        """
        self._processes("resume").resume(name)

    def _processes(self, method: str) -> ProcessCluster:
        backend = self._running
        if not isinstance(backend, ProcessCluster):
            raise ClusterError(f'{method} needs mode="processes"')
        return backend


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
