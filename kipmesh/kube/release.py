"""A Helm release as the target cluster of `kipmesh_chaos`. Its pods are the nodes; Kubernetes restarts them.

| fault                             | implementation                                                                   |
| --------------------------------- | -------------------------------------------------------------------------------- |
| `kill`                            | delete the pod with grace period 0 (SIGKILL)                                     |
| `restart`                         | evict the pod, as `kubectl drain` does: budgets, preStop hook, SIGTERM           |
| `cut` (total)                     | set a label that the chart's NetworkPolicies exclude from all traffic            |
| `pause`                           | SIGSTOP from inside the pod; needs `chaos.pause` of the chart                    |
| `full-disk`                       | fill the node's volume, which must be small                                      |
| `cpu-pressure`, `memory-pressure` | extra processes in the node's container                                          |

Nodes are named as in a local cluster: the pod RELEASE-followers-0 is `follower-1`. Must run in a pod, where the names
of the pods resolve.
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
"""Limit for an eviction: the budget and the preStop hook both wait for brokers that were evicted before."""
POLL_INTERVAL_S = 0.5
ROLES = {"controllers": "controller", "leaders": "leader", "followers": "follower"}
COMPONENT = "app.kubernetes.io/component"
CUT_LABEL = "kipmesh.cut"
FILLING = "/var/lib/kipmesh/filling"
FILL_MAX_BYTES = 4 << 30
"""Limit of free space: a larger volume may be the disk of the Kubernetes node."""
_FREE_SPACE = ["sh", "-c", "df -P -k /var/lib/kipmesh | tail -1"]
_FILL = f"head -c {FILL_MAX_BYTES} /dev/zero > {FILLING} 2>/dev/null; sync {FILLING}; df -P -k {FILLING} | tail -1"
_INSIDE = ["python", "-m", "kipmesh.kube"]
PRESS_FOR_S = 900
"""Time after which pressure ends even without `relieve`."""


class PodNode(NamedTuple):
    """A node of the cluster and its pod.

    `rack` is the name of the Kubernetes node, or "" until the pod is scheduled. `grpc` is host:port. `dir` is always
    "". `uid` is the pod's uid, or "" while the pod is missing. `is_cut` is whether its network traffic is blocked.
    """

    name: str
    node_id: int | None
    rack: str
    pid: int | None
    """Number that identifies the running container, None if it does not run. It is not a process id."""
    grpc: str | None
    dir: str
    pod: str
    uid: str
    is_ready: bool
    shares_processes: bool
    is_cut: bool


class KubeRelease:
    """The pods of one release. All methods block.

    They raise KubeError if an API call or a command in a pod fails, if the release has no node of the given name, or if
    a wait exceeds its time limit or `given_up` is set.
    """

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
        """Nodes whose pod a fault ended and Kubernetes will restart. Other missing pods were scaled down."""
        self.given_up = threading.Event()
        """Set to end all waits for pods with KubeError. Faults are still undone."""
        self._listed_at = 0.0
        self._known: list[PodNode] = []

    def nodes(self) -> Sequence[PodNode]:
        """Return all nodes, running or not, including those whose pod was ended by a fault and not yet recreated.

        The list is cached for half of POLL_INTERVAL_S.
        """
        if time.monotonic() - self._listed_at < POLL_INTERVAL_S / 2:
            return self._known
        found = {node.name: node for node in map(_node, self._api.pods(self._namespace, self._selector))}
        # A pod that is being recreated is briefly missing from the list but still a node.
        missing = [one for one in self._known if one.name not in found and one.name in self._ended]
        gone = [one._replace(pid=None, is_ready=False, uid="") for one in missing]
        self._known = sorted([*found.values(), *gone])
        self._listed_at = time.monotonic()
        return self._known

    def up(self) -> None:
        """Remove network cuts and filling files of earlier runs, then wait until all pods are ready.

        Raises KubeError if either takes longer than READY_TIMEOUT_S.
        """
        for node in map(_node, self._api.pods(self._namespace, self._selector)):
            if node.is_cut:
                self._cut.add(node.name)
            self._filled.add(node.name)
        self.undo_faults()
        self._wait("ready pods", READY_TIMEOUT_S, self._all_ready)

    def is_running(self, name: str) -> bool:
        """Return whether a node's container is running and its pod is not being deleted."""
        return self._node(name).pid is not None

    def kill(self, name: str) -> None:
        """Delete a node's pod without a grace period (SIGKILL) and wait until it is gone, for up to STOP_TIMEOUT_S."""
        node = self._node(name)
        self._ended.add(name)
        self._api.delete_pod(self._namespace, node.pod, grace_s=0)
        self._wait_gone(node)

    def stop(self, name: str) -> None:
        """Evict a node's pod as soon as the disruption budgets allow it, and wait until it is gone.

        Each of the two steps may take STOP_TIMEOUT_S. Raises TooManyError if the budgets do not allow the eviction
        within that time or before `given_up` is set.
        """
        node = self._node(name)
        self._ended.add(name)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            try:
                self._api.evict_pod(self._namespace, node.pod)
                break
            except TooManyError:
                if time.monotonic() > deadline or self.given_up.wait(POLL_INTERVAL_S):
                    raise
            except NotFoundError:
                break
        self._wait_gone(node)

    def start(self, name: str) -> None:
        """Wait until Kubernetes has restarted the node and it is ready, for up to READY_TIMEOUT_S."""
        self._wait(f"{name} to be ready", READY_TIMEOUT_S, lambda: self._node(name).is_ready)
        self._ended.discard(name)

    def disconnect(self, name: str) -> None:
        """Block all network traffic of a node, by means of a label that the chart's NetworkPolicies exclude."""
        self._cut.add(name)
        self._api.label_pod(self._namespace, self._node(name).pod, CUT_LABEL, "true")

    def reconnect(self, name: str) -> None:
        """Allow a node's network traffic again. Tries for up to READY_TIMEOUT_S.

        Does nothing if its pod was deleted in the meantime.
        """
        self._retry(f"{name} to be reconnected", lambda: self._reconnect(name))

    def can_pause(self) -> bool:
        """Return whether all pods share their process namespace, which `pause` needs."""
        return all(node.shares_processes for node in self.nodes())

    def pause(self, name: str) -> None:
        """Pause a node (SIGSTOP). Raises KubeError if the pod's containers do not share their process namespace."""
        self._held.add(name)
        self._run(name, [*_INSIDE, "hold"])

    def resume(self, name: str) -> None:
        """Resume a node (SIGCONT). Tries for up to READY_TIMEOUT_S.

        Kubernetes may have restarted the node in the meantime, after failed liveness probes.
        """
        self._retry(f"{name} to resume", lambda: self._resume(name))

    def press(self, name: str, *, workers: int = 0, memory_share: float = 0.0) -> None:
        """Start `workers` busy processes in a node's container, and use memory up to a share (0 to 1) of its limit.

        The pressure ends with `relieve` or after PRESS_FOR_S. Does not wait for it.
        """
        self._pressed.add(name)
        limits = [f"--cpu={workers}", f"--memory-share={memory_share}", f"--for-s={PRESS_FOR_S}"]
        self._run(name, [*_INSIDE, "press", *limits])

    def relieve(self, name: str) -> None:
        """End the pressure on a node. Tries for up to READY_TIMEOUT_S."""
        self._retry(f"the end of the pressure on {name}", lambda: self._relieve(name))

    def fill(self, name: str) -> str:
        """Fill a node's volume with a file, and return the line of `df` for the full volume.

        Raises KubeError without filling if more than FILL_MAX_BYTES are free, or if the command fails.
        """
        free_bytes = int(self._run(name, _FREE_SPACE).split()[3]) << 10
        if free_bytes > FILL_MAX_BYTES:
            raise KubeError(
                f"the volume of {name} must have at most {FILL_MAX_BYTES >> 30} GiB free to be filled, got "
                f"{free_bytes >> 30} GiB: use a smaller volume"
            )
        self._filled.add(name)
        return self._run(name, ["sh", "-c", _FILL])

    def empty(self, name: str) -> None:
        """Remove the filling file from a node's volume, as soon as its container runs.

        Tries for up to READY_TIMEOUT_S.
        """
        self._retry(f"free space on the volume of {name}", lambda: self._empty(name))

    def undo_faults(self) -> None:
        """Undo all faults: cuts, filling files, pauses and pressure. Tries for up to READY_TIMEOUT_S.

        A fault that cannot be undone yet does not delay the others. Raises a KubeError that names the remaining faults.
        """
        self._retry("all faults to be undone", self._try_undo_faults)

    def _try_undo_faults(self) -> None:
        """Try once to undo each fault. Raises a KubeError that names the remaining faults."""
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

    # Each tries once and forgets the fault only after success.

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

    def _retry(self, goal: str, call: Callable[[], object]) -> None:
        """Repeat `call` while it raises KubeError: a container that is starting accepts no command.

        Raises KubeError with `goal` and the last error after READY_TIMEOUT_S. Keeps trying even if `given_up` is set.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                call()
                return
            except KubeError as error:
                if time.monotonic() > deadline:
                    raise KubeError(f"waited {READY_TIMEOUT_S:g} s for {goal}: {error}") from None
            time.sleep(POLL_INTERVAL_S)

    def _all_ready(self) -> bool:
        nodes = self.nodes()
        return bool(nodes) and all(node.is_ready for node in nodes)

    def _node(self, name: str) -> PodNode:
        self._listed_at = 0.0
        for node in self.nodes():
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self._known) or "none"
        raise KubeError(f"release {self._release} in {self._namespace} has no node {name!r}; its nodes are {names}")

    def _wait_gone(self, node: PodNode) -> None:
        self._wait(f"{node.pod} to end", STOP_TIMEOUT_S, lambda: self._node(node.name).uid != node.uid)

    def _wait(self, goal: str, timeout_s: float, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            if time.monotonic() > deadline:
                raise KubeError(f"waited {timeout_s:g} s for {goal}")
            if self.given_up.wait(POLL_INTERVAL_S):
                raise KubeError(f"stopped waiting for {goal}")


def _node(pod: Any) -> PodNode:
    """Return the PodNode of one of the chart's pods (V1Pod), with the id and address from its init container's
    arguments."""
    number = ordinal(pod.metadata.name)
    options = dict(one.removeprefix("--").split("=", 1) for one in pod.spec.init_containers[0].args)
    statuses = pod.status.container_statuses or []
    runs = [] if pod.metadata.deletion_timestamp else [one for one in statuses if one.state.running is not None]
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or [])
    return PodNode(
        name=f"{ROLES[pod.metadata.labels[COMPONENT]]}-{number + 1}",
        node_id=int(options["first-id"]) + number,
        rack=pod.spec.node_name or "",
        pid=zlib.crc32(str(runs[0].container_id).encode()) if runs else None,
        grpc=f"{pod.metadata.name}.{options['service']}:{options['port']}",
        dir="",
        pod=pod.metadata.name,
        uid=pod.metadata.uid,
        is_ready=ready and pod.metadata.deletion_timestamp is None,
        shares_processes=bool(pod.spec.share_process_namespace),
        is_cut=pod.metadata.labels.get(CUT_LABEL) is not None,
    )
