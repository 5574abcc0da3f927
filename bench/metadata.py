"""`python -m bench.metadata`: cost of metadata for a producer of many topics (KIP-526).

- Start-up: one record to each topic. Shape `awaited` waits for each acknowledgement before the next record, `burst`
  sends all records first. Compares `metadata.refresh=paced` and `=all` on a local cluster with the Java producer on
  Apache Kafka. Each producer is a new process. Clusters have one broker, and topics one partition and replica. The time
  is from the creation of the producer to the last acknowledgement.
- Steady state in simulated time (`kipmesh_jobs.plan.producer_day`): the topics are used for ten hours, paced and
  literal, and then idle. `--chart F.svg` draws requests and topics per ten seconds.
- `--day`: only simulates a day with 100,000 topics under each pattern of use, and checks its invariants.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import charts, harness, kafka, system
from bench.charts import Bars, Series
from kipmesh.client import NewTopic, Producer
from kipmesh.client.sync import AdminClient
from kipmesh.cluster import LocalCluster
from kipmesh_jobs.plan.producer_day import WINDOW_MS, Day, DayConfig, DayResult

SHAPES = ("awaited", "burst")
JAVA = "Java producer, Apache Kafka"
TOPICS_PER_REQUEST = 500
VALUE = b"x" * 100
CONFIG = {"linger.ms": 0, "acks": "all", "max.block.ms": 600_000, "delivery.timeout.ms": 600_000}
ALL_LIMIT_S = 300.0
"""Time limit of mode `all` in shape `awaited`, which is quadratic in the topics. Requests until then count."""
BYTES_RATIO_TARGET = 50
"""Minimum ratio of bytes of `metadata.refresh=all` to `paced` in shape `awaited`."""


class Row(NamedTuple):
    """Figures of one producer in one shape of the start-up.

    `requests`, `topics` and `bytes` are those of the producer's metadata requests; `bytes` counts requests and
    responses. `total_s` is the time until the last acknowledgement.
    """

    shape: str
    producer: str
    requests: int
    topics: int
    bytes: int
    total_s: float
    peak_mib: float
    client_cpu_s: float
    cluster_cpu_s: float
    """CPU time of all processes of the cluster."""
    load: float
    """Load average of the machine."""
    broker_requests: int | None = None
    """Metadata requests that Apache Kafka's broker counted."""
    broker_received_bytes: int | None = None
    """Their bytes, without headers."""


def topic_name(number: int) -> str:
    """Return the name of a topic. The Java program uses the same names."""
    return f"metadata-{number:06}"


async def _produce(bootstrap: str, shape: str, mode: str, topics: int, all_limit_s: float) -> dict[str, Any]:
    names = [topic_name(number) for number in range(topics)]
    begin = time.perf_counter()
    async with Producer(bootstrap, **CONFIG, **{"metadata.refresh": mode}) as producer:
        if shape == "awaited":
            for name in names:
                await (await producer.send(name, VALUE))
                if mode == "all" and time.perf_counter() - begin > all_limit_s:
                    break
        else:
            await asyncio.gather(*await asyncio.gather(*[producer.send(name, VALUE) for name in names]))
        total_s = time.perf_counter() - begin
        metrics = producer.metrics()
    kinds = ("urgent", "non_urgent")
    return {
        "total_s": total_s,
        **{what: sum(metrics[f"metadata_{kind}_{what}"] for kind in kinds) for what in ("requests", "topics", "bytes")},
        "peak_mib": system.peak_resident_bytes() / (1 << 20),
    }


