"""Calls of the Kubernetes API, and the permissions that they need.

| method                   | verb, resource                         | purpose                                          |
| ------------------------ | -------------------------------------- | ------------------------------------------------ |
| `node_labels`            | get nodes                              | rack of a node                                   |
| `node_address`           | get nodes                              | host of a NodePort                               |
| `service_endpoint`       | get services (the pod's)               | host and port for clients outside Kubernetes     |
| `replicas_wanted`        | get statefulsets (the pod's)           | whether a pod is being scaled down               |
| `read_`, `write_lease`   | get and patch leases (the release's)   | stop one broker at a time                        |

`release` uses the other methods; helm/kipmesh/templates/chaos.yaml grants their permissions. All calls block, with a
time limit.
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
    """A call of the Kubernetes API or a command in a pod failed, or a wait for pods timed out.

    The message is one line.
    """


class Lease(NamedTuple):
    """State of a Lease: its holder ("" if free), the seconds from a renewal until expiry, and its resource version.

    `duration_s` is 0 if the Lease has no duration.
    """

    holder: str
    duration_s: int
    version: str


class ServiceEndpoint(NamedTuple):
    """External endpoint of a Service with one port."""

    is_node_port: bool
    port: int
    """Port on every node (NodePort) or of the load balancer."""
    address: str | None
    """Host name or IP address of the load balancer; None for a NodePort or until it is assigned."""


class KubeApi:
    """Client of the Kubernetes API that uses the pod's service account or a kubeconfig.

    Construction raises KubeError if neither exists or the package `kubernetes` is missing. Every method raises
    KubeError if its call fails or takes longer than CALL_TIMEOUT_S: NotFoundError if the object does not exist,
    ForbiddenError if the account lacks permission.
    """

    def __init__(self) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise KubeError("package 'kubernetes' is not installed; run: pip install 'kipmesh[kubernetes]'") from None
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                config.load_incluster_config()
            else:
                config.load_kube_config()
        except (config.ConfigException, OSError, TypeError) as error:
            raise KubeError(f"cannot configure the Kubernetes client: {' '.join(str(error).split())}") from None
        self._client = client
        self._core = client.CoreV1Api()
        self._apps = client.AppsV1Api()
        self._leases = client.CoordinationV1Api()

    def node_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a Kubernetes node."""
        node = self._call(f"get node {name}", self._core.read_node, name)
        return dict(node.metadata.labels or {})

    def node_address(self, name: str) -> str:
        """Return the ExternalIP of a Kubernetes node, or its InternalIP if it has none.

        Raises KubeError if it has neither, or the API call fails.
        """
        node = self._call(f"get node {name}", self._core.read_node, name)
        known = {one.type: one.address for one in reversed(node.status.addresses or [])}
        for kind in ("ExternalIP", "InternalIP"):
            if kind in known:
                return str(known[kind])
        raise KubeError(f"node {name} has no ExternalIP or InternalIP")

    def service_endpoint(self, namespace: str, name: str) -> ServiceEndpoint:
        """Return the endpoint of a NodePort or LoadBalancer Service.

        Its `address` is None for a NodePort, or until a load balancer is assigned. Raises KubeError for a Service of
        another type, or if the API call fails.
        """
        found = self._call(f"get service {name}", self._core.read_namespaced_service, name, namespace)
        port = found.spec.ports[0]
        if found.spec.type == "LoadBalancer":
            balancer = found.status.load_balancer
            first = next(iter((balancer.ingress if balancer is not None else None) or []), None)
            address = (first.hostname or first.ip) if first is not None else None
            return ServiceEndpoint(False, int(port.port), address)
        if port.node_port is None:
            raise KubeError(f"service {name} must be of type NodePort or LoadBalancer, got {found.spec.type}")
        return ServiceEndpoint(True, int(port.node_port), None)

    def replicas_wanted(self, namespace: str, name: str) -> int | None:
        """Return `spec.replicas` of a StatefulSet, or None if it is deleted or being deleted."""
        try:
            found = self._call(f"get statefulset {name}", self._apps.read_namespaced_stateful_set, name, namespace)
        except NotFoundError:
            return None
        return None if found.metadata.deletion_timestamp is not None else int(found.spec.replicas)

    def read_lease(self, namespace: str, name: str) -> Lease:
        """Return the state of a Lease. Raises NotFoundError if it does not exist."""
        found = self._call(f"get lease {name}", self._leases.read_namespaced_lease, name, namespace)
        spec = found.spec
        holder, duration = (spec.holder_identity, spec.lease_duration_seconds) if spec is not None else (None, None)
        return Lease(holder or "", duration or 0, found.metadata.resource_version)

    def write_lease(self, namespace: str, name: str, holder: str, duration_s: int, version: str) -> bool:
        """Acquire or renew a Lease for `holder`, for `duration_s` seconds from now.

        Returns False without changing the Lease if its resource version is no longer `version`, otherwise True.
        """
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
        """Return the pods (V1Pod) of a namespace that match a label selector."""
        call = self._core.list_namespaced_pod
        return list(self._call(f"list pods of {namespace}", call, namespace, label_selector=selector).items)

    def delete_pod(self, namespace: str, name: str, *, grace_s: int) -> None:
        """Request the deletion of a pod, without waiting until it is gone. Does nothing if the pod does not exist.

        Kubernetes kills its processes after `grace_s` seconds; 0 kills them immediately.
        """
        with contextlib.suppress(NotFoundError):
            call = self._core.delete_namespaced_pod
            self._call(f"delete pod {name}", call, name, namespace, grace_period_seconds=grace_s)

    def evict_pod(self, namespace: str, name: str) -> None:
        """Request the eviction of a pod, as `kubectl drain` does, without waiting until it is gone.

        Raises NotFoundError if it does not exist, or TooManyError if a disruption budget currently forbids the
        eviction.
        """
        body = self._client.V1Eviction(metadata=self._client.V1ObjectMeta(name=name, namespace=namespace))
        self._call(f"evict pod {name}", self._core.create_namespaced_pod_eviction, name, namespace, body)

    def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        """Set a label of a pod, or remove it if `value` is None."""
        patch = {"metadata": {"labels": {label: value}}}
        self._call(f"label pod {name}", self._core.patch_namespaced_pod, name, namespace, patch)

    def run(self, namespace: str, pod: str, command: list[str], timeout_s: float = RUN_TIMEOUT_S) -> str:
        """Run a command in a pod and return its output (stdout and stderr).

        Raises KubeError if the command cannot run, does not end within `timeout_s` seconds, or has an exit code other
        than 0.
        """
        from kubernetes import stream
        from kubernetes.client.exceptions import ApiException

        # `stream` modifies its client, so it gets a separate one.
        core = self._client.CoreV1Api(self._client.ApiClient())
        options = {"stderr": True, "stdin": False, "stdout": True, "tty": False, "_request_timeout": timeout_s}
        call, failure = core.connect_get_namespaced_pod_exec, f"cannot run {command[0]} in {pod}"
        try:
            running = stream.stream(call, pod, namespace, command=command, _preload_content=False, **options)
            try:
                running.run_forever(timeout=timeout_s)
                if running.is_open():
                    raise KubeError(f"{failure}: no end within {timeout_s:g} s")
                code = running.returncode  # before read_all, which consumes the channel of the exit code
                output = str(running.read_all())
            finally:
                running.close()
        except (ApiException, OSError, ValueError, TypeError) as error:  # TypeError: no exit code was received
            raise KubeError(f"{failure}: {' '.join(str(error).split())}") from None
        if code:
            raise KubeError(f"{failure}: exit code {code}: {' '.join(output.split())}")
        return output

    def _call(self, action: str, function: Any, *arguments: Any, **options: Any) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return function(*arguments, _request_timeout=CALL_TIMEOUT_S, **options)
        except ApiException as error:
            kind = _KINDS.get(error.status, KubeError)
            raise kind(f"cannot {action}: {error.status} {error.reason}") from None
        except (HTTPError, OSError) as error:
            raise KubeError(f"cannot {action}: {' '.join(str(error).split())}") from None


class NotFoundError(KubeError):
    """The KubeError raised when the object does not exist (404)."""


class ConflictError(KubeError):
    """The KubeError raised when the object has changed since it was read (409)."""


class TooManyError(KubeError):
    """The KubeError raised when a disruption budget currently forbids the eviction (429)."""


class ForbiddenError(KubeError):
    """The KubeError raised when the service account lacks permission or was deleted (401, 403)."""


_KINDS: dict[int, type[KubeError]] = {
    HTTPStatus.UNAUTHORIZED: ForbiddenError,
    HTTPStatus.FORBIDDEN: ForbiddenError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.TOO_MANY_REQUESTS: TooManyError,
}
