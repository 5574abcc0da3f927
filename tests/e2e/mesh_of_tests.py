"""What the end-to-end tests share: the command line as people use it, and the files of a cluster."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kipmesh.cluster import processes
from kipmesh.cluster.processes import ProcessState
from tests.command import clean_environment, run_command


class Mesh:
    """A cluster in a folder, driven by the command `kipmesh` only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self,
        *arguments: str,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = "",
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`kipmesh ARGUMENTS --dir FOLDER`; the output as text."""
        done = run_command(
            *arguments, "--dir", self.folder, stdin=stdin, env=clean_environment(env), cwd=cwd, timeout_s=200
        )
        if check:
            assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def local(self, command: str, *arguments: str) -> str:
        """`kipmesh local COMMAND ...`."""
        return self.run("local", command, *arguments).stdout

    @property
    def description(self) -> dict[str, Any]:
        """cluster.json."""
        loaded: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        return loaded

    @property
    def bootstrap(self) -> str:
        """The brokers."""
        return str(self.description["bootstrap"])

    def node(self, name: str) -> dict[str, Any]:
        """A node of cluster.json."""
        return next(node for node in self.description["nodes"] if node["name"] == name)

    def alive(self) -> list[str]:
        """Names of the nodes whose process runs."""
        return [
            node["name"]
            for node in self.description["nodes"]
            if processes.state_of(node["pid"], node["process"]) is not ProcessState.GONE
        ]

    def consume(self, topic: str, count: int) -> list[str]:
        """The first `count` values."""
        done = self.run(
            "consume", topic, "--from-beginning", "--max-messages", str(count), "--timeout-ms", "60000", "--json"
        )
        return [json.loads(line)["value"] for line in done.stdout.splitlines()]

    def log_bytes(self, node: str, partition: str) -> bytes:
        """All batches of a replica, as its files hold them."""
        folder = Path(self.node(node)["dir"]) / "data" / partition
        return b"".join(file.read_bytes() for file in sorted(folder.glob("*.log")))

    def wait_identical(self, partition: str, nodes: list[str], *, at_least_bytes: int = 1) -> bytes:
        """The bytes that all replicas have, once they have the same."""

        found: list[bytes] = []

        def equal() -> bool:
            found[:] = [self.log_bytes(node, partition) for node in nodes]
            return len(found[0]) >= at_least_bytes and all(one == found[0] for one in found)

        wait_for(equal, f"identical {partition}")
        return found[0]

    def describe(self, topic: str) -> dict[str, Any]:
        """`topic describe --json`."""
        loaded: dict[str, Any] = json.loads(self.run("topic", "describe", topic, "--json").stdout)
        return loaded

    def wait_isr(self, topic: str, size: int) -> None:
        """Until every partition has a leader and so many in-sync replicas."""
        wait_for(
            lambda: all(
                one["leader_id"] >= 0 and len(one["isr_nodes"]) == size for one in self.describe(topic)["partitions"]
            ),
            f"{size} in-sync replicas",
            interval_s=0.2,
        )


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = 60, interval_s: float = 0.05) -> None:
    """Until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:g} s"
        time.sleep(interval_s)
