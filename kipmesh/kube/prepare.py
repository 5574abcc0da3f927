"""Writes the configuration of one pod's node: what all pods of its kind share, and what only this one has.

A pod of a StatefulSet has an ordinal, which its name ends with. From it follow, without asking anybody: `node.id`, the
first id of its StatefulSet plus the ordinal, and the name under which others reach it. The rack is that of the node of
Kubernetes, by one of its labels. Where clients outside of Kubernetes reach the pod, its Service knows: see `Outside`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kipmesh.kube.api import KubeApi, KubeError, ServicePlace
from kipmesh.node.settings import read_properties, write_properties

ASK_FOR_S = 60.0
ASK_AGAIN_S = 1.0

Answer = TypeVar("Answer")


class Listener(NamedTuple):
    """A listener besides the mesh's, and where it is reached."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self.port}"


class Outside(NamedTuple):
    """How clients that are not in the cluster of Kubernetes reach one broker: by a Service of its own."""

    listener: str
    namespace: str
    service: str
    host: str | None
    """What they are told; None: what Kubernetes says, the pod's node (NodePort) or the load balancer."""
    node: str | None
    """The node that the pod runs on."""


class Member(NamedTuple):
    """A pod of a StatefulSet, how ids are given there, and where others reach it."""

    pod: str
    first_id: int
    service: str
    """Its headless service, as a whole name."""
    port: int
    more: Sequence[Listener] = ()
    """Listeners besides the mesh's, as they are advertised."""

    @property
    def node_id(self) -> int:
        """Of the node that runs in the pod; raises ValueError."""
        return self.first_id + ordinal(self.pod)

    def properties(self) -> dict[str, str]:
        """What follows from the ordinal."""
        return {
            "node.id": str(self.node_id),
            "advertised.listeners": ",".join(
                [f"MESH://{self.pod}.{self.service}:{self.port}", *(str(one) for one in self.more)]
            ),
        }


def ordinal(pod: str) -> int:
    """The number that the name of a StatefulSet's pod ends with; raises ValueError."""
    found = re.fullmatch(r".+-(\d+)", pod)
    if found is None:
        raise ValueError(f"{pod!r} is no name of a StatefulSet's pod: it does not end with a number")
    return int(found[1])


def rack_of(node: str, label: str) -> str | None:
    """The label's value of a node of Kubernetes, None when it has none; asks for ASK_FOR_S, then raises KubeError."""
    return _asked(lambda: KubeApi().node_labels(node).get(label) or None)


def from_outside(outside: Outside) -> Listener:
    """Where clients outside reach the broker; asks for ASK_FOR_S, a load balancer takes its time. Raises KubeError."""
    return _asked(lambda: _from_outside(outside, KubeApi()))


def _from_outside(outside: Outside, api: KubeApi) -> Listener:
    place: ServicePlace = api.service_place(outside.namespace, outside.service)
    host = outside.host or place.address
    if host is None and place.is_node_port and outside.node is not None:
        host = api.node_address(outside.node)
    if host is None:
        raise KubeError(f"service {outside.service} has no address yet")
    return Listener(outside.listener, host, place.port)


def _asked(ask: Callable[[], Answer]) -> Answer:
    deadline = time.monotonic() + ASK_FOR_S
    while True:
        try:
            return ask()
        except KubeError as error:
            if time.monotonic() > deadline:
                raise
            print(f"kipmesh.kube: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(ASK_AGAIN_S)


def write(base: Path, out: Path, member: Member | None, rack_key: str, rack: str | None) -> None:
    """Write the file for the node; raises InvalidConfigError, ValueError and OSError."""
    values = read_properties(base)
    if member is not None:
        values |= member.properties()
    if rack is not None:
        values.setdefault(rack_key, rack)
    temporary = out.with_name(out.name + ".new")
    temporary.write_text(write_properties(values, title="made when the pod started"))
    os.replace(temporary, out)
