"""`python -m bench.wakeup`: cost and benefit of immediate high watermark updates to followers (392-02).

Compares `replica.fetch.high.watermark.wakeup` on and off. Two clusters (a controller, and a broker in each of three
racks; the broker in rack-a leads four partitions) run all the time and get the same load in alternation: records of
100 B at a steady rate, acks=all, read by a consumer in the leader's rack and by one in a follower's rack. Each round
measures the fetches of followers per second, the CPU of all three brokers, and the time from sending to reading a
record, through the follower and from the leader.
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

from bench import harness, system, workload
from kipmesh.client import Consumer, Producer
from kipmesh.cluster import LocalCluster

KEY = "replica.fetch.high.watermark.wakeup"
SELECTOR = {"replica.selector.class": "RackAwareReplicaSelector"}
LEADER_RACK, FOLLOWER_RACK = "rack-a", "rack-b"
TOPIC = "wakeup"
PARTITIONS = 4
RECORD_BYTES = 100
RATES = (0.0, 1.0, 10.0, 100.0, 1000.0)
WARM_UP_RECORDS = 200
WAIT_S = 60.0


class Round(NamedTuple):
    """Figures of one cluster under one load. `fetches_s` counts the followers' fetches per second. Latencies are nan
    without records.
    """

    fetches_s: float
    cpu_percent: float
    """Percent of one core, all brokers together."""
    follower_ms: tuple[float, float]
    """p50 and p99 of reads from the follower."""
    leader_ms: tuple[float, float]
    """p50 and p99 of reads from the leader."""


class Pair(NamedTuple):
    """Two consecutive rounds with the same load, on the cluster with wake-ups and on the one without."""

    on: Round
    off: Round


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times) or [float("nan")]
    return workload.percentile(ordered, 0.5) * 1e3, workload.percentile(ordered, 0.99) * 1e3


class Side:
    """One of the two clusters, a producer, and a consumer in the leader's rack and in a follower's rack."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._brokers = [node for node in cluster.nodes if node.role.is_broker]
        self._bootstrap = cluster.bootstrap
        self._producer = Producer(self._bootstrap, **{"acks": "all", "linger.ms": 0})
        self._consumers = {
            rack: Consumer(self._bootstrap, **{"auto.offset.reset": "earliest", "client.rack": rack})
            for rack in (LEADER_RACK, FOLLOWER_RACK)
        }
        self._sent_at: list[float] = []
        """Time at which each record was sent. A record's value is its index."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Create the topic, connect the clients in `stack`, and send and read some records. Raises BenchError,
        KafkaError, TimeoutError.
        """
        await workload.create_topic(self._bootstrap, TOPIC, PARTITIONS, len(self._brokers))
        await stack.enter_async_context(self._producer)
        for consumer in self._consumers.values():
            await stack.enter_async_context(consumer)
            consumer.assign([(TOPIC, partition) for partition in range(PARTITIONS)])
        await self._load(WARM_UP_RECORDS, WARM_UP_RECORDS)

    async def round(self, rate: float, seconds: float) -> Round:
        """Run a load of `rate` records per second for `seconds` (0: idle), and return the figures.

        Raises BenchError if the consumer in the follower's rack read from another broker or a record was repeated,
        TimeoutError if records did not arrive in time, KafkaError and OSError.
        """
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
            raise harness.BenchError(f"wakeup: the consumer in {FOLLOWER_RACK} read from other brokers: {others}")
        return Round(fetches / passed, cpu / passed * 100, _percentiles(follower), _percentiles(leader))

    async def _load(self, count: int, rate: float) -> tuple[list[float], list[float]]:
        """Send `count` records at `rate` per second. Returns the seconds from sending to reading each record: from the
        follower, and from the leader.
        """
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
                    raise harness.BenchError(f"wakeup: record {index} was read again")
                times.append(now - self._sent_at[index])
        return times

    def _read_from(self) -> dict[int, int]:
        return dict(self._consumers[FOLLOWER_RACK].fetch_stats.bytes_by_node)

    async def _fetches(self) -> float:
        """Return the number of followers' fetches that all brokers have served so far."""
        name = "kipmesh_broker_fetch_requests_total"
        work = [asyncio.to_thread(harness.metric, node.http, name, role="follower") for node in self._brokers]
        return sum(await asyncio.gather(*work))


