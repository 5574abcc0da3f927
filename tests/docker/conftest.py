"""Images and a daemon for the tests of containers; without a daemon they are skipped and say so.

`make docker` runs all of them. Any other run leaves out the slow ones: KIPMESH_DOCKER_TESTS=full asks for them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docker_of_tests import BASE_IMAGE, ROOT, SERVICES, TAG, docker, reason_to_skip

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


@pytest.fixture(scope="session")
def image() -> Callable[[str], str]:
    """The name of a service's image, made from this checkout."""
    (ROOT / "build").mkdir(exist_ok=True)
    # Other workers of this run want the same images.
    with (ROOT / "build" / "docker-images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["sh", "tools/images.sh", str(ROOT / ".venv"), *SERVICES]
        environment = os.environ | {"IMAGE_TAG": TAG, "IMAGE_PREFIX": "kipmesh/", "BASE_IMAGE": BASE_IMAGE}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return lambda service: f"kipmesh/{service}:{TAG}"


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
