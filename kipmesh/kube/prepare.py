"""Writes the configuration of one pod's node: the properties shared by its StatefulSet, and those of this pod.

The ordinal at the end of the pod's name determines `node.id` (first id of the StatefulSet plus ordinal) and the
advertised host name. The rack is the value of a label of the Kubernetes node. The address for clients outside
Kubernetes comes from the pod's Service: see `ExternalService`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kipmesh.kube.api import KubeApi, KubeError
from kipmesh.node.settings import read_properties, write_properties

RETRY_TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 1.0

T = TypeVar("T")


class Listener(NamedTuple):
    """A listener other than MESH, and its advertised address. `str()` returns NAME://HOST:PORT."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self.port}"


class ExternalService(NamedTuple):
    """The Service by which clients outside Kubernetes reach one broker."""

    listener: str
    namespace: str
    service: str
    host: str | None
    """Host to advertise. None: the address of the load balancer or, for a NodePort, of the pod's Kubernetes node."""
    node: str | None
    """Kubernetes node of the pod."""


class Member(NamedTuple):
    """A pod of a StatefulSet, and the values from which its properties follow."""

    pod: str
    first_id: int
    service: str
    """Fully qualified name of the headless service."""
    port: int
    more: Sequence[Listener] = ()
    """Listeners other than MESH, with advertised addresses."""

    @property
    def node_id(self) -> int:
        """`node.id` of the pod's node. Raises ValueError for a name without an ordinal."""
        return self.first_id + ordinal(self.pod)

    def properties(self) -> dict[str, str]:
        """Return `node.id` and `advertised.listeners` of the pod's node.

        Raises ValueError for a pod name without an ordinal.
        """
        return {
            "node.id": str(self.node_id),
            "advertised.listeners": ",".join(
                [f"MESH://{self.pod}.{self.service}:{self.port}", *(str(one) for one in self.more)]
            ),
        }


def ordinal(pod: str) -> int:
    """Return the ordinal at the end of a StatefulSet pod's name. Raises ValueError if there is none."""
    found = re.fullmatch(r".+-(\d+)", pod)
    if found is None:
        raise ValueError(f"the name of a StatefulSet's pod must end with -NUMBER, got {pod!r}")
    return int(found[1])


def rack_of(node: str, label: str) -> str | None:
    """Return the value of a Kubernetes node's label, or None if the label is missing or empty.

    Repeats a failing call for RETRY_TIMEOUT_S, then raises KubeError.
    """
    return _retry(lambda: KubeApi().node_labels(node).get(label) or None)


def external_listener(external: ExternalService) -> Listener:
    """Return the listener for clients outside Kubernetes, with the address to advertise.

    Repeats failing calls, and waits for the address of a load balancer, for RETRY_TIMEOUT_S, then raises KubeError.
    """
    return _retry(lambda: _external_listener(external, KubeApi()))


def _external_listener(external: ExternalService, api: KubeApi) -> Listener:
    endpoint = api.service_endpoint(external.namespace, external.service)
    host = external.host or endpoint.address
    if host is None and endpoint.is_node_port and external.node is not None:
        host = api.node_address(external.node)
    if host is None:
        raise KubeError(f"service {external.service} has no address yet")
    return Listener(external.listener, host, endpoint.port)


def _retry(call: Callable[[], T]) -> T:
    deadline = time.monotonic() + RETRY_TIMEOUT_S
    while True:
        try:
            return call()
        except KubeError as error:
            if time.monotonic() > deadline:
                raise
            print(f"kipmesh.kube: {error}; retrying", file=sys.stderr, flush=True)
            time.sleep(RETRY_INTERVAL_S)


def write(base: Path, out: Path, member: Member | None, rack_key: str, rack: str | None) -> None:
    """Write the node's properties file `out` atomically, from `base`, `member` and `rack`.

    `rack` becomes the value of `rack_key`, unless it is None or `base` has that key. Raises InvalidConfigError if
    `base` is invalid or cannot be read, ValueError if the pod's name has no ordinal, and OSError if `out` cannot be
    written.
    """
    values = read_properties(base)
    if member is not None:
        values |= member.properties()
    if rack is not None:
        values.setdefault(rack_key, rack)
    temporary = out.with_name(out.name + ".new")
    temporary.write_text(write_properties(values, title="written at the start of the pod"))
    os.replace(temporary, out)
