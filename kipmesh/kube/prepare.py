"""Writes the configuration of one pod's node: what all pods of its kind share, and what only this one has.

A pod of a StatefulSet has an ordinal, which its name ends with. From it follow, without asking anybody: `node.id`, the
first id of its StatefulSet plus the ordinal, and the name under which others reach it. The rack is that of the node of
Kubernetes, by one of its labels.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kipmesh.kube.api import KubeApi, KubeError
from kipmesh.node.settings import read_properties, write_properties

ASK_FOR_S = 60.0
ASK_AGAIN_S = 1.0


class Member(NamedTuple):
    """A pod of a StatefulSet, how ids are given there, and where others reach it."""

    pod: str
    first_id: int
    service: str
    """Its headless service, as a whole name."""
    port: int

    @property
    def node_id(self) -> int:
        """Of the node that runs in the pod; raises ValueError."""
        return self.first_id + ordinal(self.pod)

    def properties(self) -> dict[str, str]:
        """What follows from the ordinal."""
        return {
            "node.id": str(self.node_id),
            "advertised.listeners": f"MESH://{self.pod}.{self.service}:{self.port}",
        }


def ordinal(pod: str) -> int:
    """The number that the name of a StatefulSet's pod ends with; raises ValueError."""
    found = re.fullmatch(r".+-(\d+)", pod)
    if found is None:
        raise ValueError(f"{pod!r} is no name of a StatefulSet's pod: it does not end with a number")
    return int(found[1])


def rack_of(node: str, label: str) -> str | None:
    """The label's value of a node of Kubernetes, None when it has none; asks for ASK_FOR_S, then raises KubeError."""
    deadline = time.monotonic() + ASK_FOR_S
    while True:
        try:
            return KubeApi().node_labels(node).get(label) or None
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
