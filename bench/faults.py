"""What can happen to a node of a `QuorumMesh`, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from bench.quorum_mesh import QuorumMesh


class Fault(NamedTuple):
    """What is done to a node, and undone later; both are given its name."""

    label: str
    do: Callable[[QuorumMesh, str], None]
    undo: Callable[[QuorumMesh, str], None]


def _heal(mesh: QuorumMesh, _name: str) -> None:
    mesh.heal()


def _cut(*, sends: bool = False, hears: bool = False, from_brokers: bool = True) -> Callable[[QuorumMesh, str], None]:
    return partial(QuorumMesh.isolate, sends=sends, hears=hears, from_brokers=from_brokers)


def _ignore(_code: int) -> None:
    pass


def _kill_with_active(mesh: QuorumMesh, name: str) -> None:
    active = mesh.active().name
    mesh.kill(name)
    if active != name:
        mesh.kill(active)


def _start_dead(mesh: QuorumMesh, _name: str) -> None:
    mesh.start(*[name for name in mesh.nodes if not mesh.is_running(name)])


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", QuorumMesh.kill, QuorumMesh.start),
    "stop": Fault("SIGTERM", lambda mesh, name: _ignore(mesh.stop(name)), QuorumMesh.start),
    "pause": Fault("SIGSTOP", QuorumMesh.pause, QuorumMesh.resume),
    "cut": Fault("cut off in both directions", _cut(), _heal),
    "mute": Fault("cut off: what it sends", _cut(hears=True), _heal),
    "deaf": Fault("cut off: what it hears", _cut(sends=True), _heal),
    "voters": Fault("cut off from the other controllers only", _cut(from_brokers=False), _heal),
    "both": Fault("SIGKILL of it and of the active controller", _kill_with_active, _start_dead),
}
"""All but the last make sense for the active controller; the first three and the last for any other node."""
