"""`python -m bench.closest`: bytes that consumers read across racks, and what happens when the replica nearby dies.

One controller and three brokers as processes, one in each of three racks; the one in rack-a leads four partitions.
Consumers in rack-b and rack-c read what is produced at a steady rate. First everybody reads from the leader, then from
the replica nearby, by each of the ways to select it (`replica.selection.mode`); each way has a cluster of its own.
Bytes are what consumers count in some seconds of steady state; the brokers' counts (392-18) are beside them where
fetches name the rack, which is without a selector and in the mode `fetch`. Then the replica in rack-c is killed and
started again: how long a partition's records stayed away from the consumer there, and how long, from when the replica
was in sync, any came from another rack. Progress goes to standard error, the figures to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from typing import Any, NamedTuple

from bench import harness, workload
from bench.closest_readers import PARTITIONS, TOPIC, Bytes, Load, in_sync, of_brokers
from kipmesh.cluster import LocalCluster

MODULE = "bench.closest"

RACKS = ("rack-b", "rack-c")
SELECTOR = "RackAwareReplicaSelector"
QUIET_S = 2.0
"""Without a byte from another rack: all partitions are read nearby."""
SHARE_TARGET, GAP_TARGET_S = 99.0, 2.0


class Mode(NamedTuple):
    """A way to select a replica."""

    label: str
    brokers: Mapping[str, str]
    consumers: Mapping[str, str]


MODES: Mapping[str, Mode] = {
    "off": Mode("the leader (no selector)", {}, {}),
    "fetch": Mode("`fetch`: leaders redirect", {"replica.selector.class": SELECTOR}, {}),
    "metadata": Mode(
        "`metadata`: brokers propose",
        {"replica.selector.class": SELECTOR, "replica.selection.mode": "metadata"},
        {"replica.selection.mode": "metadata", "replica.selection.policy": "preferred"},
    ),
    "consumer": Mode(
        "`consumer`: its own selector",
        {},
        {
            "replica.selector.class": SELECTOR,
            "replica.selection.mode": "consumer",
            "replica.selection.policy": "preferred",
        },
    ),
}
OFF = "off"
NOTHING: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """What came of one run of a mode."""

    clients: Bytes
    brokers: Bytes
    """Nothing where fetches do not name the rack."""
    gap_s: float
    """The longest that a partition's records stayed away after the kill; nan where nothing was killed."""
    return_s: float
    """From when the replica was in sync until the last byte from another rack; nan where nothing was killed."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(MODULE, __doc__, "few seconds of each", harness.TABLE)
    parser.add_argument("--runs", type=int, default=None, help="how often each mode (3; 1 with --quick)")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="only these")
    parser.add_argument("--seconds", type=float, default=None, help="of steady state (15; 3 with --quick)")
    parser.add_argument("--records", type=float, default=400, help="of 1,000 B a second, in all (400)")
    parser.add_argument("--max-age-ms", type=int, default=3000, help="metadata.max.age.ms of the consumers (3,000)")
    options = parser.parse_args(given)
    harness.fill(options, {"runs": 1, "seconds": 3.0}, {"runs": 3, "seconds": 15.0})
    if options.runs < 1 or not 0 < options.seconds <= 600 or not 0 < options.records <= 5000:
        parser.error("runs from 1, seconds up to 600, records up to 5,000 a second")
    if not 1000 <= options.max_age_ms <= 60_000:
        parser.error("max-age-ms from 1,000 to 60,000")
    return options


async def steady(cluster: LocalCluster, load: Load, seconds: float, *, is_off: bool) -> tuple[Bytes, Bytes]:
    """What consumers and what brokers counted in some seconds of steady state."""
    brokers = [node for node in cluster.nodes if node.role.is_broker]
    began = time.monotonic()
    for reader in load.readers:
        await reader.goes_on(began)
        if not is_off:
            await reader.is_near(QUIET_S / 2)
    before, clients_before = await of_brokers(brokers), load.bytes
    await asyncio.sleep(seconds)
    return load.bytes.since(clients_before), (await of_brokers(brokers)).since(before)


async def measure(
    cluster: LocalCluster, mode: str, options: argparse.Namespace, *, kills: bool, consumers: Mapping[str, str]
) -> Outcome:
    """One mode on a cluster that was made for it; BenchError."""
    brokers = [node for node in cluster.nodes if node.role.is_broker]
    await workload.create_topic(cluster.bootstrap, TOPIC, PARTITIONS, len(brokers))
    config = {**MODES[mode].consumers, "metadata.max.age.ms": options.max_age_ms, **consumers}
    async with Load(brokers, RACKS, options.records, config) as load:
        clients, told = await steady(cluster, load, options.seconds, is_off=mode == OFF)
        if not kills or mode == OFF:
            return Outcome(clients, told, nan, nan)
        reader = load.readers[-1]
        victim = next(node.name for node in brokers if node.rack == reader.rack)
        killed = time.monotonic()
        await asyncio.to_thread(cluster.kill, victim)
        await reader.goes_on(killed + QUIET_S)
        gap_s = reader.gap_s(killed)
        await asyncio.to_thread(cluster.start, victim)
        back = await in_sync(load.bootstrap, len(brokers))
        await reader.is_near(QUIET_S)
        return Outcome(clients, told, gap_s, max(0.0, reader.other_at - back))


def run_mode(
    mode: str,
    options: argparse.Namespace,
    *,
    kills: bool = True,
    brokers: Mapping[str, str] = NOTHING,
    consumers: Mapping[str, str] = NOTHING,
) -> Outcome:
    """A cluster with the mode, more configuration, from start to stop; BenchError, ClusterError, KafkaError."""
    config = {**MODES[mode].brokers, **brokers}
    with harness.three_brokers(config=config) as cluster:
        return asyncio.run(measure(cluster, mode, options, kills=kills, consumers=consumers))


Found = dict[str, list[Outcome]]


def _span(values: Sequence[float], target: float) -> tuple[str, str]:
    """Median with range, and whether the median meets the target."""
    median = statistics.median(values)
    if isnan(median):  # nothing was killed
        return "-", ""
    return f"{median:.2f} s ({min(values):.2f} .. {max(values):.2f})", "met" if median <= target else "missed"


def _percent(shares: Iterable[float]) -> str:
    least = min(shares)
    return "-" if isnan(least) else f"{least:.2f} %"


def _or_none(value: float) -> float | None:
    return None if isnan(value) else value


def as_markdown(found: Found, max_age_ms: int) -> str:
    """A table for docs/benchmarks.md."""
    lines = [
        "| who selects | own rack, MB | across, MB | share in the own rack | the same, by brokers | killed: goes on "
        f"(target: {GAP_TARGET_S:g} s) | in sync again: reads there (target: {max_age_ms / 1000:g} s) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, outcomes in found.items():
        own, other = (sum(part) / 1e6 for part in zip(*(one.clients for one in outcomes), strict=True))
        gap, gap_verdict = _span([one.gap_s for one in outcomes], GAP_TARGET_S)
        back, back_verdict = _span([one.return_s for one in outcomes], max_age_ms / 1000)
        share = min(one.clients.share for one in outcomes)
        verdict = "" if mode == OFF else ": met" if share >= SHARE_TARGET else ": missed"
        told = _percent(one.brokers.share for one in outcomes)
        lines.append(
            f"| {MODES[mode].label} | {own:.2f} | {other:.2f} | {share:.2f} %{verdict} | {told} "
            f"| {gap}{gap_verdict and ': ' + gap_verdict} | {back}{back_verdict and ': ' + back_verdict} |"
        )
    return "\n".join(lines)


def as_text(found: Found) -> str:
    """Lines for a terminal."""
    return "\n".join(
        f"{mode:<9} own rack {one.clients.own / 1e6:8.2f} MB, across {one.clients.other / 1e6:8.2f} MB, "
        f"share {_percent([one.clients.share])} (brokers: {_percent([one.brokers.share])}), "
        f"goes on after {one.gap_s:.2f} s, near again after {one.return_s:.2f} s"
        for mode, outcomes in found.items()
        for one in outcomes
    )


def figures(found: Found) -> dict[str, Any]:
    """Every outcome by mode."""
    return {
        mode: [
            {
                "own_bytes": one.clients.own,
                "other_bytes": one.clients.other,
                "brokers_own_bytes": one.brokers.own,
                "brokers_other_bytes": one.brokers.other,
                "gap_s": _or_none(one.gap_s),
                "return_s": _or_none(one.return_s),
            }
            for one in outcomes
        ]
        for mode, outcomes in found.items()
    }


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of what was measured."""
    options = arguments(given)
    found: Found = {}

    def measure_all() -> None:
        for number in range(1, options.runs + 1):
            for mode in options.modes:
                harness.say(MODULE, f"run {number}/{options.runs}: {mode} ...")
                found.setdefault(mode, []).append(outcome := run_mode(mode, options))
                harness.say(MODULE, f"  {as_text({mode: [outcome]})}")

    def text() -> str:
        return as_markdown(found, options.max_age_ms) if options.markdown and found else as_text(found)

    about = {"max_age_ms": options.max_age_ms, "seconds": options.seconds}
    return harness.run(MODULE, options, measure_all, figures=lambda: {**about, "modes": figures(found)}, text=text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
