"""The streaming queries of the job: flights and dead letters, windows of delays, rotations of aircraft.

Each query reads the topic from its beginning to its end at the start of the job, in micro-batches with a checkpoint. A
micro-batch overwrites its own directory, so repeating it is idempotent.

Windows and rotations are event-time aggregations with a watermark in append mode: a result is emitted once the
watermark passes its end, and later flights are late (see `results.late`). To close the remaining groups, the stream
also reads a directory of files. At the end it gets one row of the year 9999, which advances the watermark. This marker
has an empty key and is never emitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (PySpark's usual alias)

from kipmesh.client.sync import Consumer
from kipmesh.core.errors import KafkaError
from kipmesh_jobs.flights import values
from kipmesh_jobs.frame import JobError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

ON_TIME_MINUTES: Final = 15
"""Usual limit for a departure on time."""
MARKER_TIME: Final = "9999-01-01T00:00:00Z"
_MARKER_KEY: Final = ""
"""Key of the marker row of the year 9999."""
_REPORT_SECONDS: Final = 1
_ATTEMPTS: Final = 4
_SLOW_START: Final = "Python worker failed to connect back"
"""Error of Spark if a worker does not start within ten seconds, as on a busy machine."""
_LEG: Final = ("event_time", "partition", "offset", "origin", "dest", "dep_delay")

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Input and settings of the streaming queries.

    `ends` are the end offsets by partition, `client` is consumer configuration besides the addresses. `watermark`,
    `window` and `gap` are intervals such as `2 hours`. The output goes to `parquet`, the state of the queries to
    `checkpoints`.
    """

    bootstrap: str
    client: Mapping[str, str]
    topic: str
    ends: Mapping[int, int]
    parquet: Path
    checkpoints: Path
    max_offsets_per_trigger: int
    watermark: str = ""
    window: str = ""
    gap: str = ""


def offsets(bootstrap: str, client: Mapping[str, str], topic: str) -> tuple[dict[int, int], dict[int, int]]:
    """Return the start offsets and the end offsets, each by partition. Raises JobError if the topic or the cluster is
    unavailable.
    """
    try:
        with Consumer(bootstrap, **client) as consumer:
            found = [(topic, partition) for partition in consumer.partitions_for(topic).partitions]
            begins, ends = consumer.beginning_offsets(found), consumer.end_offsets(found)
    except KafkaError as error:
        raise JobError(f"topic {topic} at {bootstrap}: {error}") from None
    return {one.partition: at for one, at in begins.items()}, {one.partition: at for one, at in ends.items()}


def source(spark: SparkSession, settings: StreamSettings) -> DataFrame:
    """Return a stream of the topic's records below the end offsets, parsed by `values.parse`."""
    from kipmesh.spark.readers import _HAS_READ_LIMITS

    reader = (
        spark.readStream.format("kipmesh")
        .options(**{f"kafka.{key}": value for key, value in settings.client.items()})
        .option("kafka.bootstrap.servers", settings.bootstrap)
        .option("subscribe", settings.topic)
        .option("startingOffsets", "earliest")
    )
    if _HAS_READ_LIMITS:  # Spark 4.1 makes one micro-batch of everything
        reader = reader.option("maxOffsetsPerTrigger", settings.max_offsets_per_trigger)
    within = F.lit(False)
    for partition, end in settings.ends.items():
        within = within | ((F.col("partition") == partition) & (F.col("offset") < end))
    return values.parse(reader.load().where(within))


def run_flights(
    spark: SparkSession, settings: StreamSettings, references: values.References, report: Progress
) -> Mapping[int, int]:
    """Write `flights`, joined with the reference tables, and `dead_letters` with their reasons. Returns the number of
    records by micro-batch.

    `report` is called with the number of records read so far. Raises StreamingQueryException.
    """

    def write(batch: DataFrame, number: int) -> None:
        batch = batch.persist()
        found = values.enrich(values.flights(batch), references)
        _write(found, settings.parquet / "flights", number)
        _write(values.dead_letters(batch).coalesce(1), settings.checkpoints / "dead_letters", number)
        batch.unpersist()

    batches = _run(source(spark, settings), settings, "flights", write, report)
    dead = read(spark, settings.checkpoints, "dead_letters").drop("batch")
    values.with_reasons(dead).coalesce(1).write.parquet(str(settings.parquet / "dead_letters"))
    return batches


def run_windows(spark: SparkSession, settings: StreamSettings, report: Progress) -> None:
    """Write `windows`: counts and sums of delays by airport and window of scheduled departure.

    `report` is called with the number of records read so far. Raises StreamingQueryException.
    """
    delay = F.col("dep_delay")

    def aggregate(stream: DataFrame) -> DataFrame:
        return (
            stream.groupBy(F.window("event_time", settings.window).alias("window"), "origin")
            .agg(
                F.count("*").alias("flights"),
                F.count(delay).alias("departures"),
                F.count_if(delay.isNull()).alias("cancelled"),
                F.coalesce(F.sum(delay), F.lit(0)).alias("delay_sum"),
                F.max(delay).alias("delay_max"),
                F.count_if(delay <= ON_TIME_MINUTES).alias("on_time"),
            )
            .select(F.col("window.start").alias("begin"), F.col("window.end").alias("end"), "origin", *_MEASURES)
        )

    columns = {"origin": F.col("origin"), "dep_delay": delay}
    _run_closing(spark, settings, "windows", "origin", columns, aggregate, report)


