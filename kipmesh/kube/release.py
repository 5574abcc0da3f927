"""A release on Kubernetes as `kipmesh_chaos` wants a cluster: its pods are the nodes, Kubernetes starts them again.

| of an experiment      | here                                                                                       |
| --------------------- | ------------------------------------------------------------------------------------------ |
| `kill`                | the pod is deleted without grace: SIGKILL; Kubernetes starts another one at once           |
| `restart`             | the pod is evicted, as by `kubectl drain`: budgets, preStop hook, SIGTERM                  |
| `cut` from everybody  | the label that the chart's NetworkPolicies leave out: nothing comes in, nothing goes out   |
| `pause`               | SIGSTOP within the pod, whose containers share their processes (the chart's `chaos.pause`) |
| `full-disk`           | a file takes what is free on the node's volume, which is a small one                       |
| `cpu-pressure`, `memory-pressure` | processes beside the node, in its container                                    |

Nodes have the names of a local cluster's: the pod RELEASE-followers-0 is `follower-1`. Everything is by the API, so it
works wherever the names of the pods can be resolved: in a pod.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kipmesh.kube.api import KubeApi, KubeError, NotFoundError, TooManyError
from kipmesh.kube.prepare import ordinal

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 600.0
"""Until a budget lets a pod go, and then until its hook does: both wait for the brokers that were evicted before it."""
LOOK_AGAIN_S = 0.5
ROLES = {"controllers": "controller", "leaders": "leader", "followers": "follower"}
COMPONENT = "app.kubernetes.io/component"
CUT_LABEL = "kipmesh.cut"
FILLING = "/var/lib/kipmesh/filling"
FILL_MAX_BYTES = 4 << 30
"""A volume with more room may be the disk of a node of Kubernetes, with all that is on it."""
_ROOM = ["sh", "-c", "df -P -k /var/lib/kipmesh | tail -1"]
_FILL = f"head -c {FILL_MAX_BYTES} /dev/zero > {FILLING} 2>/dev/null; sync {FILLING}; df -P -k {FILLING} | tail -1"
_INSIDE = ["python", "-m", "kipmesh.kube"]
PRESS_FOR_S = 900
"""After that the pressure ends by itself, whoever was to end it."""


class PodNode(NamedTuple):
    """A node of the mesh, and its pod."""

    name: str
    node_id: int | None
    rack: str
    pid: int | None
    """Of its container while that runs, another for each; within the pod the id is 1."""
    grpc: str | None
    dir: str
    pod: str
    uid: str
    is_ready: bool
    shares_processes: bool
    is_cut: bool


class KubeRelease:
    """The pods of one release. Every method blocks, and raises KubeError."""

    def __init__(self, namespace: str, release: str) -> None:
        self._api = KubeApi()
        self._namespace = namespace
        self._selector = f"app.kubernetes.io/instance={release},{COMPONENT} in ({','.join(ROLES)})"
        self._release = release
        self._filled: set[str] = set()
        self._cut: set[str] = set()
        self._held: set[str] = set()
        self._pressed: set[str] = set()
        self._ended: set[str] = set()
        """By a fault, and expected back: others that are not there any more were scaled away."""
        self.given_up = threading.Event()
        """Set to end all waits for pods with KubeError; undoing faults goes on."""
        self._looked_at = 0.0
        self._known: list[PodNode] = []

    def nodes(self) -> Sequence[PodNode]:
        """All nodes, whether they run or not; asked for at most so often as they are looked at."""
        if time.monotonic() - self._looked_at < LOOK_AGAIN_S / 2:
            return self._known
        found = {node.name: node for node in map(_node, self._api.pods(self._namespace, self._selector))}
        # A pod that is being made anew is not there for a moment: it is a node nevertheless.
        missing = [one for one in self._known if one.name not in found and one.name in self._ended]
        gone = [one._replace(pid=None, is_ready=False, uid="") for one in missing]
        self._known = sorted([*found.values(), *gone])
        self._looked_at = time.monotonic()
        return self._known

    def up(self) -> None:
        """Wait until all pods are ready, after taking away the cuts and filling files that another run left."""
        for node in map(_node, self._api.pods(self._namespace, self._selector)):
            if node.is_cut:
                self._cut.add(node.name)
            self._filled.add(node.name)
        self.undo_faults()
        self._wait("ready pods", READY_TIMEOUT_S, self._all_ready)

    def is_running(self, name: str) -> bool:
        """Whether its container runs."""
        return self._node(name).pid is not None

    def kill(self, name: str) -> None:
        """SIGKILL, as Kubernetes does it; returns when the pod is gone."""
        node = self._node(name)
        self._ended.add(name)
        self._api.delete_pod(self._namespace, node.pod, grace_s=0)
        self._wait_gone(node)

    def stop(self, name: str) -> None:
        """Evict it, when the budgets let it go; returns when the pod is gone."""
        node = self._node(name)
        self._ended.add(name)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            try:
                self._api.evict_pod(self._namespace, node.pod)
                break
            except TooManyError:
                if time.monotonic() > deadline or self.given_up.wait(LOOK_AGAIN_S):
                    raise
            except NotFoundError:
                break
        self._wait_gone(node)

    def start(self, name: str) -> None:
        """Kubernetes does that: wait until it is ready."""
        self._wait(f"{name} to be ready", READY_TIMEOUT_S, lambda: self._node(name).is_ready)
        self._ended.discard(name)

    def disconnect(self, name: str) -> None:
        """Cut it off from everybody."""
        self._cut.add(name)
        self._api.label_pod(self._namespace, self._node(name).pod, CUT_LABEL, "true")

    def reconnect(self, name: str) -> None:
        """An end to that; a pod that is gone by now has nothing to mend."""
        self._patiently(f"{name} to be reached again", lambda: self._reconnect(name))

    def can_pause(self) -> bool:
        """Whether the pods are made so that a process in them can be held."""
        return all(node.shares_processes for node in self.nodes())

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._held.add(name)
        self._run(name, [*_INSIDE, "hold"])

    def resume(self, name: str) -> None:
        """SIGCONT, if it is still the process that was held: Kubernetes restarts one that says nothing for a minute."""
        self._patiently(f"{name} to go on", lambda: self._resume(name))

    def press(self, name: str, *, workers: int = 0, memory_share: float = 0.0) -> None:
        """Busy processes in its container, and memory taken until that share of its limit is in use."""
        self._pressed.add(name)
        limits = [f"--cpu={workers}", f"--memory-share={memory_share}", f"--for-s={PRESS_FOR_S}"]
        self._run(name, [*_INSIDE, "press", *limits])

    def relieve(self, name: str) -> None:
        """An end to that."""
        self._patiently(f"{name} to be relieved", lambda: self._relieve(name))

    def fill(self, name: str) -> str:
        """Take what is free on its volume; gives what `df` says then. Raises KubeError when that is too much."""
        free_bytes = int(self._run(name, _ROOM).split()[3]) << 10
        if free_bytes > FILL_MAX_BYTES:
            raise KubeError(
                f"the volume of {name} has {free_bytes >> 30} GiB free: only a volume with an end of its own, of at "
                f"most {FILL_MAX_BYTES >> 30} GiB, is filled"
            )
        self._filled.add(name)
        return self._run(name, ["sh", "-c", _FILL])

    def empty(self, name: str) -> None:
        """Give it back, when its container runs: one whose disk is full may have ended."""
        self._patiently(f"room on the volume of {name}", lambda: self._empty(name))

    def undo_faults(self) -> None:
        """Whatever is left of all that: one that cannot be mended yet keeps no other from it."""
        self._patiently("everything to be mended", self._mend_what_can_be)

    def _mend_what_can_be(self) -> None:
        """One try of each. Raises KubeError with what is left."""
        errors = []
        for names, undo in (
            (self._cut, self._reconnect),
            (self._filled, self._empty),
            (self._held, self._resume),
            (self._pressed, self._relieve),
        ):
            for name in sorted(names):
                try:
                    undo(name)
                except KubeError as error:
                    errors.append(f"{name}: {error}")
        if errors:
            raise KubeError("; ".join(errors))

    # One try each, and what is undone is forgotten after that, not before.

    def _reconnect(self, name: str) -> None:
        with suppress(NotFoundError):
            self._api.label_pod(self._namespace, self._node(name).pod, CUT_LABEL, None)
        self._cut.discard(name)

    def _empty(self, name: str) -> None:
        self._run(name, ["rm", "-f", FILLING])
        self._filled.discard(name)

    def _resume(self, name: str) -> None:
        self._run(name, [*_INSIDE, "resume"])
        self._held.discard(name)

    def _relieve(self, name: str) -> None:
        self._run(name, [*_INSIDE, "relieve"])
        self._pressed.discard(name)

    def _run(self, name: str, command: list[str]) -> str:
        return self._api.run(self._namespace, self._node(name).pod, command)

    def _patiently(self, what: str, do: Callable[[], object]) -> None:
        """Again and again: a container that is being started takes no command."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                do()
                return
            except KubeError as error:
                if time.monotonic() > deadline:
                    raise KubeError(f"waited {READY_TIMEOUT_S:g} s for {what}: {error}") from None
            time.sleep(LOOK_AGAIN_S)

    def _all_ready(self) -> bool:
        nodes = self.nodes()
        return bool(nodes) and all(node.is_ready for node in nodes)

    def _node(self, name: str) -> PodNode:
        self._looked_at = 0.0
        for node in self.nodes():
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self._known) or "none"
        raise KubeError(f"release {self._release} in {self._namespace} has no node {name!r}; there are {names}")

    def _wait_gone(self, node: PodNode) -> None:
        self._wait(f"{node.pod} to end", STOP_TIMEOUT_S, lambda: self._node(node.name).uid != node.uid)

    def _wait(self, what: str, timeout_s: float, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise KubeError(f"waited {timeout_s:g} s for {what}")
            if self.given_up.wait(LOOK_AGAIN_S):
                raise KubeError(f"nobody waits for {what} any more")


def _node(pod: Any) -> PodNode:
    """From a pod of the chart: what its init container is told says the rest."""
    number = ordinal(pod.metadata.name)
    told = dict(one.removeprefix("--").split("=", 1) for one in pod.spec.init_containers[0].args)
    statuses = pod.status.container_statuses or []
    runs = [] if pod.metadata.deletion_timestamp else [one for one in statuses if one.state.running is not None]
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or [])
    return PodNode(
        name=f"{ROLES[pod.metadata.labels[COMPONENT]]}-{number + 1}",
        node_id=int(told["first-id"]) + number,
        rack=pod.spec.node_name or "",
        pid=zlib.crc32(str(runs[0].container_id).encode()) if runs else None,
        grpc=f"{pod.metadata.name}.{told['service']}:{told['port']}",
        dir="",
        pod=pod.metadata.name,
        uid=pod.metadata.uid,
        is_ready=ready and pod.metadata.deletion_timestamp is None,
        shares_processes=bool(pod.spec.share_process_namespace),
        is_cut=pod.metadata.labels.get(CUT_LABEL) is not None,
    )
