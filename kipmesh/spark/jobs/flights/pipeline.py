"""The structured stream: topic -> parsed flights -> joined with weather and airlines -> Parquet.

Each micro-batch writes the folder ``flights/batch=<id>`` anew (foreachBatch). Its records are the offset ranges in the
checkpoint, so a batch that is repeated after a failure writes the same rows again over the old ones: exactly once, and
in plain Parquet that any reader sees right, without the log of committed files that Spark's own file sink needs.

The weather is static and small, so the join is a broadcast join of each micro-batch. The tables that people read are
computed after the stream from that Parquet (`aggregates`): exact quantiles want all values of a group, which as
streaming state would be the data set itself kept a second time.

A value that is not a flight (no JSON, or without carrier or origin) is not joined but counted, as `malformed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

FLIGHT_SCHEMA: Final = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT,"
    " arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT,"
    " distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)
_WEATHER: Final = ("temp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
_REPORT_SECONDS: Final = 1


class StreamProgress(NamedTuple):
    """How far the stream is."""

    batches: int
    records: int


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Where a stream reads and writes; `weather` and `airlines` are Parquet."""

    bootstrap: str
    topic: str
    parquet: Path
    checkpoint: Path
    weather: Path
    airlines: Path
    max_offsets_per_trigger: int


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What the stream did in all."""

    records: int
    batches: int
    seconds: float


def run_stream(
    spark: SparkSession, settings: StreamSettings, report: Callable[[StreamProgress], None] = lambda _progress: None
) -> StreamResult:
    """Stream what is in the topic now, to its end, and return. Continues where the checkpoint says."""
    begin = time.monotonic()
    source = (
        spark.readStream.format("kipmesh")
        .option("kafka.bootstrap.servers", settings.bootstrap)
        .option("subscribe", settings.topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.max_offsets_per_trigger)
        .load()
    )
    target = settings.parquet / "flights"

    def write_batch(batch: DataFrame, batch_id: int) -> None:
        batch.write.mode("overwrite").parquet(str(target / f"batch={batch_id:05d}"))

    query = (
        enrich(source, spark.read.parquet(str(settings.weather)), spark.read.parquet(str(settings.airlines)))
        .writeStream.foreachBatch(write_batch)
        .option("checkpointLocation", str(settings.checkpoint))
        .trigger(availableNow=True)
        .queryName("flights")
        .start()
    )
    records: dict[int, int] = {}
    try:
        while not query.awaitTermination(_REPORT_SECONDS):
            records.update((each.batchId, each.numInputRows) for each in query.recentProgress)
            report(StreamProgress(len(records), sum(records.values())))
    except BaseException:
        # An interrupt leaves the connection to the JVM between two messages: what matters is the interrupt.
        with suppress(Exception):
            query.stop()
        raise
    records.update((each.batchId, each.numInputRows) for each in query.recentProgress if each.numInputRows)
    report(StreamProgress(len(records), sum(records.values())))
    return StreamResult(sum(records.values()), len(records), time.monotonic() - begin)


def enrich(records: DataFrame, weather: DataFrame, airlines: DataFrame) -> DataFrame:
    """A row a record: the flight, its place in the topic, the weather of its scheduled hour, the airline's name."""
    value = F.col("value").cast("string")
    flights = records.select(
        F.from_json(value, FLIGHT_SCHEMA).alias("flight"), "partition", "offset", F.col("timestamp").alias("appended")
    )
    flights = flights.select("flight.*", "partition", "offset", "appended")
    hourly = weather.select("origin", F.col("time_hour").cast("timestamp").alias("time_hour"), *_WEATHER)
    return (
        flights.join(F.broadcast(hourly), ["origin", "time_hour"], "left")
        .join(F.broadcast(airlines.withColumnRenamed("name", "airline")), "carrier", "left")
        .withColumn("date", F.make_date("year", "month", "day"))
        .withColumn("cancelled", F.col("dep_delay").isNull())
        .withColumn("malformed", malformed())
    )


def malformed() -> Column:
    """Whether a record is no flight."""
    return F.col("carrier").isNull() | F.col("origin").isNull() | F.col("year").isNull()
