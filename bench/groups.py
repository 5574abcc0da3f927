"""`python -m bench.groups`: members of a consumer group join, leave and die at random, and its coordinator is killed.

One controller and three brokers as processes; idempotent producers write all the while. Members are consumers of this
process, each with connections of its own; one that dies ends without a word, so that its session has to end. Now and
then the broker that coordinates the group gets a SIGKILL, and is started again some seconds later. At the end nobody
goes any more, what was written is read to its end, and all leave.

What must hold (`bench.group_ledger`): a partition has at most one owner a generation, as the members were told and as
`__consumer_offsets` says; every acknowledged record was read; what was read twice has a reason; no committed offset
goes back; and generations are at most twice the changes of the membership and ten a kill. Else the exit code is 1.
Progress goes to standard error, the figures to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench import harness, system, workload
from bench.group_ledger import CAUSES, End, Ledger, LogFacts
from bench.group_members import GROUP, TOPIC, Lateness, Settings, Stage, Writer, read_log
from kipmesh.client import AdminClient
from kipmesh.cluster import LocalCluster

MODULE = "bench.groups"

CONFIG = {"group.initial.rebalance.delay.ms": "500"}
"""An empty group's first rebalance is put off as long as members keep coming, and here they never cease."""
WRITERS = 2
DOWN_S = 5.0
SETTLE_S = 120.0
"""For reading what was written by the end."""
GENERATIONS_PER_CHANGE, GENERATIONS_PER_KILL = 2, 10
"""One in which partitions are given up, and one in which they are handed over."""
STRATEGIES = ("cooperative-sticky", "range", "roundrobin")


class Outcome(NamedTuple):
    """What came of a run."""

    seconds: float
    ledger: Ledger
    log: LogFacts
    acknowledged: list[tuple[int, int]]
    """Partition and offset of each record that the producers were told of."""
    failed: int
    """Records that they gave up."""
    kills: int
    late_s: float
    """How late the members' event loop was at most."""
    cpu_s: tuple[float, float]
    """CPU time of this process and of the cluster's."""

    @property
    def generations_max(self) -> int:
        """The bound on generations."""
        return GENERATIONS_PER_CHANGE * self.ledger.changes + GENERATIONS_PER_KILL * self.kills

    def problems(self) -> list[str]:
        """All that does not hold."""
        found = [*self.ledger.verdicts(self.acknowledged), *self.log.problems]
        if self.log.last_generation > self.generations_max:
            found.append(f"{self.log.last_generation} generations, where {self.generations_max} are the most")
        if self.failed:
            found.append(f"{self.failed} records were not written")
        return found


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(MODULE, __doc__, "few members for a short time", harness.TABLE)
    parser.add_argument(
        "--seconds", type=float, default=None, help="of joining, leaving and dying (600; 20 with --quick)"
    )
    parser.add_argument("--members", type=int, default=None, help="at a time (50; 6 with --quick)")
    parser.add_argument("--partitions", type=int, default=None, help="of the topic (60; 12 with --quick)")
    parser.add_argument("--life", type=float, default=None, help="seconds of a life on average (120; 20 with --quick)")
    parser.add_argument(
        "--session", type=float, default=None, help="session timeout, s (30; 6, the least, with --quick)"
    )
    parser.add_argument("--deaths", type=float, default=0.5, help="share of those that go that dies (0.5)")
    parser.add_argument("--kills", type=int, default=None, help="of the coordinator's broker (3; 1 with --quick)")
    parser.add_argument("--records", type=float, default=120, help="a second, in all (120)")
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0], help="how partitions are shared out")
    parser.add_argument("--seed", type=int, default=1, help="of who goes when (1)")
    options = parser.parse_args(given)
    small = {"seconds": 20.0, "members": 6, "partitions": 12, "life": 20.0, "kills": 1, "session": 6.0}
    large = {"seconds": 600.0, "members": 50, "partitions": 60, "life": 120.0, "kills": 3, "session": 30.0}
    harness.fill(options, small, large)
    if not 5 <= options.seconds <= 3600 or not 1 <= options.members <= 200 or not 1 <= options.partitions <= 1000:
        parser.error("seconds from 5 to 3,600, members up to 200, partitions up to 1,000")
    if not 0 < options.records <= 5000 or not 0 <= options.deaths <= 1 or not 1 <= options.life <= 3600:
        parser.error("records up to 5,000 a second, deaths from 0 to 1, a life from 1 to 3,600 s")
    if not 6 <= options.session <= 1800:
        parser.error("sessions of 6 s (group.min.session.timeout.ms) to 1,800 s")
    if not 0 <= options.kills * 4 * DOWN_S <= options.seconds:
        parser.error(f"a kill takes {4 * DOWN_S:g} s")
    return options


