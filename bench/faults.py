"""What can happen to a node of a `QuorumCluster`, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from bench.quorum_cluster import QuorumCluster


class Fault(NamedTuple):
    """What is done to a node, and undone later; both are given its name."""

    label: str
    do: Callable[[QuorumCluster, str], None]
    undo: Callable[[QuorumCluster, str], None]


def _heal(mesh: QuorumCluster, _name: str) -> None:
    mesh.heal()


def _cut(
    *, sends: bool = False, hears: bool = False, from_brokers: bool = True
) -> Callable[[QuorumCluster, str], None]:
    return partial(QuorumCluster.isolate, sends=sends, hears=hears, from_brokers=from_brokers)


def _ignore(_code: int) -> None:
    pass


def _kill_with_active(mesh: QuorumCluster, name: str) -> None:
    active = mesh.active().name
    mesh.kill(name)
    if active != name:
        mesh.kill(active)


def _start_dead(mesh: QuorumCluster, _name: str) -> None:
    mesh.start(*[name for name in mesh.nodes if not mesh.is_running(name)])


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", QuorumCluster.kill, QuorumCluster.start),
    "stop": Fault("SIGTERM", lambda mesh, name: _ignore(mesh.stop(name)), QuorumCluster.start),
    "pause": Fault("SIGSTOP", QuorumCluster.pause, QuorumCluster.resume),
    "cut": Fault("cut off in both directions", _cut(), _heal),
    "mute": Fault("cut off: what it sends", _cut(hears=True), _heal),
    "deaf": Fault("cut off: what it hears", _cut(sends=True), _heal),
    "voters": Fault("cut off from the other controllers only", _cut(from_brokers=False), _heal),
    "both": Fault("SIGKILL of it and of the active controller", _kill_with_active, _start_dead),
}
"""All but the last make sense for the active controller; the first three and the last for any other node."""
