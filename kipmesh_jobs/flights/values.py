"""Parses values of the topic into flights and dead letters.

A flight is a JSON object whose fields have the right types and that has all of `REQUIRED`. Any other value is a dead
letter: its position, key, value and the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (PySpark's usual alias)

from kipmesh_jobs.flights import dataset

FLIGHT_SCHEMA: Final = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT,"
    " arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT,"
    " distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)
REQUIRED: Final = ("carrier", "flight", "origin", "dest", "time_hour", "minute")
_BROKEN: Final = "broken"
_FIELDS: Final = tuple(part.split()[0] for part in FLIGHT_SCHEMA.split(", "))
_PLACE: Final = ("topic", "partition", "offset")


class References(NamedTuple):
    """Tables that flights are joined with."""

    weather: DataFrame
    airlines: DataFrame
    planes: DataFrame
    airports: DataFrame


def parse(records: DataFrame) -> DataFrame:
    """Return a row per record: position, `key`, `value`, `appended`, the flight's fields, `event_time` and `is_flight`.

    `appended` is the record's timestamp, `event_time` the scheduled departure in UTC. If `is_flight` is false, the
    flight's fields are not valid and `event_time` is null.
    """
    text = F.col("value").cast("string")
    flight = F.from_json(text, f"{FLIGHT_SCHEMA}, {_BROKEN} STRING", {"columnNameOfCorruptRecord": _BROKEN})
    parsed = records.select(*_PLACE, "key", "value", F.col("timestamp").alias("appended"), flight.alias("flight_value"))
    parsed = parsed.select(*_PLACE, "key", "value", "appended", "flight_value.*")
    whole = F.col(_BROKEN).isNull() & F.col("minute").between(0, 59)
    for name in REQUIRED:
        whole = whole & F.col(name).isNotNull()
    seconds = F.unix_timestamp("time_hour") + 60 * F.col("minute")
    return (
        parsed.withColumn("is_flight", F.coalesce(whole, F.lit(False)))
        .withColumn("event_time", F.when(F.col("is_flight"), F.timestamp_seconds(seconds)))
        .drop(_BROKEN)
    )


def flights(parsed: DataFrame) -> DataFrame:
    """Return the rows of `parse` that are flights, without `key`, `value` and `is_flight`."""
    return parsed.where("is_flight").drop("is_flight", "key", "value")


def dead_letters(parsed: DataFrame) -> DataFrame:
    """Return the rows of `parse` that are not flights: position, `appended`, `key` and `value`."""
    return parsed.where("NOT is_flight").select(*_PLACE, "appended", "key", "value")


def with_reasons(dead: DataFrame) -> DataFrame:
    """Add a column `reason` to dead letters. It says why the value is not a flight.

    This second parse accepts any JSON. Only the few dead letters need it, not every flight.
    """
    text = F.col("value").cast("string")
    flight = F.from_json(text, FLIGHT_SCHEMA)
    parsed = dead.withColumn("any", F.try_parse_json(F.when(F.is_valid_utf8(text), text))).withColumn("flight", flight)

    def is_given(name: str) -> Column:
        return F.try_variant_get(F.col("any"), f"$.{name}", "string").isNotNull()

    found = F.col("flight")
    wrong = F.concat_ws(", ", *(F.when(found[name].isNull() & is_given(name), name) for name in _FIELDS))
    lacking = F.concat_ws(", ", *(F.when(found[name].isNull(), name) for name in REQUIRED))
    reason = (
        F.when(F.col("value").isNull(), "no value")
        .when(~F.is_valid_utf8(text), "not UTF-8")
        .when(F.col("any").isNull(), "not JSON")
        .when(~F.schema_of_variant("any").startswith("OBJECT"), "no JSON object")
        .when(wrong != "", F.concat(F.lit("wrong type of "), wrong))
        .when(lacking != "", F.concat(F.lit("lacks "), lacking))
        .when(~found["minute"].between(0, 59), "minute is not 0 to 59")
        .otherwise("a field cannot be read")
    )
    return parsed.withColumn("reason", reason).select(*_PLACE, "appended", "reason", "key", "value")


def load_references(spark: SparkSession, directory: Path, scale: int) -> References:
    """Load weather (`scale` years), airlines, planes and airports from the CSV files in `directory`. Raises OSError."""

    def frame(table: pd.DataFrame) -> DataFrame:
        return spark.createDataFrame(pa.Table.from_pandas(table, preserve_index=False))

    tables = (dataset.load_table(directory, name) for name in ("airlines", "planes", "airports"))
    return References(frame(dataset.load_weather(directory, scale=scale)), *map(frame, tables))


def enrich(found: DataFrame, references: References) -> DataFrame:
    """Join flights with their airline, aircraft and destination, and with the weather of the scheduled hour. Add `date`
    (New York) and `cancelled`.

    Columns of a missing reference are null. Each table has at most one row per key, so no flight is duplicated.
    """
    hourly = references.weather.select(
        "origin",
        F.col("time_hour").cast("timestamp").alias("time_hour"),
        *("temp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib"),
    )
    aircraft = references.planes.select(
        "tailnum", F.col("year").alias("plane_year"), "manufacturer", "model", "engines", "seats", "engine"
    )
    places = references.airports.select(
        F.col("faa").alias("dest"),
        F.col("name").alias("dest_name"),
        F.col("lat").alias("dest_lat"),
        F.col("lon").alias("dest_lon"),
    )
    return (
        found.join(F.broadcast(hourly), ["origin", "time_hour"], "left")
        .join(F.broadcast(references.airlines.withColumnRenamed("name", "airline")), "carrier", "left")
        .join(F.broadcast(aircraft), "tailnum", "left")
        .join(F.broadcast(places), "dest", "left")
        .withColumn("date", F.to_date(F.from_utc_timestamp("event_time", "America/New_York")))
        .withColumn("cancelled", F.col("dep_delay").isNull())
    )
