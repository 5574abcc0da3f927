"""`python -m bench.catch_up`: time for a new broker to load a large image from a controller over loopback.

One controller starts with nothing but a snapshot of 1,000,000 partitions, so that its log starts above 0. Brokers with
empty directories then join, one after the other: each learns of the snapshot by Fetch, receives it by FetchSnapshot,
checks, installs and loads it, applies the rest of the log, and is unfenced. Times are those of the broker's log, bytes
are the controller's metric. The brokers of the image do not run, and joining brokers host no partitions. Fails if a
broker obtains its image without the snapshot.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from bench import harness, images, system
from bench.quorum_cluster import QuorumCluster, QuorumError, wait_for

CONFIG = {
    # The brokers of the image do not run and must not be fenced during the measurement.
    "broker.session.timeout.ms": "86400000",
    "broker.connection.loss.timeout.ms": "0",
}
JOIN_TIMEOUT_S = 300.0
LOG_START = "kipmesh_metadata_log_start_offset"
SENT = "kipmesh_metadata_fetch_snapshot_bytes_total"
STEPS = ("fetching a metadata snapshot", "metadata snapshot installed", "snapshot loaded", "unfenced")


class Joined(NamedTuple):
    """Times in seconds, transferred bytes, CPU time and memory (PSS) of one joining broker."""

    start_s: float
    """From the start of the process to the first FetchSnapshot."""
    fetch_s: float
    """Until the snapshot is received, checked and installed in place of the log."""
    load_s: float
    rest_s: float
    """Until the rest of the log is applied and the broker unfenced."""
    total_s: float
    sent_bytes: int
    cpu_s: float
    memory_bytes: int

    @property
    def mb_s(self) -> float:
        """Megabytes (10^6) per second of the transfer, including the check."""
        return self.sent_bytes / self.fetch_s / 1e6


def steps_of(log: str) -> list[float]:
    """Return the time of each of `STEPS` in a broker's log, in seconds since 1970. Raises QuorumError if a step is
    missing.

    If the transfer was restarted, its first attempt counts.
    """
    found: dict[str, float] = {}
    for line in log.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        event = entry.get("event")
        if event in STEPS and (event not in found or event != STEPS[0]):
            found[event] = datetime.fromisoformat(entry["timestamp"]).timestamp()
    missing = [step for step in STEPS if step not in found]
    if missing:
        raise QuorumError(f"catch-up: the broker did not log: {', '.join(missing)}")
    return [found[step] for step in STEPS]


def join(cluster: QuorumCluster, node_id: int, end_offset: int, size_bytes: int) -> Joined:
    """Start a new broker, wait until it is unfenced, stop it and return its figures.

    Raises QuorumError after 300 s, or if the broker obtained its image without the snapshot of `end_offset` and
    `size_bytes`.
    """
    (controller,) = cluster.controllers
    node = cluster.add_broker(node_id)
    sent = int(harness.metric(controller.http, SENT))
    begun = time.time()
    cluster.start(node.name, wait=False)
    ready = '"event": "unfenced"'
    wait_for(lambda: ready in node.log.read_text(), lambda: f"unfenced {node.name}:\n{node.tail()}", JOIN_TIMEOUT_S)
    assert node.process is not None
    cpu_s = system.cpu_seconds([node.process.pid])
    memory_bytes = system.pss_bytes([node.process.pid])
    sent = int(harness.metric(controller.http, SENT)) - sent
    if sent < size_bytes or harness.metric(node.http, LOG_START) != end_offset:
        raise QuorumError(f"catch-up: the controller sent {sent} bytes of a snapshot of {size_bytes}")
    cluster.stop(node.name)
    requested, installed, loaded, unfenced = steps_of(node.log.read_text())
    return Joined(
        requested - begun,
        installed - requested,
        loaded - installed,
        unfenced - loaded,
        unfenced - begun,
        sent,
        cpu_s,
        memory_bytes,
    )


def measure(topics: int, runs: int, directory: Path) -> list[Joined]:
    """Start a controller from a snapshot of `topics` topics, let `runs` brokers join one after the other, and return
    their figures. Raises QuorumError, CalledProcessError.
    """
    cluster = QuorumCluster(directory, controllers=1, brokers=0, config=CONFIG)
    (controller,) = cluster.controllers
    controller.metadata.mkdir(parents=True)
    harness.in_process("bench.snapshot", "--step", "generate", "--topics", topics, "--directory", controller.metadata)
    (file,) = controller.metadata.glob("*.checkpoint")
    end_offset, size_bytes = int(file.name.partition("-")[0]), file.stat().st_size
    with cluster:
        wait_for(lambda: cluster.describe().high_watermark > end_offset, "active controller", JOIN_TIMEOUT_S)
        if harness.metric(controller.http, LOG_START) != end_offset:
            raise QuorumError("catch-up: the controller's log does not start at its snapshot")
        return [join(cluster, images.BROKERS + number, end_offset, size_bytes) for number in range(1, runs + 1)]


ROWS = (
    ("start of the process, until it requests the snapshot", "s", "start_s", 1),
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
    """Format the median and the range of each figure over all joined brokers as a table."""
    rows = []
    for label, unit, name, scale in ROWS:
        values = [float(getattr(one, name)) / scale for one in joined]
        span = f"{min(values):,.2f} .. {max(values):,.2f}"
        rows.append((label, f"{statistics.median(values):,.2f} {unit}", span))
    return harness.table(("what", "median", "min .. max"), rows)


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures, and return the exit code of `harness.run`."""
    parser = harness.Parser("bench.catch_up", __doc__, "load a small image, once")
    parser.number("--topics", "topics with 10 partitions each", 100_000, 2000, least=1000, most=1_000_000)
    parser.number("--runs", "brokers that join", 3, 1, most=20)
    options = parser.parse(given)
    about = {"topics": options.topics, "partitions": options.topics * images.PARTITIONS}
    joined: list[Joined] = []

    def measure_all() -> None:
        with tempfile.TemporaryDirectory() as directory:
            joined.extend(measure(options.topics, options.runs, Path(directory)))

    return harness.run(
        options,
        measure_all,
        figures=lambda: {**about, "runs": [{**one._asdict(), "mb_s": one.mb_s} for one in joined]},
        text=lambda: as_table(joined) if joined else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
