"""Clusters and groups of figures of `bench.compare`. Each group is measured on a running cluster by client processes.

Clusters are kipmesh in two shapes, and Apache Kafka with its defaults and with our timeouts. Each has three brokers and
three replicas. kipmesh has three separate controllers. Each broker of Apache Kafka is a controller as well, which needs
the fewest JVMs.
"""

from __future__ import annotations

import json
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from bench import compare_clients, harness, system
from bench.compare_clients import FAILOVER_PARTITIONS
from bench.harness import BenchError
from bench.kafka import HEAP, ROOT, KafkaBroker, KafkaCluster, jmx_values, run_java
from kipmesh.cluster import NodeInfo

READY_SECONDS_MAX = 180
TUNED: Mapping[str, str] = {
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.timeout.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
}
"""Default timeouts of kipmesh, as configuration of Apache Kafka."""


class Apache:
    """A running cluster of three Apache Kafka brokers with additional properties, started by the constructor. Brokers
    are numbered from 1.

    The constructor and the methods raise KafkaMissingError.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._cluster = KafkaCluster(3, HEAP, lambda _broker: properties)
        self._cluster.__enter__()
        self.bootstrap = self._cluster.bootstrap

    def _alive(self) -> Sequence[KafkaBroker]:
        return [broker for broker in self._cluster.brokers if broker.is_running]

    def pids(self) -> list[int]:
        """Return the process ids of all running nodes and of their children."""
        return system.with_children(broker.pid for broker in self._alive())

    def kill(self, broker: int) -> None:
        """Send SIGKILL to the broker with this id and wait for it to exit."""
        self._cluster.brokers[broker - 1].kill()

    def restart(self, broker: int) -> None:
        """Start a killed broker again. Does not wait until it is ready."""
        self._cluster.brokers[broker - 1].start()

    def bytes_out(self) -> float:
        """Return the bytes that the running brokers have sent to consumers since their start, according to their
        metrics.
        """
        name = "kafka.server:type=BrokerTopicMetrics,name=BytesOutPerSec"
        found = [jmx_values(broker, [name]) for broker in self._alive()]
        return sum(value for each in found for key, value in each.items() if key.endswith(":Count"))

    def stop(self) -> None:
        """Kill all nodes and delete their data. In a clean stop, the last nodes would wait a minute for the lost
        quorum.
        """
        for broker in self._alive():
            broker.kill()
        self._cluster.stop()


class Ours:
    """A running cluster of kipmesh processes, started by the constructor: three controllers and three brokers.

    The constructor raises ClusterError, and BenchError if the cluster has no Kafka listener.
    """

    def __init__(self, leaders: int) -> None:
        self._cluster = harness.three_brokers(leaders, controllers=3)
        self._cluster.up()
        found = self._cluster.kafka_bootstrap
        if found is None:
            self._cluster.down()
            raise BenchError("the cluster has no Kafka listener")
        self.bootstrap = found

    def _brokers(self) -> Sequence[NodeInfo]:
        return [node for node in self._cluster.nodes if node.role.is_broker]

    def pids(self) -> list[int]:
        """Return the process ids of all running nodes and of their children."""
        return harness.pids(self._cluster)

    def kill(self, broker: int) -> None:
        """Send SIGKILL to the broker with this id."""
        self._cluster.kill(self._name(broker))

    def restart(self, broker: int) -> None:
        """Start a killed broker again and wait until it is ready. Raises ClusterError."""
        self._cluster.start(self._name(broker))

    def _name(self, broker: int) -> str:
        return next(node.name for node in self._brokers() if node.node_id == broker)

    def bytes_out(self) -> float:
        """Return the bytes that all brokers have sent to consumers since their start, according to their metrics.
        Raises OSError.
        """
        name = "kafka_server_brokertopicmetrics_bytesout_total"
        return sum(harness.metric(node.http, name) for node in self._brokers())

    def stop(self) -> None:
        """Stop all nodes. Raises ClusterError."""
        self._cluster.down()


Running: TypeAlias = Ours | Apache
_ALL = ("ready", "memory", "latency", "produce", "consume", "failover", "many")


class Shape(NamedTuple):
    """A kind of cluster to compare. `properties` are additional properties of Apache Kafka's brokers."""

    key: str
    label: str
    leaders: int = 0
    """Preferred leaders among the three brokers of kipmesh; 0 for Apache Kafka."""
    properties: Mapping[str, str] = {}
    groups: Sequence[str] = _ALL
    """Groups of figures that are measured."""

    def start(self) -> tuple[Running, float]:
        """Start a cluster, and return it with the seconds until a client sees three brokers. Raises ClusterError, or
        BenchError after 180 s.
        """
        begin = time.perf_counter()
        running: Running = Ours(self.leaders) if self.leaders else Apache(self.properties)
        try:
            while compare_clients.brokers(running.bootstrap) < 3:
                if time.perf_counter() - begin > READY_SECONDS_MAX:
                    raise BenchError(f"{self.label}: no three brokers within {READY_SECONDS_MAX} s")
                time.sleep(0.02)
        except BaseException:
            running.stop()
            raise
        return running, time.perf_counter() - begin


