"""Tables of the flights job, late flights, and checks.

Tables are computed from the Parquet after the stream, with exact quantiles (`percentile`), one Parquet file each.
Delays are of departures in minutes; a cancelled flight has none and counts in `cancelled`. `date` and `hour` are
scheduled, local to New York.

Spark drops late rows and reports only their number. The checkpoint identifies them: it has the end offsets and the
watermark of each micro-batch. A row is dropped in batch n if its window, or its own session, ends no later than the
watermark of batch n - 1. (Spark uses the previous batch's watermark so that all aggregations of a query agree.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet as parquet_file
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (PySpark's usual alias)

from kipmesh_jobs.flights.streams import ON_TIME_MINUTES, read
from kipmesh_jobs.report import Check, Row

QUANTILES: Final = (0.1, 0.5, 0.75, 0.9, 0.99)
SUMMED: Final = ("dep_delay", "arr_delay", "distance")
LEGS_MAX: Final = 20
"""Later legs of a rotation are grouped together."""
SAMPLES: Final = 40
"""Number of rows in tables of single records. The Parquet has all."""
_CONCURRENT_TABLES: Final = 2
"""Planning and compiling a query uses one core, so two run concurrently."""
_COLUMNS: Final = (
    *("origin", "dest", "dest_name", "carrier", "airline", "date", "hour", "wind_speed", "visib", "precip"),
    *("plane_year", "dep_delay", "cancelled", "distance"),
)
_SPANS: Final = "partition INT, span_begin BIGINT, span_end BIGINT, stream_batch INT, watermark_ms BIGINT"


class BatchEnd(NamedTuple):
    """A micro-batch: its number, the watermark in ms since 1970 that it determined (0 for none), and the end offset of
    each partition.
    """

    number: int
    watermark_ms: int
    ends: Mapping[int, int]


class Span(NamedTuple):
    """The offsets of a partition that one micro-batch read, from `begin` (inclusive) to `end` (exclusive), and the
    watermark in ms that applied to them.
    """

    partition: int
    begin: int
    end: int
    batch: int
    watermark_ms: int


def read_batches(checkpoint: Path, topic: str) -> list[BatchEnd]:
    """Return the micro-batches of a checkpoint in order; empty if there are none. Raises ValueError for a file that is
    not an offset log of version 1. A batch without this topic has no end offsets.
    """
    batches = []
    for path in sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)):
        version, *lines = path.read_text().splitlines()
        if version != "v1" or not lines:
            raise ValueError(f"{path}: not an offset log of version 1")
        metadata, *sources = [json.loads(line) for line in lines if line.startswith("{")]
        ends: dict[str, int] = next((one[topic] for one in sources if isinstance(one.get(topic), dict)), {})
        watermark_ms = int(metadata.get("batchWatermarkMs", 0))
        batches.append(BatchEnd(int(path.name), watermark_ms, {int(part): int(end) for part, end in ends.items()}))
    return batches


def spans(batches: Sequence[BatchEnd]) -> list[Span]:
    """Return the non-empty offset ranges that each batch read, with the watermark of the previous batch (0 for the
    first).
    """
    found: list[Span] = []
    reached: dict[int, int] = {}
    watermark_ms = 0
    for batch in batches:
        for partition, end in sorted(batch.ends.items()):
            begin = reached.get(partition, 0)
            if end > begin:
                found.append(Span(partition, begin, end, batch.number, watermark_ms))
            reached[partition] = max(begin, end)
        watermark_ms = batch.watermark_ms
    return found


class Expected(NamedTuple):
    """Counts and the sum of delays in minutes of the values that this job wrote to the topic."""

    flights: int
    cancelled: int
    dep_delay_sum: int
    broken: int


def window_end_ms(window_ms: int) -> Column:
    """Return a column with the end of the window of a flight's `event_time`, in ms. Windows start at multiples of
    `window_ms` since 1970.
    """
    at = F.unix_millis("event_time")
    return at - at % window_ms + window_ms


def session_end_ms(gap_ms: int) -> Column:
    """Return a column with the end of a session that has only this flight (`event_time` plus the gap), in ms."""
    return F.unix_millis("event_time") + gap_ms


def late(flights: DataFrame, spans: Sequence[Span], end_ms: Column, stream: str) -> DataFrame:
    """Return the flights that a streaming query dropped as late: position in the topic, identity, micro-batch, its
    watermark, and `late_by_ms`, the time from `end_ms` to the watermark.

    `spans` are the offset ranges of the query's micro-batches. `end_ms` is the end of a flight's window or session,
    `stream` the name of the query.
    """
    spark = flights.sparkSession
    batch_spans = spark.createDataFrame([tuple(span) for span in spans], _SPANS)
    at = F.col("offset")
    joined = flights.join(F.broadcast(batch_spans), "partition").where(
        (at >= F.col("span_begin")) & (at < F.col("span_end"))
    )
    return joined.where((F.col("watermark_ms") > 0) & (end_ms <= F.col("watermark_ms"))).select(
        F.lit(stream).alias("stream"),
        *("topic", "partition", "offset", "carrier", "flight", "tailnum", "origin", "event_time"),
        F.col("stream_batch").alias("batch"),
        F.timestamp_millis("watermark_ms").alias("watermark"),
        (F.col("watermark_ms") - end_ms).alias("late_by_ms"),
    )


def write_tables(spark: SparkSession, parquet: Path) -> dict[str, list[dict[str, Any]]]:
    """Write the tables that need only the flights to `parquet`/NAME; return their rows by table name,
    sorted by keys.
    """
    flights = read(spark, parquet, "flights").select(*_COLUMNS).cache()
    age = binned(F.year("date") - F.col("plane_year"), 5, 30)
    keys: dict[str, tuple[str | Column, ...]] = {
        "daily": ("origin", "date"),
        "daily_all": ("date",),
        "origins": ("origin",),
        "carriers": ("carrier", "airline"),
        "clock": (F.weekday("date").alias("weekday"), "hour"),
        "destinations": ("dest", "dest_name"),
        "wind": (binned(F.col("wind_speed"), 5, 30).alias("wind_speed"),),
        "visibility": (binned(F.col("visib"), 2, 10).alias("visib"),),
        "rain": (_rain().alias("rain"),),
        "plane_age": (age.alias("age"),),
    }
    rows = _write(parquet, {name: (by_group(flights, *of), len(of)) for name, of in keys.items()})
    flights.unpersist()
    return rows


def write_stream_tables(spark: SparkSession, parquet: Path) -> dict[str, list[dict[str, Any]]]:
    """Write the tables that need windows and rotations to `parquet`/NAME; return their rows by table name, sorted by
    keys.
    """
    rotations = read(spark, parquet, "rotations")
    sizes = rotations.groupBy(F.least("departures", F.lit(LEGS_MAX)).alias("departures")).agg(
        F.count("*").alias("rotations"), F.countDistinct("tailnum").alias("aircraft")
    )
    daily = windows_daily(read(spark, parquet, "windows"))
    return _write(parquet, {"legs": (legs(rotations), 1), "rotation_sizes": (sizes, 1), "windows_daily": (daily, 2)})


def _write(parquet: Path, tables: Mapping[str, tuple[DataFrame, int]]) -> dict[str, list[dict[str, Any]]]:
    """Write tables, each a frame and the number of its leading key columns; return their rows by name,
    sorted by keys.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(_CONCURRENT_TABLES) as pool:
        arrow = dict(zip(tables, pool.map(lambda table: table[0].toArrow(), tables.values()), strict=True))
    for name, collected in arrow.items():
        # Sorted here, because a sort in Spark computes its input twice.
        ordered = collected.sort_by([(key, "ascending") for key in collected.column_names[: tables[name][1]]])
        rows[name] = ordered.to_pylist()
        (parquet / name).mkdir()
        parquet_file.write_table(ordered, parquet / name / "part-00000.parquet")
    return rows


