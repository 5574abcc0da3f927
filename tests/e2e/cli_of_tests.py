"""Drives a local cluster by the command `kipmesh` and reads its files, for end-to-end tests."""

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


class ClusterCli:
    """A cluster in a directory, driven by the command `kipmesh`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(
        self,
        *arguments: str,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = "",
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `kipmesh ARGUMENTS --dir DIRECTORY`; with `check` the exit code must be 0."""
        done = run_command(
            *arguments, "--dir", self.directory, stdin=stdin, env=clean_environment(env), cwd=cwd, timeout_s=200
        )
        if check:
            assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def local(self, command: str, *arguments: str) -> str:
        """Run `kipmesh local COMMAND ...` and return its standard output."""
        return self.run("local", command, *arguments).stdout

    @property
    def description(self) -> dict[str, Any]:
        """Content of cluster.json."""
        loaded: dict[str, Any] = json.loads((self.directory / "cluster.json").read_text())
        return loaded

    @property
    def bootstrap(self) -> str:
        """Addresses of the brokers."""
        return str(self.description["bootstrap"])

    def node(self, name: str) -> dict[str, Any]:
        """Entry of a node in cluster.json."""
        return next(node for node in self.description["nodes"] if node["name"] == name)

    def running_nodes(self) -> list[str]:
        """Names of the nodes whose process exists."""
        return [
            node["name"]
            for node in self.description["nodes"]
            if processes.state_of(node["pid"], node["process"]) is not ProcessState.GONE
        ]

    def consume(self, topic: str, count: int) -> list[str]:
        """Consume the first `count` values of the topic."""
        done = self.run(
            "consume", topic, "--from-beginning", "--max-messages", str(count), "--timeout-ms", "60000", "--json"
        )
        return [json.loads(line)["value"] for line in done.stdout.splitlines()]

    def log_bytes(self, node: str, partition: str) -> bytes:
        """Bytes of all segments of a replica."""
        log_directory = Path(self.node(node)["dir"]) / "data" / partition
        return b"".join(file.read_bytes() for file in sorted(log_directory.glob("*.log")))

    def wait_identical(self, partition: str, nodes: list[str], *, at_least_bytes: int = 1) -> bytes:
        """Wait until the logs of all replicas are identical and return their bytes."""
        found: list[bytes] = []

        def equal() -> bool:
            found[:] = [self.log_bytes(node, partition) for node in nodes]
            return len(found[0]) >= at_least_bytes and all(log == found[0] for log in found)

        wait_for(equal, f"identical {partition}")
        return found[0]

    def describe(self, topic: str) -> dict[str, Any]:
        """Output of `topic describe --json`."""
        loaded: dict[str, Any] = json.loads(self.run("topic", "describe", topic, "--json").stdout)
        return loaded

    def wait_isr(self, topic: str, size: int) -> None:
        """Wait until every partition has a leader and `size` in-sync replicas."""
        wait_for(
            lambda: all(
                partition["leader_id"] >= 0 and len(partition["isr_nodes"]) == size
                for partition in self.describe(topic)["partitions"]
            ),
            f"{size} in-sync replicas",
            interval_s=0.2,
        )


def wait_for(condition: Callable[[], bool], awaited: str, *, timeout_s: float = 60, interval_s: float = 0.05) -> None:
    """Wait until the condition holds; `awaited` names it in the error."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {awaited} after {timeout_s:g} s"
        time.sleep(interval_s)
