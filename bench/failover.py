"""`python -m bench.failover`: how long no topic can be created when the active controller fails.

Three controllers and two brokers as processes; clients create topics all the time through the brokers. The gap of a
fault is the longest time between two acknowledged creations that ended after it. Each run is a new mesh in which every
kind of fault happens once, to whichever controller is active then; the next comes when all replicas have caught up.
Progress goes to standard error, the figures to standard output.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import report, system
from bench.creations import Creations
from bench.quorum_mesh import MeshError, QuorumMesh
from kipmesh.core.errors import KafkaError

TARGET_S = 1.5
TOPICS = (50, 100, 50)
"""That are created before a fault, while it lasts, and after its end, at least."""


class Fault(NamedTuple):
    """What is done to the active controller, and undone later; both are given its name."""

    label: str
    do: Callable[[QuorumMesh, str], None]
    undo: Callable[[QuorumMesh, str], None]


def _heal(mesh: QuorumMesh, _name: str) -> None:
    mesh.heal()


def _cut(*, sends: bool = False, hears: bool = False, from_brokers: bool = True) -> Callable[[QuorumMesh, str], None]:
    return partial(QuorumMesh.isolate, sends=sends, hears=hears, from_brokers=from_brokers)


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", QuorumMesh.kill, QuorumMesh.start),
    "stop": Fault("SIGTERM", lambda mesh, name: _ignore(mesh.stop(name)), QuorumMesh.start),
    "pause": Fault("SIGSTOP", QuorumMesh.pause, QuorumMesh.resume),
    "cut": Fault("cut off in both directions", _cut(), _heal),
    "mute": Fault("cut off: what it sends", _cut(hears=True), _heal),
    "deaf": Fault("cut off: what it hears", _cut(sends=True), _heal),
    "voters": Fault("cut off from the other controllers only", _cut(from_brokers=False), _heal),
}


def _ignore(_code: int) -> None:
    pass


class Outcome(NamedTuple):
    """What one fault did."""

    gap_s: float
    before: str
    after: str
    """The active controller's name before the fault, and after its end."""
    creations: Creations


def suffer(mesh: QuorumMesh, kind: str, topics: tuple[int, int, int] = TOPICS) -> Outcome:
    """One fault of the active controller under creations, undone at the end; MeshError, TimeoutError."""
    fault, (first, during, after) = FAULTS[kind], topics
    prefix = f"{kind}-{time.monotonic_ns() // 1_000_000}"
    with Creations(mesh.portal, [broker.grpc for broker in mesh.brokers], prefix) as creations:
        creations.more(first)
        before = mesh.active().name
        since = time.monotonic()
        fault.do(mesh, before)
        creations.more(during)
        fault.undo(mesh, before)
        creations.more(after)
    return Outcome(creations.gap_s(since), before, mesh.active().name, creations)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.failover", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="how often each fault happens (5)")
    parser.add_argument("--kinds", nargs="+", choices=sorted(FAULTS), default=list(FAULTS), help="only these faults")
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
    sys.stderr.write(f"bench.failover: {text}\n")
    sys.stderr.flush()


def run_once(run: str, options: argparse.Namespace, gaps: defaultdict[str, list[float]]) -> None:
    """One mesh, each kind of fault once."""
    config = dict(item.split("=", 1) for item in options.config)
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-failover-") as folder,
        QuorumMesh(Path(folder), controllers=3, brokers=2, config=config) as mesh,
    ):
        for kind in options.kinds:
            mesh.wait_caught_up()
            found = suffer(mesh, kind)
            gaps[kind].append(found.gap_s)
            told = f"{run}: {kind}: {found.gap_s:.2f} s, {found.before} -> {found.after}"
            say(f"{told}, {len(found.creations.times)} topics, {len(found.creations.unknown)} failed")


def _interrupted(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of what was measured."""
    options = arguments(given)
    signal.signal(signal.SIGTERM, _interrupted)
    about = {"machine": system.describe_machine(), "target_s": TARGET_S}
    gaps: defaultdict[str, list[float]] = defaultdict(list)
    status = 0
    try:
        for run in range(1, options.runs + 1):
            run_once(f"run {run}/{options.runs}", options, gaps)
    except KeyboardInterrupt:
        say("interrupted")
        status = 130
    except (MeshError, KafkaError, TimeoutError) as error:
        say(f"failed: {error or 'out of time'}")
        status = 1
    figures = [report.Figure(kind, fault.label, "s", TARGET_S, True) for kind, fault in FAULTS.items()]
    summaries = report.summarize(gaps, figures)
    if options.json:
        sys.stdout.write(json.dumps({**json.loads(report.as_json(summaries, about)), "gaps_s": gaps}) + "\n")
    elif summaries:
        text = report.as_markdown(summaries) if options.markdown else report.as_text(summaries)
        sys.stdout.write(f"{text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