async def coordinator(cluster: LocalCluster) -> str:
    """The name of the node that coordinates the group; KafkaError."""
    async with AdminClient(cluster.bootstrap) as admin:
        node_id = (await admin.describe_groups([GROUP]))[GROUP].coordinator.node_id
    return next(node.name for node in cluster.nodes if node.node_id == node_id and node.role.is_broker)


async def kill_coordinators(cluster: LocalCluster, stage: Stage, seconds: float, kills: int) -> None:
    """At equal distances; each broker is back, in the ISR or not, before the next one dies."""
    for number in range(1, kills + 1):
        await asyncio.sleep(max(seconds / (kills + 1) - (DOWN_S if number > 1 else 0), 0))
        name = await coordinator(cluster)
        harness.say(MODULE, f"SIGKILL to {name}, the coordinator; {_progress(stage)}")
        await asyncio.to_thread(cluster.kill, name)
        await asyncio.sleep(DOWN_S)
        await asyncio.to_thread(cluster.start, name)


def _progress(stage: Stage) -> str:
    ledger = stage.ledger
    return (
        f"{ledger.joins} joined, {ledger.leaves} left, {ledger.deaths} died, {ledger.losses} lost it; generation "
        f"{max(ledger.generations, default=0)}, {ledger.reads} read; {len(ledger.problems)} problems"
    )


async def _tell(stage: Stage) -> None:
    while True:
        await asyncio.sleep(30)
        harness.say(MODULE, _progress(stage))


