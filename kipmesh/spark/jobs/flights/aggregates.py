"""The tables of the flights job, from the enriched Parquet: small, exact, one Parquet file each.

Delays are of departures, in minutes; a cancelled flight has none and counts in `cancelled`. `date` and `hour` are
local to New York and by schedule. Quantiles are exact (`percentile`), not sketches.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as parquet_file
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

QUANTILES: Final = (0.1, 0.5, 0.75, 0.9, 0.99)
ON_TIME_MINUTES: Final = 15
"""The usual limit: a departure at most this late is on time."""
_CONCURRENT_TABLES: Final = 2
"""Planning and compiling a query runs on one core; two at a time use both."""
_COLUMNS: Final = (
    *("origin", "dest", "carrier", "airline", "date", "hour", "wind_speed", "visib", "precip"),
    *("dep_delay", "cancelled", "distance"),
)
_MEASURES: Final = 6 + len(QUANTILES)
"""Columns of a table after its keys."""


def read_flights(spark: SparkSession, parquet: Path) -> DataFrame:
    """The enriched flights of all micro-batches."""
    return spark.read.option("basePath", str(parquet / "flights")).parquet(str(parquet / "flights" / "batch=*"))


def write_tables(spark: SparkSession, parquet: Path) -> dict[str, list[dict[str, Any]]]:
    """Compute every table, write each to `parquet`/<name>, and return their rows in order of the keys."""
    flights = read_flights(spark, parquet).where(~F.col("malformed")).select(*_COLUMNS).cache()
    tables = {
        "daily": by_group(flights, "origin", "date"),
        "daily_all": by_group(flights, "date"),
        "origins": by_group(flights, "origin"),
        "carriers": by_group(flights, "carrier", "airline"),
        "clock": by_group(flights, F.weekday("date").alias("weekday"), "hour"),
        "destinations": by_group(flights, "dest"),
        "wind": by_group(flights, binned(F.col("wind_speed"), 5, 30).alias("wind_speed")),
        "visibility": by_group(flights, binned(F.col("visib"), 2, 10).alias("visib")),
        "rain": by_group(flights, _rain().alias("rain")),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(_CONCURRENT_TABLES) as pool:
        arrow = dict(zip(tables, pool.map(lambda table: table.toArrow(), tables.values()), strict=True))
    for name, collected in arrow.items():
        # Sorted here: a sort in Spark samples its input first, which computes a small table twice.
        collected = collected.sort_by([(key, "ascending") for key in collected.column_names[:-_MEASURES]])
        rows[name] = collected.to_pylist()
        parquet_file.write_table(collected, _emptied(parquet / name) / "part-00000.parquet")
    flights.unpersist()
    return rows


def by_group(flights: DataFrame, *keys: str | Column) -> DataFrame:
    """Counts and delay quantiles of each group, in no order.

    In two levels: flights with the same delay are counted first, by generated code, and the quantiles are then those
    of delays with frequencies, which costs half of what quantiles of all flights do.
    """
    delay = F.col("dep_delay")
    cells = flights.groupBy(*keys, delay).agg(
        F.count("*").alias("flights"), F.count_if("cancelled").alias("cancelled"), F.sum("distance").alias("miles")
    )
    names = [name for name in cells.columns if name not in ("dep_delay", "flights", "cancelled", "miles")]
    departures = F.sum(F.when(delay.isNotNull(), F.col("flights")).otherwise(0))
    grouped = cells.groupBy(*names).agg(
        F.sum("flights").alias("flights"),
        departures.alias("departures"),
        F.sum("cancelled").alias("cancelled"),
        (F.sum(delay * F.col("flights")) / departures).alias("mean_delay"),
        F.sum(F.when(delay <= ON_TIME_MINUTES, F.col("flights")).otherwise(0)).alias("on_time"),
        F.sum("miles").alias("miles"),
        F.percentile("dep_delay", list(QUANTILES), F.col("flights")).alias("quantiles"),
    )
    quantiles = [F.col("quantiles")[i].alias(f"p{round(q * 100)}") for i, q in enumerate(QUANTILES)]
    return grouped.select(*grouped.columns[:-1], *quantiles)


def totals(spark: SparkSession, parquet: Path) -> dict[str, int]:
    """What the proof compares with the CSV: counts and sums over everything that was streamed."""
    row = (
        read_flights(spark, parquet)
        .agg(
            F.count("*").alias("records"),
            F.countDistinct("partition", "offset").alias("distinct_records"),
            F.count_if("malformed").alias("malformed"),
            F.count_if("cancelled").alias("cancelled"),
            F.count("temp").alias("with_weather"),
            F.sum("dep_delay").alias("dep_delay_sum"),
            F.sum("arr_delay").alias("arr_delay_sum"),
            F.sum("distance").alias("distance_sum"),
        )
        .first()
    )
    return {} if row is None else {name: int(value or 0) for name, value in row.asDict().items()}


def binned(value: Column, width: int, top: int) -> Column:
    """The lower edge of the bin that a value lies in; from `top` up all are one bin; null (`least` skips it) stays."""
    return F.when(value.isNotNull(), F.least(F.floor(value / width) * width, F.lit(top)).cast("int"))


def _rain() -> Column:
    inches = F.col("precip")
    return F.when(inches.isNull(), None).when(inches == 0, "dry").when(inches < 0.1, "rain").otherwise("heavy rain")


def _emptied(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    return folder
