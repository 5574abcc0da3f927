"""Images and a daemon for the tests of containers; without a daemon they are skipped and say so.

`make docker` runs all of them. Any other run leaves out the slow ones: KIPMESH_DOCKER_TESTS=full asks for them.
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
FOLDER = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if FOLDER in item.path.parents]
    if not mine:
        return
    reason = reason_to_skip()
    for item in mine:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("slow") and os.environ.get("KIPMESH_DOCKER_TESTS") != "full":
            item.add_marker(pytest.mark.skip(reason="slow: `make docker` runs it"))


def _build(*services: str) -> None:
    """From this checkout."""
    (ROOT / "build").mkdir(exist_ok=True)
    # Other workers of this run want the same images.
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
    """The name of a service's image, made from this checkout."""
    _build(*SERVICES)
    return lambda service: f"kipmesh/{service}:{TAG}"


@pytest.fixture(scope="session")
def spark_image() -> str:
    """The name of the image of the Spark jobs; its build needs Debian's packages."""
    _build("spark")
    return f"kipmesh/spark:{TAG}"


@pytest.fixture(scope="session")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of docker-compose.yml where it is to be had, else one of this machine's Prometheus, with the same user."""
    name = os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0")
    if succeeds("docker", "image", "inspect", name) or succeeds("docker", "pull", "--quiet", name):
        return name
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip(f"{name} cannot be pulled, and there is no Prometheus here (on Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(binary, folder / "prometheus")
    (folder / "Dockerfile").write_text(
        f"FROM {BASE_IMAGE}\nCOPY prometheus /bin/prometheus\n"
        'RUN mkdir /prometheus && chown 65534:65534 /prometheus\nUSER 65534:65534\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    docker("build", "--quiet", "--tag", f"kipmesh/prometheus:{TAG}", str(folder), timeout_s=BUILD_TIMEOUT_S)
    return f"kipmesh/prometheus:{TAG}"


@pytest.fixture
def until() -> Callable[..., None]:
    """Asks until the answer is the one that is wanted."""

    def wait(answer: Callable[[], Any], wanted: Any, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while (found := answer()) != wanted:
            assert time.monotonic() < deadline, f"{found}, not {wanted}"
            time.sleep(0.5)

    return wait


@pytest.fixture
def containers() -> Iterator[Callable[..., str]]:
    """Runs containers in the background; they are gone at the end."""
    started: list[str] = []

    def run(*arguments: str) -> str:
        started.append(docker("run", "--detach", *arguments))
        return started[-1]

    yield run
    for one in started:
        docker("rm", "--force", "--volumes", one, check=False)
