"""Entries of the trace to tables: every figure is an estimate of all exchanges, which at a sample of 1 is exact.

An entry that was sampled with share p stands for 1/p exchanges, so sums are of value / p. What limits dropped is not
made up for: `status` says how much that is. A value that is no entry goes to ``dead_letters`` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

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
    """A row a record: its place, the entry's fields, and `reason`, null where it is an entry."""
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
    """``entries`` and ``dead_letters``, from one read of the topic."""
    parsed = parse(records).cache()
    parsed.where("reason IS NULL").drop("value", "reason").write.parquet(str(parquet / "entries"))
    dead = parsed.where("reason IS NOT NULL").select("topic", "partition", "offset", "reason", "value")
    dead.coalesce(1).write.parquet(str(parquet / "dead_letters"))
    parsed.unpersist()


def _sum(value: str | int, where: Column) -> Column:
    """The estimate of a sum over all exchanges of which `where` is true."""
    share = F.when(where, F.col(value) if isinstance(value, str) else F.lit(value)) / F.col("sample")
    return F.coalesce(F.round(F.sum(share)), F.lit(0)).cast("bigint")


def _measures() -> Iterator[Column]:
    fetch, produce, metadata = (F.col("kind") == kind for kind in ("fetch", "produce", "metadata"))
    follower, consumer = fetch & (F.col("replica") >= 0), fetch & (F.col("replica") < 0)
    saved = "saved_bytes"
    yield F.count("*").alias("entries")
    yield _sum(1, fetch).alias("fetches")
    yield _sum(1, fetch & (F.col("fetch") == "incremental")).alias("incremental_fetches")
    yield _sum(1, fetch & (F.col("error") != 0)).alias("session_errors")
    yield _sum("request_bytes", fetch).alias("fetch_request_bytes")
    yield _sum("response_bytes", fetch).alias("fetch_response_bytes")
    yield _sum("record_bytes", fetch).alias("fetched_record_bytes")
    yield _sum(saved, follower).alias("followers_saved_bytes")
    yield _sum(saved, consumer).alias("consumers_saved_bytes")
    for relation in ("same", "cross", "unknown"):
        for role in ("leader", "follower"):
            yield _sum(f"{role}_bytes", consumer & (F.col("relation") == relation)).alias(
                f"{relation}_rack_{role}_bytes"
            )
    yield _sum("saved_cross_rack_bytes", consumer).alias("saved_cross_rack_bytes")
    yield _sum(1, metadata).alias("metadata_requests")
    yield _sum("asked", metadata).alias("metadata_topics_asked")
    yield _sum(1, metadata & F.col("all_topics")).alias("metadata_requests_for_all")
    yield _sum("exchange_bytes", metadata).alias("metadata_bytes")
    yield _sum(1, produce).alias("produce_requests")
    yield _sum("records", produce).alias("produced_records")
    yield _sum("record_bytes", produce).alias("produced_bytes")


def measure(entries: DataFrame, *keys: str) -> DataFrame:
    """All measures by the keys, of which there are `time` (of a given interval) and `client`; one row without keys."""
    exchanges = entries.where(F.col("kind").isin("fetch", "produce", "metadata"))
    with_sums = exchanges.withColumn(
        "saved_bytes", F.col("saved_request_bytes") + F.col("saved_response_bytes")
    ).withColumn("exchange_bytes", F.col("request_bytes") + F.col("response_bytes"))
    return with_sums.groupBy(*keys).agg(*_measures())


def with_time(entries: DataFrame, interval: str) -> DataFrame:
    """With the beginning of each entry's hour (or another interval), UTC."""
    return entries.withColumn("time", F.date_trunc(interval, F.timestamp_millis("ts")))


def snapshots(entries: DataFrame) -> DataFrame:
    """Snapshots one by one, in the order of time."""
    found = entries.where("kind = 'snapshot'").select(
        F.timestamp_millis("ts").alias("at"),
        *("broker", "event", "end_offset", "records", "bytes", "took_ms"),
        *("replay_records", "replay_bytes", "replay_bytes_exact"),
    )
    return found.coalesce(1).sortWithinPartitions("at", "broker")


def status(entries: DataFrame, since_ms: int | None = None) -> DataFrame:
    """By process of a broker: what it sampled and dropped by its last word, and how much of that is here.

    Of a process that had started before `since_ms`: since its first word after that.
    """
    is_entry = F.col("kind") != "status"
    before = F.lit(False) if since_ms is None else F.coalesce(F.col("started") < since_ms, F.lit(False))

    def grown(count: Column) -> Column:
        said = F.when(~is_entry, count)
        return F.coalesce(F.max(said) - F.when(F.max(before), F.min(said)).otherwise(0), F.lit(0))

    counted = F.aggregate(F.map_values("sampled"), F.lit(0).cast("bigint"), lambda total, one: total + one)
    dropped = [
        grown(F.coalesce(F.col("dropped")[reason], F.lit(0))).alias(f"dropped_{reason}") for reason in DROP_REASONS
    ]
    return entries.groupBy("broker", "started").agg(
        grown(counted).alias("sampled"),
        *dropped,
        F.count(F.when(is_entry, 1)).alias("entries"),
        F.min(F.when(is_entry & (F.col("kind") != "snapshot"), F.col("sample"))).alias("sample_min"),
        F.max(F.when(is_entry & (F.col("kind") != "snapshot"), F.col("sample"))).alias("sample_max"),
    )


def collected(frame: DataFrame, order: str | None, rows_max: int) -> tuple[list[dict[str, Any]], bool]:
    """At most `rows_max` of a table's rows, those with the greatest `order` first; and whether there are more."""
    ordered = frame if order is None else frame.orderBy(F.desc(order))
    rows: list[dict[str, Any]] = ordered.limit(rows_max + 1).toArrow().to_pylist()
    return rows[:rows_max], len(rows) > rows_max