async def churn(cluster: LocalCluster, options: argparse.Namespace) -> Outcome:
    """The whole on a cluster that was made for it; BenchError, KafkaError."""
    await workload.create_topic(cluster.bootstrap, TOPIC, options.partitions)
    ledger, lateness, ends = Ledger(options.partitions), Lateness(), asyncio.Event()
    settings = Settings(options.strategy, options.life, options.deaths, options.session)
    stage = Stage(cluster.bootstrap, ledger, settings, options.seed)
    writers = [
        Writer(cluster.bootstrap, options.partitions, options.records / WRITERS, number) for number in range(WRITERS)
    ]
    cpu, began = _cpu_s(cluster), time.monotonic()
    aside = [asyncio.create_task(work) for work in (lateness.watch(), _tell(stage))]
    members = [asyncio.create_task(stage.slot()) for _ in range(options.members)]
    writing = [asyncio.create_task(writer.write(ends)) for writer in writers]
    try:
        killing = asyncio.create_task(kill_coordinators(cluster, stage, options.seconds, options.kills))
        aside.append(killing)
        await _while_all_run([*members, *writing], options.seconds)
        await killing
        stage.stays = True
        ends.set()
        await asyncio.gather(*writing)
        acknowledged = [where for writer in writers for where in writer.acknowledged]
        harness.say(MODULE, f"{len(acknowledged)} records written; {_progress(stage)}")
        await _settle(ledger, acknowledged, members)
        used = tuple(now - before for now, before in zip(_cpu_s(cluster), cpu, strict=True))
        seconds = time.monotonic() - began
        stage.ends.set()
        await asyncio.gather(*members)
    finally:
        tasks = [*aside, *members, *writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    failed = sum(writer.failed for writer in writers)
    facts = await read_log(cluster.bootstrap)
    return Outcome(seconds, ledger, facts, acknowledged, failed, options.kills, lateness.longest_s, (used[0], used[1]))


async def _while_all_run(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Sleep so long; what ends before has failed."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _settle(ledger: Ledger, acknowledged: list[tuple[int, int]], members: Sequence[asyncio.Task[None]]) -> None:
    """Until all is read, or the time for that is over: what is missing then is told at the end."""
    deadline = time.monotonic() + SETTLE_S
    while ledger.missing(acknowledged) and time.monotonic() < deadline:
        await _while_all_run(members, 0.5)


def _cpu_s(cluster: LocalCluster) -> tuple[float, float]:
    """Of this process and of the brokers and controllers that run; one that was killed took its own with it."""
    pids = [node.pid for node in cluster.nodes if node.pid is not None]
    return time.process_time(), system.cpu_seconds(pids)


def run(options: argparse.Namespace) -> Outcome:
    """A cluster from start to stop, and what happened on it; BenchError, ClusterError, KafkaError."""
    with LocalCluster("processes", controllers=1, leaders=1, followers=2, config=CONFIG) as cluster:
        return asyncio.run(churn(cluster, options))


def rows(outcome: Outcome, options: argparse.Namespace) -> list[tuple[str, str]]:
    """What is told, and how much of it."""
    ledger, repeats, pauses = outcome.ledger, outcome.ledger.repeats(), outcome.ledger.pauses()
    again = ", ".join(f"{count:,} {_cause(cause)}" for cause in (*CAUSES, None) if (count := repeats.get(cause)))
    minutes = outcome.seconds / 60
    return [
        ("members, partitions, strategy", f"{options.members}, {options.partitions}, {options.strategy}"),
        ("session timeout, records a second", f"{options.session:g} s, {options.records:g}"),
        ("joined, left, died", f"{ledger.joins}, {ledger.leaves}, {ledger.deaths}"),
        ("coordinator's broker killed", f"{outcome.kills} times"),
        ("lost their membership and came back", f"{ledger.losses}"),
        (
            "generations, the bound",
            f"{outcome.log.last_generation} ({outcome.log.last_generation / minutes:.1f} a minute), "
            f"at most {outcome.generations_max}",
        ),
        ("partitions with two owners in a generation", f"{sum('own it' in text for text in ledger.problems)}"),
        (
            "records acknowledged, not read",
            f"{len(outcome.acknowledged):,}, {len(ledger.missing(outcome.acknowledged))}",
        ),
        ("read again", f"{sum(repeats.values()):,}" + (f": {again}" if again else "")),
        ("commits in the log, refused to members", f"{outcome.log.commits:,}, {ledger.failed_commits}"),
        ("errors that poll raised", ", ".join(f"{k} {n}" for k, n in ledger.failed_polls.items()) or "none"),
        (
            "longest pause of a partition",
            f"{pauses.longest_s:.1f} s (of each one the longest: median {pauses.median_s:.1f} s)",
        ),
        ("members' event loop late at most", f"{outcome.late_s:.2f} s"),
        ("CPU of the members' process", f"{100 * outcome.cpu_s[0] / outcome.seconds:.0f} % of a core"),
    ]


def _cause(cause: End | None) -> str:
    return {
        End.DIED: "whose reader died",
        End.LOST: "whose reader lost its membership",
        End.UNCOMMITTED: "whose reader could not commit",
        None: "without a reason",
    }[cause]


def as_table(outcome: Outcome, options: argparse.Namespace) -> str:
    """A row for each figure."""
    return harness.table(("what", "figure"), rows(outcome, options), markdown=options.markdown)


def figures(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """Every figure by its name."""
    ledger, pauses = outcome.ledger, outcome.ledger.pauses()
    return {
        "options": {key: value for key, value in vars(options).items() if key not in {"json", "markdown", "quick"}},
        "seconds": outcome.seconds,
        "joined": ledger.joins,
        "left": ledger.leaves,
        "died": ledger.deaths,
        "lost": ledger.losses,
        "kills": outcome.kills,
        "generations": outcome.log.last_generation,
        "generations_max": outcome.generations_max,
        "acknowledged": len(outcome.acknowledged),
        "missing": len(ledger.missing(outcome.acknowledged)),
        "read_again": {"none" if cause is None else cause.name: count for cause, count in ledger.repeats().items()},
        "commits": outcome.log.commits,
        "failed_commits": ledger.failed_commits,
        "failed_polls": dict(ledger.failed_polls),
        "longest_pause_s": pauses.longest_s,
        "median_longest_pause_s": pauses.median_s,
        "late_s": outcome.late_s,
        "cpu_s": outcome.cpu_s,
        "problems": outcome.problems(),
    }


def main(given: Sequence[str]) -> int:
    """Run, and print the figures."""
    options = arguments(given)
    harness.say(MODULE, f"{options.members} members, {options.partitions} partitions, {options.seconds:g} s")
    done: list[Outcome] = []
    return harness.run(
        MODULE,
        options,
        lambda: done.append(run(options)),
        figures=lambda: figures(done[0], options) if done else {},
        text=lambda: as_table(done[0], options) if done else "",
        problems=lambda: done[0].problems() if done else [],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
