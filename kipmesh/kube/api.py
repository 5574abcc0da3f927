"""The few things that are asked of the Kubernetes API, with what they need to be allowed.

| what                     | verb, resource                         | for                                              |
| ------------------------ | -------------------------------------- | ------------------------------------------------ |
| `node_labels`            | get nodes                              | the rack of a node                               |
| `node_address`           | the same                               | where clients outside find a NodePort            |
| `service_place`          | get services, the pod's own            | the same, and the port                           |
| `replicas_wanted`        | get statefulsets, the pod's own        | whether a pod goes for good                      |
| `read_`, `write_lease`   | get and patch leases, the release's    | one broker at a time                             |

The rest is for `mesh`, which needs much more: see helm/kipmesh/templates/chaos.yaml. Every call is blocking, and
limited in time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple

CALL_TIMEOUT_S = 5.0
RUN_TIMEOUT_S = 120.0


class KubeError(Exception):
    """The API did not do what it was asked; the text is one line."""


class Lease(NamedTuple):
    """Who has it (empty: nobody), for how long after each renewal, and the version that was read."""

    holder: str
    duration_s: int
    version: str


class ServicePlace(NamedTuple):
    """Where a Service with one port is reached from outside."""

    is_node_port: bool
    port: int
    """Of every node (NodePort), or of the load balancer."""
    address: str | None
    """Of the load balancer, once it has one."""


class KubeApi:
    """The API as a pod's service account sees it, or as a kubeconfig says."""

    def __init__(self) -> None:
        """Raises KubeError when there is neither."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise KubeError("the package `kubernetes` is missing: install kipmesh[kubernetes]") from None
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                config.load_incluster_config()
            else:
                config.load_kube_config()
        except (config.ConfigException, OSError, TypeError) as error:
            raise KubeError(f"no Kubernetes: {' '.join(str(error).split())}") from None
        self._client = client
        self._core = client.CoreV1Api()
        self._apps = client.AppsV1Api()
        self._leases = client.CoordinationV1Api()

    def node_labels(self, name: str) -> Mapping[str, str]:
        """The labels of a node of Kubernetes; raises KubeError."""
        node = self._call(f"get node {name}", self._core.read_node, name)
        return dict(node.metadata.labels or {})

    def node_address(self, name: str) -> str:
        """Where a node is reached: its ExternalIP, or else its InternalIP; raises KubeError."""
        node = self._call(f"get node {name}", self._core.read_node, name)
        known = {one.type: one.address for one in reversed(node.status.addresses or [])}
        for kind in ("ExternalIP", "InternalIP"):
            if kind in known:
                return str(known[kind])
        raise KubeError(f"node {name} has no address")

    def service_place(self, namespace: str, name: str) -> ServicePlace:
        """Of a Service of type NodePort or LoadBalancer; raises KubeError."""
        found = self._call(f"get service {name}", self._core.read_namespaced_service, name, namespace)
        port = found.spec.ports[0]
        if found.spec.type == "LoadBalancer":
            balancer = found.status.load_balancer
            first = next(iter((balancer.ingress if balancer is not None else None) or []), None)
            address = (first.hostname or first.ip) if first is not None else None
            return ServicePlace(False, int(port.port), address)
        if port.node_port is None:
            raise KubeError(f"service {name} of type {found.spec.type} is not reached from outside")
        return ServicePlace(True, int(port.node_port), None)

    def replicas_wanted(self, namespace: str, name: str) -> int | None:
        """`spec.replicas` of a StatefulSet, None when it is gone or going; raises KubeError."""
        try:
            found = self._call(f"get statefulset {name}", self._apps.read_namespaced_stateful_set, name, namespace)
        except NotFoundError:
            return None
        return None if found.metadata.deletion_timestamp is not None else int(found.spec.replicas)

    def read_lease(self, namespace: str, name: str) -> Lease:
        """The Lease of that name, which exists; raises KubeError."""
        found = self._call(f"get lease {name}", self._leases.read_namespaced_lease, name, namespace)
        spec = found.spec
        holder, duration = (spec.holder_identity, spec.lease_duration_seconds) if spec is not None else (None, None)
        return Lease(holder or "", duration or 0, found.metadata.resource_version)

    def write_lease(self, namespace: str, name: str, holder: str, duration_s: int, version: str) -> bool:
        """Take or renew it; False when somebody wrote it after that version was read. Raises KubeError."""
        spec = self._client.V1LeaseSpec(
            holder_identity=holder, lease_duration_seconds=duration_s, renew_time=datetime.now(UTC)
        )
        patch = {
            "metadata": {"resourceVersion": version},
            "spec": self._client.ApiClient().sanitize_for_serialization(spec),
        }
        try:
            self._call(f"write lease {name}", self._leases.patch_namespaced_lease, name, namespace, patch)
        except ConflictError:
            return False
        return True

    def pods(self, namespace: str, selector: str) -> list[Any]:
        """The pods that a label selector takes; raises KubeError."""
        call = self._core.list_namespaced_pod
        return list(self._call(f"list pods of {namespace}", call, namespace, label_selector=selector).items)

    def delete_pod(self, namespace: str, name: str, *, grace_s: int) -> None:
        """Delete it; grace 0 is at once. One that is gone is gone. Raises KubeError."""
        with contextlib.suppress(NotFoundError):
            call = self._core.delete_namespaced_pod
            self._call(f"delete pod {name}", call, name, namespace, grace_period_seconds=grace_s)

    def evict_pod(self, namespace: str, name: str) -> None:
        """As a node that is drained does; raises TooManyError when a budget is against it, NotFoundError, KubeError."""
        body = self._client.V1Eviction(metadata=self._client.V1ObjectMeta(name=name, namespace=namespace))
        self._call(f"evict pod {name}", self._core.create_namespaced_pod_eviction, name, namespace, body)

    def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        """Set a label, or take it away; raises KubeError."""
        patch = {"metadata": {"labels": {label: value}}}
        self._call(f"label pod {name}", self._core.patch_namespaced_pod, name, namespace, patch)

    def run(self, namespace: str, pod: str, command: list[str], timeout_s: float = RUN_TIMEOUT_S) -> str:
        """Run a command in a pod; gives what it wrote. Raises KubeError, also when it fails."""
        from kubernetes import stream
        from kubernetes.client.exceptions import ApiException

        # `stream` changes the client that it is called with: this one is used for nothing else.
        core = self._client.CoreV1Api(self._client.ApiClient())
        options = {"stderr": True, "stdin": False, "stdout": True, "tty": False, "_request_timeout": timeout_s}
        call, what = core.connect_get_namespaced_pod_exec, f"cannot run {command[0]} in {pod}"
        try:
            running = stream.stream(call, pod, namespace, command=command, _preload_content=False, **options)
            try:
                running.run_forever(timeout=timeout_s)
                if running.is_open():
                    raise KubeError(f"{what}: no end within {timeout_s:g} s")
                code = running.returncode  # first: reading everything takes the channel that it is told by
                wrote = str(running.read_all())
            finally:
                running.close()
        except (ApiException, OSError, ValueError, TypeError) as error:  # TypeError: nobody told how it ended
            raise KubeError(f"{what}: {' '.join(str(error).split())}") from None
        if code:
            raise KubeError(f"{what}: exit code {code}: {' '.join(wrote.split())}")
        return wrote

    def _call(self, what: str, function: Any, *arguments: Any, **options: Any) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return function(*arguments, _request_timeout=CALL_TIMEOUT_S, **options)
        except ApiException as error:
            kind = _KINDS.get(error.status, KubeError)
            raise kind(f"cannot {what}: {error.status} {error.reason}") from None
        except (HTTPError, OSError) as error:
            raise KubeError(f"cannot {what}: {' '.join(str(error).split())}") from None


class NotFoundError(KubeError):
    """There is no such thing."""


class ConflictError(KubeError):
    """It was changed meanwhile."""


class TooManyError(KubeError):
    """Not now: a disruption budget is against it."""


class ForbiddenError(KubeError):
    """The account may not do that, or is gone."""


_KINDS: dict[int, type[KubeError]] = {
    HTTPStatus.UNAUTHORIZED: ForbiddenError,
    HTTPStatus.FORBIDDEN: ForbiddenError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.TOO_MANY_REQUESTS: TooManyError,
}
