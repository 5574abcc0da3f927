"""Fixtures of the Helm chart's tests on the Kubernetes cluster of the kubeconfig: `make kube` (docs/operations.md).

| variable                  | meaning                                                                                 |
| ------------------------- | --------------------------------------------------------------------------------------- |
| `KUBECONFIG`              | configuration of the cluster                                                            |
| `KIPMESH_KUBE_IMAGE`      | REPOSITORY:TAG of an image that the nodes have or can pull                              |
| `KIPMESH_KUBE_IMAGE_NEXT` | image for the upgrade (`make image-next`); without it the test is skipped               |
| `KIPMESH_KUBE_IMAGE_SPARK`| image of the Spark jobs; without it their test is skipped                               |
| `KIPMESH_KUBE_CUT_NODE`   | command that cuts the power of node `{node}`; without it the test is skipped            |
| `KIPMESH_KUBE_BOOT_NODE`  | command that boots the node again                                                       |
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.kube_of_tests import CHART, Release, command, image_values, make_secrets


def _reason_to_skip() -> str | None:
    for tool in ("kubectl", "helm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if "KIPMESH_KUBE_IMAGE" not in os.environ:
        return "KIPMESH_KUBE_IMAGE is not set"
    try:
        subprocess.run(["kubectl", "get", "--raw", "/readyz"], check=True, capture_output=True, timeout=10)
    except (subprocess.SubprocessError, OSError):
        return "the Kubernetes cluster does not respond (KUBECONFIG)"
    return None


_SKIP_REASON = _reason_to_skip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "test_kube_chaos" in str(item.path))  # last, because it moves pods to other nodes
    for item in items:
        if _SKIP_REASON and "tests/kube/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=_SKIP_REASON))


@pytest.fixture(scope="session")
def namespace() -> Iterator[str]:
    """Namespace that enforces the restricted pod security standard."""
    name = f"kipmesh-{secrets.token_hex(3)}"
    command("kubectl", "create", "namespace", name)
    enforced = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    command("kubectl", "label", "namespace", name, *enforced)
    yield name
    command("kubectl", "delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def release(namespace: str) -> Iterator[Release]:
    """Release with three controllers, a leader, two followers, a consumer and the chaos pod."""
    small = ["--set", "controllers.persistence.size=1Gi,leaders.persistence.size=1Gi,followers.persistence.size=1Gi"]
    more = ["--set", "chaos.enabled=true,kafka.external.enabled=true"]
    installed = Release(namespace, "mesh", *image_values(os.environ["KIPMESH_KUBE_IMAGE"]), *small, *more)
    assert CHART.is_dir()
    installed.install()
    yield installed
    installed.uninstall()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a certificate authority and its certificates."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def secure(namespace: str, certificates: Path) -> Iterator[Release]:
    """Release with TLS and pausable processes, whose followers have little memory and small volumes."""
    installed = Release(
        namespace, "safe", *image_values(os.environ["KIPMESH_KUBE_IMAGE"]),
        "--set", "chaos.enabled=true,chaos.pause=true,tls.enabled=true",
        "--set", "tls.secretName=safe-nodes,tls.clientSecretName=safe-client,tls.consumersClientAuth=required",
        "--set", "leaders.resources.limits.memory=512Mi,followers.resources.limits.memory=512Mi",
        "--set", "controllers.persistence.size=1Gi,leaders.persistence.size=1Gi",
        "--set", "followers.persistence.enabled=false",
        "--set", "followers.emptyDir.medium=Memory,followers.emptyDir.sizeLimit=64Mi",
    )  # fmt: skip
    make_secrets(installed, certificates)
    installed.install()
    yield installed
    installed.uninstall()
    for name in ("safe-nodes", "safe-client"):
        installed.kubectl("delete", "secret", name)
