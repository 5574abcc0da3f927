"""The structured streams of the job: flights and dead letters, windows of delays, rotations of aircraft.

All three read the same offsets of the topic, from its beginning to where it ended when the job began, in micro-batches
with a checkpoint each; each micro-batch writes a folder of its own anew, so that one that is repeated writes the same.

Windows and rotations are Spark's event-time aggregations with a watermark, in append mode: a result is emitted once,
when the watermark has passed its end, and flights that come after that are late (`lateness`). What is still open when
the topic has been read is closed by a marker: the stream also reads a folder of files, which is empty until then and
then gets one row of the year 9999, which moves the watermark to the end of time. The marker is a group of its own, with
an empty key, that is never emitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

from kipmesh.client.sync import Consumer
from kipmesh.core.errors import KafkaError
from kipmesh_jobs.flights import values
from kipmesh_jobs.frame import JobError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

ON_TIME_MINUTES: Final = 15
"""The usual limit: a departure at most this late is on time."""
MARKER_TIME: Final = "9999-01-01T00:00:00Z"
_NOBODY: Final = ""
"""The key of the marker."""
_REPORT_SECONDS: Final = 1
_ATTEMPTS: Final = 4
_SLOW_START: Final = "Python worker failed to connect back"
"""Spark gives a worker ten seconds to start, whatever else the machine has to do."""
_LEG: Final = ("event_time", "partition", "offset", "origin", "dest", "dep_delay")

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What is read, and how. `ends` are the offsets after the last records to read, by partition.

    `client` is further configuration of the consumers.
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
    """Where each partition begins and ends now. JobError for a topic or a mesh that is not there."""
    try:
        with Consumer(bootstrap, **client) as consumer:
            found = [(topic, partition) for partition in consumer.partitions_for(topic).partitions]
            begins, ends = consumer.beginning_offsets(found), consumer.end_offsets(found)
    except KafkaError as error:
        raise JobError(f"topic {topic} at {bootstrap}: {error}") from None
    return {one.partition: at for one, at in begins.items()}, {one.partition: at for one, at in ends.items()}


def source(spark: SparkSession, settings: StreamSettings) -> DataFrame:
    """The records that are there now, as a stream of parsed values."""
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
    """Write ``flights``, joined with the tables, and ``dead_letters``; the records of each micro-batch that had any."""

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
    """Write ``windows``: sums of delays by window of the scheduled departure and by airport."""
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
    """Write ``rotations``: departures of one aircraft, each at most a gap after the one before, legs in order."""

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
    """Run to the topic's end, then once more with the marker."""
    markers = settings.checkpoints / f"{name}-marker"
    markers.mkdir(parents=True)

    def write(batch: DataFrame, number: int) -> None:
        # Not in the query itself: Spark would move the filter below the watermark, which the marker is to move.
        _write(batch.where(F.col(key) != _NOBODY), settings.parquet / name, number)

    for is_end in (False, True):
        if is_end:
            line = json.dumps({"event_time": MARKER_TIME, key: _NOBODY})
            _put_whole(markers / "end.json", line + "\n")
        found = values.flights(source(spark, settings)).where(F.col(key).isNotNull())
        stream = found.select("event_time", *(column.alias(alias) for alias, column in columns.items()))
        end = spark.readStream.schema(stream.schema).json(str(markers))
        marked = stream.unionByName(end).withWatermark("event_time", settings.watermark)
        _run(aggregate(marked), settings, name, write, report if not is_end else lambda _records: None)


def _put_whole(path: Path, text: str) -> None:
    """Under another name first: a file of a stream's folder is read as soon as it is seen."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(text)
    hidden.rename(path)


def _write(batch: DataFrame, folder: Path, number: int) -> None:
    batch.write.mode("overwrite").parquet(str(folder / f"batch={number:05d}"))


def _run(
    stream: DataFrame, settings: StreamSettings, name: str, write: Callable[[DataFrame, int], None], report: Progress
) -> Mapping[int, int]:
    """Run to the topic's end; once more, from the checkpoint, when a worker of Python's was too slow to start."""
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
            return _follow(query, report)
        except StreamingQueryException as error:
            if _SLOW_START not in str(error) or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _follow(query: StreamingQuery, report: Progress) -> Mapping[int, int]:
    """Wait for the end of a query; the records of each micro-batch that had any."""
    seen: dict[int, int] = {}
    is_over = False
    try:
        while not is_over:
            is_over = bool(query.awaitTermination(_REPORT_SECONDS))
            progress: list[Any] = list(query.recentProgress)
            seen.update((each.batchId, each.numInputRows) for each in progress if each.numInputRows)
            report(sum(seen.values()))
    except BaseException:
        # An interrupt leaves the connection to the JVM between two messages: what matters is the interrupt.
        with suppress(Exception):
            query.stop()
        raise
    return seen


def read(spark: SparkSession, parquet: Path, name: str) -> DataFrame:
    """What all micro-batches wrote."""
    return spark.read.option("basePath", str(parquet / name)).parquet(str(parquet / name / "batch=*"))
