"""The cluster that an experiment runs on, by protocol: `kipmesh.cluster` has one, and does not know of chaos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from kipmesh.chaos.experiment import ClusterPart, CpuPressure, Fault, MemoryPressure


class ChaosError(Exception):
    """A run that cannot be done; the text is one line."""


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


class Cluster(Protocol):
    """Processes of nodes; every method blocks, and raises what it likes when it fails."""

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

    def start(self, name: str) -> None:
        """Start it, and return when it is ready."""

    def pause(self, name: str) -> None:
        """SIGSTOP."""

    def resume(self, name: str) -> None:
        """SIGCONT."""

    def down(self) -> None:
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
class Limited(Protocol):
    """A cluster that cannot have every fault; a run asks before it begins."""

    def unable(self, fault: Fault) -> str | None:
        """Why a fault cannot be had here; None if it can."""


class Remote(Limited, Cluster, Protocol):
    """A cluster that is somebody else's: it runs before and after, on other machines, and its files cannot be reached.

    What a fault does to a node by its process or its files elsewhere, the cluster does by itself.
    """

    def fill(self, name: str) -> None:
        """No byte is free where it keeps its data."""

    def empty(self, name: str) -> None:
        """An end to that."""

    def press(self, name: str, fault: CpuPressure | MemoryPressure) -> None:
        """Others take the processor or the memory that it has."""

    def relieve(self, name: str) -> None:
        """An end to that."""

    def mend_all(self) -> None:
        """An end to all that is left of these."""


MakeCluster = Callable[[Path, ClusterPart, Hook], Cluster]
"""A cluster in a folder that is not started yet."""

CONTROLLER = "controller-"


def remote(cluster: Cluster) -> Remote | None:
    """The same cluster if it is a remote one."""
    return cast("Remote", cluster) if hasattr(cluster, "mend_all") else None


def is_controller(node: Node) -> bool:
    """Whether it is a voter of the metadata quorum."""
    return node.name.startswith(CONTROLLER)


def is_broker(node: Node) -> bool:
    """Whether it has partitions."""
    return node.node_id is not None and not is_controller(node)


def bootstrap(nodes: Sequence[Node]) -> str:
    """The brokers' own addresses."""
    return ",".join(node.grpc for node in nodes if is_broker(node) and node.grpc)
