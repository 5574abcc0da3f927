"""What follows from the streams: late flights by name, small tables for people, and the proofs.

Tables are computed from the Parquet that the streams wrote, in batch; `aggregates` has those of delays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

from kipmesh.spark.jobs.flights import aggregates, streams
from kipmesh.spark.jobs.flights.lateness import Span
from kipmesh.spark.jobs.report import Check

_AGE_YEARS: Final = 5
_AGE_MAX: Final = 30
_SPANS: Final = "partition INT, span_begin BIGINT, span_end BIGINT, stream_batch INT, watermark_ms BIGINT"
LEGS_MAX: Final = 20
"""Legs of a rotation that are told apart."""


class Expected(NamedTuple):
    """What was put into the topic, when this job did that."""

    flights: int
    cancelled: int
    dep_delay_sum: int
    broken: int


def window_end_ms(window_ms: int) -> Column:
    """The end of the window that a flight is in: windows begin at whole multiples since 1970."""
    at = F.unix_millis("event_time")
    return at - at % window_ms + window_ms


def session_end_ms(gap_ms: int) -> Column:
    """The end of the session that a flight alone would be."""
    return F.unix_millis("event_time") + gap_ms


def late(flights: DataFrame, spans: Sequence[Span], end_ms: Column, stream: str) -> DataFrame:
    """The flights that a stream left out: their place, by which watermark, and how late that made them."""
    spark = flights.sparkSession
    told = spark.createDataFrame([tuple(span) for span in spans], _SPANS)
    at = F.col("offset")
    joined = flights.join(F.broadcast(told), "partition").where((at >= F.col("span_begin")) & (at < F.col("span_end")))
    return joined.where((F.col("watermark_ms") > 0) & (end_ms <= F.col("watermark_ms"))).select(
        F.lit(stream).alias("stream"),
        *("topic", "partition", "offset", "carrier", "flight", "tailnum", "origin", "event_time"),
        F.col("stream_batch").alias("batch"),
        F.timestamp_millis("watermark_ms").alias("watermark"),
        (F.col("watermark_ms") - end_ms).alias("late_by_ms"),
    )


def write_tables(spark: SparkSession, parquet: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables of delays, and those of rotations, aircraft and destinations; their rows in order of the keys."""
    rows = aggregates.write_tables(spark, parquet)
    flights = streams.read(spark, parquet, "flights").cache()
    age = aggregates.binned(F.year("date") - F.col("plane_year"), _AGE_YEARS, _AGE_MAX)
    rotations = streams.read(spark, parquet, "rotations")
    frames = {
        "plane_age": (aggregates.by_group(flights, age.alias("age")), ["age"]),
        "destinations": (aggregates.by_group(flights, "dest", "dest_name"), ["dest"]),
        "legs": (legs(rotations), ["leg"]),
        "rotation_sizes": (
            rotations.groupBy(F.least("departures", F.lit(LEGS_MAX)).alias("departures")).agg(
                F.count("*").alias("rotations"), F.countDistinct("tailnum").alias("aircraft")
            ),
            ["departures"],
        ),
        "windows_daily": (windows_daily(streams.read(spark, parquet, "windows")), ["day", "origin"]),
    }
    for name, (frame, keys) in frames.items():
        target = str(parquet / name)
        frame.coalesce(1).write.mode("overwrite").parquet(target)
        table = spark.read.parquet(target).toArrow()
        rows[name] = table.sort_by([(key, "ascending") for key in keys]).to_pylist()
    flights.unpersist()
    return rows


def legs(rotations: DataFrame) -> DataFrame:
    """Delays by the place of a flight in its rotation, from 1; `gained`: more than the delay of the leg before."""
    one = rotations.select("legs", F.posexplode("legs").alias("at", "leg"))
    before = F.when(F.col("at") > 0, F.try_element_at("legs", F.col("at"))["dep_delay"])
    delay = F.col("leg")["dep_delay"]
    return one.groupBy(F.least(F.col("at") + 1, F.lit(LEGS_MAX)).alias("leg")).agg(
        F.count("*").alias("flights"),
        F.count(delay).alias("departures"),
        F.avg(delay).alias("mean_delay"),
        F.avg(delay - before).alias("gained"),
    )


def windows_daily(windows: DataFrame) -> DataFrame:
    """The windows added up by day, UTC."""
    return windows.groupBy(F.to_date("begin").alias("day"), "origin").agg(
        *(F.sum(name).alias(name) for name in ("flights", "departures", "cancelled", "delay_sum", "on_time")),
        F.max("delay_max").alias("delay_max"),
    )


