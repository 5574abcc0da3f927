"""`LocalCluster`: a cluster as a context manager.

    with LocalCluster(mode="single") as cluster:
        producer = Producer(cluster.bootstrap)

`mode="single"` runs all nodes in this process and is ready within a second; `mode="processes"` starts what
`kipmesh local up` starts. With `tls=True` everything speaks TLS, and clients need `client_config` beside the addresses.
Both modes leave nothing behind: no process, no thread, and no folder unless `dir` was given.
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
    """A cluster on this machine, from `up()` (or `with`) to `down()`; `config` holds dotted keys."""

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
            raise ValueError(f"mode is 'processes' or 'single', not {mode!r}")
        self.mode = mode
        self._tls = tls
        self._counts = Counts(controllers, leaders, followers, consumers)
        self._config = {key: _text(value) for key, value in (config or {}).items()}
        self._given_dir = Path(dir) if dir is not None else None
        self._start_timeout_s = start_timeout_s
        self._dir: Path | None = None
        self._backend: ProcessCluster | SingleCluster | None = None

    def up(self) -> Self:
        """Start, and return when every node is ready.

        One controller, one leader, two followers by default; `kipmesh local up` makes three controllers.
        """
        if self._backend is not None:
            raise ClusterError("the cluster is up already")
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
        """Stop every node and remove the folder, unless it was given; idempotent."""
        atexit.unregister(self.down)
        backend, self._backend = self._backend, None
        try:
            if isinstance(backend, ProcessCluster):
                try:
                    if (backend.folder / "cluster.json").exists():
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
            raise ClusterError("the cluster is not up")
        return self._backend

    @property
    def state(self) -> ClusterState:
        """Everything that is known of the nodes."""
        return self._running.state()

    @property
    def bootstrap(self) -> str:
        """`host:port` of the brokers, separated by commas."""
        return self.state.bootstrap

    @property
    def kafka_bootstrap(self) -> str | None:
        """The same for clients of Kafka's own protocol; None where no broker listens for them."""
        return self.state.kafka_bootstrap

    @property
    def client_config(self) -> dict[str, str]:
        """What clients need beside the addresses: nothing, or with `tls` the keys for it (`Producer(..., **these)`)."""
        return dict(client_config(self.nodes))

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self.state.cluster_id

    @property
    def dir(self) -> Path:
        """The cluster's folder."""
        if self._dir is None:
            raise ClusterError("the cluster is not up")
        return self._dir

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes, whether they run or not."""
        return self.state.nodes

    def node(self, name: str) -> NodeInfo:
        """The node of that name, for example `leader-1`."""
        return self.state.node(name)

    def start(self, name: str) -> None:
        """Start a node that does not run, and wait until it is ready.

        A controller is not waited for while too few of them run to elect the active one.
        """
        self._running.start(name)

    def stop(self, name: str) -> None:
        """Stop a node cleanly."""
        self._running.stop(name)

    def kill(self, name: str) -> None:
        """Stop a node as a crash would: SIGKILL, or without any goodbye within this process."""
        self._running.kill(name)

    def pause(self, name: str) -> None:
        """Hold a node's process (mode="processes" only)."""
        self._processes("pause").pause(name)

    def resume(self, name: str) -> None:
        """Let a held process go on (mode="processes" only)."""
        self._processes("resume").resume(name)

    def _processes(self, what: str) -> ProcessCluster:
        backend = self._running
        if not isinstance(backend, ProcessCluster):
            raise ClusterError(f'{what} needs mode="processes"')
        return backend


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
