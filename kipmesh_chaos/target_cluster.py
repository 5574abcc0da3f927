"""The cluster that an experiment runs on, by protocol: `kipmesh.cluster` has one, and does not know of chaos.

Calls to it come from several threads, and an interrupted run does not end them: `Calls` counts them, so that the
cluster's end waits for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from kipmesh_chaos.experiment import ClusterPart, Fault

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class ChaosError(Exception):
    """A run that cannot be done; the text is one line."""


class Calls:
    """Counts the calls that are under way. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._are_over = False

    @property
    def are_over(self) -> bool:
        """Whether no more are taken."""
        return self._are_over

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """One call; raises ChaosError when no more are taken."""
        with self._changed:
            if self._are_over:
                raise ChaosError("the run is over: nothing more is done to its cluster")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    async def run(self, method: Callable[_Given, _Result], /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
        """A blocking call in a thread, as one that is under way."""

        def call() -> _Result:
            with self.under_way():
                return method(*given, **named)

        return await asyncio.to_thread(call)

    def end(self, timeout_s: float) -> bool:
        """Take no more, and wait for those under way; gives whether they ended. Idempotent."""
        with self._changed:
            self._are_over = True
            return self._changed.wait_for(lambda: not self._count, timeout_s)


class Node(Protocol):
    """A node as `cluster.json` has it."""

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
    """What an experiment changes in how nodes start; called in the cluster's thread."""

    def properties(self, state: Any, node: Any) -> Mapping[str, str]: ...  # noqa: D102
    def command(self, node: Any, command: list[str]) -> list[str]: ...  # noqa: D102


class TargetCluster(Protocol):
    """Processes of nodes; every method blocks, and raises what it likes when it fails.

    What changes the cluster is called by `calls.run`; `destroy` ends the calls.
    """

    @property
    def calls(self) -> Calls: ...  # noqa: D102

    def unable(self, fault: Fault) -> str | None:
        """Why a fault cannot be had here, None if it can; a run asks before it begins."""

    def up(self) -> None:
        """Start everything, and return when it is ready."""

    def nodes(self) -> Sequence[Node]:
        """All nodes, whether they run or not."""

    def is_running(self, name: str) -> bool:
        """Whether a node's process is there, held or not."""

    def kill(self, name: str) -> None:
        """SIGKILL."""

    def stop(self, name: str) -> None:
        """SIGTERM, and wait until it is gone."""

    def start(self, name: str) -> object:
        """Start it, and return when it is ready."""

    def pause(self, name: str) -> None:
        """SIGSTOP."""

    def resume(self, name: str) -> None:
        """SIGCONT."""

    def down(self) -> object:
        """Stop everything cleanly, what is held too; idempotent."""

    def destroy(self) -> None:
        """SIGKILL what still runs; idempotent."""


@runtime_checkable
class Separable(Protocol):
    """A cluster whose nodes can be taken off the network altogether; both methods block."""

    def disconnect(self, name: str) -> None:
        """Nobody hears it, and it hears nobody."""

    def reconnect(self, name: str) -> None:
        """As before; idempotent."""


@runtime_checkable
class RemoteCluster(TargetCluster, Protocol):
    """A cluster that is somebody else's: it runs before and after, on other machines, and its files cannot be reached.

    What a fault does to a node by its process or its files elsewhere, the cluster does by itself.
    """

    def fill(self, name: str) -> object:
        """No byte is free where it keeps its data."""

    def empty(self, name: str) -> None:
        """An end to that."""

    def press(self, name: str, *, workers: int = 0, memory_share: float = 0.0) -> object:
        """Busy processes beside it, and memory of its limit that is taken."""

    def relieve(self, name: str) -> None:
        """An end to that."""

    def mend_all(self) -> None:
        """An end to all that is left of these."""


MakeCluster = Callable[[Path, ClusterPart, Hook], TargetCluster]
"""A cluster in a folder that is not started yet."""

CONTROLLER = "controller-"


def is_controller(node: Node) -> bool:
    """Whether it is a voter of the metadata quorum."""
    return node.name.startswith(CONTROLLER)


def is_broker(node: Node) -> bool:
    """Whether it has partitions."""
    return node.node_id is not None and not is_controller(node)


def bootstrap(nodes: Sequence[Node]) -> str:
    """The brokers' own addresses."""
    return ",".join(node.grpc for node in nodes if is_broker(node) and node.grpc)
