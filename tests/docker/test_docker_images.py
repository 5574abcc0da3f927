"""Images of services: size, layers, privileges, health checks and shutdown."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.docker.docker_of_tests import BASE_IMAGE, ROOT, SERVICES, docker

pytestmark = pytest.mark.timeout(1200)

MEGABYTES_OVER_BASE_MAX = 200
STRICT = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def _about(image: str) -> Any:
    return json.loads(docker("image", "inspect", image))[0]


def _until(read: Callable[[], str], wanted: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while (found := read()) != wanted:
        assert time.monotonic() < deadline, f"expected {wanted}, got {found}"
        time.sleep(0.3)


def _health(container: str) -> str:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container)


@pytest.mark.parametrize("service", SERVICES)
def test_image_is_small_and_runs_as_an_unprivileged_user(image: Callable[[str], str], service: str) -> None:
    about, base = _about(image(service)), _about(BASE_IMAGE)
    assert (about["Size"] - base["Size"]) / 1e6 < MEGABYTES_OVER_BASE_MAX
    assert about["RootFS"]["Layers"][: len(base["RootFS"]["Layers"])] == base["RootFS"]["Layers"]
    config = about["Config"]
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["kipmesh.service"] == service
    assert "/var/lib/kipmesh" in config["Volumes"]


def test_services_share_all_layers(image: Callable[[str], str]) -> None:
    assert len({tuple(_about(image(service))["RootFS"]["Layers"]) for service in SERVICES}) == 1


def test_image_has_no_development_packages(image: Callable[[str], str]) -> None:
    script = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    absent = ("pyspark", "pandas", "mypy", "pytest", "ruff", "grpc_tools", "testcontainers")
    found = docker("run", "--rm", "--entrypoint", "/opt/kipmesh/bin/python", image("leader"), "-c", script, *absent)
    assert found == "[]"


def test_service_user_can_write_its_volume_but_not_the_root(image: Callable[[str], str]) -> None:
    script = (
        "for f in /opt/kipmesh/x /etc/kipmesh/x /x; do touch $f 2>/dev/null && echo wrote $f; done;"
        " touch /var/lib/kipmesh/x && id -u"
    )
    # Without --read-only, so that only file permissions apply.
    assert docker("run", "--rm", "--entrypoint", "sh", image("leader"), "-c", script) == "10001"


@pytest.mark.parametrize("service", ["metadata_controller", "leader", "follower", "consumer"])
def test_missing_configuration_is_reported_in_one_line(image: Callable[[str], str], service: str) -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", *STRICT, image(service)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "is required" in done.stderr


def test_broker_becomes_healthy_when_ready_and_stops_on_sigterm(
    image: Callable[[str], str], containers: Callable[..., str]
) -> None:
    """A broker without a controller is alive but not healthy. `docker stop` ends it with exit code 0 and no errors."""
    network = f"kipmesh-tests-{time.time_ns()}"
    docker("network", "create", network)
    try:
        settings = {"CLUSTER_ID": "tests", "CONTROLLER_QUORUM_VOTERS": "1001@controller-1:9093"}

        def run(name: str, service: str, **more: str) -> str:
            pairs = [f"KIPMESH_CONFIG_{key}={value}" for key, value in (settings | more).items()]
            environment = [word for pair in pairs for word in ("--env", pair)]
            location = ("--network", network, "--network-alias", name)
            return containers(*STRICT, *location, *environment, image(service))

        broker = run("leader-1", "leader", NODE_ID="1", ADVERTISED_LISTENERS="MESH://leader-1:9092")
        alive = ("exec", broker, "python", "-m", "kipmesh.node.health", "9404")
        _until(lambda: docker(*alive, "--path", "/healthz", check=False), "alive")
        assert docker(*alive, check=False) == "not ready"
        assert _health(broker) != "healthy"
        controller = run("controller-1", "metadata_controller", NODE_ID="1001")
        for container in (controller, broker):
            _until(partial(_health, container), "healthy")
        for container in (broker, controller):
            docker("stop", "--time", "30", container)
            assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
            logs = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=60, check=True)
            lines = [json.loads(line) for line in (logs.stdout + logs.stderr).strip().splitlines()]
            assert lines[-1]["event"] == "stopped"
            assert not [line for line in lines if line["level"] == "error"]
    finally:
        for container in docker("ps", "--all", "--quiet", "--filter", f"network={network}").split():
            docker("rm", "--force", "--volumes", container)
        docker("network", "rm", network)


@pytest.mark.slow
def test_image_build_is_reproducible(image: Callable[[str], str]) -> None:
    about = _about(image("leader"))
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    again = docker(
        *("build", "--no-cache", "--quiet", "--file", str(ROOT / "deploy/docker/service.Dockerfile")),
        *("--build-arg", "SERVICE=leader", "--build-arg", f"SOURCE_DATE_EPOCH={epoch}"),
        *("--build-arg", f"BASE_IMAGE={BASE_IMAGE}", str(ROOT)),
        timeout_s=900,
    )
    assert _about(again.splitlines()[-1])["RootFS"]["Layers"] == about["RootFS"]["Layers"]
