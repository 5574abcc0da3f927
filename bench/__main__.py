"""`python -m bench`: figures of a local cluster with three replicas and acks=all, each the median of several runs.

Each run is a new cluster of processes, which is gone at the end, also after an interruption. With `--partitions` it is
an idle one instead, and then there are bursts on 100 of its partitions, beside bursts on a cluster that has no others.
Progress goes to standard error, the figures to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from bench import bursts, closest, harness, report, system, workload
from kipmesh.client.types import TopicPartition
from kipmesh.cluster import LocalCluster

MODULE = "bench"

T = TypeVar("T")
Samples = defaultdict[str, list[float]]

_TOPIC_PARTITIONS = 100  # of one topic, where many partitions are wanted
_SETTLE_S = 75  # what creating leaves to do: new folders are synced within log.flush.offset.checkpoint.interval.ms


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(MODULE, __doc__, "a tenth of the load: seconds instead of minutes", harness.TABLE)
    parser.add_argument("--runs", type=int, default=None, help="how often (5; 1 with --quick or --partitions)")
    parser.add_argument(
        "--partitions", type=int, default=0, help="only: idle CPU and traffic with so many partitions x 3, and bursts"
    )
    parser.add_argument("--leaders", type=int, default=1, help="of the three brokers, with --partitions (1)")
    parser.add_argument("--bursts", type=int, default=50, help="with --partitions; 0 for none (50)")
    parser.add_argument("--idle-seconds", type=float, default=None, help="how long to watch an idle cluster")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="configuration of the nodes")
    options = parser.parse_args(given)
    options.runs = options.runs or (1 if options.quick or options.partitions else 5)
    options.idle_seconds = options.idle_seconds or (60.0 if options.partitions else 3.0 if options.quick else 10.0)
    if options.runs < 1 or not 0 <= options.partitions <= 100_000 or not 0 < options.idle_seconds <= 600:
        parser.error("runs from 1, partitions up to 100,000, idle seconds up to 600")
    if not 1 <= options.leaders <= workload.REPLICAS or not 0 <= options.bursts <= 10_000:
        parser.error("leaders from 1 to 3, bursts up to 10,000")
    if options.partitions % bursts.BURST:
        parser.error(f"partitions: a multiple of {bursts.BURST}")
    return options


class Progress:
    """Lines on standard error: what is going on, and what came of it."""

    def __init__(self) -> None:
        self._run = ""

    def start_run(self, run: int, runs: int) -> None:
        """The lines that follow belong to this run."""
        self._run = f"run {run}/{runs}"

    def say(self, text: str) -> None:
        """One line."""
        harness.say(MODULE, f"{self._run}: {text}")

    def run(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Do a step that has a loop of its own."""
        self.say(f"{what} ...")
        return asyncio.run(work)


def pids_of(cluster: LocalCluster) -> list[int]:
    """All processes of the cluster."""
    return system.with_children(node.pid for node in cluster.nodes if node.pid is not None)


def measure_idle(cluster: LocalCluster, seconds: float, samples: Samples) -> None:
    """CPU and loopback traffic while nobody does anything."""
    pids = pids_of(cluster)
    cpu, loopback, begin = system.cpu_seconds(pids), system.loopback_bytes(), time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begin
    samples["idle_cpu_percent"].append((system.cpu_seconds(pids) - cpu) / passed * 100)
    samples["idle_loopback_kb_s"].append((system.loopback_bytes() - loopback) / passed / 1e3)


