"""`python -m bench.leader_failover`: how long nothing can be produced when the leader of a partition fails.

Three controllers and three brokers as processes, one topic with three replicas; a few producers send one record after
the other with acks=all. The gap of a fault is the longest time between two acknowledgements that ended after it: a
producer has to learn of another leader, which has to be elected. Every fault happens to whichever broker leads then;
the next one comes when all three replicas are in sync again. Progress goes to standard error, figures to standard
output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from bench import report, system
from bench.failover import FAULTS
from bench.quorum_mesh import MeshError, QuorumMesh, wait_for
from kipmesh.client import AdminClient, Producer
from kipmesh.client.types import NewTopic
from kipmesh.core.errors import KafkaError

TARGETS_S = {"kill": 1.5, "pause": 4.0, "stop": 1.5}
"""The faults of `bench.failover` that are measured here, and what their median should be."""
TOPIC = "records"
PRODUCERS = 3
PAUSE_S = 0.005
WAIT_S = 60.0
RECORDS = (100, 200, 100)
"""That are acknowledged before a fault, while it lasts, and after its end, at least."""


class Outcome(NamedTuple):
    """What one fault did: the leader's name before it and after its end, and how many records failed."""

    gap_s: float
    before: str
    after: str
    failed: int


class Records:
    """`with Records(...)`: produced from then on, until the end of the block, on the loop of the mesh's portal."""

    def __init__(self, mesh: QuorumMesh) -> None:
        self._mesh = mesh
        self.times: list[float] = []
        """When each was acknowledged, by `time.monotonic`, in order."""
        self.failed = 0
        self._ends = False
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        self._mesh.run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mesh.run(self._end(at_once=error is not None))

    def more(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Return when so many more are acknowledged than now; TimeoutError."""
        self._mesh.run(self._more(count, timeout_s))

    def gap_s(self, since: float) -> float:
        """The longest time without an acknowledgement that ended after `since` (as `time.monotonic` counts)."""
        return max([after - before for before, after in pairwise(self.times) if after >= since], default=0.0)

    async def _begin(self) -> None:
        self._tasks = [asyncio.create_task(self._produce()) for _ in range(PRODUCERS)]

    async def _end(self, *, at_once: bool) -> None:
        self._ends = True
        if at_once:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures and not at_once:
            raise failures[0]

    async def _more(self, count: int, timeout_s: float) -> None:
        wanted = len(self.times) + count
        async with asyncio.timeout(timeout_s):
            while len(self.times) < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                self._arrived.clear()
                await self._arrived.wait()

    async def _produce(self) -> None:
        async with Producer(self._mesh.bootstrap, acks="all", **{"linger.ms": 0}) as producer:
            while not self._ends:
                try:
                    await (await producer.send(TOPIC, b"x" * 100))
                except KafkaError:
                    self.failed += 1
                    continue
                self.times.append(time.monotonic())
                self._arrived.set()
                await asyncio.sleep(PAUSE_S)


async def _create(bootstrap: str) -> None:
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(TOPIC, 1, 3)])


async def _partition(bootstrap: str) -> tuple[int, int]:
    async with AdminClient(bootstrap) as admin:
        (topic,) = await admin.describe_topics([TOPIC])
        partition = topic.partitions[0]
        return partition.leader_id, len(partition.isr)


def prepare(mesh: QuorumMesh) -> None:
    """Make the topic."""
    mesh.run(_create(mesh.bootstrap))


def leader(mesh: QuorumMesh) -> str:
    """The name of the broker that leads, once all three replicas are in sync; MeshError."""
    found = (-1, 0)

    def in_sync() -> bool:
        nonlocal found
        found = mesh.run(_partition(mesh.bootstrap))
        return found[0] >= 0 and found[1] == 3

    wait_for(in_sync, lambda: f"leader with three replicas in sync: {found}", WAIT_S)
    return next(node.name for node in mesh.brokers if node.node_id == found[0])


def suffer(mesh: QuorumMesh, kind: str) -> Outcome:
    """One fault of the leader under load, undone at the end; MeshError, TimeoutError."""
    fault, (first, during, after) = FAULTS[kind], RECORDS
    before = leader(mesh)
    with Records(mesh) as records:
        records.more(first)
        since = time.monotonic()
        fault.do(mesh, before)
        records.more(during)
        gap_s = records.gap_s(since)
        fault.undo(mesh, before)
        records.more(after)
    return Outcome(gap_s, before, leader(mesh), records.failed)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.leader_failover", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="how often each fault happens (5)")
    kinds = list(TARGETS_S)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="only these faults")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="configuration of the nodes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="a table for docs/benchmarks.md")
    options = parser.parse_args(given)
    if options.runs < 1 or not all("=" in item for item in options.config):
        parser.error("runs from 1, configuration as KEY=VALUE")
    return options


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"bench.leader_failover: {text}\n")
    sys.stderr.flush()


def run_all(options: argparse.Namespace, gaps: defaultdict[str, list[float]]) -> None:
    """One mesh, each kind of fault so many times."""
    config = dict(item.split("=", 1) for item in options.config)
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-leader-failover-") as folder,
        QuorumMesh(Path(folder), controllers=3, brokers=3, config=config) as mesh,
    ):
        prepare(mesh)
        for run in range(1, options.runs + 1):
            for kind in options.kinds:
                found = suffer(mesh, kind)
                gaps[kind].append(found.gap_s)
                told = f"run {run}/{options.runs}: {kind}: {found.gap_s:.2f} s, {found.before} -> {found.after}"
                say(f"{told}, {found.failed} failed")


def _interrupted(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of what was measured."""
    options = arguments(given)
    signal.signal(signal.SIGTERM, _interrupted)
    gaps: defaultdict[str, list[float]] = defaultdict(list)
    status = 0
    try:
        run_all(options, gaps)
    except KeyboardInterrupt:
        say("interrupted")
        status = 130
    except (MeshError, KafkaError, TimeoutError) as error:
        say(f"failed: {error or 'out of time'}")
        status = 1
    figures = [report.Figure(kind, FAULTS[kind].label, "s", target, True) for kind, target in TARGETS_S.items()]
    summaries = report.summarize(gaps, figures)
    if options.json:
        about = {"machine": system.describe_machine()}
        sys.stdout.write(json.dumps({**json.loads(report.as_json(summaries, about)), "gaps_s": gaps}) + "\n")
    elif summaries:
        text = report.as_markdown(summaries) if options.markdown else report.as_text(summaries)
        sys.stdout.write(f"{text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
