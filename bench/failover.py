"""`python -m bench.failover`: how long nothing goes on when the active controller or a partition's leader fails.

Of the active controller: three controllers and two brokers as processes; clients create topics all the time through the
brokers. The gap of a fault is the longest time between two acknowledged creations that ended after it. Each run is a
new mesh in which every kind of fault happens once, to whichever controller is active then; the next comes when all
replicas have caught up. Of a partition's leader (`leader-...`): see `bench.leader_failover`; a mesh of its own in each
run. Progress goes to standard error, the figures to standard output.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bench import harness, leader_failover, report
from bench.creations import Creations
from bench.faults import FAULTS
from bench.quorum_cluster import QuorumCluster

MODULE = "bench.failover"

TARGET_S = 1.5
"""Of each fault of the active controller."""
TOPICS = (50, 100, 50)
"""That are created before a fault, while it lasts, and after its end, at least."""
LEADER = "leader-"
"""Begins the names of the faults of a partition's leader; the others are the active controller's."""
FIGURES = [
    *[report.Figure(kind, fault.label, "s", TARGET_S, True) for kind, fault in FAULTS.items() if kind != "both"],
    *[
        report.Figure(f"{LEADER}{kind}", f"partition leader: {FAULTS[kind].label}", "s", target_s, True)
        for kind, target_s in leader_failover.TARGETS_S.items()
    ],
]
Gaps: TypeAlias = defaultdict[str, list[float]]
"""Seconds of each run by kind of fault."""


class Outcome(NamedTuple):
    """What one fault did."""

    gap_s: float
    before: str
    after: str
    """The active controller's name before the fault, and after its end."""
    creations: Creations


def suffer(mesh: QuorumCluster, kind: str, topics: tuple[int, int, int] = TOPICS) -> Outcome:
    """One fault of the active controller under creations, undone at the end; QuorumError, TimeoutError."""
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
    parser = harness.parser(MODULE, __doc__, markdown=harness.TABLE)
    parser.add_argument("--runs", type=int, default=5, help="how often each fault happens (5)")
    kinds = [figure.key for figure in FIGURES]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="only these faults")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="configuration of the nodes")
    options = parser.parse_args(given)
    if options.runs < 1:
        parser.error("runs from 1")
    return options


def run_controllers(run: str, kinds: Sequence[str], config: dict[str, str], gaps: Gaps) -> None:
    """One mesh, each kind of fault of the active controller once."""
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-failover-") as folder,
        QuorumCluster(Path(folder), controllers=3, brokers=2, config=config) as mesh,
    ):
        for kind in kinds:
            mesh.wait_caught_up()
            found = suffer(mesh, kind)
            gaps[kind].append(found.gap_s)
            told = f"{run}: {kind}: {found.gap_s:.2f} s, {found.before} -> {found.after}"
            harness.say(MODULE, f"{told}, {len(found.creations.times)} topics, {len(found.creations.unknown)} failed")


def run_leaders(run: str, kinds: Sequence[str], config: dict[str, str], gaps: Gaps) -> None:
    """One mesh, each kind of fault of the partition's leader once."""
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-failover-") as folder,
        QuorumCluster(Path(folder), controllers=3, brokers=3, config=config) as mesh,
    ):
        leader_failover.prepare(mesh)
        for kind in kinds:
            found = leader_failover.suffer(mesh, kind.removeprefix(LEADER))
            gaps[kind].append(found.gap_s)
            harness.say(
                MODULE, f"{run}: {kind}: {found.gap_s:.2f} s, {found.before} -> {found.after}, {found.failed} failed"
            )


def run_all(options: argparse.Namespace, gaps: Gaps) -> None:
    """All runs; `gaps` gets what is measured as it comes."""
    config = harness.key_values(options.config)
    of_leaders = [kind for kind in options.kinds if kind.startswith(LEADER)]
    of_controllers = [kind for kind in options.kinds if kind not in of_leaders]
    for number in range(1, options.runs + 1):
        for measure, kinds in ((run_controllers, of_controllers), (run_leaders, of_leaders)):
            if kinds:
                measure(f"run {number}/{options.runs}", kinds, config, gaps)


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of what was measured."""
    options = arguments(given)
    gaps: Gaps = defaultdict(list)

    def figures() -> dict[str, Any]:
        targets = {figure.key: figure.target for figure in FIGURES}
        return {"targets_s": targets, **report.figures(report.summarize(gaps, FIGURES)), "gaps_s": gaps}

    return harness.run(
        MODULE,
        options,
        lambda: run_all(options, gaps),
        figures=figures,
        text=lambda: report.table(report.summarize(gaps, FIGURES), markdown=options.markdown),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
