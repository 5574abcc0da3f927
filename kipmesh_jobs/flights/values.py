"""Values of the topic to flights, and why one is none.

A value is a flight when it is a JSON object whose fields have their types and that has all of `REQUIRED`. Everything
else is a dead letter: its place in the topic, its key and value as they are, and the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

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
    """The tables that flights are joined with."""

    weather: DataFrame
    airlines: DataFrame
    planes: DataFrame
    airports: DataFrame


def parse(records: DataFrame) -> DataFrame:
    """A row a record: its place, `key`, `value`, `appended`, the flight's fields, `event_time` and `is_flight`.

    `event_time` is the scheduled departure, UTC. Of what is no flight only the place, key and value mean anything.
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
    """The rows that are flights."""
    return parsed.where("is_flight").drop("is_flight", "key", "value")


def dead_letters(parsed: DataFrame) -> DataFrame:
    """The records that are none, as they are."""
    return parsed.where("NOT is_flight").select(*_PLACE, "appended", "key", "value")


def with_reasons(dead: DataFrame) -> DataFrame:
    """Dead letters with the `reason` of each.

    They are looked at a second time, by a parser that takes any JSON: there are few of them, and the stream is not to
    pay for it with every flight.
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


def load_references(spark: SparkSession, folder: Path, scale: int) -> References:
    """The tables of the data set in `folder`."""

    def frame(table: pd.DataFrame) -> DataFrame:
        return spark.createDataFrame(pa.Table.from_pandas(table, preserve_index=False))

    return References(
        weather=frame(dataset.load_weather(folder, scale=scale)),
        airlines=frame(dataset.load_table(folder, "airlines")),
        planes=frame(dataset.load_table(folder, "planes")),
        airports=frame(dataset.load_table(folder, "airports")),
    )


def enrich(found: DataFrame, references: References) -> DataFrame:
    """A row a flight, with the weather of its scheduled hour, its airline, aircraft and destination.

    What a table does not know is null; each table has at most one row a key, so that no flight is doubled.
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
