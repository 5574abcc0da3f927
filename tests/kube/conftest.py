"""The chart on a real Kubernetes: whatever cluster the kubeconfig names. `make kube`; docs/operations.md says how.

| variable                  | what                                                                                    |
| ------------------------- | --------------------------------------------------------------------------------------- |
| `KUBECONFIG`              | the cluster                                                                             |
| `KIPMESH_KUBE_IMAGE`      | REPOSITORY:TAG of an image that its nodes have or can pull                              |
| `KIPMESH_KUBE_IMAGE_NEXT` | the one to upgrade to, of `make image-next`; without it that test is skipped            |
| `KIPMESH_KUBE_IMAGE_SPARK`| the image of the Spark jobs; without it their test is skipped                           |
| `KIPMESH_KUBE_CUT_NODE`   | a command that cuts the power of node `{node}`; without it that test is skipped         |
| `KIPMESH_KUBE_BOOT_NODE`  | a command that boots it again                                                           |
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


def _why_not() -> str | None:
    for tool in ("kubectl", "helm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if "KIPMESH_KUBE_IMAGE" not in os.environ:
        return "KIPMESH_KUBE_IMAGE names no image"
    try:
        subprocess.run(["kubectl", "get", "--raw", "/readyz"], check=True, capture_output=True, timeout=10)
    except (subprocess.SubprocessError, OSError):
        return "no Kubernetes answers (KUBECONFIG)"
    return None


_WHY_NOT = _why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "test_kube_chaos" in str(item.path))  # last: it moves pods away from where they began
    for item in items:
        if _WHY_NOT and "tests/kube/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=_WHY_NOT))


@pytest.fixture(scope="session")
def namespace() -> Iterator[str]:
    """One that takes no pod that is not within the restricted standard."""
    name = f"kipmesh-{secrets.token_hex(3)}"
    command("kubectl", "create", "namespace", name)
    enforced = [f"pod-security.kubernetes.io/{what}=restricted" for what in ("enforce", "warn")]
    command("kubectl", "label", "namespace", name, *enforced)
    yield name
    command("kubectl", "delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def release(namespace: str) -> Iterator[Release]:
    """Three controllers, a leader, two followers, a consumer, and the chaos pod."""
    small = ["--set", "controllers.persistence.size=1Gi,leaders.persistence.size=1Gi,followers.persistence.size=1Gi"]
    more = ["--set", "chaos.enabled=true,kafka.external.enabled=true"]
    mesh = Release(namespace, "mesh", *image_values(os.environ["KIPMESH_KUBE_IMAGE"]), *small, *more)
    assert CHART.is_dir()
    mesh.install()
    yield mesh
    mesh.uninstall()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an authority, and what it has signed."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def secure(namespace: str, certificates: Path) -> Iterator[Release]:
    """One with TLS, whose processes can be held, and whose followers have little memory and small volumes."""
    mesh = Release(
        namespace, "safe", *image_values(os.environ["KIPMESH_KUBE_IMAGE"]),
        "--set", "chaos.enabled=true,chaos.pause=true,tls.enabled=true",
        "--set", "tls.secretName=safe-nodes,tls.clientSecretName=safe-client,tls.consumersClientAuth=required",
        "--set", "leaders.resources.limits.memory=512Mi,followers.resources.limits.memory=512Mi",
        "--set", "controllers.persistence.size=1Gi,leaders.persistence.size=1Gi",
        "--set", "followers.persistence.enabled=false",
        "--set", "followers.emptyDir.medium=Memory,followers.emptyDir.sizeLimit=64Mi",
    )  # fmt: skip
    make_secrets(mesh, certificates)
    mesh.install()
    yield mesh
    mesh.uninstall()
    for name in ("safe-nodes", "safe-client"):
        mesh.kubectl("delete", "secret", name)