SHAPES: Sequence[Shape] = (
    Shape("ours", "kipmesh, 1 leader and 2 followers", leaders=1),
    Shape("kafka", "Apache Kafka"),
    Shape("ours3", "kipmesh, 3 leaders", leaders=3),
    Shape("tuned", "Apache Kafka, our timeouts", 0, TUNED, _ALL[:-1]),
)


PARTITIONS = 6
TOPIC, LATENCY_TOPIC, FAILOVER_TOPIC = "bench", "bench-latency", "bench-failover"
MANY_TOPICS, MANY_PARTITIONS = 30, 100
CLIENT_SECONDS_MAX = 180
SETTLE_S = 4
WARM_RECORDS = 40_000


class Sizes(NamedTuple):
    """Numbers of records, topics and kills, and waiting times in seconds, for the steps."""

    large_records: int = 200_000
    small_records: int = 800_000
    latencies: int = 1_000
    many_topics: int = MANY_TOPICS
    many_settle_s: float = 25
    idle_s: float = 15
    kills: int = 3


QUICK = Sizes(20_000, 80_000, 200, 3, 5, 5, 1)
Samples = dict[str, float]


def client(verb: str, **given: Any) -> dict[str, float]:
    """Run a step of `bench.compare_clients` in a new process and return the object that it prints. Raises BenchError if
    it fails or takes more than 180 s.
    """
    command = [sys.executable, "-m", "bench.compare_clients", verb, json.dumps(given)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=CLIENT_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{verb}: did not end within {CLIENT_SECONDS_MAX} s") from None
    if done.returncode:
        raise BenchError((done.stderr.strip().splitlines() or [f"{verb}: exit {done.returncode}"])[-1][:300])
    found: dict[str, float] = json.loads(done.stdout)
    return found


@dataclass(slots=True)
class Figures:
    """Measures the groups of figures on one cluster. A method named after a group returns its samples by key and raises
    BenchError.
    """

    _running: Running
    _sizes: Sizes
    _say: Callable[[str], None]
    _produced: dict[str, float] = field(default_factory=dict)
    _killed: int = -1

    def memory(self) -> Samples:
        """Measure the memory (PSS) of the new, idle cluster in MiB."""
        time.sleep(SETTLE_S)
        return {"memory_mib": system.pss_bytes(self._running.pids()) / (1 << 20)}

    def latency(self) -> Samples:
        """Measure p50 and p99 of the latency of single records, in ms, on a cluster with one topic."""
        found = self._latency(LATENCY_TOPIC)
        return {"latency_p50_ms": found["p50_ms"], "latency_p99_ms": found["p99_ms"]}

    def _latency(self, topic: str) -> dict[str, float]:
        bootstrap = self._running.bootstrap
        client("create", bootstrap=bootstrap, topics={topic: 1})
        before = self._running.bytes_out()
        found = client("latency", bootstrap=bootstrap, topic=topic, count=self._sizes.latencies)
        self._served("latency", before, found["bytes"])
        return found

    def _served(self, step: str, before: float, least: float) -> float:
        """Return the bytes that brokers have sent since the count `before`, according to their metrics. Raises
        BenchError if these are fewer than `least`.
        """
        time.sleep(1)
        served = self._running.bytes_out() - before
        if served < least:
            raise BenchError(f"{step}: {least:,.0f} bytes were read, but the brokers counted {served:,.0f}")
        return served

    def produce(self) -> Samples:
        """Measure the throughput of records of 1,000 B (MB/s) and of 100 B (records/s), after a warm-up."""
        bootstrap = self._running.bootstrap
        client("create", bootstrap=bootstrap, topics={TOPIC: PARTITIONS})
        loads = ((1000, WARM_RECORDS), (1000, self._sizes.large_records), (100, self._sizes.small_records))
        parts = [client("produce", bootstrap=bootstrap, topic=TOPIC, size=size, count=count) for size, count in loads]
        _, large, small = parts
        self._produced = {key: sum(each[key] for each in parts) for key in ("records", "bytes")}
        return {
            "produce_1000_mb_s": large["bytes"] / large["seconds"] / 1e6,
            "produce_100_records_s": small["records"] / small["seconds"],
        }

    def consume(self) -> Samples:
        """Measure the throughput (MB/s) of reading all produced records with librdkafka and with Kafka's performance
        tool. Checks that the brokers counted the bytes. Produces first if necessary.
        """
        if not self._produced:
            self.produce()
        bootstrap, count = self._running.bootstrap, int(self._produced["records"])
        before = self._running.bytes_out()
        found = client("consume", bootstrap=bootstrap, topic=TOPIC, partitions=PARTITIONS, count=count)
        if found["bytes"] != self._produced["bytes"]:
            raise BenchError(f"consume: read {found['bytes']:,.0f} of {self._produced['bytes']:,.0f} bytes")
        samples = {"consume_mb_s": found["bytes"] / found["seconds"] / 1e6}
        samples["java_consume_mb_s"] = self._java_consume(count)
        samples["served_mb"] = self._served("consume", before, 2 * found["bytes"]) / 1e6
        return samples

    def _java_consume(self, count: int) -> float:
        command = ["java", "-Xmx512m", "org.apache.kafka.tools.ConsumerPerformance", "--topic", TOPIC]
        command += ["--bootstrap-server", self._running.bootstrap, "--messages", str(count)]
        command += ["--timeout", "30000", "--group", "bench-java"]
        output = run_java("ConsumerPerformance", command, CLIENT_SECONDS_MAX)
        lines = [line.split(", ") for line in output.splitlines() if line.count(", ") >= 9]
        if len(lines) < 2:
            raise BenchError(f"ConsumerPerformance printed no figures: {output.strip()[-300:]}")
        row = dict(zip(lines[0], lines[-1], strict=False))
        if int(row["data.consumed.in.nMsg"]) < count:
            raise BenchError(f"ConsumerPerformance read {row['data.consumed.in.nMsg']} of {count} records")
        return float(row["fetch.MB.sec"]) * (1 << 20) / 1e6  # excludes joining the group

    def failover(self) -> Samples:
        """Kill the leader of a partition several times, and return the median and the longest gap in seconds. Waits
        before the next kill until the broker is back in sync.
        """
        bootstrap = self._running.bootstrap
        config = {"min.insync.replicas": "2"}
        client("create", bootstrap=bootstrap, topics={FAILOVER_TOPIC: FAILOVER_PARTITIONS}, config=config)
        gaps = []
        for kill in range(self._sizes.kills):
            if kill:
                self._running.restart(self._killed)
                client("complete", bootstrap=bootstrap, topic=FAILOVER_TOPIC, partitions=FAILOVER_PARTITIONS)
            gaps.append(self._kill_leader())
            self._say(f"  kill {kill + 1}: {gaps[-1]:.2f} s")
        return {"failover_gap_s": statistics.median(gaps), "failover_gap_max_s": max(gaps)}

    def _kill_leader(self) -> float:
        """Kill the leader at a random time, because clients and brokers have timers of several seconds. Return the
        longest gap in seconds.
        """
        given = {"bootstrap": self._running.bootstrap, "topic": FAILOVER_TOPIC, "delay_s": random.uniform(0, 2)}
        command = [sys.executable, "-m", "bench.compare_clients", "failover", json.dumps(given)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                assert process.stdout is not None
                ready, _, _ = select.select([process.stdout], [], [], CLIENT_SECONDS_MAX)
                if ready and (line := process.stdout.readline()):
                    self._killed = int(line)
                    self._running.kill(self._killed)
                output, errors = process.communicate("killed\n", timeout=CLIENT_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                raise BenchError(f"failover: did not end within {CLIENT_SECONDS_MAX} s") from None
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise BenchError((errors.strip().splitlines() or ["failover: no output"])[-1][:300])
        return float(json.loads(output)["gap_s"])

    def many(self) -> Samples:
        """Create thousands of partitions and measure them idle: creation (s), CPU, traffic, memory, and the latency of
        single records.
        """
        bootstrap = self._running.bootstrap
        topics = {f"many-{number:03}": MANY_PARTITIONS for number in range(self._sizes.many_topics)}
        created = client("create", bootstrap=bootstrap, topics=topics)
        self._say(f"  {len(topics) * MANY_PARTITIONS:,} partitions after {created['seconds']:.1f} s; settling ...")
        time.sleep(self._sizes.many_settle_s)
        pids = self._running.pids()
        cpu_percent, loopback_kb_s = system.idle_load(pids, self._sizes.idle_s)
        samples = {
            "many_create_s": created["seconds"],
            "many_cpu_percent": cpu_percent,
            "many_loopback_kb_s": loopback_kb_s,
            "many_memory_mib": system.pss_bytes(pids) / (1 << 20),
        }
        found = self._latency(LATENCY_TOPIC)
        return {**samples, "many_latency_p50_ms": found["p50_ms"], "many_latency_p99_ms": found["p99_ms"]}


FRESH: Sequence[Sequence[str]] = (("memory", "latency", "produce", "consume", "failover"), ("many",))
"""Groups that share a cluster, in this order. `failover` comes last, because a broker is dead after it."""
GROUPS: Sequence[str] = ("ready", *(name for share in FRESH for name in share))


def measure(
    shape: Shape,
    wanted: Sequence[str],
    sizes: Sizes,
    say: Callable[[str], None],
    keep: Callable[[str, Samples | None, str], None],
) -> None:
    """Measure the wanted groups of figures, on as many clusters as they need, and stop the clusters.

    Calls `keep` for each group with its name, its samples and "", or with None and the error. `say` prints progress.
    """
    shares = [[name for name in share if name in wanted] for share in FRESH]
    if "ready" in wanted and not any(shares):
        shares[0] = ["ready"]
    for share in filter(None, shares):
        try:
            running, seconds = shape.start()
        except Exception as error:  # any error of a cluster, while others are still measured
            for name in share:
                keep(name, None, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            continue
        try:
            say(f"{shape.label}: ready after {seconds:.2f} s")
            if "ready" in wanted:
                keep("ready", {"ready_s": seconds}, "")
            figures = Figures(running, sizes, say)
            for name in share:
                if name != "ready":
                    _group(figures, name, say, keep)
        finally:
            running.stop()


def _group(
    figures: Figures, name: str, say: Callable[[str], None], keep: Callable[[str, Samples | None, str], None]
) -> None:
    begin = time.perf_counter()
    try:
        found: Samples = getattr(figures, name)()
    except BenchError as error:
        keep(name, None, str(error))
        say(f"  {name}: failed: {error}")
        return
    keep(name, found, "")
    text = ", ".join(f"{key} {value:,.2f}" for key, value in found.items())
    say(f"  {name}: {text} ({time.perf_counter() - begin:.0f} s)")