_MEASURES: Final = ("flights", "departures", "cancelled", "delay_sum", "delay_max", "on_time")


def run_rotations(spark: SparkSession, settings: StreamSettings, report: Progress) -> None:
    """Write `rotations`. Each has the departures of one aircraft in order as `legs`; the gap is the maximum time
    between two successive departures.

    `report` is called with the number of records read so far. Raises StreamingQueryException.
    """

    def aggregate(stream: DataFrame) -> DataFrame:
        legs = F.sort_array(F.collect_list(F.struct(*_LEG)))
        return (
            stream.groupBy(F.session_window("event_time", settings.gap).alias("session"), "tailnum")
            .agg(legs.alias("legs"))
            .select(
                "tailnum",
                F.col("session.start").alias("begin"),
                F.element_at("legs", -1)["event_time"].alias("last_departure"),
                F.size("legs").alias("departures"),
                "legs",
            )
        )

    columns = {name: F.col(name) for name in ("tailnum", "partition", "offset", "origin", "dest", "dep_delay")}
    _run_closing(spark, settings, "rotations", "tailnum", columns, aggregate, report)


def _run_closing(
    spark: SparkSession,
    settings: StreamSettings,
    name: str,
    key: str,
    columns: Mapping[str, Column],
    aggregate: Callable[[DataFrame], DataFrame],
    report: Progress,
) -> None:
    """Run an aggregation by `key` to the end of the topic, then again with a marker row of the year 9999. The marker
    advances the watermark, so that all remaining groups are emitted.
    """
    markers = settings.checkpoints / f"{name}-marker"
    markers.mkdir(parents=True)

    def write(batch: DataFrame, number: int) -> None:
        # Not in the query: Spark would push the filter below the watermark, which the marker must reach.
        _write(batch.where(F.col(key) != _MARKER_KEY), settings.parquet / name, number)

    for is_end in (False, True):
        if is_end:
            line = json.dumps({"event_time": MARKER_TIME, key: _MARKER_KEY})
            _write_atomically(markers / "end.json", line + "\n")
        found = values.flights(source(spark, settings)).where(F.col(key).isNotNull())
        stream = found.select("event_time", *(column.alias(alias) for alias, column in columns.items()))
        end = spark.readStream.schema(stream.schema).json(str(markers))
        marked = stream.unionByName(end).withWatermark("event_time", settings.watermark)
        _run(aggregate(marked), settings, name, write, report if not is_end else lambda _records: None)


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, because a stream reads a file as soon as it is visible."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(text)
    hidden.rename(path)


def _write(batch: DataFrame, directory: Path, number: int) -> None:
    batch.write.mode("overwrite").parquet(str(directory / f"batch={number:05d}"))


def _run(
    stream: DataFrame, settings: StreamSettings, name: str, write: Callable[[DataFrame, int], None], report: Progress
) -> Mapping[int, int]:
    """Run a query to the end of the topic; return the number of records by micro-batch.

    Restarts it from the checkpoint, up to 3 times, if a Python worker started too slowly. Raises
    StreamingQueryException.
    """
    from pyspark.errors import StreamingQueryException

    for attempt in range(_ATTEMPTS):
        query = (
            stream.writeStream.foreachBatch(write)
            .outputMode("append")
            .option("checkpointLocation", str(settings.checkpoints / name))
            .trigger(availableNow=True)
            .queryName(name)
            .start()
        )
        try:
            return _await_end(query, report)
        except StreamingQueryException as error:
            if _SLOW_START not in str(error) or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _await_end(query: StreamingQuery, report: Progress) -> Mapping[int, int]:
    """Wait for the end of a query; return the number of records by micro-batch. Stops the query if the wait is
    interrupted.
    """
    seen: dict[int, int] = {}
    is_over = False
    try:
        while not is_over:
            is_over = bool(query.awaitTermination(_REPORT_SECONDS))
            progress: list[Any] = list(query.recentProgress)
            seen.update((each.batchId, each.numInputRows) for each in progress if each.numInputRows)
            report(sum(seen.values()))
    except BaseException:
        # After an interrupt the connection to the JVM may be unusable.
        with suppress(Exception):
            query.stop()
        raise
    return seen


def read(spark: SparkSession, parquet: Path, name: str) -> DataFrame:
    """Return the output `name` of all micro-batches. The column `batch` has the number of the micro-batch."""
    return spark.read.option("basePath", str(parquet / name)).parquet(str(parquet / name / "batch=*"))
