"""`python -m bench.catch_up`: how long a new broker takes to load a large image from a controller, over loopback.

One controller starts on nothing but a snapshot of 1,000,000 partitions, so that its log begins above 0. Then brokers
join, one after the other, each a process with an empty folder: it is told of the snapshot by Fetch, receives it by
FetchSnapshot, checks and installs it, loads it, goes on with the log, and is unfenced when it has applied that. Times
are those of its own log; bytes are what the controller says that it sent. None of the image's brokers runs, and none of
its partitions is on those that join. The command fails where a broker came by its image in another way.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from bench import harness, images, system
from bench.quorum_cluster import QuorumCluster, QuorumError, QuorumNode, wait_for

MODULE = "bench.catch_up"

CONFIG = {
    # The image's brokers are not there, and are not to be fenced for it while others catch up.
    "broker.session.timeout.ms": "86400000",
    "broker.connection.loss.timeout.ms": "0",
}
JOIN_TIMEOUT_S = 300.0
HTTP_TIMEOUT_S = 30.0
LOG_START = "kipmesh_metadata_log_start_offset"
SENT = "kipmesh_metadata_fetch_snapshot_bytes_total"
STEPS = ("fetching a metadata snapshot", "metadata snapshot installed", "snapshot loaded", "unfenced")


class Joined(NamedTuple):
    """How a broker came by its image."""

    start_s: float
    """Until it asked for the snapshot: mostly Python's start."""
    fetch_s: float
    """Until the snapshot was there, checked, and in the place of the log."""
    load_s: float
    rest_s: float
    """Until it had applied the log as well, and was unfenced."""
    total_s: float
    sent_bytes: int
    cpu_s: float
    memory_bytes: int

    @property
    def mb_s(self) -> float:
        """Of the transfer with its check."""
        return self.sent_bytes / self.fetch_s / 1e6


def steps_of(log: str) -> list[float]:
    """When each of `STEPS` was logged; of a transfer that began again the first time. QuorumError where one lacks."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        said = json.loads(line) if line.startswith("{") else {}
        event = said.get("event")
        if event in STEPS and (event not in found or event != STEPS[0]):
            found[event] = datetime.fromisoformat(said["timestamp"]).timestamp()
    missing = [step for step in STEPS if step not in found]
    if missing:
        raise QuorumError(f"catch-up: not in the log of the broker: {', '.join(missing)}")
    return [found[step] for step in STEPS]


def _metric(node: QuorumNode, name: str) -> int:
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=HTTP_TIMEOUT_S) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return int(sum(sample.value for family in families for sample in family.samples if sample.name == name))


def join(mesh: QuorumCluster, node_id: int, end_offset: int, size_bytes: int) -> Joined:
    """A broker that was never there joins, and is stopped again; QuorumError."""
    (controller,) = mesh.controllers
    node = mesh.add_broker(node_id)
    sent = _metric(controller, SENT)
    begun = time.time()
    mesh.start(node.name, wait=False)
    ready = '"event": "unfenced"'
    wait_for(lambda: ready in node.log.read_text(), lambda: f"unfenced {node.name}:\n{node.tail()}", JOIN_TIMEOUT_S)
    assert node.process is not None
    cpu_s = system.cpu_seconds([node.process.pid])
    memory_bytes = system.pss_bytes([node.process.pid])
    sent = _metric(controller, SENT) - sent
    if sent < size_bytes or _metric(node, LOG_START) != end_offset:
        raise QuorumError(f"catch-up: {sent} bytes were sent of a snapshot of {size_bytes}")
    mesh.stop(node.name)
    asked, installed, loaded, unfenced = steps_of(node.log.read_text())
    return Joined(
        asked - begun,
        installed - asked,
        loaded - installed,
        unfenced - loaded,
        unfenced - begun,
        sent,
        cpu_s,
        memory_bytes,
    )


def measure(topics: int, runs: int, folder: Path) -> list[Joined]:
    """All runs, on one controller; QuorumError."""
    mesh = QuorumCluster(folder, controllers=1, brokers=0, config=CONFIG)
    (controller,) = mesh.controllers
    controller.metadata.mkdir(parents=True)
    command = [sys.executable, "-m", "bench.snapshot", "--step", "generate", "--topics", str(topics)]
    subprocess.run([*command, "--folder", str(controller.metadata)], check=True, stdout=subprocess.DEVNULL)
    (file,) = controller.metadata.glob("*.checkpoint")
    end_offset, size_bytes = int(file.name.partition("-")[0]), file.stat().st_size
    with mesh:
        wait_for(lambda: mesh.describe().high_watermark > end_offset, "active controller", JOIN_TIMEOUT_S)
        if _metric(controller, LOG_START) != end_offset:
            raise QuorumError("catch-up: the controller's log does not start at its snapshot")
        return [join(mesh, images.BROKERS + number, end_offset, size_bytes) for number in range(1, runs + 1)]


ROWS = (
    ("start of the process, until it asks for the snapshot", "s", "start_s", 1),
    ("FetchSnapshot: received, checked, installed", "s", "fetch_s", 1),
    ("the same", "MB/s", "mb_s", 1),
    ("sent by the controller", "MB", "sent_bytes", 1e6),
    ("load", "s", "load_s", 1),
    ("the log after it, and unfenced", "s", "rest_s", 1),
    ("in all, from nothing to unfenced", "s", "total_s", 1),
    ("CPU of the broker", "s", "cpu_s", 1),
    ("memory of the broker then (PSS)", "MiB", "memory_bytes", 1 << 20),
)


def as_table(joined: Sequence[Joined]) -> str:
    """For docs/benchmarks.md and for people."""
    rows = []
    for label, unit, name, scale in ROWS:
        values = [float(getattr(one, name)) / scale for one in joined]
        span = f"{min(values):,.2f} .. {max(values):,.2f}"
        rows.append((label, f"{statistics.median(values):,.2f} {unit}", span))
    return harness.table(("what", "median", "min .. max"), rows)


def main(given: Sequence[str]) -> int:
    """Run, and print the figures."""
    parser = harness.parser(MODULE, __doc__, "a small image, once")
    parser.add_argument(
        "--topics", type=int, default=None, help="with 10 partitions each (100,000; 2,000 with --quick)"
    )
    parser.add_argument("--runs", type=int, default=None, help="brokers that join (3; 1 with --quick)")
    options = parser.parse_args(given)
    harness.fill(options, {"topics": 2000, "runs": 1}, {"topics": 100_000, "runs": 3})
    if not 1000 <= options.topics <= 1_000_000 or not 1 <= options.runs <= 20:
        parser.error("topics from 1,000 to 1,000,000, runs up to 20")
    about = {"topics": options.topics, "partitions": options.topics * images.PARTITIONS}
    joined: list[Joined] = []

    def measure_all() -> None:
        with tempfile.TemporaryDirectory() as folder:
            joined.extend(measure(options.topics, options.runs, Path(folder)))

    return harness.run(
        MODULE,
        options,
        measure_all,
        figures=lambda: {**about, "runs": [{**one._asdict(), "mb_s": one.mb_s} for one in joined]},
        text=lambda: as_table(joined) if joined else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
