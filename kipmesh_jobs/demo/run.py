"""The job of the demo: its steps in order.

A node that ends during the demo does not stop it, because other replicas have the acknowledged records. The demo
restarts such a node before it compares the replicas.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from kipmesh.cluster import NodeInfo, Role
from kipmesh.cluster.layout import Counts
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh.spark.java import ensure_java
from kipmesh_jobs.demo import proofs
from kipmesh_jobs.flights import dataset, feed, results, streams, values
from kipmesh_jobs.flights.job import RAIN
from kipmesh_jobs.frame import PARQUET, Job, JobRun, Outcome
from kipmesh_jobs.report import Check, Page, Row, Stage, Tables, percent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC: Final = "flights"
_SAMPLE: Final = 3
_MICRO_BATCHES: Final = 4
_BATCH_RECORDS_MIN: Final = 50_000
_BATCH_RECORDS_MAX: Final = 250_000
_CATCH_UP_SECONDS: Final = 30.0
_HTTP_SECONDS: Final = 10.0
_SPARK_START_SECONDS: Final = 120.0
_HEAT_FLIGHTS_MIN: Final = 20
_RADII: Final = {"Daily": 0, "7 days": 3, "4 weeks": 14}
_AIRPORTS: Final = {"EWR": "Newark", "JFK": "Kennedy", "LGA": "LaGuardia"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the demo: copies of the year, number of flights (None: all), and whether the cluster keeps running."""

    scale: int = 1
    limit: int | None = None
    keep: bool = False


def run(run: JobRun, options: Options) -> Outcome:
    """Start a cluster, produce all flights, stream them through Spark, check the results, and stop the cluster unless
    `keep`.

    The outcome's `passed` is False if a check fails. Raises JobError, ClusterError, JavaMissingError and KafkaError.
    """
    begin = time.monotonic()
    source = dataset.find_directory()
    ensure_java(run.screen.line)
    directory = run.directory.root / "cluster"
    left = feed.remove_cluster(directory)
    if left:
        run.screen.line(f"  stopped {left} processes of an earlier run")
    with ExitStack() as stack:
        with run.step("Start the mesh and Spark"):
            started = stack.enter_context(_starting(run))
            cluster = stack.enter_context(feed.local_cluster(directory, Counts(1, 1, 2, 1), keep=options.keep))
            year = dataset.load_flights(source, limit=options.limit)
            started()
        facts, tables = _run(run, options, cluster, year, source, begin)
    return _outcome(facts, tables, run.screen.stages, options, directory)


@contextmanager
def _starting(run: JobRun) -> Iterator[Callable[[], SparkSession]]:
    """Start Spark in a thread while the block runs. The yielded function waits for the session and returns it, or
    raises its error.

    The end of the block waits up to 120 s for the start, because a starting JVM cannot be cancelled.
    """

    def start() -> SparkSession:
        spark = run.start_spark()
        # The first use of a Python source starts processes to discover sources, which is done here in advance.
        spark.read.format("kipmesh").option("kafka.bootstrap.servers", "localhost:1").option("subscribe", TOPIC).load()
        return spark

    future = ThreadPoolExecutor(1).submit(start)
    try:
        yield future.result
    finally:
        with suppress(Exception):
            future.result(_SPARK_START_SECONDS)


def _run(
    run: JobRun, options: Options, cluster: ProcessCluster, year: pd.DataFrame, source: Path, begin: float
) -> tuple[dict[str, Any], Tables]:
    """Run all steps; return the facts and the tables of the run. Rates are per second; bytes are those of keys and
    values.
    """
    spark, bootstrap = run.spark, cluster.state().bootstrap
    total = len(year) * options.scale
    flights = (one for shift in range(options.scale) for one in dataset.encode(dataset.shift_years(year, shift)))
    expected = [proofs.SequenceDigest() for _ in range(feed.PARTITIONS)]
    with run.step("Produce, acks=all", total) as done:
        config = {"min.insync.replicas": "2"}
        feed.produce(bootstrap, TOPIC, proofs.expecting(flights, expected), done, {}, config)
    with run.step("Stream through Spark", total) as done:
        batches = _stream(run, bootstrap, values.load_references(spark, source, options.scale), total, done)
    with run.step("Delays, carriers, weather"):
        tables = results.write_tables(spark, run.parquet)
    with run.step("Read the topic with Spark, warm"):
        read_rate, read_records = _read_rate(spark, bootstrap)
    with run.step("Prove it"):
        checks, partitions = _prove(run, cluster, expected, year, options.scale)
        url, lines = _read_from_service(cluster)
    read, service = f"{read_records:,} of {total:,} records", f"{len(lines)} NDJSON lines"
    checks += [
        Check("A Spark batch read sees the same records", read_records == total, read),
        Check("The consumer service streams records over HTTP", len(lines) == _SAMPLE, service),
    ]
    seconds = {stage.name: stage.seconds for stage in run.screen.stages}
    produce_s, stream_s = seconds["Produce, acks=all"], seconds["Stream through Spark"]
    records, payload_bytes = sum(one.records for one in expected), sum(one.payload_bytes for one in expected)
    facts = {
        "passed": all(check.passed for check in checks),
        "scale": options.scale,
        "topic": TOPIC,
        "replication_factor": feed.REPLICATION_FACTOR,
        "records": records,
        "payload_bytes": payload_bytes,
        "produce_seconds": produce_s,
        "stream_seconds": stream_s,
        "stream_batches": len(batches),
        "total_seconds": time.monotonic() - begin,
        "read_records_per_second": read_rate,
        "sample_url": url,
        "produce_records_per_second": records / produce_s,
        "produce_mb_per_second": payload_bytes / produce_s / 1e6,
        "stream_records_per_second": records / stream_s,
        "stages": {name: round(took, 3) for name, took in seconds.items()},
        "checks": [check._asdict() for check in checks],
        "nodes": [{"name": node.name, "role": node.role, "rack": node.rack} for node in cluster.state().nodes],
        "partitions": [partition._asdict() for partition in partitions],
        "sample_lines": lines,
    }
    return facts, tables


