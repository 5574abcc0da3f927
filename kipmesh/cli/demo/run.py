"""The steps of the demo, in order, and their clean-up in reverse.

A node that ends while the demo runs does not stop it: what was acknowledged is on the others. Before the replicas are
compared, a node that is gone is started again and catches up.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kipmesh.cli.demo import checks
from kipmesh.cli.demo.produce import Produced, create_topic, produce, read_topic
from kipmesh.cli.demo.replicas import digest_until_equal, folders_of_replicas
from kipmesh.cli.demo.workspace import Workspace
from kipmesh.cluster import ClusterError, NodeInfo, Role
from kipmesh.cluster.layout import Counts
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh.spark.java import ensure_java
from kipmesh.spark.jobs.flights import dataset
from kipmesh.spark.jobs.flights.report import Check, NodeFacts, PartitionFacts, RunFacts, render
from kipmesh.spark.jobs.screen import Screen

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

    from kipmesh.spark.jobs.flights.pipeline import StreamResult

TOPIC: Final = "flights"
PARTITIONS: Final = 6
REPLICATION_FACTOR: Final = 3
_SAMPLE: Final = 3
_MICRO_BATCHES: Final = 4
_BATCH_RECORDS_MIN: Final = 50_000
_BATCH_RECORDS_MAX: Final = 250_000
_CATCH_UP_SECONDS: Final = 30.0
_HTTP_SECONDS: Final = 10.0
_SPARK_START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a run is asked to do; `limit` takes only the first flights of a year."""

    root: Path
    scale: int = 1
    limit: int | None = None
    keep: bool = False
    as_json: bool = False
    cores: int = 2