def step(given: str) -> str:
    """Run one of our producers and return its figures as JSON.

    `given` is BOOTSTRAP,SHAPE,MODE,TOPICS[,LIMIT_S].
    """
    bootstrap, shape, mode, topics, *limit_s = given.split(",")
    all_limit_s = float(limit_s[0]) if limit_s else ALL_LIMIT_S
    return json.dumps(asyncio.run(_produce(bootstrap, shape, mode, int(topics), all_limit_s)))


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Clocks:
    """CPU seconds used by the processes `nodes` and by ended child processes of this process since the object was
    created.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._cluster_s, self._children_s = system.cpu_seconds(nodes), _cpu_of_children_s()

    def row(self, shape: str, producer: str, figures: dict[str, Any]) -> Row:
        """Return a row with the figures of a producer and the CPU times since this object was created, and print the
        row as progress.
        """
        client_s = _cpu_of_children_s() - self._children_s
        cluster_s = system.cpu_seconds(self._nodes) - self._cluster_s
        row = Row(shape, producer, **figures, client_cpu_s=client_s, cluster_cpu_s=cluster_s, load=os.getloadavg()[0])
        harness.say(json.dumps(row._asdict()))
        return row


def _ours(topics: int, shapes: Sequence[str], all_limit_s: float) -> list[Row]:
    rows = []
    with LocalCluster(mode="processes", controllers=1, leaders=1, followers=0) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            for first in range(0, topics, TOPICS_PER_REQUEST):
                last = min(first + TOPICS_PER_REQUEST, topics)
                admin.create_topics([NewTopic(topic_name(number), 1, 1) for number in range(first, last)])
        nodes = harness.pids(cluster)
        # The slowest comes last: `all`, awaited.
        for shape, mode in [*((each, "paced") for each in shapes), *((each, "all") for each in reversed(shapes))]:
            clocks = _Clocks(nodes)
            figures = harness.in_process(
                "bench.metadata", "--step", ",".join(map(str, (cluster.bootstrap, shape, mode, topics, all_limit_s)))
            )
            rows.append(clocks.row(shape, f"`{mode}`", figures))
    return rows


def _java(topics: int, shapes: Sequence[str]) -> list[Row]:
    rows = []
    name = "ProducerStart"
    with tempfile.TemporaryDirectory() as directory, kafka.KafkaBroker() as broker:
        classes = Path(directory)
        kafka.compile_program(name, classes)
        address = (broker.bootstrap, str(broker.jmx_port))
        kafka.run_program(name, classes, *address, "create", str(topics), "1")
        for shape in shapes:
            clocks = _Clocks([broker.pid])
            figures = kafka.run_program(name, classes, *address, shape, str(topics))
            rows.append(clocks.row(shape, JAVA, figures))
    return rows


def start_up(topics: int, shapes: Sequence[str], with_kafka: bool, all_limit_s: float) -> list[Row]:
    """Measure each producer in each shape and return a row for each pair. The Java producer is left out if it cannot be
    run.

    Args:
        with_kafka: whether to run the Java producer at all.
        all_limit_s: time limit of mode `all` in shape `awaited`.
    """
    rows: list[Row] = []
    if with_kafka:
        try:
            rows = _java(topics, shapes)
        except kafka.KafkaMissingError as error:
            harness.say(f"without Apache Kafka: {error}")
    rows += _ours(topics, shapes, all_limit_s)
    return sorted(rows, key=lambda row: (shapes.index(row.shape), row.producer == JAVA))


def as_markdown(rows: Sequence[Row], topics: int) -> list[str]:
    """Return the lines of a table and, for each shape, of a comparison of the producers."""
    head = ["shape", "producer", "metadata requests", "topics requested", "bytes of metadata", "total", "peak memory"]
    cells = [
        (
            row.shape,
            f"{row.producer}{_stopped(row, topics)}",
            *(f"{value:,}" for value in (row.requests, row.topics, row.bytes)),
            f"{row.total_s:.1f} s",
            f"{row.peak_mib:.0f} MiB",
            f"{row.client_cpu_s:.1f} s, {row.cluster_cpu_s:.1f} s",
            f"{row.load:.1f}",
        )
        for row in rows
    ]
    lines = harness.table([*head, "CPU: client, cluster", "load"], cells, left=2).splitlines()
    comparisons: list[str] = []
    for shape in dict.fromkeys(row.shape for row in rows):
        by = {row.producer: row for row in rows if row.shape == shape}
        comparisons += _compared(by["`paced`"], by["`all`"], by.get(JAVA), topics)
    return [f"One record to each of {topics:,} topics.", "", *lines, "", *comparisons]


def _stopped(row: Row, topics: int) -> str:
    """Return a note if mode `all` in shape `awaited` stopped early, otherwise an empty string. It sends one request per
    topic.
    """
    is_stopped = row.shape == "awaited" and row.producer == "`all`" and row.requests < topics
    return f", stopped after {row.requests:,} topics" if is_stopped else ""


def _compared(few: Row, every: Row, java: Row | None, topics: int) -> list[str]:
    is_stopped = bool(_stopped(every, topics))
    ratio = every.bytes / few.bytes
    text = f"- {few.shape}: `all` moved {'more than ' if is_stopped else ''}{ratio:,.1f} times the bytes of `paced`"
    if few.shape == "awaited":
        text += f" (>= {BYTES_RATIO_TARGET}: {harness.met(ratio >= BYTES_RATIO_TARGET)})"
    lines = [text + ("." if is_stopped else f", in {every.total_s / few.total_s:.2f} times its time.")]
    if java is not None:
        share = few.total_s / java.total_s
        lines.append(
            f"- {few.shape}: `paced` took {share:.2f} of the Java producer's time "
            f"(< 1: {harness.met(share < 1)}). Apache Kafka's broker counted {java.broker_requests or 0:,} "
            f"metadata requests, the Java producer {java.requests:,}."
        )
    return lines


HOURS = 10
USES_A_TOPIC_S = 240
"""Interval of the records of each topic in the steady state. No topic is evicted."""
QUIET_S = 900
"""Time without records after the steady state. Each topic is evicted."""
STEADY_MS = 300_000
"""The steady state begins after the urgent requests of the start and the first spreading."""
DAY_TOPICS = 100_000
DAY_RECORDS_PER_S = {"uniform": 500.0, "zipf": 300.0, "bursts": 1.0, "idle": 1.0, "steady": 400.0}


def steady(topics: int, hours: int) -> dict[str, DayResult]:
    """Simulate `hours` of steady use of all topics in the modes `paced` and `literal`; return the results by mode.
    Raises DayError if an invariant is violated.
    """
    found = {}
    for mode in ("paced", "literal"):
        kind: Any = mode
        config = DayConfig(
            "steady",
            kind,
            topics=topics,
            duration_s=hours * 3600 + QUIET_S,
            quiet_s=QUIET_S,
            records_per_s=topics / USES_A_TOPIC_S,
            scan_every_ms=600_000,
        )
        found[mode] = Day(config).run()
    return found


def day(topics: int, hours: int, patterns: Sequence[str] = tuple(DAY_RECORDS_PER_S)) -> list[str]:
    """Simulate `hours` under each pattern of use, and return the lines of a table. Raises DayError if an invariant is
    violated.
    """
    head = ["pattern", "records", "urgent requests", "their topics", "other requests", "their topics", "evictions"]
    rows = []
    for pattern in patterns:
        kind: Any = pattern
        begin = time.process_time()
        config = DayConfig(
            kind,
            topics=topics,
            duration_s=hours * 3600,
            records_per_s=DAY_RECORDS_PER_S[pattern] * topics / DAY_TOPICS,
            missing_share=0.0005,
            moves_per_s=0.1,
            scan_every_ms=1_800_000,
        )
        result = Day(config).run()
        counts = result.metrics
        requests = (counts.urgent_requests, counts.urgent_topics, counts.non_urgent_requests, counts.non_urgent_topics)
        numbers = (result.records, *requests, counts.evictions, result.cached_most)
        ages = (f"{ms / 1000:.2f} s" for ms in (result.oldest_ms, result.idle_longest_ms))
        rows.append((f"`{pattern}`", *(f"{each:,}" for each in numbers), *ages))
        harness.say(f"{pattern}: {time.process_time() - begin:.0f} s of CPU")
    return harness.table([*head, "most topics cached", "oldest metadata", "longest idle"], rows).splitlines()


def _steady_text(found: dict[str, DayResult], topics: int, hours: int) -> list[str]:
    head = ["`metadata.refresh`", "requests", "topics requested", "most requests in 10 s", "most topics in 10 s"]
    head += ["windows without a request", "oldest metadata", "evictions", "idle until then"]
    windows = range(STEADY_MS // WINDOW_MS, hours * 3_600_000 // WINDOW_MS)
    rows = [
        (
            f"`{mode}`",
            f"{sum(result.requests.values()):,}",
            f"{sum(result.topics.values()):,}",
            max(result.requests[each] for each in windows),
            f"{max(result.topics[each] for each in windows):,}",
            f"{sum(not result.requests[each] for each in windows):,} of {len(windows):,}",
            f"{result.oldest_ms / 1000:.2f} s",
            f"{result.metrics.evictions:,}",
            f"{result.idle_shortest_ms / 1000:.2f} to {result.idle_longest_ms / 1000:.2f} s",
        )
        for mode, result in found.items()
    ]
    title = f"{topics:,} topics in use for {hours} simulated hours, and then idle."
    return [title, "", *harness.table(head, rows).splitlines()]


def steady_chart(found: dict[str, DayResult], hours: int) -> str:
    """Return an SVG with columns: requests and topics per ten seconds, by mode."""
    windows = hours * 3_600_000 // WINDOW_MS
    series = []
    for name in ("requests", "topics"):
        for mode, result in found.items():
            counts = getattr(result, name)
            # Without the start, whose urgent requests name all topics.
            columns = [counts[each] if each else 0 for each in range(windows)]
            series.append(Series(f"{mode}: {name} in ten seconds", columns))
    return charts.columns(series, hours)


def start_chart(rows: Sequence[Row]) -> str:
    """Return an SVG with bars: bytes of metadata on a logarithmic axis, and times, by shape and producer."""
    panels = []
    for shape in dict.fromkeys(row.shape for row in rows):
        of_shape = [row for row in rows if row.shape == shape]
        names = [row.producer.replace("`", "") for row in of_shape]
        panels.append(Bars(f"{shape}: bytes of metadata", names, [row.bytes for row in of_shape], is_log=True))
        panels.append(Bars(f"{shape}: seconds to the last acknowledgement", names, [row.total_s for row in of_shape]))
    return charts.bars(panels)


def main(given: Sequence[str]) -> int:
    """Run the selected parts, print their tables, and return the exit code. With `--day` or `--step`, the exit code is
    0. DayError propagates.
    """
    parser = harness.Parser("bench.metadata", __doc__)
    parser.add_argument("--topics", type=int, help="number of topics (10,000; 100,000 with --day)")
    parser.add_argument("--hours", type=int, help="simulated hours (10; 24 with --day)")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=SHAPES, help="shapes of the start-up, or none")
    parser.add_argument("--no-kafka", action="store_true", help="leave out the Java producer")
    parser.number("--all-minutes", "time limit of `all`, awaited", ALL_LIMIT_S / 60, least=0.01)
    parser.add_argument("--no-steady", action="store_true", help="leave out the steady state")
    parser.add_argument("--day", action="store_true", help="only simulate a day under each pattern of use")
    parser.add_argument(
        "--patterns", nargs="+", choices=list(DAY_RECORDS_PER_S), default=list(DAY_RECORDS_PER_S), help="with --day"
    )
    parser.add_argument("--chart", type=Path, help="write the steady state as SVG")
    parser.add_argument("--start-chart", type=Path, help="write the start-up as SVG")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse(given)
    topics = options.topics or (DAY_TOPICS if options.day else 10_000)
    hours = options.hours or (24 if options.day else HOURS)
    if topics < 1 or hours < 1:
        parser.error("--topics and --hours must be at least 1")
    if options.step:
        sys.stdout.write(step(options.step))
        return 0
    if options.day:
        sys.stdout.write("\n".join(day(topics, hours, options.patterns)) + "\n")
        return 0
    rows: list[Row] = []
    found: dict[str, DayResult] = {}

    def measure() -> None:
        if options.shapes:
            rows.extend(start_up(topics, options.shapes, not options.no_kafka, options.all_minutes * 60))
            if options.start_chart:
                options.start_chart.write_text(start_chart(rows), encoding="utf-8")
        if not options.no_steady:
            found.update(steady(topics, hours))
            if options.chart:
                options.chart.write_text(steady_chart(found, hours), encoding="utf-8")

    def text() -> str:
        lines = [f"{key}: {value}" for key, value in system.describe_machine().items()]
        lines += ["", *as_markdown(rows, topics)] if rows else []
        lines += ["", *_steady_text(found, topics, hours)] if found else []
        return "\n".join(lines)

    def figures() -> dict[str, Any]:
        requests = {mode: sum(result.requests.values()) for mode, result in found.items()}
        return {"topics": topics, "start_up": [row._asdict() for row in rows], "steady_requests": requests}

    return harness.run(options, measure, figures=figures, text=text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