def by_group(flights: DataFrame, *keys: str | Column) -> DataFrame:
    """Return counts, mean delay and delay quantiles (`p10` to `p99`, minutes) of each group, unordered.

    Counts flights with equal delays first, because quantiles of delays with frequencies cost half as much as quantiles
    of all flights.
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


def binned(value: Column, width: int, top: int) -> Column:
    """Return a column with the lower edge of a value's bin of `width`. Values of `top` or more share the bin `top`;
    null stays null.
    """
    return F.when(value.isNotNull(), F.least(F.floor(value / width) * width, F.lit(top)).cast("int"))


def _rain() -> Column:
    inches = F.col("precip")
    return F.when(inches.isNull(), None).when(inches == 0, "dry").when(inches < 0.1, "rain").otherwise("heavy rain")


def legs(rotations: DataFrame) -> DataFrame:
    """Return counts and mean delays by the position of a flight in its rotation, from 1 to `LEGS_MAX`. The last row
    also includes all later positions. `gained` is the mean increase over the previous flight.
    """
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
    """Return the sums of all windows by day (UTC) and origin, and the greatest delay."""
    return windows.groupBy(F.to_date("begin").alias("day"), "origin").agg(
        *(F.sum(name).alias(name) for name in ("flights", "departures", "cancelled", "delay_sum", "on_time")),
        F.max("delay_max").alias("delay_max"),
    )


def flight_counts(spark: SparkSession, parquet: Path) -> dict[str, int]:
    """Return counts of all flights, sums of `SUMMED` (`NAME_sum`) and the number of dead letters (`dead_letters`)."""
    found = _first(
        read(spark, parquet, "flights").agg(
            F.count("*").alias("flights"),
            F.countDistinct("partition", "offset").alias("distinct_flights"),
            F.count_if("cancelled").alias("cancelled"),
            F.count_if(F.col("tailnum").isNull()).alias("without_tailnum"),
            F.count("temp").alias("with_weather"),
            F.count("manufacturer").alias("with_plane"),
            F.count("dest_name").alias("with_airport"),
            *(F.coalesce(F.sum(name), F.lit(0)).alias(f"{name}_sum") for name in SUMMED),
        )
    )
    found["dead_letters"] = spark.read.parquet(str(parquet / "dead_letters")).count()
    return found


def counts(spark: SparkSession, parquet: Path) -> dict[str, int]:
    """Return the figures for `check`: those of `flight_counts`, and counts of windows, rotations and late flights."""
    found = flight_counts(spark, parquet)
    windows, rotations = (read(spark, parquet, name) for name in ("windows", "rotations"))
    late_by = {
        row["stream"]: row["count"]
        for row in spark.read.parquet(str(parquet / "late")).groupBy("stream").count().collect()
    }
    for name, frame, column in (("windows", windows, "flights"), ("rotations", rotations, "departures")):
        total = F.coalesce(F.sum(column), F.lit(0)).alias(f"in_{name}")
        found |= _first(frame.agg(F.count("*").alias(name), total))
    leg = rotations.select(F.explode("legs").alias("leg")).select("leg.partition", "leg.offset")
    found["distinct_in_rotations"] = leg.distinct().count()
    found["late_windows"] = late_by.get("windows", 0)
    found["late_rotations"] = late_by.get("rotations", 0)
    return found


def _first(frame: DataFrame) -> dict[str, int]:
    row = frame.first()
    return {} if row is None else {name: int(value) for name, value in row.asDict().items()}


def differing_windows(spark: SparkSession, parquet: Path, window_ms: int) -> int:
    """Return the number of windows (end, origin) that differ between the stream and a batch aggregation without the
    late flights.
    """
    flights = read(spark, parquet, "flights")
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
    streamed = read(spark, parquet, "windows").select(*plain.columns)
    differing = plain.exceptAll(streamed).unionByName(streamed.exceptAll(plain))
    return differing.select("end", "origin").distinct().count()


def check(found: Mapping[str, int], records: int, differing: int, expected: Expected | None) -> list[Check]:
    """Return the checks of a run's figures against each other, and against the input if it is known.

    `found` is the result of `counts`, `records` the number of records in the topic, and `differing` the result of
    `differing_windows`. `expected` describes the input that this run wrote, or is None.
    """
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
            "No flight is duplicated by the four joins",
            found["distinct_flights"] == flights,
            f"{flights:,} rows, {found['distinct_flights']:,} positions in the topic",
        ),
        Check(
            "Every flight is in a window or listed as late",
            found["in_windows"] + late_windows == flights,
            f"{found['in_windows']:,} in {found['windows']:,} windows + {late_windows:,} late",
        ),
        Check(
            "The windows equal those of a batch aggregation",
            differing == 0,
            f"{differing:,} of {found['windows']:,} windows differ",
        ),
        Check(
            "Every flight with a tail number is in one rotation or listed as late",
            in_rotations == flights and found["distinct_in_rotations"] == found["in_rotations"],
            f"{found['in_rotations']:,} in {found['rotations']:,} rotations + {late_rotations:,} late"
            f" + {found['without_tailnum']:,} without tail number",
        ),
    ]
    if expected is not None:
        got = Expected(flights, found["cancelled"], found["dep_delay_sum"], dead)
        checks.append(
            Check(
                "Counts and sums equal those of the CSV",
                got == expected,
                f"{got.flights:,} flights, {got.cancelled:,} cancelled, {got.dep_delay_sum:,} minutes of delay,"
                f" {got.broken:,} invalid values; input: {expected.flights:,}, {expected.cancelled:,},"
                f" {expected.dep_delay_sum:,}, {expected.broken:,}",
            )
        )
    return checks


class Samples(NamedTuple):
    """Sample rows for the page: dead letters, late flights and rotations. `dead_reasons` has the number of all dead
    letters by reason.
    """

    dead: Sequence[Row]
    dead_reasons: Sequence[Row]
    late: Sequence[Row]
    rotations: Sequence[Row]


def samples(spark: SparkSession, parquet: Path) -> Samples:
    """Return the first dead letters, the first late flights and the longest rotations, `SAMPLES` rows of each, and the
    number of dead letters by reason.
    """
    dead = spark.read.parquet(str(parquet / "dead_letters"))
    late = spark.read.parquet(str(parquet / "late"))
    rotations = read(spark, parquet, "rotations").selectExpr(
        *("tailnum", "begin", "departures"),
        "array_join(transform(legs, leg -> concat(leg.origin, '→', leg.dest)), ', ') AS way",
        "array_join(transform(legs, leg -> coalesce(string(leg.dep_delay), '–')), ', ') AS delays",
    )

    def rows(frame: Any) -> list[dict[str, Any]]:
        return [row.asDict() for row in frame.collect()]

    return Samples(
        rows(dead.orderBy("partition", "offset").limit(SAMPLES)),
        rows(dead.groupBy("reason").count().orderBy(F.desc("count"), "reason")),
        [
            {**row, "late_by": str(timedelta(milliseconds=row["late_by_ms"]))}
            for row in rows(late.orderBy("partition", "offset", "stream").limit(SAMPLES))
        ],
        rows(rotations.orderBy(F.desc("departures"), "begin", "tailnum").limit(SAMPLES)),
    )