def measure_load(cluster: LocalCluster, options: argparse.Namespace, progress: Progress, samples: Samples) -> None:
    """Throughput and latency through the client library."""
    bootstrap, share = cluster.bootstrap, 10 if options.quick else 1
    topic = "bench"
    progress.run("creating topics", workload.create_topic(bootstrap, topic, workload.PARTITIONS))
    progress.run("warming up", workload.produce(bootstrap, topic, workload.values_of(1000), 20_000))
    total = 20_000
    for name, values, count in (
        ("1000B", workload.values_of(1000), 300_000 // share),
        ("100B", workload.values_of(100), 1_000_000 // share),
        ("mixed", workload.mixed_values(4000), 100_000 // share),
    ):
        rate = progress.run(f"producing {count:,} records, {name}", workload.produce(bootstrap, topic, values, count))
        progress.say(f"  {rate.mb_s:.1f} MB/s, {rate.records_s:,.0f} records/s")
        samples[f"produce_{name}_mb_s"].append(rate.mb_s)
        samples[f"produce_{name}_records_s"].append(rate.records_s)
        total += count
    rate = progress.run(f"consuming {total:,} records", workload.consume(bootstrap, topic, workload.PARTITIONS, total))
    progress.say(f"  {rate.mb_s:.1f} MB/s, {rate.records_s:,.0f} records/s")
    samples["consume_mb_s"].append(rate.mb_s)
    samples["consume_records_s"].append(rate.records_s)
    progress.run("creating topics", workload.create_topic(bootstrap, f"{topic}-latency", 1))
    times = progress.run(
        "latency of single records", workload.latencies_ms(bootstrap, f"{topic}-latency", 1600 // share)
    )
    samples["latency_p50_ms"].append(workload.percentile(times, 0.5))
    samples["latency_p99_ms"].append(workload.percentile(times, 0.99))
    progress.say(f"  p50 {samples['latency_p50_ms'][-1]:.2f} ms, p99 {samples['latency_p99_ms'][-1]:.2f} ms")


def create_partitions(cluster: LocalCluster, partitions: int, progress: Progress) -> list[TopicPartition]:
    """Topics of 100 partitions each."""
    created = []
    for first in range(0, partitions, _TOPIC_PARTITIONS):
        topic = f"many-{first:06}"
        asyncio.run(workload.create_topic(cluster.bootstrap, topic, _TOPIC_PARTITIONS))
        created += [TopicPartition(topic, partition) for partition in range(_TOPIC_PARTITIONS)]
        progress.say(f"created {len(created):,} of {partitions:,} partitions")
    return created


def measure_bursts(
    many: bursts.Load, config: dict[str, str], options: argparse.Namespace, progress: Progress, samples: Samples
) -> None:
    """Bursts on a cluster with many partitions and on one with as many as a burst has, in turns."""
    progress.say("starting another cluster ...")
    with harness.three_brokers(options.leaders, config) as cluster:
        few = bursts.Load(cluster.bootstrap, create_partitions(cluster, bursts.BURST, progress))
        times = progress.run(f"{options.bursts} bursts on both", bursts.alternate(many, few, options.bursts))
    samples["burst_many_ms"] += times.many_ms
    samples["burst_few_ms"] += times.few_ms
    samples["burst_ratio"].append(times.ratio)


def measure_racks(progress: Progress, samples: Samples) -> None:
    """What consumers in two racks read across racks, without a selector and with one; clusters of their own."""
    options = closest.arguments(["--quick"])
    for mode, key in (("off", "racks_off_kb_s"), ("fetch", "racks_on_kb_s")):
        progress.say(f"consumers in two racks, selector: {mode} ...")
        told = closest.run_mode(mode, options, kills=False).brokers
        samples[key].append(told.other / options.seconds / 1e3)
        progress.say(f"  {told.own / 1e6:.2f} MB in the own rack, {told.other / 1e6:.2f} MB across")
    samples["racks_share_percent"].append(told.share)


def run_once(options: argparse.Namespace, progress: Progress, samples: Samples) -> None:
    """One cluster from start to stop."""
    config = harness.key_values(options.config)
    followers = workload.REPLICAS - options.leaders
    progress.say(f"starting 1 controller, {options.leaders} leaders, {followers} followers ...")
    begin = time.perf_counter()
    with harness.three_brokers(options.leaders, config) as cluster:
        samples["ready_s"].append(time.perf_counter() - begin)
        progress.say(f"  ready after {samples['ready_s'][-1]:.2f} s")
        samples["memory_ready_mib"].append(system.pss_bytes(pids_of(cluster)) / (1 << 20))
        created: list[TopicPartition] = []
        if options.partitions:
            begin = time.perf_counter()
            created = create_partitions(cluster, options.partitions, progress)
            samples["create_s"].append(time.perf_counter() - begin)
            progress.say(f"letting it settle for {_SETTLE_S} s ...")
            time.sleep(_SETTLE_S)
        else:
            measure_load(cluster, options, progress, samples)
            time.sleep(2)
        samples["memory_loaded_mib"].append(system.pss_bytes(pids_of(cluster)) / (1 << 20))
        progress.say(f"watching the idle cluster for {options.idle_seconds:g} s ...")
        measure_idle(cluster, options.idle_seconds, samples)
        if created and options.bursts:
            measure_bursts(bursts.Load(cluster.bootstrap, created), config, options, progress, samples)
    if not options.partitions:
        measure_racks(progress, samples)


def main(given: Sequence[str]) -> int:
    """Run, and print the figures of the runs that were completed."""
    options = arguments(given)
    progress, samples = Progress(), Samples(list)

    def measure() -> None:
        for run in range(1, options.runs + 1):
            progress.start_run(run, options.runs)
            mine = Samples(list)
            run_once(options, progress, mine)
            for key, values in mine.items():
                samples[key] += values

    def summaries() -> list[report.Summary]:
        return report.summarize(samples, report.MANY_FIGURES if options.partitions else report.FIGURES)

    about = {"quick": options.quick, "partitions": options.partitions}
    return harness.run(
        MODULE,
        options,
        measure,
        figures=lambda: {**about, **report.figures(summaries())},
        text=lambda: report.table(summaries(), markdown=options.markdown),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
