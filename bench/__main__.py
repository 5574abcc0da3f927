"""`python -m bench`: figures of a local cluster with three replicas and acks=all, as medians of several runs.

Each run starts a new cluster of processes and stops it, also after an interruption. With `--partitions` the cluster is
idle, and then compared with a cluster of 100 partitions: a burst is one record of 100 B to each of 100 partitions of a
topic. Its time ends when a consumer of all partitions has returned the records. Both clusters alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from bench import closest, harness, system, workload
from bench.harness import Figure
from kipmesh.client import Consumer, Producer
from kipmesh.client.types import TopicPartition
from kipmesh.cluster import LocalCluster

T = TypeVar("T")
Samples = defaultdict[str, list[float]]

BURST = 100
"""Partitions of each topic with `--partitions`, and records of a burst."""
WARM_UP_BURSTS = 5
BURST_PAUSE_S = 0.2
BURST_TIMEOUT_S = 180
SETTLE_S = 75
"""New directories are synced within log.flush.offset.checkpoint.interval.ms."""

FIGURES: Sequence[Figure] = (
    Figure("ready_s", "start of all processes to ready", "s", 4, True),
    Figure("produce_1000B_mb_s", "produce, 1,000 B records", "MB/s", 30),
    Figure("produce_1000B_records_s", "the same", "records/s"),
    Figure("produce_100B_mb_s", "produce, 100 B records", "MB/s"),
    Figure("produce_100B_records_s", "the same", "records/s"),
    Figure("produce_mixed_mb_s", "produce, records of 1 to 4,000 B", "MB/s"),
    Figure("consume_mb_s", "consume, all of them", "MB/s", 80),
    Figure("consume_records_s", "the same", "records/s"),
    Figure("latency_p50_ms", "produce to consume, 100 B, one at a time: p50", "ms", 3, True),
    Figure("latency_p99_ms", "the same: p99", "ms"),
    Figure("memory_ready_mib", "memory of all processes when ready", "MiB"),
    Figure("memory_loaded_mib", "memory of all processes after the load", "MiB", 400, True),
    Figure("idle_cpu_percent", "idle CPU of all processes, percent of one core", "%", 50, True),
    Figure("idle_loopback_kb_s", "idle loopback traffic", "kB/s"),
    Figure("racks_off_kb_s", "consumers in two racks: read across racks", "kB/s"),
    Figure("racks_on_kb_s", "the same with RackAwareReplicaSelector", "kB/s"),
    Figure("racks_share_percent", "with it: share read in the own rack", "%", 99),
    Figure("create_s", "creating the partitions", "s"),
    Figure("burst_many_ms", "burst on 100 of them, to a consumer of all", "ms"),
    Figure("burst_few_ms", "the same on a cluster with 100 partitions", "ms"),
    Figure("burst_ratio", "the first beside the second", "x", 1.1, True),
)
MANY_TARGETS = {"idle_cpu_percent": 15.0, "idle_loopback_kb_s": 10.0}
"""Targets with `--partitions`: with fetch sessions, idle partitions cost next to nothing."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line and fill in defaults that depend on other options. Exits with 2 on a bad option."""
    parser = harness.Parser("bench", __doc__, "run a tenth of the load: seconds instead of minutes", harness.TABLE)
    parser.add_argument("--runs", type=int, default=None, help="number of runs (5; 1 with --quick or --partitions)")
    parser.number("--partitions", "only measure an idle cluster with so many partitions x 3", 0, least=0, most=100_000)
    parser.number("--leaders", "preferred leaders among the three brokers", 1, most=workload.REPLICAS)
    parser.number("--bursts", "bursts on each cluster, with --partitions", 50, least=0, most=10_000)
    parser.add_argument("--idle-seconds", type=float, help="seconds of idling (10; 3 with --quick, 60 --partitions)")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="configuration of the nodes")
    options = parser.parse(given)
    options.runs = options.runs or (1 if options.quick or options.partitions else 5)
    options.idle_seconds = options.idle_seconds or (60.0 if options.partitions else 3.0 if options.quick else 10.0)
    if options.runs < 1 or not 0 < options.idle_seconds <= 600:
        parser.error("--runs must be at least 1, and --idle-seconds at most 600")
    if options.partitions % BURST:
        parser.error(f"--partitions must be a multiple of {BURST}, got {options.partitions}")
    return options


def run(step: str, work: Coroutine[Any, Any, T]) -> T:
    """Print the name of the step, run a coroutine on a new event loop and return its result."""
    harness.say(f"{step} ...")
    return asyncio.run(work)