class Demo:
    """One run."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._space = Workspace(options.root)
        self._screen = Screen(to_stderr=options.as_json)
        self._spark: Future[SparkSession] | None = None

    def run(self) -> bool:
        """Everything; whether all proofs hold. Raises `DemoError` and what its parts raise, all with one clear line."""
        begin = time.monotonic()
        folder = dataset.find_folder()
        ensure_java(self._screen.line)
        with self._space.locked():
            left = self._space.clear()
            if left:
                self._screen.line(f"  stopped {left} processes of an earlier run")
            try:
                with self._cluster() as cluster:
                    return self._run(cluster, folder, begin)
            finally:
                self._stop_spark()

    @contextmanager
    def _cluster(self) -> Iterator[ProcessCluster]:
        """The mesh, stopped at the end unless it is to be kept; its data stays for ``kipmesh local up``."""
        cluster = ProcessCluster(self._make_cluster_folder(), owned=not self._options.keep)
        finished = False
        try:
            yield cluster
            finished = True
        finally:
            if finished and self._options.keep:
                cluster.detach()
            else:
                with suppress(ClusterError):
                    cluster.down()
            cluster.close()

    def _make_cluster_folder(self) -> Path:
        self._space.cluster.mkdir(parents=True, exist_ok=True)
        return self._space.cluster

    def _run(self, cluster: ProcessCluster, folder: Path, begin: float) -> bool:
        screen, options = self._screen, self._options
        with screen.step("Start the mesh and Spark"):
            self._spark = ThreadPoolExecutor(1).submit(self._start_spark)
            cluster.up(Counts(1, 1, 2, 1), {})
            year = dataset.load_flights(folder, limit=options.limit)
            self._write_tables_of_reference(folder)
            spark = self._spark.result()
            bootstrap = cluster.state().bootstrap
            asyncio.run(create_topic(bootstrap, TOPIC, PARTITIONS, REPLICATION_FACTOR))
        total = len(year) * options.scale
        with screen.step("Produce, acks=all", total) as done:
            flights = (
                one for shift in range(options.scale) for one in dataset.encode(dataset.shift_years(year, shift))
            )
            produced = asyncio.run(produce(bootstrap, TOPIC, PARTITIONS, flights, done))
        with screen.step("Stream through Spark", total) as done:
            streamed = self._stream(spark, bootstrap, total, done)
        from kipmesh.spark.jobs.flights import aggregates

        with screen.step("Delays, carriers, weather"):
            tables = aggregates.write_tables(spark, self._space.parquet)
        with screen.step("Read the topic with Spark, warm"):
            read_rate, read_records = self._read_rate(spark, bootstrap)
        with screen.step("Prove it"):
            proofs, partitions = self._prove(cluster, spark, produced, year)
            url, lines = self._ask_service(cluster)
        proofs += [checks.check_read(read_records, total), checks.check_service(lines, _SAMPLE)]
        facts = RunFacts(
            topic=TOPIC,
            replication_factor=REPLICATION_FACTOR,
            records=produced.records,
            payload_bytes=produced.payload_bytes,
            produce_seconds=produced.seconds,
            stream_seconds=streamed.seconds,
            stream_batches=streamed.batches,
            total_seconds=time.monotonic() - begin,
            read_records_per_second=read_rate,
            stages=tuple(screen.stages),
            nodes=tuple(NodeFacts(node.name, node.role, node.rack) for node in cluster.state().nodes),
            partitions=partitions,
            checks=tuple(proofs),
            sample_url=url,
            sample_lines=tuple(lines),
        )
        self._finish(facts, render(tables, facts, generated=datetime.now(UTC)))
        return facts.passed

    def _start_spark(self) -> SparkSession:
        from kipmesh.spark.session import local_session

        spark = local_session("kipmesh demo", self._space.spark, cores=self._options.cores)
        # Spark looks for Python sources at their first use, in processes of their own: let that happen by the way.
        spark.read.format("kipmesh").option("kafka.bootstrap.servers", "localhost:1").option("subscribe", TOPIC).load()
        return spark

    def _stop_spark(self) -> None:
        """Also when the run ended while Spark was starting: a JVM on its way cannot be called back."""
        if self._spark is not None:
            from kipmesh.spark.session import stop_session

            with suppress(Exception):
                stop_session(self._spark.result(_SPARK_START_SECONDS))

    def _write_tables_of_reference(self, folder: Path) -> None:
        """Weather and airlines, which the stream joins."""
        weather = dataset.load_weather(folder, scale=self._options.scale)
        for name, table in (("weather", weather), ("airlines", dataset.load_airlines(folder))):
            target = self._space.parquet / name
            target.mkdir(parents=True, exist_ok=True)
            table.to_parquet(target / "part-00000.parquet", index=False)

    def _stream(self, spark: SparkSession, bootstrap: str, total: int, report: Callable[[int], None]) -> StreamResult:
        from kipmesh.spark.jobs.flights.pipeline import StreamSettings, run_stream

        settings = StreamSettings(
            bootstrap=bootstrap,
            topic=TOPIC,
            parquet=self._space.parquet,
            checkpoint=self._space.checkpoint,
            weather=self._space.parquet / "weather",
            airlines=self._space.parquet / "airlines",
            max_offsets_per_trigger=max(_BATCH_RECORDS_MIN, min(_BATCH_RECORDS_MAX, -(-total // _MICRO_BATCHES))),
        )
        return run_stream(spark, settings, lambda progress: report(progress.records))

    def _read_rate(self, spark: SparkSession, bootstrap: str) -> tuple[float, int]:
        """Records a second of a batch read of the whole topic, the second of two, and the records that it saw."""
        begin, count = 0.0, 0
        for _ in range(2):
            begin = time.monotonic()
            reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", bootstrap)
            row = reader.option("subscribe", TOPIC).load().selectExpr("count(*)", "sum(length(value))").first()
            count = 0 if row is None else int(row[0])
        return count / (time.monotonic() - begin), count

    def _prove(
        self, cluster: ProcessCluster, spark: SparkSession, produced: Produced, year: pd.DataFrame
    ) -> tuple[list[Check], tuple[PartitionFacts, ...]]:
        from kipmesh.spark.jobs.flights import aggregates

        for status in cluster.status():
            if status.state == "stopped":
                self._screen.line(f"  {status.node.name} is gone; starting it again")
                cluster.start(status.node.name)
        found = asyncio.run(read_topic(cluster.state().bootstrap, TOPIC, PARTITIONS))
        proofs = checks.check_topic(found, produced.expected)
        proofs += checks.check_totals(aggregates.totals(spark, self._space.parquet), year, self._options.scale)
        partitions = self._compare_replicas(cluster.state().nodes, [one.records for one in found])
        return [*proofs, checks.check_replicas(partitions, REPLICATION_FACTOR)], partitions

    def _compare_replicas(self, nodes: Sequence[NodeInfo], ends: Sequence[int]) -> tuple[PartitionFacts, ...]:
        brokers = [node for node in nodes if node.role in (Role.LEADER, Role.FOLLOWER)]
        facts = []
        for partition, high_watermark in enumerate(ends):
            folders = {node.name: Path(node.dir) / "data" / f"{TOPIC}-{partition}" for node in brokers}
            there = folders_of_replicas(folders, REPLICATION_FACTOR, _CATCH_UP_SECONDS)
            digests = digest_until_equal(list(there.values()), high_watermark, _CATCH_UP_SECONDS)
            one = digests[0]
            identical = len(set(digests)) == 1 and one.next_offset == high_watermark
            facts.append(
                PartitionFacts(
                    partition, one.records, one.size_bytes, high_watermark, tuple(there), identical, one.sha256
                )
            )
        return tuple(facts)

    def _ask_service(self, cluster: ProcessCluster) -> tuple[str, list[str]]:
        """Three records from the consumer service, over HTTP."""
        node = next(node for node in cluster.state().nodes if node.role is Role.CONSUMER)
        url = f"http://{node.http}/v1/topics/{TOPIC}/records?limit={_SAMPLE}"
        with urllib.request.urlopen(url, timeout=_HTTP_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return f"GET {url}", [line for line in lines if line]

    def _finish(self, facts: RunFacts, report: str) -> None:
        """Show the proofs, put the results in place, say where they are."""
        screen, root = self._screen, self._space.root
        screen.line()
        for check in facts.checks:
            screen.check(check)
        screen.line()
        screen.line(f"  {facts.sample_url}")
        for line in facts.sample_lines:
            screen.line(f"    {line}")
        summary = json.dumps(summarize(facts, self._options), indent=2)
        self._space.publish(report, summary + "\n")
        screen.line()
        screen.line(
            f"  {facts.records:,} flights in {facts.total_seconds:.1f} s:"
            f" produced {facts.produce_records_per_second:,.0f}/s ({facts.produce_mb_per_second:.1f} MB/s, acks=all),"
            f" streamed {facts.stream_records_per_second:,.0f}/s, Spark read {facts.read_records_per_second:,.0f}/s"
        )
        up = "is running" if self._options.keep else "comes back with: kipmesh local up"
        for name, what in (
            ("report.html", "the report, opens in any browser"),
            ("parquet", "flights joined with weather, and the tables"),
            ("summary.json", "counts, rates and proofs"),
            ("cluster", f"the mesh {up} --dir {self._space.cluster}"),
        ):
            screen.line(f"  {root / name}  ({what})")
        if self._options.as_json:
            print(summary)


def summarize(facts: RunFacts, options: DemoOptions) -> dict[str, Any]:
    """`summary.json`."""
    return {
        "passed": facts.passed,
        "scale": options.scale,
        **{name: value for name, value in asdict(facts).items() if name not in _LISTS},
        "produce_records_per_second": facts.produce_records_per_second,
        "produce_mb_per_second": facts.produce_mb_per_second,
        "stream_records_per_second": facts.stream_records_per_second,
        "stages": {stage.name: round(stage.seconds, 3) for stage in facts.stages},
        "checks": [check._asdict() for check in facts.checks],
        "nodes": [node._asdict() for node in facts.nodes],
        "partitions": [partition._asdict() for partition in facts.partitions],
    }


_LISTS: Final = ("stages", "checks", "nodes", "partitions", "sample_lines")
