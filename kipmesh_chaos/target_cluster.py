"""Protocols of the cluster that an experiment runs on.

Several threads call a cluster, and an interrupted run leaves such calls behind. `Calls` counts them, so that the end of
the cluster waits for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from kipmesh_chaos.experiment import ClusterPart, Fault

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class ChaosError(Exception):
    """A run is impossible, or the cluster refused an operation. The message is one line."""


class Calls:
    """Counts the calls in progress and refuses new ones after `end`. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._are_over = False

    @property
    def are_over(self) -> bool:
        """Whether `end` was called, so that new calls are refused."""
        return self._are_over

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a call in progress while the block runs. Raises ChaosError after `end`."""
        with self._changed:
            if self._are_over:
                raise ChaosError("the run is over, its cluster accepts no more calls")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    async def run(
        self, method: Callable[_Params, _Result], /, *args: _Params.args, **kwargs: _Params.kwargs
    ) -> _Result:
        """Run a blocking call in a thread, count it and return its result. Raises ChaosError after `end`, and any error
        of the call.
        """

        def call() -> _Result:
            with self.under_way():
                return method(*args, **kwargs)

        return await asyncio.to_thread(call)

    def end(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those in progress. Returns False if some have not ended after `timeout_s`.
        Idempotent.
        """
        with self._changed:
            self._are_over = True
            return self._changed.wait_for(lambda: not self._count, timeout_s)


class Node(Protocol):
    """A node of the cluster, as in `cluster.json`. `pid` is None if the node is not running; `grpc` (`host:port`) is
    None if it has no address.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def node_id(self) -> int | None: ...  # noqa: D102
    @property
    def rack(self) -> str: ...  # noqa: D102
    @property
    def pid(self) -> int | None: ...  # noqa: D102
    @property
    def grpc(self) -> str | None: ...  # noqa: D102
    @property
    def dir(self) -> str: ...  # noqa: D102


class Hook(Protocol):
    """Adds properties to the nodes of a cluster and replaces the command that starts them. Called in the thread that
    starts the nodes.
    """

    def properties(self, state: Any, node: Any) -> Mapping[str, str]: ...  # noqa: D102
    def command(self, node: Any, command: list[str]) -> list[str]: ...  # noqa: D102


class TargetCluster(Protocol):
    """A cluster of nodes that an experiment runs on. Every method blocks and raises the errors of its kind of cluster.

    Callers change the cluster through `calls.run`. `destroy` ends these calls.
    """

    @property
    def calls(self) -> Calls: ...  # noqa: D102

    def unsupported_reason(self, fault: Fault) -> str | None:
        """Return the reason why the cluster does not support a fault, or None if it does. Called before the
        run starts.
        """

    def up(self) -> None:
        """Start all nodes and wait until they are ready."""

    def nodes(self) -> Sequence[Node]:
        """Return all nodes, running or not."""

    def is_running(self, name: str) -> bool:
        """Whether the process of a node exists, paused or not."""

    def kill(self, name: str) -> None:
        """Send SIGKILL to a node's process."""

    def stop(self, name: str) -> None:
        """Send SIGTERM to a node and wait for its end."""

    def start(self, name: str) -> object:
        """Start a node and wait until it is ready."""

    def pause(self, name: str) -> None:
        """Send SIGSTOP to a node."""

    def resume(self, name: str) -> None:
        """Send SIGCONT to a node."""

    def down(self) -> object:
        """Stop all nodes with SIGTERM, including paused ones; idempotent."""

    def destroy(self) -> None:
        """Stop using the cluster; idempotent. Kills the nodes if the run started the cluster, otherwise undoes all
        faults.
        """


@runtime_checkable
class Separable(Protocol):
    """A cluster whose nodes can be disconnected from the network. Both methods block and raise the errors of their kind
    of cluster.
    """

    def disconnect(self, name: str) -> None:
        """Block all traffic to and from a node."""

    def reconnect(self, name: str) -> None:
        """Restore the traffic of a node; idempotent."""


@runtime_checkable
class RemoteCluster(TargetCluster, Protocol):
    """A cluster that outlives the run, on other machines, whose files are not accessible.

    The cluster itself injects the faults that need a node's process or files.
    """

    def fill(self, name: str) -> object:
        """Fill the disk that holds a node's data. `empty` undoes this."""

    def empty(self, name: str) -> None:
        """Undo `fill` for a node."""

    def press(self, name: str, *, workers: int = 0, memory_share: float = 0.0) -> object:
        """Run `workers` busy processes beside a node, and allocate memory until `memory_share` of its limit is in use
        (0: none).
        """

    def relieve(self, name: str) -> None:
        """Undo `press` for a node."""

    def undo_faults(self) -> None:
        """Undo all remaining faults that `fill`, `press` and other methods injected."""


MakeCluster = Callable[[Path, ClusterPart, Hook], TargetCluster]
"""Returns a cluster in a directory, not yet started."""

CONTROLLER = "controller-"


def is_controller(node: Node) -> bool:
    """Whether a node is a controller, by its name. Controllers are the voters of the metadata quorum."""
    return node.name.startswith(CONTROLLER)


def is_broker(node: Node) -> bool:
    """Whether a node is a broker and hosts partitions: it has a node id and is not a controller."""
    return node.node_id is not None and not is_controller(node)


def bootstrap(nodes: Sequence[Node]) -> str:
    """Return the bootstrap servers: the direct addresses of all brokers that have one, separated by commas. May be
    empty.
    """
    return ",".join(node.grpc for node in nodes if is_broker(node) and node.grpc)