Found = dict[float, list[Pair]]


async def measure(on: LocalCluster, off: LocalCluster, rates: Sequence[float], runs: int, seconds: float) -> Found:
    """Run all rounds and return them by rate. The order of the two clusters alternates. Raises BenchError, KafkaError,
    TimeoutError, OSError.
    """
    found: Found = {rate: [] for rate in rates}
    async with AsyncExitStack() as stack:
        sides = Side(on), Side(off)
        for side in sides:
            await side.start(stack)
        for number in range(runs):
            for rate in rates:
                rounds = {side: await side.round(rate, seconds) for side in (sides if number % 2 == 0 else sides[::-1])}
                found[rate].append(Pair(rounds[sides[0]], rounds[sides[1]]))
                harness.say(f"run {number + 1}/{runs}: {as_table({rate: found[rate][-1:]}).splitlines()[-1]}")
    return found


FIGURES: Mapping[str, tuple[str, Callable[[Round], float]]] = {
    "fetches of followers a second": (".1f", lambda one: one.fetches_s),
    "CPU of the brokers, % of a core": (".1f", lambda one: one.cpu_percent),
    "through the follower, ms: p50": (".1f", lambda one: one.follower_ms[0]),
    "p99": (".1f", lambda one: one.follower_ms[1]),
    "from the leader, ms: p50": (".1f", lambda one: one.leader_ms[0]),
    "its p99": (".1f", lambda one: one.leader_ms[1]),
}


def _cell(pairs: Sequence[Pair], form: str, value: Callable[[Round], float]) -> str:
    """Format the medians with and without wake-ups, and the median and range of the pairs' ratios. Returns `-` without
    ratios.
    """
    on, off = [value(pair.on) for pair in pairs], [value(pair.off) for pair in pairs]
    ratios = [one / other for one, other in zip(on, off, strict=True) if other]
    if not ratios or isnan(ratios[0]):
        return "-"
    return f"{statistics.median(on):,{form}}, {statistics.median(off):,{form}}: {harness.spread(ratios)}"


def as_table(found: Found) -> str:
    """Format a Markdown table with a row for each load."""
    rows = [
        [f"{rate:,g}", *(_cell(pairs, form, value) for form, value in FIGURES.values())]
        for rate, pairs in found.items()
    ]
    return harness.table(("records a second", *FIGURES), rows, left=0)


def run(rates: Sequence[float], runs: int, seconds: float) -> Found:
    """Start two clusters, run all rounds and stop them. Raises ClusterError and the errors of `measure`."""
    with ExitStack() as stack:
        on, off = [
            stack.enter_context(harness.three_brokers(config={**SELECTOR, KEY: value})) for value in ("true", "false")
        ]
        return asyncio.run(measure(on, off, rates, runs, seconds))


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser("bench.wakeup", __doc__, "run short rounds", f"{harness.TABLE} (the default)")
    parser.number("--runs", "rounds of each cluster with each load", 3, 1, most=100)
    parser.number("--seconds", "duration of a round", 10.0, 3.0, least=0.1, most=600)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="records per second of each load")
    options = parser.parse(given)
    if not all(0 <= rate <= 5000 for rate in options.rates):
        parser.error(f"--rates must be from 0 to 5,000, got {options.rates}")
    return options


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures, and return the exit code of `harness.run`. Without a complete run there are
    no figures.
    """
    options = arguments(given)
    found: Found = {}

    def loads() -> dict[str, Any]:
        return {f"{rate:g}": [{"on": pair.on, "off": pair.off} for pair in pairs] for rate, pairs in found.items()}

    return harness.run(
        options,
        lambda: found.update(run(options.rates, options.runs, options.seconds)),
        figures=lambda: {"loads": loads()},
        text=lambda: as_table(found) if found else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
