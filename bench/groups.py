"""`python -m bench.groups`: members of a group join, leave and die at random, and its coordinator is killed.

One controller and three brokers run as processes, and idempotent producers write meanwhile. Members are consumers of
this process with their own connections. Sometimes the coordinator of the group gets SIGKILL and is restarted seconds
later. At the end members stay until all records are read, and then leave.

Checks the rules of `bench.group_ledger`, and a maximum of two generations per change of the membership and ten per
kill. The exit code is 1 if a rule is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench import harness, system, workload
from bench.group_ledger import CAUSES, End, Ledger, LogFacts
from bench.group_members import GROUP, TOPIC, Lateness, Settings, Stage, Writer, read_log
from kipmesh.client import AdminClient
from kipmesh.cluster import LocalCluster

CONFIG = {"group.initial.rebalance.delay.ms": "500"}
"""A group delays its first rebalance while members keep joining, which never ends here."""
WRITERS = 2
DOWN_S = 5.0
SETTLE_S = 120.0
"""Maximum time to read all records at the end."""
GENERATIONS_PER_CHANGE, GENERATIONS_PER_KILL = 2, 10
"""A cooperative rebalance revokes partitions in one generation and assigns them in the next."""
STRATEGIES = ("cooperative-sticky", "range", "roundrobin")


class Outcome(NamedTuple):
    """Result of a run of `seconds`: what members did, facts of the log, and other counts."""

    seconds: float
    ledger: Ledger
    log: LogFacts
    acknowledged: list[tuple[int, int]]
    """Partition and offset of each acknowledged record."""
    failed: int
    """Number of records whose delivery failed."""
    kills: int
    late_s: float
    """Maximum delay of the members' event loop."""
    cpu_s: tuple[float, float]
    """CPU time of this process and of the cluster."""

    @property
    def generations_max(self) -> int:
        """Maximum permitted number of generations for this number of changes and kills."""
        return GENERATIONS_PER_CHANGE * self.ledger.changes + GENERATIONS_PER_KILL * self.kills

    def problems(self) -> list[str]:
        """Return messages that describe the violations, including too many generations and records that could not be
        written; empty if there are none.
        """
        found = [*self.ledger.verdicts(self.acknowledged), *self.log.problems]
        if self.log.last_generation > self.generations_max:
            found.append(f"{self.log.last_generation} generations, but at most {self.generations_max} are allowed")
        if self.failed:
            found.append(f"{self.failed} records could not be written")
        return found


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser("bench.groups", __doc__, "run few members for a short time", harness.TABLE)
    parser.number("--seconds", "duration of joining, leaving and dying", 600.0, 20.0, least=5, most=3600)
    parser.number("--members", "members at a time", 50, 6, most=200)
    parser.number("--partitions", "partitions of the topic", 60, 12)
    parser.number("--life", "mean seconds of a member's life", 120.0, 20.0, most=3600)
    parser.number("--session", "session timeout in seconds", 30.0, 6.0, least=6, most=1800)
    parser.number("--deaths", "share of lives that end without leaving", 0.5, least=0, most=1)
    parser.number("--kills", "kills of the coordinator's broker", 3, 1, least=0)
    parser.number("--records", "records per second, in total", 120.0, least=0.1, most=5000)
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0], help="partition.assignment.strategy")
    parser.number("--seed", "seed of lives and deaths", 1, least=0, most=1 << 31)
    options = parser.parse(given)
    if options.kills * 4 * DOWN_S > options.seconds:
        parser.error(f"--seconds must be at least {4 * DOWN_S:g} for each kill, got {options.seconds:g}")
    return options


async def coordinator(cluster: LocalCluster) -> str:
    """Return the name of the node that is the coordinator of the group. Raises KafkaError."""
    async with AdminClient(cluster.bootstrap) as admin:
        node_id = (await admin.describe_groups([GROUP]))[GROUP].coordinator.node_id
    return next(node.name for node in cluster.nodes if node.node_id == node_id and node.role.is_broker)


async def kill_coordinators(cluster: LocalCluster, stage: Stage, seconds: float, kills: int) -> None:
    """Kill and restart the coordinator `kills` times within `seconds`, at equal intervals. Raises ClusterError,
    KafkaError.
    """
    for number in range(1, kills + 1):
        await asyncio.sleep(max(seconds / (kills + 1) - (DOWN_S if number > 1 else 0), 0))
        name = await coordinator(cluster)
        harness.say(f"SIGKILL to {name}, the coordinator; {_progress(stage)}")
        await asyncio.to_thread(cluster.kill, name)
        await asyncio.sleep(DOWN_S)
        await asyncio.to_thread(cluster.start, name)


def _progress(stage: Stage) -> str:
    ledger = stage.ledger
    return (
        f"{ledger.joins} joined, {ledger.leaves} left, {ledger.deaths} died, {ledger.losses} lost membership; "
        f"generation {max(ledger.generations, default=0)}, {ledger.reads} read; {len(ledger.problems)} problems"
    )


async def _report_progress(stage: Stage) -> None:
    while True:
        await asyncio.sleep(30)
        harness.say(_progress(stage))