def counts(spark: SparkSession, parquet: Path) -> dict[str, int]:
    """What the proofs compare."""
    flights = streams.read(spark, parquet, "flights")
    windows, rotations = (streams.read(spark, parquet, name) for name in ("windows", "rotations"))
    late_by = {
        row["stream"]: row["count"]
        for row in spark.read.parquet(str(parquet / "late")).groupBy("stream").count().collect()
    }
    found = _first(
        flights.agg(
            F.count("*").alias("flights"),
            F.countDistinct("partition", "offset").alias("distinct_flights"),
            F.count_if("cancelled").alias("cancelled"),
            F.count_if(F.col("tailnum").isNull()).alias("without_tailnum"),
            F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("dep_delay_sum"),
            F.count("temp").alias("with_weather"),
            F.count("manufacturer").alias("with_plane"),
            F.count("dest_name").alias("with_airport"),
        )
    )
    found["dead_letters"] = spark.read.parquet(str(parquet / "dead_letters")).count()
    found |= _first(
        windows.agg(F.count("*").alias("windows"), F.coalesce(F.sum("flights"), F.lit(0)).alias("in_windows"))
    )
    leg = rotations.select(F.explode("legs").alias("leg")).select("leg.partition", "leg.offset")
    found |= _first(
        rotations.agg(F.count("*").alias("rotations"), F.coalesce(F.sum("departures"), F.lit(0)).alias("in_rotations"))
    )
    found["distinct_in_rotations"] = leg.distinct().count()
    found["late_windows"] = late_by.get("windows", 0)
    found["late_rotations"] = late_by.get("rotations", 0)
    return found


def _first(frame: DataFrame) -> dict[str, int]:
    row = frame.first()
    return {} if row is None else {name: int(value) for name, value in row.asDict().items()}


def differing_windows(spark: SparkSession, parquet: Path, window_ms: int) -> int:
    """Windows of the stream that a plain aggregation of the flights on time does not give, and vice versa."""
    flights = streams.read(spark, parquet, "flights")
    late_ones = spark.read.parquet(str(parquet / "late")).where("stream = 'windows'").select("partition", "offset")
    delay = F.col("dep_delay")
    end = F.timestamp_millis(window_end_ms(window_ms))
    plain = (
        flights.join(late_ones, ["partition", "offset"], "left_anti")
        .groupBy(end.alias("end"), "origin")
        .agg(
            F.count("*").alias("flights"),
            F.count(delay).alias("departures"),
            F.coalesce(F.sum(delay), F.lit(0)).alias("delay_sum"),
            F.max(delay).alias("delay_max"),
        )
    )
    streamed = streams.read(spark, parquet, "windows").select(*plain.columns)
    return plain.exceptAll(streamed).count() + streamed.exceptAll(plain).count()


def check(found: Mapping[str, int], records: int, differing: int, expected: Expected | None) -> list[Check]:
    """The proofs."""
    flights, dead = found["flights"], found["dead_letters"]
    late_windows, late_rotations = found["late_windows"], found["late_rotations"]
    in_rotations = found["in_rotations"] + late_rotations + found["without_tailnum"]
    checks = [
        Check(
            "Every record is a flight or a dead letter",
            flights + dead == records,
            f"{flights:,} flights + {dead:,} dead letters, {records:,} offsets",
        ),
        Check(
            "No flight is there twice, after four joins",
            found["distinct_flights"] == flights,
            f"{flights:,} rows, {found['distinct_flights']:,} places in the topic",
        ),
        Check(
            "Every flight is in a window or named as late",
            found["in_windows"] + late_windows == flights,
            f"{found['in_windows']:,} in {found['windows']:,} windows + {late_windows:,} late",
        ),
        Check(
            "The windows are those of a plain aggregation",
            differing == 0,
            f"{differing:,} of {found['windows']:,} windows differ",
        ),
        Check(
            "Every flight with a tail number is in one rotation or named as late",
            in_rotations == flights and found["distinct_in_rotations"] == found["in_rotations"],
            f"{found['in_rotations']:,} in {found['rotations']:,} rotations + {late_rotations:,} late"
            f" + {found['without_tailnum']:,} without tail number",
        ),
    ]
    if expected is not None:
        got = Expected(flights, found["cancelled"], found["dep_delay_sum"], dead)
        checks.append(
            Check(
                "Counts and sums are those of the CSV",
                got == expected,
                f"{got.flights:,} flights, {got.cancelled:,} cancelled, {got.dep_delay_sum:,} minutes of delay,"
                f" {got.broken:,} values that are none; put in: {expected.flights:,}, {expected.cancelled:,},"
                f" {expected.dep_delay_sum:,}, {expected.broken:,}",
            )
        )
    return checks
