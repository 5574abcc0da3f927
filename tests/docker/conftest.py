"""Fixtures of container tests: images, and helpers to run containers. Without a docker daemon the tests are skipped.

`make docker` runs all of them. Other runs skip the slow tests, unless KIPMESH_DOCKER_TESTS=full.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker.docker_of_tests import BASE_IMAGE, ROOT, SERVICES, TAG, docker, reason_to_skip, succeeds

BUILD_TIMEOUT_S = 900
DIRECTORY = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    container_tests = [item for item in items if DIRECTORY in item.path.parents]
    if not container_tests:
        return
    reason = reason_to_skip()
    for item in container_tests:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("slow") and os.environ.get("KIPMESH_DOCKER_TESTS") != "full":
            item.add_marker(pytest.mark.skip(reason="slow: `make docker` runs it"))


def _build(*services: str) -> None:
    """Build the images of services from this checkout."""
    (ROOT / "build").mkdir(exist_ok=True)
    # Other workers build the same images.
    with (ROOT / "build" / "docker-images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["sh", "tools/images.sh", str(ROOT / ".venv"), *services]
        environment = os.environ | {"IMAGE_TAG": TAG, "IMAGE_PREFIX": "kipmesh/", "BASE_IMAGE": BASE_IMAGE}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="session")
def image() -> Callable[[str], str]:
    """`image(service)` returns the name of the service's image, built from this checkout."""
    _build(*SERVICES)
    return lambda service: f"kipmesh/{service}:{TAG}"


@pytest.fixture(scope="session")
def spark_image() -> str:
    """Name of the image of the Spark jobs. Its build needs Debian packages."""
    _build("spark")
    return f"kipmesh/spark:{TAG}"


@pytest.fixture(scope="session")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Image of docker-compose.yml or, if it cannot be pulled, an image of this machine's Prometheus."""
    name = os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0")
    if succeeds("docker", "image", "inspect", name) or succeeds("docker", "pull", "--quiet", name):
        return name
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip(f"{name} cannot be pulled, and Prometheus is not installed (on Debian: apt-get install prometheus)")
    directory = tmp_path_factory.mktemp("prometheus")
    shutil.copy(binary, directory / "prometheus")
    (directory / "Dockerfile").write_text(
        f"FROM {BASE_IMAGE}\nCOPY prometheus /bin/prometheus\n"
        'RUN mkdir /prometheus && chown 65534:65534 /prometheus\nUSER 65534:65534\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    docker("build", "--quiet", "--tag", f"kipmesh/prometheus:{TAG}", str(directory), timeout_s=BUILD_TIMEOUT_S)
    return f"kipmesh/prometheus:{TAG}"


@pytest.fixture
def until() -> Callable[..., None]:
    """`until(read, wanted)` reads a value until it is the wanted one."""

    def wait(read: Callable[[], Any], wanted: Any, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while (found := read()) != wanted:
            assert time.monotonic() < deadline, f"expected {wanted}, got {found}"
            time.sleep(0.5)

    return wait


@pytest.fixture
def containers() -> Iterator[Callable[..., str]]:
    """`containers(*arguments)` runs a container in the background, which is removed after the test."""
    started: list[str] = []

    def run(*arguments: str) -> str:
        started.append(docker("run", "--detach", *arguments))
        return started[-1]

    yield run
    for container in started:
        docker("rm", "--force", "--volumes", container, check=False)
