"""`python -m bench.failover`: time without progress when the active controller or the leader of a partition fails.

Each run starts a new cluster of processes, in which each fault happens once, to the node that is active or leads at
that time. The gap of a fault is the longest time between two acknowledgements of which the second came after the fault.

- Active controller: three controllers and two brokers. Clients create topics through the brokers.
- Leader of a partition (`leader-...`): three controllers and three brokers. Producers send single records, acks=all, to
  one partition with three replicas.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bench import harness
from bench.continuous_load import TOPIC, ContinuousLoad, Creations, Records
from bench.harness import Figure
from bench.quorum_cluster import QuorumCluster, wait_for
from kipmesh.client import AdminClient
from kipmesh.client.types import NewTopic


class Fault(NamedTuple):
    """A fault of a node. `begin` causes it and `end` undoes it; both take the cluster and the node's name."""

    label: str
    begin: Callable[[QuorumCluster, str], object]
    end: Callable[[QuorumCluster, str], object]


def _heal(cluster: QuorumCluster, _name: str) -> None:
    cluster.heal()


def _kill_with_active(cluster: QuorumCluster, name: str) -> None:
    for each in {name, cluster.active().name}:
        cluster.kill(each)


def _start_dead(cluster: QuorumCluster, _name: str) -> None:
    cluster.start(*[name for name in cluster.nodes if not cluster.is_running(name)])


isolate = QuorumCluster.isolate
FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", QuorumCluster.kill, QuorumCluster.start),
    "stop": Fault("SIGTERM", QuorumCluster.stop, QuorumCluster.start),
    "pause": Fault("SIGSTOP", QuorumCluster.pause, QuorumCluster.resume),
    "cut": Fault("cut off in both directions", isolate, _heal),
    "mute": Fault("cut off: what it sends", partial(isolate, receives=True), _heal),
    "deaf": Fault("cut off: what it receives", partial(isolate, sends=True), _heal),
    "voters": Fault("cut off from the other controllers only", partial(isolate, from_brokers=False), _heal),
    "both": Fault("SIGKILL of it and of the active controller", _kill_with_active, _start_dead),
}
"""All but `both` apply to the active controller. `kill`, `stop`, `pause` and `both` apply to any other node."""
CONTROLLER_TARGET_S = 1.5
LEADER_TARGETS_S = {"kill": 1.5, "pause": 4.0, "stop": 1.5, "both": None}
"""Faults of a partition's leader, and the targets of their medians."""
LEADER = "leader-"
"""Prefix of the names of these faults."""
TOPICS, RECORDS = (50, 100, 50), (100, 200, 100)
"""Minimum of acknowledgements before a fault, while it lasts, and after its end."""
FIGURES = [
    *[Figure(kind, fault.label, "s", CONTROLLER_TARGET_S, True) for kind, fault in FAULTS.items() if kind != "both"],
    *[
        Figure(f"{LEADER}{kind}", f"partition leader: {FAULTS[kind].label}", "s", target_s, True)
        for kind, target_s in LEADER_TARGETS_S.items()
    ],
]
Gaps: TypeAlias = defaultdict[str, list[float]]
"""Seconds of each run by kind of fault."""


class Outcome(NamedTuple):
    """Effect of one fault. `gap_s` is the longest time between two acknowledgements, the second of them after the fault
    began.
    """

    gap_s: float
    before: str
    """Name of the active controller, or of the leader, before the fault."""
    after: str
    """The same after the end of the fault."""
    load: ContinuousLoad


def inject_fault(
    cluster: QuorumCluster, kind: str, load: ContinuousLoad, current: Callable[[], str], counts: tuple[int, int, int]
) -> tuple[Outcome, float]:
    """Cause a fault under load, end it, and return its effect and the time when it began (`time.monotonic`). Raises
    QuorumError, TimeoutError.

    Args:
        kind: key of `FAULTS`.
        current: returns the name of the node to which the fault happens.
        counts: minimum numbers of acknowledgements before, during and after the fault.
    """
    fault, (first, during, after) = FAULTS[kind], counts
    with load:
        load.more(first)
        before = current()
        since = time.monotonic()
        fault.begin(cluster, before)
        load.more(during)
        gap_s = load.gap_s(since)
        fault.end(cluster, before)
        load.more(after)
    return Outcome(gap_s, before, current(), load), since


