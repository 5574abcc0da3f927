"""What an image is: small, without privileges, content with a read-only root, healthy or not, and gone on SIGTERM."""

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


def _until(answer: Callable[[], str], wanted: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while (found := answer()) != wanted:
        assert time.monotonic() < deadline, f"{found}, not {wanted}"
        time.sleep(0.3)


def _health(container: str) -> str:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container)


@pytest.mark.parametrize("service", SERVICES)
def test_image_is_small_and_of_no_privileged_user(image: Callable[[str], str], service: str) -> None:
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


def test_nothing_for_developers_is_in_it(image: Callable[[str], str]) -> None:
    script = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    absent = ("pyspark", "pandas", "mypy", "pytest", "ruff", "grpc_tools", "testcontainers")
    found = docker("run", "--rm", "--entrypoint", "/opt/kipmesh/bin/python", image("leader"), "-c", script, *absent)
    assert found == "[]"


def test_root_is_nobody_s_and_the_volume_is_the_service_s(image: Callable[[str], str]) -> None:
    script = (
        "for f in /opt/kipmesh/x /etc/kipmesh/x /x; do touch $f 2>/dev/null && echo wrote $f; done;"
        " touch /var/lib/kipmesh/x && id -u"
    )
    # Without --read-only: the files' own permissions have to do.
    assert docker("run", "--rm", "--entrypoint", "sh", image("leader"), "-c", script) == "10001"


@pytest.mark.parametrize("service", ["metadata_controller", "leader", "follower", "consumer"])
def test_missing_configuration_is_one_line(image: Callable[[str], str], service: str) -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", *STRICT, image(service)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "is required" in done.stderr


def test_broker_is_healthy_when_it_is_ready_and_ends_on_sigterm(
    image: Callable[[str], str], containers: Callable[..., str]
) -> None:
    """A broker without its controller is alive, and not healthy; with it it is; `docker stop` gets 0 and clean logs."""
    network = f"kipmesh-tests-{time.time_ns()}"
    docker("network", "create", network)
    try:
        settings = {"CLUSTER_ID": "tests", "CONTROLLER_QUORUM_VOTERS": "1001@controller-1:9093"}

        def run(name: str, service: str, **more: str) -> str:
            pairs = [f"KIPMESH_CONFIG_{key}={value}" for key, value in (settings | more).items()]
            environment = [word for pair in pairs for word in ("--env", pair)]
            where = ("--network", network, "--network-alias", name)
            return containers(*STRICT, *where, *environment, image(service))

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
def test_the_same_sources_make_the_same_layers(image: Callable[[str], str]) -> None:
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
