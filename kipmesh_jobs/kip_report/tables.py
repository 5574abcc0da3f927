"""Turns trace entries into tables. Every figure estimates all exchanges, and is exact at a sample of 1.

An entry with sampling share p represents 1/p exchanges, so sums are of value / p. Dropped entries are not estimated;
`status` has their number. A value that is not an entry goes to `dead_letters` with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 (PySpark's usual alias)

ENTRY_SCHEMA: Final = (
    "kind STRING, ts BIGINT, broker INT, broker_rack STRING, started BIGINT, sample DOUBLE, client STRING, rack STRING,"
    " replica INT, session INT, epoch INT, fetch STRING, error INT, named INT, answered INT, session_partitions INT,"
    " saved_request_bytes BIGINT, saved_response_bytes BIGINT, record_bytes BIGINT, relation STRING,"
    " leader_bytes BIGINT, follower_bytes BIGINT, saved_cross_rack_bytes BIGINT, request_bytes BIGINT,"
    " response_bytes BIGINT, partitions INT, records BIGINT, all_topics BOOLEAN, asked INT, event STRING,"
    " end_offset BIGINT, snapshot_epoch INT, bytes BIGINT, took_ms BIGINT, replay_records BIGINT, replay_bytes BIGINT,"
    " replay_bytes_exact BOOLEAN, sampled MAP<STRING, BIGINT>, dropped MAP<STRING, BIGINT>, own MAP<STRING, BIGINT>"
)
KINDS: Final = ("fetch", "produce", "metadata", "snapshot", "status")
DROP_REASONS: Final = ("rate", "queue", "write")
_BROKEN: Final = "broken"


def parse(records: DataFrame) -> DataFrame:
    """Return a row per record: position, `value`, the entry's fields, and `reason`, which says why the record is not an
    entry (null for a valid entry).
    """
    value = F.col("value").cast("string")
    options = {"columnNameOfCorruptRecord": _BROKEN}
    parsed = records.select(
        "topic",
        "partition",
        "offset",
        "value",
        F.from_json(value, f"{ENTRY_SCHEMA}, {_BROKEN} STRING", options).alias("entry"),
    ).select("topic", "partition", "offset", "value", "entry.*")
    sample = F.col("sample")
    reason = (
        F.when(F.col(_BROKEN).isNotNull() | F.col("value").isNull(), "not the JSON of an entry")
        .when(F.col("kind").isNull() | ~F.col("kind").isin(*KINDS), "no known kind")
        .when(F.col("ts").isNull() | F.col("broker").isNull(), "lacks ts or broker")
        .when(sample.isNull() | (sample <= 0) | (sample > 1), "sample is not above 0 and at most 1")
    )
    return parsed.withColumn("reason", reason).drop(_BROKEN)


def write_entries(records: DataFrame, parquet: Path) -> None:
    """Write the Parquet tables `entries` and `dead_letters` into `parquet`, reading the topic once."""
    parsed = parse(records).cache()
    parsed.where("reason IS NULL").drop("value", "reason").write.parquet(str(parquet / "entries"))
    dead = parsed.where("reason IS NOT NULL").select("topic", "partition", "offset", "reason", "value")
    dead.coalesce(1).write.parquet(str(parquet / "dead_letters"))
    parsed.unpersist()


def _sum(value: str | int, where: Column) -> Column:
    """Return a column with the rounded sum of `value` (column or number) divided by the sampling share, over the rows
    that match `where`. The sum is 0 if there are none.
    """
    share = F.when(where, F.col(value) if isinstance(value, str) else F.lit(value)) / F.col("sample")
    return F.coalesce(F.round(F.sum(share)), F.lit(0)).cast("bigint")


def _measures() -> list[Column]:
    fetch, produce, metadata = (F.col("kind") == kind for kind in ("fetch", "produce", "metadata"))
    follower, consumer = fetch & (F.col("replica") >= 0), fetch & (F.col("replica") < 0)
    racks = {
        f"{relation}_rack_{role}_bytes": (f"{role}_bytes", consumer & (F.col("relation") == relation))
        for relation in ("same", "cross", "unknown")
        for role in ("leader", "follower")
    }
    sums: dict[str, tuple[str | int, Column]] = {
        "fetches": (1, fetch),
        "incremental_fetches": (1, fetch & (F.col("fetch") == "incremental")),
        "session_errors": (1, fetch & (F.col("error") != 0)),
        "fetch_request_bytes": ("request_bytes", fetch),
        "fetch_response_bytes": ("response_bytes", fetch),
        "fetched_record_bytes": ("record_bytes", fetch),
        "followers_saved_bytes": ("saved_bytes", follower),
        "consumers_saved_bytes": ("saved_bytes", consumer),
        **racks,
        "saved_cross_rack_bytes": ("saved_cross_rack_bytes", consumer),
        "metadata_requests": (1, metadata),
        "metadata_topics_asked": ("asked", metadata),
        "metadata_requests_for_all": (1, metadata & F.col("all_topics")),
        "metadata_bytes": ("exchange_bytes", metadata),
        "produce_requests": (1, produce),
        "produced_records": ("records", produce),
        "produced_bytes": ("record_bytes", produce),
    }
    return [F.count("*").alias("entries"), *(_sum(*one).alias(name) for name, one in sums.items())]


def measure(entries: DataFrame, *keys: str) -> DataFrame:
    """Return estimated counts and sums of fetch, produce and metadata exchanges, grouped by `keys` (`time`, `client`).
    Without keys, returns one row.
    """
    exchanges = entries.where(F.col("kind").isin("fetch", "produce", "metadata"))
    with_sums = exchanges.withColumn(
        "saved_bytes", F.col("saved_request_bytes") + F.col("saved_response_bytes")
    ).withColumn("exchange_bytes", F.col("request_bytes") + F.col("response_bytes"))
    return with_sums.groupBy(*keys).agg(*_measures())


def with_time(entries: DataFrame, interval: str) -> DataFrame:
    """Add `time`, the start (UTC) of the `minute`, `hour` or `day` that contains each entry."""
    return entries.withColumn("time", F.date_trunc(interval, F.timestamp_millis("ts")))


def snapshots(entries: DataFrame) -> DataFrame:
    """Return the snapshot entries in order of time, with `at` as timestamp."""
    found = entries.where("kind = 'snapshot'").select(
        F.timestamp_millis("ts").alias("at"),
        *("broker", "event", "end_offset", "records", "bytes", "took_ms"),
        *("replay_records", "replay_bytes", "replay_bytes_exact"),
    )
    return found.coalesce(1).sortWithinPartitions("at", "broker")


def status(entries: DataFrame, since_ms: int | None = None) -> DataFrame:
    """Return a row per broker process: sampled and dropped entries according to its last status entry, the number of
    entries in the topic, and the range of its sampling shares.

    For a process that started before `since_ms`, the counts start at its first status entry after that.
    """
    is_entry = F.col("kind") != "status"
    before = F.lit(False) if since_ms is None else F.coalesce(F.col("started") < since_ms, F.lit(False))

    def increase(count: Column) -> Column:
        reported = F.when(~is_entry, count)
        return F.coalesce(F.max(reported) - F.when(F.max(before), F.min(reported)).otherwise(0), F.lit(0))

    counted = F.aggregate(F.map_values("sampled"), F.lit(0).cast("bigint"), lambda total, one: total + one)
    dropped = [
        increase(F.coalesce(F.col("dropped")[reason], F.lit(0))).alias(f"dropped_{reason}") for reason in DROP_REASONS
    ]
    return entries.groupBy("broker", "started").agg(
        increase(counted).alias("sampled"),
        *dropped,
        F.count(F.when(is_entry, 1)).alias("entries"),
        F.min(F.when(is_entry & (F.col("kind") != "snapshot"), F.col("sample"))).alias("sample_min"),
        F.max(F.when(is_entry & (F.col("kind") != "snapshot"), F.col("sample"))).alias("sample_max"),
    )


def collected(frame: DataFrame, order: str | None, rows_max: int) -> tuple[list[dict[str, Any]], bool]:
    """Return at most `rows_max` rows, and whether there are more. The rows are those with the greatest values of column
    `order`, in descending order. Without `order`, any rows may be returned.
    """
    ordered = frame if order is None else frame.orderBy(F.desc(order))
    rows: list[dict[str, Any]] = ordered.limit(rows_max + 1).toArrow().to_pylist()
    return rows[:rows_max], len(rows) > rows_max
