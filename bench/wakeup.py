"""`python -m bench.wakeup`: what it costs, and what it gives, that followers are told the high watermark at once.

Rule 392-02, `replica.fetch.high.watermark.wakeup`. Two clusters of one shape (a controller, and a broker in each of
three racks, of which the one in rack-a leads four partitions) are there all the time, one with it and one without it,
and get the same load in turns: records of 100 B at a steady rate, acks=all, that a consumer in the leader's rack and
one in a follower's rack read. Of each turn: how many fetches of followers the leader took a second, the CPU of all
three brokers, and the time from sending a record to having it, through the follower and from the leader. Progress goes
to standard error, the table to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from math import isnan
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from bench import harness, system, workload
from bench.closest_readers import scrape
from kipmesh.client import Consumer, Producer
from kipmesh.cluster import LocalCluster

MODULE = "bench.wakeup"

KEY = "replica.fetch.high.watermark.wakeup"
SELECTOR = {"replica.selector.class": "RackAwareReplicaSelector"}
LEADER_RACK, FOLLOWER_RACK = "rack-a", "rack-b"
TOPIC = "told"
PARTITIONS = 4
RECORD_BYTES = 100
RATES = (0.0, 1.0, 10.0, 100.0, 1000.0)
WARM_UP_RECORDS = 200
WAIT_S = 60.0


class Turn(NamedTuple):
    """What was seen of one cluster while it had one load; latencies are nan without records."""

    fetches_s: float
    cpu_percent: float
    """Of one core, all brokers together."""
    follower_ms: tuple[float, float]
    """Through the follower: p50, p99."""
    leader_ms: tuple[float, float]


class Pair(NamedTuple):
    """Two turns, one after the other, with the same load."""

    on: Turn
    off: Turn


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times) or [float("nan")]
    return workload.percentile(ordered, 0.5) * 1e3, workload.percentile(ordered, 0.99) * 1e3


class Side:
    """A cluster and its clients."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._brokers = [node for node in cluster.nodes if node.role.is_broker]
        self._bootstrap = cluster.bootstrap
        self._producer = Producer(self._bootstrap, **{"acks": "all", "linger.ms": 0})
        self._consumers = {
            rack: Consumer(self._bootstrap, **{"auto.offset.reset": "earliest", "client.rack": rack})
            for rack in (LEADER_RACK, FOLLOWER_RACK)
        }
        self._sent_at: list[float] = []
        """When each record was sent, by its number, which is its value."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Connect, and send and read some records."""
        await workload.create_topic(self._bootstrap, TOPIC, PARTITIONS, len(self._brokers))
        await stack.enter_async_context(self._producer)
        for consumer in self._consumers.values():
            await stack.enter_async_context(consumer)
            consumer.assign([(TOPIC, partition) for partition in range(PARTITIONS)])
        await self._load(WARM_UP_RECORDS, WARM_UP_RECORDS)

    async def turn(self, rate: float, seconds: float) -> Turn:
        """The load for so long; BenchError where the follower's rack was not read from."""
        pids = [node.pid for node in self._brokers if node.pid is not None]
        near = next(node.node_id for node in self._brokers if node.rack == FOLLOWER_RACK)
        before = self._read_from()
        fetches, cpu, begun = await self._fetches(), system.cpu_seconds(pids), time.perf_counter()
        if rate:
            follower, leader = await self._load(max(1, round(rate * seconds)), rate)
        else:
            await asyncio.sleep(seconds)
            follower, leader = [], []
        cpu, passed = system.cpu_seconds(pids) - cpu, time.perf_counter() - begun
        fetches = await self._fetches() - fetches
        others = {node: count - before.get(node, 0) for node, count in self._read_from().items() if node != near}
        if any(others.values()):
            raise harness.BenchError(f"wakeup: the consumer in {FOLLOWER_RACK} read elsewhere: {others}")
        return Turn(fetches / passed, cpu / passed * 100, _percentiles(follower), _percentiles(leader))

    async def _load(self, count: int, rate: float) -> tuple[list[float], list[float]]:
        """Seconds from sending to having each record: through the follower, from the leader; BenchError."""
        first = len(self._sent_at)
        work = [
            self._read(self._consumers[FOLLOWER_RACK], first, count),
            self._read(self._consumers[LEADER_RACK], first, count),
            self._send(count, rate),
        ]
        tasks = [asyncio.create_task(one) for one in work]
        try:
            async with asyncio.timeout(count / rate + WAIT_S):
                follower, leader, _ = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return follower, leader

    async def _send(self, count: int, rate: float) -> list[float]:
        begun = time.perf_counter()
        for number in range(count):
            await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
            index = len(self._sent_at)
            self._sent_at.append(time.perf_counter())
            value = index.to_bytes(8, "big") + bytes(RECORD_BYTES - 8)
            await self._producer.send(TOPIC, value, partition=index % PARTITIONS)
        return []

    async def _read(self, consumer: Consumer, first: int, count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            records = await consumer.poll(timeout_ms=1000)
            now = time.perf_counter()
            for record in records:
                index = int.from_bytes((record.value or b"")[:8], "big")
                if index < first:
                    raise harness.BenchError("wakeup: a record came twice")
                times.append(now - self._sent_at[index])
        return times

    def _read_from(self) -> dict[int, int]:
        return dict(self._consumers[FOLLOWER_RACK].fetch_stats.bytes_by_node)

    async def _fetches(self) -> float:
        """Of followers, that brokers took so far."""
        found = 0.0
        for node in self._brokers:
            for family in text_string_to_metric_families(
                await asyncio.to_thread(scrape, f"http://{node.http}/metrics")
            ):
                if family.name == "kipmesh_broker_fetch_requests":
                    found += sum(
                        sample.value
                        for sample in family.samples
                        if sample.name.endswith("_total") and sample.labels["role"] == "follower"
                    )
        return found


Found = dict[float, list[Pair]]


async def measure(on: LocalCluster, off: LocalCluster, rates: Sequence[float], runs: int, seconds: float) -> Found:
    """All turns; which of the two is first changes each time."""
    found: Found = {rate: [] for rate in rates}
    async with AsyncExitStack() as stack:
        sides = Side(on), Side(off)
        for side in sides:
            await side.start(stack)
        for number in range(runs):
            for rate in rates:
                turns = {side: await side.turn(rate, seconds) for side in (sides if number % 2 == 0 else sides[::-1])}
                found[rate].append(Pair(turns[sides[0]], turns[sides[1]]))
                harness.say(MODULE, f"run {number + 1}/{runs}: {as_table({rate: found[rate][-1:]}).splitlines()[-1]}")
    return found


FIGURES: Mapping[str, tuple[str, Callable[[Turn], float]]] = {
    "fetches of followers a second": (".1f", lambda turn: turn.fetches_s),
    "CPU of the brokers, % of a core": (".1f", lambda turn: turn.cpu_percent),
    "through the follower, ms: p50": (".1f", lambda turn: turn.follower_ms[0]),
    "p99": (".1f", lambda turn: turn.follower_ms[1]),
    "from the leader, ms: p50": (".1f", lambda turn: turn.leader_ms[0]),
    "its p99": (".1f", lambda turn: turn.leader_ms[1]),
}


def _cell(pairs: Sequence[Pair], form: str, value: Callable[[Turn], float]) -> str:
    """Medians with it and without it, and the median and range of the pairs' ratios."""
    on, off = [value(pair.on) for pair in pairs], [value(pair.off) for pair in pairs]
    ratios = [one / other for one, other in zip(on, off, strict=True) if other]
    if not ratios or isnan(ratios[0]):
        return "-"
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
    return f"{statistics.median(on):,{form}}, {statistics.median(off):,{form}}: {spread}"


def as_table(found: Found) -> str:
    """A row for each load."""
    lines = [f"| records a second | {' | '.join(FIGURES)} |", "|---:" * (len(FIGURES) + 1) + "|"]
    for rate, pairs in found.items():
        cells = [_cell(pairs, form, value) for form, value in FIGURES.values()]
        lines.append(f"| {rate:,g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(rates: Sequence[float], runs: int, seconds: float) -> Found:
    """Two clusters from start to stop; BenchError, ClusterError, KafkaError."""
    with ExitStack() as stack:
        on, off = [
            stack.enter_context(harness.three_brokers(config={**SELECTOR, KEY: value})) for value in ("true", "false")
        ]
        return asyncio.run(measure(on, off, rates, runs, seconds))


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(MODULE, __doc__, "few seconds of each", f"{harness.TABLE} (the default)")
    parser.add_argument(
        "--runs", type=int, default=None, help="rounds of each cluster with each load (3; 1 with --quick)"
    )
    parser.add_argument("--seconds", type=float, default=None, help="of a round (10; 3 with --quick)")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="records a second")
    options = parser.parse_args(given)
    harness.fill(options, {"runs": 1, "seconds": 3.0}, {"runs": 3, "seconds": 10.0})
    if not 1 <= options.runs <= 100 or not 0 < options.seconds <= 600:
        parser.error("runs from 1 to 100, seconds up to 600")
    if not all(0 <= rate <= 5000 for rate in options.rates):
        parser.error("up to 5,000 records a second")
    return options


def main(given: Sequence[str]) -> int:
    """Run, and print the figures."""
    options = arguments(given)
    found: Found = {}

    def loads() -> dict[str, Any]:
        return {f"{rate:g}": [{"on": pair.on, "off": pair.off} for pair in pairs] for rate, pairs in found.items()}

    return harness.run(
        MODULE,
        options,
        lambda: found.update(run(options.rates, options.runs, options.seconds)),
        figures=lambda: {"loads": loads()},
        text=lambda: as_table(found) if found else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