def _stream(
    run: JobRun, bootstrap: str, references: values.References, total: int, report: Callable[[int], None]
) -> Mapping[int, int]:
    _, ends = streams.offsets(bootstrap, {}, TOPIC)
    settings = streams.StreamSettings(
        bootstrap=bootstrap,
        client={},
        topic=TOPIC,
        ends=ends,
        parquet=run.parquet,
        checkpoints=run.directory.work / "checkpoint",
        max_offsets_per_trigger=max(_BATCH_RECORDS_MIN, min(_BATCH_RECORDS_MAX, -(-total // _MICRO_BATCHES))),
    )
    return streams.run_flights(run.spark, settings, references, report)


def _read_rate(spark: SparkSession, bootstrap: str) -> tuple[float, int]:
    """Read the whole topic in two batch queries. Return the records per second of the second read, and the number of
    records.
    """
    begin, count = 0.0, 0
    for _ in range(2):
        begin = time.monotonic()
        reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", bootstrap)
        row = reader.option("subscribe", TOPIC).load().selectExpr("count(*)", "sum(length(value))").first()
        count = 0 if row is None else int(row[0])
    return count / (time.monotonic() - begin), count


def _prove(
    run: JobRun, cluster: ProcessCluster, expected: Sequence[proofs.SequenceDigest], year: pd.DataFrame, scale: int
) -> tuple[list[Check], tuple[proofs.PartitionFacts, ...]]:
    for status in cluster.status():
        if status.state == "stopped":
            run.screen.line(f"  {status.node.name} has ended; restarting it")
            cluster.start(status.node.name)
    found = proofs.read_topic(cluster.state().bootstrap, TOPIC, feed.PARTITIONS)
    checks = proofs.check_topic(found, expected)
    checks += proofs.check_totals(results.flight_counts(run.spark, run.parquet), year, scale)
    partitions = _compare_replicas(cluster.state().nodes, [one.records for one in found])
    return [*checks, proofs.check_replicas(partitions, feed.REPLICATION_FACTOR)], partitions


def _compare_replicas(nodes: Sequence[NodeInfo], ends: Sequence[int]) -> tuple[proofs.PartitionFacts, ...]:
    brokers = [node for node in nodes if node.role in (Role.LEADER, Role.FOLLOWER)]
    facts = []
    for partition, high_watermark in enumerate(ends):
        log_dirs = {node.name: Path(node.dir) / "data" / f"{TOPIC}-{partition}" for node in brokers}
        existing = proofs.existing_log_dirs(log_dirs, feed.REPLICATION_FACTOR, _CATCH_UP_SECONDS)
        digests = proofs.digest_until_equal(list(existing.values()), high_watermark, _CATCH_UP_SECONDS)
        one = digests[0]
        identical = len(set(digests)) == 1 and one.next_offset == high_watermark
        place = (partition, one.records, one.size_bytes, high_watermark)
        facts.append(proofs.PartitionFacts(*place, tuple(existing), identical, one.sha256))
    return tuple(facts)


def _read_from_service(cluster: ProcessCluster) -> tuple[str, list[str]]:
    """Read three records from the consumer service over HTTP; return the request and the response's non-empty lines."""
    node = next(node for node in cluster.state().nodes if node.role is Role.CONSUMER)
    url = f"http://{node.http}/v1/topics/{TOPIC}/records?limit={_SAMPLE}"
    with urllib.request.urlopen(url, timeout=_HTTP_SECONDS) as response:
        lines = response.read().decode().splitlines()
    return f"GET {url}", [line for line in lines if line]


def _outcome(
    facts: dict[str, Any], tables: Tables, stages: Sequence[Stage], options: Options, directory: Path
) -> Outcome:
    state = "is running" if options.keep else "can be restarted with: kipmesh local up"
    sample = facts.pop("sample_lines")
    lines = (
        facts["sample_url"],
        *(f"  {line}" for line in sample),
        f"{facts['records']:,} flights in {facts['total_seconds']:.1f} s: produced"
        f" {facts['produce_records_per_second']:,.0f}/s ({facts['produce_mb_per_second']:.1f} MB/s, acks=all),"
        f" streamed {facts['stream_records_per_second']:,.0f}/s, Spark read {facts['read_records_per_second']:,.0f}/s",
        f"{directory}  (the cluster {state} --dir {directory})",
    )
    checks = tuple(Check(**one) for one in facts["checks"])
    return Outcome(facts, make_page(tables, facts, stages, sample), lines, checks, facts["passed"])


def make_page(tables: Tables, facts: Mapping[str, Any], stages: Sequence[Stage], sample: Sequence[str]) -> Page:
    """Return the page `demo.html`. `tables` are the results of `results.write_tables`; `sample` has lines of the
    consumer service's response.
    """
    days, origins = tables["daily_all"], tables["origins"]
    departures = sum(row["departures"] for row in origins)
    delay = sum((row["mean_delay"] or 0) * row["departures"] for row in origins)
    carriers = sorted(tables["carriers"], key=lambda row: -1e9 if row["p90"] is None else row["p90"])
    shown: dict[str, Any] = {
        "facts": facts,
        "sample": sample,
        "tables": tables,
        "days": [row["date"] for row in days],
        "miles": sum(row["miles"] or 0 for row in origins),
        "mean_delay": delay / departures if departures else None,
        "slowest": max(days, key=lambda row: (-1e9 if row["p50"] is None else row["p50"], row["date"])),
        "grounded": max(days, key=lambda row: (row["cancelled"], row["date"])),
        "bands": {name: _bands(tables["daily"], days, radius) for name, radius in _RADII.items()},
        "cancellation_notes": [
            f"{row['date']:%d %b %Y}: {row['cancelled']} of {row['flights']} flights cancelled" for row in days
        ],
        "carriers": carriers,
        "carrier_spans": [
            (row["airline"] or row["carrier"], row["p50"], row["p90"], _minutes(row["p90"]))
            for row in carriers
            if row["p90"] is not None
        ],
        "clock": [
            (row["weekday"], row["hour"], row["p75"], f"75% within {_minutes(row['p75'])}, {row['flights']:,} flights")
            for row in tables["clock"]
            if row["flights"] >= _HEAT_FLIGHTS_MIN and None not in (row["hour"], row["p75"])
        ],
        "weather": {
            "Wind, mph": _weather(tables["wind"], "wind_speed", 5, 30),
            "Visibility, miles": _weather(tables["visibility"], "visib", 2, 10),
            "Rain in the hour": _weather(sorted(tables["rain"], key=lambda row: RAIN.index(row["rain"])), "rain"),
        },
        "minutes_text": _minutes,
        "steps": _steps(stages),
    }
    return Page("demo.html", shown)


def _minutes(value: float) -> str:
    return f"{value:.0f} min"


def _bands(daily: Sequence[Row], days: Sequence[Row], radius: int) -> dict[str, dict[str, list[float]]]:
    """Return moving averages of the delay quantiles over `2 * radius + 1` days, by airport. Days without flights are
    ignored.
    """
    dates = [row["date"] for row in days]
    return {
        f"{origin} {_AIRPORTS.get(str(origin), '')}": rows.set_index("date")[["p50", "p75", "p90"]]
        .astype(float)
        .reindex(dates)
        .rolling(2 * radius + 1, center=True, min_periods=1)
        .mean()
        .to_dict("list")
        for origin, rows in pd.DataFrame(daily).groupby("origin")
    }


def _weather(rows: Sequence[Row], column: str, width: int = 0, top: int = 0) -> list[tuple[str, float, str]]:
    """Return a bar for the 90th percentile of each bin, labelled with the share of cancelled flights. Bins without a
    value are left out.
    """
    bars = []
    for row in rows:
        low = row[column]
        if low is not None and row["p90"] is not None:
            bin_name = f"{low}" if not width else f"{low}+" if low >= top else f"{low}–{low + width}"
            cancelled = f"{percent(row['cancelled'] / row['flights'])} cancelled"
            note = f"{row['flights']:,} flights, median {_minutes(row['p50'])}, 90% within {_minutes(row['p90'])}"
            bars.append((f"{bin_name}: {cancelled}", row["p90"], f"{bin_name}: {note}, {cancelled}"))
    return bars


def _steps(stages: Sequence[Stage]) -> list[tuple[str, float, float, str]]:
    ends = list(accumulate(stage.seconds for stage in stages))
    return [
        (stage.name, end - stage.seconds, end, f"{stage.seconds:.1f} s")
        for stage, end in zip(stages, ends, strict=True)
    ]


JOB: Final = Job("demo", "", "", "", Options, run, (PARQUET, "checkpoint"))