async def churn(cluster: LocalCluster, options: argparse.Namespace) -> Outcome:
    """Run members, producers and kills on a new cluster, then wait until all records are read, and return the result.

    Violations do not raise an exception. Raises ClusterError, KafkaError, TimeoutError.
    """
    await workload.create_topic(cluster.bootstrap, TOPIC, options.partitions)
    ledger, lateness, ends = Ledger(options.partitions), Lateness(), asyncio.Event()
    settings = Settings(options.strategy, options.life, options.deaths, options.session)
    stage = Stage(cluster.bootstrap, ledger, settings, random.Random(options.seed))
    writers = [
        Writer(cluster.bootstrap, options.partitions, options.records / WRITERS, number) for number in range(WRITERS)
    ]
    cpu, began = _cpu_s(cluster), time.monotonic()
    background = [asyncio.create_task(work) for work in (lateness.watch(), _report_progress(stage))]
    members = [asyncio.create_task(stage.slot()) for _ in range(options.members)]
    writing = [asyncio.create_task(writer.write(ends)) for writer in writers]
    try:
        killing = asyncio.create_task(kill_coordinators(cluster, stage, options.seconds, options.kills))
        background.append(killing)
        await _while_all_run([*members, *writing], options.seconds)
        await killing
        stage.stays = True
        ends.set()
        await asyncio.gather(*writing)
        acknowledged = [position for writer in writers for position in writer.acknowledged]
        harness.say(f"{len(acknowledged)} records written; {_progress(stage)}")
        await _settle(ledger, acknowledged, members)
        used = tuple(now - before for now, before in zip(_cpu_s(cluster), cpu, strict=True))
        seconds = time.monotonic() - began
        stage.ends.set()
        await asyncio.gather(*members)
    finally:
        tasks = [*background, *members, *writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    failed = sum(writer.failed for writer in writers)
    facts = await read_log(cluster.bootstrap)
    return Outcome(seconds, ledger, facts, acknowledged, failed, options.kills, lateness.longest_s, (used[0], used[1]))


async def _while_all_run(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait for `seconds`, or until a task ends. Raises the error of that task."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _settle(ledger: Ledger, acknowledged: list[tuple[int, int]], members: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all acknowledged records are read, or for `SETTLE_S`. Raises the error of a member."""
    deadline = time.monotonic() + SETTLE_S
    while ledger.missing(acknowledged) and time.monotonic() < deadline:
        await _while_all_run(members, 0.5)


def _cpu_s(cluster: LocalCluster) -> tuple[float, float]:
    """Return the CPU seconds of this process and of the running nodes. Those of killed processes are not included."""
    return time.process_time(), system.cpu_seconds(harness.pids(cluster))


def run(options: argparse.Namespace) -> Outcome:
    """Start a cluster, run members on it, stop it and return the result. Raises the errors of `churn`."""
    with harness.three_brokers(config=CONFIG) as cluster:
        return asyncio.run(churn(cluster, options))


def rows(outcome: Outcome, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (label, value) of each figure, for the table."""
    ledger, repeats, pauses = outcome.ledger, outcome.ledger.repeats(), outcome.ledger.pauses()
    again = ", ".join(f"{count:,} {CAUSE_TEXTS[cause]}" for cause in (*CAUSES, None) if (count := repeats.get(cause)))
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
        ("partitions with two owners in a generation", f"{sum('owned by' in text for text in ledger.problems)}"),
        (
            "records acknowledged, not read",
            f"{len(outcome.acknowledged):,}, {len(ledger.missing(outcome.acknowledged))}",
        ),
        ("read again", f"{sum(repeats.values()):,}" + (f": {again}" if again else "")),
        ("commits in the log, refused to members", f"{outcome.log.commits:,}, {ledger.failed_commits}"),
        ("errors that poll raised", ", ".join(f"{k} {n}" for k, n in ledger.failed_polls.items()) or "none"),
        (
            "longest pause of a partition",
            f"{pauses.longest_s:.1f} s (median of the longest of each: {pauses.median_s:.1f} s)",
        ),
        ("members' event loop late at most", f"{outcome.late_s:.2f} s"),
        ("CPU of the members' process", f"{100 * outcome.cpu_s[0] / outcome.seconds:.0f} % of a core"),
    ]


CAUSE_TEXTS: Mapping[End | None, str] = {
    End.DIED: "whose reader died",
    End.LOST: "whose reader lost its membership",
    End.UNCOMMITTED: "whose reader could not commit",
    None: "without a cause",
}


def as_table(outcome: Outcome, options: argparse.Namespace) -> str:
    """Format a table with a row for each figure."""
    return harness.table(("what", "figure"), rows(outcome, options), markdown=options.markdown)


def figures(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """Return every figure by name, for `--json`, with the violations as `problems`."""
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
    """Run the benchmark, print the figures, and return the exit code of `harness.run`: 1 if a rule is violated."""
    options = arguments(given)
    harness.say(f"{options.members} members, {options.partitions} partitions, {options.seconds:g} s")
    done: list[Outcome] = []
    return harness.run(
        options,
        lambda: done.append(run(options)),
        figures=lambda: figures(done[0], options) if done else {},
        text=lambda: as_table(done[0], options) if done else "",
        problems=lambda: done[0].problems() if done else [],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