def memory_mib(cluster: LocalCluster) -> float:
    """Return the proportional set size of all processes of the cluster, in MiB. Raises OSError if one has ended."""
    return system.pss_bytes(harness.pids(cluster)) / (1 << 20)


def measure_load(cluster: LocalCluster, options: argparse.Namespace, samples: Samples) -> None:
    """Measure throughput and latency through the client library and add the figures to `samples`. Raises BenchError,
    KafkaError, TimeoutError.
    """
    bootstrap, share = cluster.bootstrap, 10 if options.quick else 1
    topic, warm_up = "bench", 20_000
    run("creating topics", workload.create_topic(bootstrap, topic, workload.PARTITIONS))
    run("warming up", workload.produce(bootstrap, topic, workload.values_of(1000), warm_up))
    total = warm_up

    def keep(name: str, rate: workload.Rate) -> None:
        harness.say(f"  {rate.mb_s:.1f} MB/s, {rate.records_s:,.0f} records/s")
        samples[f"{name}_mb_s"].append(rate.mb_s)
        samples[f"{name}_records_s"].append(rate.records_s)

    for name, values, count in (
        ("1000B", workload.values_of(1000), 300_000 // share),
        ("100B", workload.values_of(100), 1_000_000 // share),
        ("mixed", workload.mixed_values(4000), 100_000 // share),
    ):
        work = workload.produce(bootstrap, topic, values, count)
        keep(f"produce_{name}", run(f"producing {count:,} records, {name}", work))
        total += count
    work = workload.consume(bootstrap, topic, workload.PARTITIONS, total)
    keep("consume", run(f"consuming {total:,} records", work))
    run("creating topics", workload.create_topic(bootstrap, f"{topic}-latency", 1))
    times = run("latency of single records", workload.latencies_ms(bootstrap, f"{topic}-latency", 1600 // share))
    samples["latency_p50_ms"].append(workload.percentile(times, 0.5))
    samples["latency_p99_ms"].append(workload.percentile(times, 0.99))
    harness.say(f"  p50 {samples['latency_p50_ms'][-1]:.2f} ms, p99 {samples['latency_p99_ms'][-1]:.2f} ms")


# -- many partitions


def create_partitions(cluster: LocalCluster, partitions: int) -> list[TopicPartition]:
    """Create topics with `BURST` partitions each until there are `partitions` in total, and return all partitions.
    Raises KafkaError, TimeoutError.
    """
    created = []
    for first in range(0, partitions, BURST):
        topic = f"many-{first:06}"
        asyncio.run(workload.create_topic(cluster.bootstrap, topic, BURST))
        created += [TopicPartition(topic, partition) for partition in range(BURST)]
        harness.say(f"created {len(created):,} of {partitions:,} partitions")
    return created


class BurstLoad:
    """A producer of bursts and a consumer of all `partitions`, on one cluster. Each burst goes to one topic."""

    def __init__(self, bootstrap: str, partitions: Sequence[TopicPartition]) -> None:
        self._partitions = partitions
        first = len(partitions) // 2 // BURST * BURST  # one topic, so that both clusters get the same messages
        self._targets = partitions[first : first + BURST]
        self._value = workload.values_of(100)[0]
        self._producer = Producer(bootstrap, **{"acks": "all", "linger.ms": 0})
        self._consumer = Consumer(bootstrap, **{"auto.offset.reset": "earliest"})

    async def start(self) -> None:
        """Connect both clients. Raises KafkaError."""
        await self._producer.start()
        await self._consumer.start()
        self._consumer.assign(self._partitions)
        await self._producer.partitions_for(self._targets[0].topic)

    async def close(self) -> None:
        """Disconnect both clients."""
        await self._consumer.close()
        await self._producer.close()

    async def burst_ms(self) -> float:
        """Send one burst and return the milliseconds until it is consumed. Raises BenchError if the count is wrong,
        TimeoutError after 180 s, or KafkaError.
        """
        begin = time.perf_counter()
        deliveries = [await self._producer.send(to.topic, self._value, partition=to.partition) for to in self._targets]
        seen = 0
        async with asyncio.timeout(BURST_TIMEOUT_S):
            while seen < len(self._targets):
                seen += len(await self._consumer.poll(timeout_ms=BURST_TIMEOUT_S * 1000, max_records=1000))
        passed = (time.perf_counter() - begin) * 1e3
        await asyncio.gather(*deliveries)
        if seen != len(self._targets):
            raise harness.BenchError(f"burst: consumed {seen} records, sent {len(self._targets)}")
        return passed


async def alternate_bursts(many: BurstLoad, few: BurstLoad, rounds: int) -> tuple[list[float], list[float]]:
    """Alternate bursts between both clusters, and return their durations in ms on `many` and on `few`, without the
    warm-up. Closes both loads. Raises BenchError, KafkaError, TimeoutError.
    """
    times: tuple[list[float], list[float]] = [], []
    try:
        for load in (many, few):
            await load.start()
        for _ in range(WARM_UP_BURSTS + rounds):
            for load, into in zip((many, few), times, strict=True):
                await asyncio.sleep(BURST_PAUSE_S)
                into.append(await load.burst_ms())
    finally:
        await many.close()
        await few.close()
    return times[0][WARM_UP_BURSTS:], times[1][WARM_UP_BURSTS:]


def measure_bursts(many: BurstLoad, config: dict[str, str], options: argparse.Namespace, samples: Samples) -> None:
    """Add to `samples` the times of bursts on `many` and on a new cluster with only as many partitions as a burst has,
    and their median ratio.
    """
    harness.say("starting another cluster ...")
    with harness.three_brokers(options.leaders, config) as cluster:
        few = BurstLoad(cluster.bootstrap, create_partitions(cluster, BURST))
        times = run(f"{options.bursts} bursts on both", alternate_bursts(many, few, options.bursts))
    samples["burst_many_ms"] += times[0]
    samples["burst_few_ms"] += times[1]
    samples["burst_ratio"].append(statistics.median(one / other for one, other in zip(*times, strict=True)))


# -- runs


def measure_racks(samples: Samples) -> None:
    """Add to `samples` the bytes that consumers read across racks, without a selector and with one, each on a new
    cluster.
    """
    options = closest.arguments(["--quick"])
    for mode, key in (("off", "racks_off_kb_s"), ("fetch", "racks_on_kb_s")):
        harness.say(f"consumers in two racks, selector: {mode} ...")
        counted = closest.run_mode(mode, options, kills=False).brokers
        samples[key].append(counted.other / options.seconds / 1e3)
        harness.say(f"  {counted.own / 1e6:.2f} MB in the own rack, {counted.other / 1e6:.2f} MB across")
    samples["racks_share_percent"].append(counted.share)


def run_once(options: argparse.Namespace, samples: Samples) -> None:
    """Start a cluster, measure it, stop it, and add the figures to `samples`. Raises BenchError, ClusterError,
    KafkaError, TimeoutError.
    """
    config = harness.key_values(options.config)
    followers = workload.REPLICAS - options.leaders
    harness.say(f"starting 1 controller, {options.leaders} leaders, {followers} followers ...")
    begin = time.perf_counter()
    with harness.three_brokers(options.leaders, config) as cluster:
        samples["ready_s"].append(time.perf_counter() - begin)
        harness.say(f"  ready after {samples['ready_s'][-1]:.2f} s")
        samples["memory_ready_mib"].append(memory_mib(cluster))
        created: list[TopicPartition] = []
        if options.partitions:
            begin = time.perf_counter()
            created = create_partitions(cluster, options.partitions)
            samples["create_s"].append(time.perf_counter() - begin)
            harness.say(f"waiting for {SETTLE_S} s until new directories are synced ...")
            time.sleep(SETTLE_S)
        else:
            measure_load(cluster, options, samples)
            time.sleep(2)
        samples["memory_loaded_mib"].append(memory_mib(cluster))
        harness.say(f"idling for {options.idle_seconds:g} s ...")
        cpu_percent, loopback_kb_s = system.idle_load(harness.pids(cluster), options.idle_seconds)
        samples["idle_cpu_percent"].append(cpu_percent)
        samples["idle_loopback_kb_s"].append(loopback_kb_s)
        if created and options.bursts:
            measure_bursts(BurstLoad(cluster.bootstrap, created), config, options, samples)
    if not options.partitions:
        measure_racks(samples)


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures of all complete runs, and return the exit code of `harness.run`."""
    options = arguments(given)
    samples = Samples(list)

    def measure() -> None:
        for number in range(1, options.runs + 1):
            harness.say(f"run {number}/{options.runs}")
            of_run = Samples(list)
            run_once(options, of_run)
            for key, values in of_run.items():
                samples[key] += values

    def summaries() -> list[harness.Summary]:
        targets = MANY_TARGETS if options.partitions else {}
        figures = [
            each._replace(target=targets[each.key], is_upper=True) if each.key in targets else each for each in FIGURES
        ]
        return harness.summarize(samples, figures)

    about = {"quick": options.quick, "partitions": options.partitions}
    return harness.run(
        options,
        measure,
        figures=lambda: {**about, **harness.as_json(summaries())},
        text=lambda: harness.as_table(summaries(), markdown=options.markdown),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