def fail_controller(cluster: QuorumCluster, kind: str, topics: tuple[int, int, int] = TOPICS) -> Outcome:
    """Cause a fault of the active controller while clients create topics, and return its effect. Raises QuorumError,
    KafkaError, TimeoutError.

    The gap may also follow the end of the fault, because that end can cause another election. `topics` are the minimum
    numbers of topics created before, during and after the fault.
    """
    brokers = [broker.grpc for broker in cluster.brokers]
    creations = Creations(cluster.portal, brokers, f"{kind}-{time.monotonic_ns() // 1_000_000}")
    outcome, since = inject_fault(cluster, kind, creations, lambda: cluster.active().name, topics)
    return outcome._replace(gap_s=creations.gap_s(since))


def fail_leader(cluster: QuorumCluster, kind: str) -> Outcome:
    """Cause a fault of the leader of the partition of `TOPIC` while producers send records, and return its effect.
    Raises QuorumError, KafkaError, TimeoutError.
    """
    return inject_fault(cluster, kind, Records(cluster), lambda: leader(cluster), RECORDS)[0]


def create_topic(cluster: QuorumCluster) -> None:
    """Create `TOPIC` with one partition and three replicas. Raises KafkaError."""

    async def create() -> None:
        async with AdminClient(cluster.bootstrap) as admin:
            await admin.create_topics([NewTopic(TOPIC, 1, 3)])

    cluster.run(create())


def leader(cluster: QuorumCluster) -> str:
    """Wait until the partition of `TOPIC` has a leader and three replicas in sync, and return the leader's name. Raises
    KafkaError, or QuorumError after 60 s.
    """
    found = (-1, 0)

    async def describe() -> tuple[int, int]:
        async with AdminClient(cluster.bootstrap) as admin:
            (topic,) = await admin.describe_topics([TOPIC])
            return topic.partitions[0].leader_id, len(topic.partitions[0].isr)

    def in_sync() -> bool:
        nonlocal found
        found = cluster.run(describe())
        return found[0] >= 0 and found[1] == 3

    wait_for(in_sync, lambda: f"leader with three replicas in sync: {found}")
    return next(node.name for node in cluster.brokers if node.node_id == found[0])


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser("bench.failover", __doc__, markdown=harness.TABLE)
    parser.number("--runs", "how often each fault happens", 5)
    kinds = [figure.key for figure in FIGURES]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="only these faults")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="configuration of the nodes")
    return parser.parse(given)


def run_cluster(run: str, kinds: Sequence[str], config: dict[str, str], gaps: Gaps, *, of_leader: bool) -> None:
    """Start a cluster, cause the faults `kinds` on it one after the other, and add the gaps in seconds to `gaps`.

    If `of_leader` is set, all kinds are faults of a partition's leader, otherwise of the active controller. Raises
    QuorumError, KafkaError, TimeoutError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kipmesh-failover-") as directory,
        QuorumCluster(Path(directory), controllers=3, brokers=3 if of_leader else 2, config=config) as cluster,
    ):
        if of_leader:
            create_topic(cluster)
        for kind in kinds:
            if of_leader:
                found = fail_leader(cluster, kind.removeprefix(LEADER))
            else:
                cluster.wait_caught_up()
                found = fail_controller(cluster, kind)
            gaps[kind].append(found.gap_s)
            acknowledged = f"{len(found.load.times)} acknowledged"
            harness.say(f"{run}: {kind}: {found.gap_s:.2f} s, {found.before} -> {found.after}, {acknowledged}")


def run_all(options: argparse.Namespace, gaps: Gaps) -> None:
    """Run all faults, `--runs` times, and add the gaps to `gaps`. Raises BenchError, KafkaError, TimeoutError."""
    config = harness.key_values(options.config)
    for number in range(1, options.runs + 1):
        for of_leader in (False, True):
            kinds = [kind for kind in options.kinds if kind.startswith(LEADER) == of_leader]
            if kinds:
                run_cluster(f"run {number}/{options.runs}", kinds, config, gaps, of_leader=of_leader)


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures that were measured, and return the exit code of `harness.run`."""
    options = arguments(given)
    gaps: Gaps = defaultdict(list)

    def figures() -> dict[str, Any]:
        targets = {figure.key: figure.target for figure in FIGURES}
        return {"targets_s": targets, **harness.as_json(harness.summarize(gaps, FIGURES)), "gaps_s": gaps}

    return harness.run(
        options,
        lambda: run_all(options, gaps),
        figures=figures,
        text=lambda: harness.as_table(harness.summarize(gaps, FIGURES), markdown=options.markdown),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
