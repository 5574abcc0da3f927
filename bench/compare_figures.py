"""The figures of `bench.compare`: in groups, each measured on a cluster that is up, by clients in processes."""

from __future__ import annotations

import json
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench import system
from bench.compare_clients import FAILOVER_PARTITIONS
from bench.compare_shapes import Running, Shape
from bench.harness import BenchError
from bench.kafka import JARS, ROOT

PARTITIONS = 6
TOPIC, LATENCY_TOPIC, FAILOVER_TOPIC = "bench", "bench-latency", "bench-failover"
MANY_TOPICS, MANY_PARTITIONS = 30, 100
CLIENT_SECONDS_MAX = 180
SETTLE_S = 4
WARM_RECORDS = 40_000
JAVA = ("java", "-Xmx512m", "-cp", f"{JARS}/*")


class Sizes(NamedTuple):
    """How much of everything."""

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
    """What a client's process prints; BenchError."""
    command = [sys.executable, "-m", "bench.compare_clients", verb, json.dumps(given)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=CLIENT_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{verb}: not done within {CLIENT_SECONDS_MAX} s") from None
    if done.returncode:
        raise BenchError((done.stderr.strip().splitlines() or [f"{verb}: exit {done.returncode}"])[-1][:300])
    found: dict[str, float] = json.loads(done.stdout)
    return found


class Figures:
    """Of one cluster, from its start until it is stopped."""

    def __init__(self, shape: Shape, running: Running, sizes: Sizes, say: Callable[[str], None]) -> None:
        self._shape = shape
        self._running = running
        self._sizes = sizes
        self._say = say
        self._produced: dict[str, float] = {}
        self._killed = -1

    def memory(self) -> Samples:
        """Idle, before anything was done with it."""
        time.sleep(SETTLE_S)
        return {"memory_mib": system.pss_bytes(self._running.pids()) / (1 << 20)}

    def latency(self) -> Samples:
        """Of single records; the first eighth warms up."""
        found = self._latency(LATENCY_TOPIC)
        return {"latency_p50_ms": found["p50_ms"], "latency_p99_ms": found["p99_ms"]}

    def _latency(self, topic: str) -> dict[str, float]:
        bootstrap = self._running.bootstrap
        client("create", bootstrap=bootstrap, topics={topic: 1})
        before = self._running.bytes_out()
        found = client("latency", bootstrap=bootstrap, topic=topic, count=self._sizes.latencies)
        self._served("latency", before, found["bytes"])
        return found

    def _served(self, what: str, before: float, least: float) -> float:
        """What the brokers say that they sent since; BenchError if that is less than what came."""
        time.sleep(1)
        served = self._running.bytes_out() - before
        if served < least:
            raise BenchError(f"{what}: {least:,.0f} bytes came, the brokers say that they sent {served:,.0f}")
        return served

    def produce(self) -> Samples:
        """Large records, then small ones, after some that warm up."""
        bootstrap = self._running.bootstrap
        client("create", bootstrap=bootstrap, topics={TOPIC: PARTITIONS})
        warm = client("produce", bootstrap=bootstrap, topic=TOPIC, size=1000, count=WARM_RECORDS)
        large = client("produce", bootstrap=bootstrap, topic=TOPIC, size=1000, count=self._sizes.large_records)
        small = client("produce", bootstrap=bootstrap, topic=TOPIC, size=100, count=self._sizes.small_records)
        parts = (warm, large, small)
        self._produced = {key: sum(each[key] for each in parts) for key in ("records", "bytes")}
        return {
            "produce_1000_mb_s": large["bytes"] / large["seconds"] / 1e6,
            "produce_100_records_s": small["records"] / small["seconds"],
        }

    def consume(self) -> Samples:
        """All of it, by librdkafka and by Java's own performance tool; the brokers must say that they sent it."""
        if not self._produced:
            self.produce()
        bootstrap, count = self._running.bootstrap, int(self._produced["records"])
        before = self._running.bytes_out()
        found = client("consume", bootstrap=bootstrap, topic=TOPIC, partitions=PARTITIONS, count=count)
        if found["bytes"] != self._produced["bytes"]:
            raise BenchError(f"consume: {found['bytes']:,.0f} bytes came of {self._produced['bytes']:,.0f}")
        samples = {"consume_mb_s": found["bytes"] / found["seconds"] / 1e6}
        samples["java_consume_mb_s"] = self._java_consume(count)
        samples["served_mb"] = self._served("consume", before, 2 * found["bytes"]) / 1e6
        return samples

    def _java_consume(self, count: int) -> float:
        command = [*JAVA, "org.apache.kafka.tools.ConsumerPerformance", "--bootstrap-server", self._running.bootstrap]
        command += ["--topic", TOPIC, "--messages", str(count), "--timeout", "30000", "--group", "bench-java"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_SECONDS_MAX, check=False)
        except subprocess.TimeoutExpired:
            raise BenchError(f"Java's consumer was not done within {CLIENT_SECONDS_MAX} s") from None
        lines = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") >= 9]
        if done.returncode or len(lines) < 2:
            raise BenchError(f"Java's consumer failed: {(done.stderr + done.stdout).strip()[-300:]}")
        row = dict(zip(lines[0], lines[-1], strict=False))
        if int(row["data.consumed.in.nMsg"]) < count:
            raise BenchError(f"Java's consumer read {row['data.consumed.in.nMsg']} of {count} records")
        return float(row["fetch.MB.sec"]) * (1 << 20) / 1e6  # without the time that joining a group takes

    def failover(self) -> Samples:
        """The leader of a partition is killed, several times; before the next time it is back and in sync."""
        bootstrap = self._running.bootstrap
        config = {"min.insync.replicas": "2"}
        client("create", bootstrap=bootstrap, topics={FAILOVER_TOPIC: FAILOVER_PARTITIONS}, config=config)
        gaps = []
        for kill in range(self._sizes.kills):
            if kill:
                self._running.restart(self._killed)
                client("complete", bootstrap=bootstrap, topic=FAILOVER_TOPIC, partitions=FAILOVER_PARTITIONS)
            gaps.append(self._kill_a_leader())
            self._say(f"  kill {kill + 1}: {gaps[-1]:.2f} s")
        return {"failover_gap_s": statistics.median(gaps), "failover_gap_max_s": max(gaps)}

    def _kill_a_leader(self) -> float:
        """The longest gap; at a random moment, for clients and brokers have timers of a second and more."""
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
                raise BenchError(f"failover: not done within {CLIENT_SECONDS_MAX} s") from None
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise BenchError((errors.strip().splitlines() or ["failover failed"])[-1][:300])
        return float(json.loads(output)["gap_s"])

    def many(self) -> Samples:
        """What thousands of idle partitions cost, and what they do to latency."""
        bootstrap = self._running.bootstrap
        topics = {f"many-{number:03}": MANY_PARTITIONS for number in range(self._sizes.many_topics)}
        created = client("create", bootstrap=bootstrap, topics=topics)
        self._say(f"  {len(topics) * MANY_PARTITIONS:,} partitions after {created['seconds']:.1f} s; they settle ...")
        time.sleep(self._sizes.many_settle_s)
        pids = self._running.pids()
        cpu, loopback, begin = system.cpu_seconds(pids), system.loopback_bytes(), time.perf_counter()
        time.sleep(self._sizes.idle_s)
        seconds = time.perf_counter() - begin
        samples = {
            "many_create_s": created["seconds"],
            "many_cpu_percent": (system.cpu_seconds(pids) - cpu) / seconds * 100,
            "many_loopback_kb_s": (system.loopback_bytes() - loopback) / seconds / 1e3,
            "many_memory_mib": system.pss_bytes(pids) / (1 << 20),
        }
        found = self._latency(LATENCY_TOPIC)
        return {**samples, "many_latency_p50_ms": found["p50_ms"], "many_latency_p99_ms": found["p99_ms"]}


FRESH: Sequence[Sequence[str]] = (("memory", "latency", "produce", "consume", "failover"), ("many",))
"""Groups that share a cluster, in this order; `failover` leaves it short of a broker. Each start is `ready`, too."""
GROUPS: Sequence[str] = ("ready", *(name for share in FRESH for name in share))


def measure(
    shape: Shape,
    wanted: Sequence[str],
    sizes: Sizes,
    say: Callable[[str], None],
    keep: Callable[[str, Samples | None, str], None],
) -> None:
    """Start the shape as often as the groups need, and hand each group's samples to `keep`, or why there are none."""
    shares = [[name for name in share if name in wanted] for share in FRESH]
    if "ready" in wanted and not any(shares):
        shares[0] = ["ready"]
    for share in filter(None, shares):
        try:
            running, seconds = shape.start()
        except Exception as error:  # of a cluster: what it may be is not known here, and others are still measured
            for name in share:
                keep(name, None, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            continue
        try:
            say(f"{shape.label}: ready after {seconds:.2f} s")
            if "ready" in wanted:
                keep("ready", {"ready_s": seconds}, "")
            figures = Figures(shape, running, sizes, say)
            for name in share:
                if name != "ready":
                    _group(figures, name, say, keep)
        finally:
            running.stop()


def _group(
    figures: Figures, name: str, say: Callable[[str], None], keep: Callable[[str, Samples | None, str], None]
) -> None:
    methods: Mapping[str, Callable[[], Samples]] = {
        "memory": figures.memory,
        "latency": figures.latency,
        "produce": figures.produce,
        "consume": figures.consume,
        "failover": figures.failover,
        "many": figures.many,
    }
    begin = time.perf_counter()
    try:
        found = methods[name]()
    except BenchError as error:
        keep(name, None, str(error))
        say(f"  {name}: failed: {error}")
        return
    keep(name, found, "")
    told = ", ".join(f"{key} {value:,.2f}" for key, value in found.items())
    say(f"  {name}: {told} ({time.perf_counter() - begin:.0f} s)")
