"""Manages a release of the chart by kubectl and helm on the Kubernetes cluster of the kubeconfig."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kipmesh_chaos.history import Event, from_line

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kipmesh"
JOB_CHART = ROOT / "helm" / "kipmesh-job"
EXPERIMENTS = ROOT / "deploy" / "chaos" / "kubernetes"
INSTALL_TIMEOUT = "600s"
POLL_INTERVAL_S = 1.0


class CommandFailedError(Exception):
    """A command failed; the text has its output."""


def command(*arguments: str, stdin: str | None = None, timeout_s: float = 700, check: bool = True) -> str:
    done = subprocess.run(arguments, input=stdin, check=False, capture_output=True, text=True, timeout=timeout_s)
    if check and done.returncode:
        raise CommandFailedError(f"{' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def image_values(image: str) -> list[str]:
    """Return helm options for the image REPOSITORY:TAG."""
    repository, _, tag = image.rpartition(":")
    return ["--set-string", f"image.repository={repository},image.tag={tag}"]


def wait_for(awaited: str, condition: Callable[[], bool], timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {awaited}")
        time.sleep(POLL_INTERVAL_S)


class Release:
    """A release in a namespace. `values` are options of every helm install and upgrade."""

    def __init__(self, namespace: str, name: str, *values: str) -> None:
        self.namespace = namespace
        self.name = name
        self.values = values
        self.full = f"{name}-kipmesh"

    def helm(self, verb: str, *arguments: str) -> str:
        return command("helm", verb, self.name, *arguments, "--namespace", self.namespace)

    def install(self, *more: str) -> None:
        self.helm("install", str(CHART), *self.values, *more, "--wait", "--timeout", INSTALL_TIMEOUT)

    def upgrade(self, *more: str, wait: bool = True) -> None:
        waiting = ["--wait", "--timeout", INSTALL_TIMEOUT] if wait else []
        self.helm("upgrade", str(CHART), *self.values, *more, *waiting)
        if wait:
            self.wait_rolled()

    def wait_rolled(self) -> None:
        """Wait until all StatefulSets are rolled, which helm's --wait does not do."""
        for kind in ("controllers", "leaders", "followers"):
            self.kubectl("rollout", "status", f"statefulset/{self.full}-{kind}", f"--timeout={INSTALL_TIMEOUT}")

    def uninstall(self) -> None:
        self.helm("uninstall", "--wait", "--timeout", INSTALL_TIMEOUT)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 700, check: bool = True) -> str:
        return command(
            "kubectl", "--namespace", self.namespace, *arguments, stdin=stdin, timeout_s=timeout_s, check=check
        )

    def json(self, *arguments: str) -> Any:
        return json.loads(self.kubectl(*arguments, "-o", "json"))

    def pods(self, component: str | None = None) -> dict[str, dict[str, Any]]:
        """Return pods by name."""
        selector = f"app.kubernetes.io/instance={self.name}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        return {pod["metadata"]["name"]: pod for pod in self.json("get", "pods", "-l", selector)["items"]}

    def kipmesh(self, *arguments: str, stdin: str | None = None, pod: str | None = None) -> str:
        """Run a kipmesh command in the chaos pod or another pod."""
        pod = pod or f"{self.full}-chaos"
        return self.kubectl("exec", "-i", pod, "--", "python", "-m", "kipmesh.cli.main", *arguments, stdin=stdin)

    def lines(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.kipmesh(*arguments, "--json").splitlines()]

    def write_experiment(self, experiment: Mapping[str, Any]) -> str:
        """Write an experiment into the chaos pod and return the file name."""
        file = f"{experiment['name']}.yaml"
        self.kubectl(
            "exec",
            "-i",
            f"{self.full}-chaos",
            "--",
            "sh",
            "-c",
            f"cat > {file}",
            stdin=yaml.safe_dump(dict(experiment)),
        )
        return file

    def chaos(self, file: str, seed: int = 1) -> str:
        """Run an experiment and return its output. Raises CommandFailedError for anomalies."""
        return self.kipmesh("chaos", "run", file, "--dir", "chaos", "--seed", str(seed))

    def history(self, name: str, seed: int = 1) -> list[Event]:
        """Return the events of a run."""
        file = f"chaos/{name}-{seed}/history.jsonl"
        return [from_line(line) for line in self.kubectl("exec", f"{self.full}-chaos", "--", "cat", file).splitlines()]


def make_secrets(release: Release, directory: Path) -> None:
    """Create or renew secrets in cert-manager's layout with certificates of nodes, and of consumers and clients."""
    domain = f"{release.namespace}.svc.cluster.local"
    kinds = [f"*.{release.full}-{kind}.{domain}" for kind in ("controllers", "leaders", "followers")]
    names = [*kinds, *(f"{release.full}-{kind}.{domain}" for kind in ("nodes", "brokers"))]
    kipmesh = [sys.executable, "-m", "kipmesh.cli.main", "certs", "make", str(directory)]
    command(*kipmesh, "nodes", *(word for name in names for word in ("--san", name)))
    command(*kipmesh, "client", "--san", f"{release.full}-consumers.{domain}")
    for name, secret in (("nodes", "nodes"), ("client", "client")):
        files = [f"--from-file={file}={directory / name / file}" for file in ("tls.crt", "tls.key", "ca.crt")]
        secret_name = f"{release.name}-{secret}"
        manifest = release.kubectl(
            "create",
            "secret",
            "generic",
            secret_name,
            "--type=kubernetes.io/tls",
            *files,
            "--dry-run=client",
            "-o",
            "yaml",
        )
        release.kubectl("apply", "-f", "-", stdin=manifest)


def put_kafka_python(release: Release) -> None:
    """Copy kafka-python, which is pure Python, into the chaos pod."""
    found = importlib.util.find_spec("kafka")  # an import would emit warnings
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    archive = subprocess.run(
        ["tar", "-C", str(package.parent), "--exclude=__pycache__", "-cf", "-", package.name],
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout
    target = ["kubectl", "--namespace", release.namespace, "exec", "-i", f"{release.full}-chaos"]
    subprocess.run([*target, "--", "tar", "-C", "/tmp", "-xf", "-"], input=archive, check=True, timeout=120)


def experiment(name: str, **changes: Any) -> dict[str, Any]:
    """Load an experiment of `deploy/chaos/kubernetes`, without time limits, which depend on the machine."""
    document: dict[str, Any] = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())
    document["steady_state"] = {"write_gap_s": None, "read_delay_s": None, "recovered_within_s": 240}
    return {**document, **changes}


@contextmanager
def under_load(release: Release, name: str, duration_s: float) -> Iterator[Callable[[], list[Event]]]:
    """Run a workload during the block. Yields a function that waits for a clean verdict and returns the history."""
    calm = {
        "name": name,
        "hypothesis": "No acknowledged record is lost during external changes.",
        "duration_s": duration_s,
        "steady_state": {"write_gap_s": None, "read_delay_s": None, "recovered_within_s": 300},
    }
    file = release.write_experiment(calm)
    arguments = ["exec", f"{release.full}-chaos", "--", "python", "-m", "kipmesh.cli.main", "chaos", "run", file]
    running = subprocess.Popen(
        ["kubectl", "--namespace", release.namespace, *arguments, "--dir", "chaos", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def verdict() -> list[Event]:
        out, _ = running.communicate(timeout=duration_s + 500)
        assert running.returncode == 0, out
        return release.history(name)

    try:
        time.sleep(8)  # warm-up; earlier events are recorded as well
        yield verdict
    finally:
        if running.poll() is None:
            running.kill()
            running.wait(30)
