"""Compares the batches of all replicas: gaps, agreements and differences.

Two replicas are compared on the offsets that both cover. Batches with equal base offset must be equal bytes, including
the leader epoch, and no batch may be missing on one side. Compaction rewrites batches: below either replica's cleaner
checkpoint only records that both still have must be equal.

Replicas must agree below both checkpointed high watermarks. They must also agree up to the last offset where both have
a batch of the same leader epoch: one leader assigns the offsets of an epoch, and a replica that has them has everything
before (log matching, as in Raft). For the metadata log only that rule and its snapshots, which contain committed
records, apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kipmesh_jobs.audit.inventory import ReplicaLog

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

LOGS_SCHEMA: Final = """replica string, topic string, partition int, topic_id string, high_watermark long,
 log_start long, cleaned_to long, first_base long, last_base long"""
_LOG: Final = ("topic", "partition")
_PAIR: Final = (*_LOG, "a", "b")


def logs_frame(spark: SparkSession, logs: Sequence[ReplicaLog]) -> DataFrame:
    """Return a row per log with its identity, checkpointed offsets, and the base offsets of its first and last segment
    (null without segments).
    """
    plain = attrgetter("replica", "topic", "partition", "topic_id", "high_watermark", "log_start", "cleaned_to")
    bases: list[list[int | None]] = [[one.base_offset for one in log.segments] or [None] for log in logs]
    rows = [(*plain(log), base[0], base[-1]) for log, base in zip(logs, bases, strict=True)]
    return spark.createDataFrame(rows, LOGS_SCHEMA)


def ranges_frame(batches: DataFrame, logs: DataFrame) -> DataFrame:
    """Return the rows of `logs` with start offset, end offset (exclusive), number and bytes of each log's valid
    batches.

    For a log without valid batches, start and end are the base offset of its last segment. The start is at least
    `log_start`.
    """
    from pyspark.sql import functions as f

    whole = batches.where("damage is null").groupBy("replica", *_LOG)
    found = whole.agg(
        f.min("base_offset").alias("start"),
        (f.max("last_offset") + 1).alias("end"),
        f.count("*").alias("batches"),
        f.sum("size_bytes").alias("bytes"),
    )
    empty = f.coalesce("last_base", f.lit(0))
    return (
        logs.join(found, ["replica", *_LOG], "left")
        .withColumn("end", f.coalesce("end", empty))
        .withColumn("start", f.greatest(f.coalesce("start", empty), "log_start"))
        .fillna(0, ["batches", "bytes"])
    )


def gaps_frame(batches: DataFrame, logs: DataFrame) -> DataFrame:
    """Return a row per batch that does not start at the end of its predecessor, and a row per log whose last segment
    starts beyond the end of its batches.

    Gaps below the cleaner checkpoint are allowed. Columns: replica, topic, partition, file, position (null for a
    segment), kind (gap or overlap), expected, offset.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    by_log = Window.partitionBy("replica", *_LOG).orderBy("segment_base", "position")
    placed = (
        batches.where("base_offset is not null")
        .withColumn("before", f.lag("last_offset").over(by_log) + 1)
        .join(f.broadcast(logs), ["replica", *_LOG])
        .withColumn("expected", f.coalesce("before", f.col("segment_base")))
        .where("base_offset != expected")
        # Apache Kafka's compaction leaves gaps between batches, kipmesh's does not.
        .where("not (base_offset > expected and expected < cleaned_to)")
    )
    within = placed.select(
        "replica",
        *_LOG,
        "file",
        "position",
        f.when(f.col("base_offset") > f.col("expected"), "gap").otherwise("overlap").alias("kind"),
        "expected",
        f.col("base_offset").alias("offset"),
    )
    ends = batches.where("base_offset is not null").groupBy("replica", *_LOG)
    after = (
        ends.agg(
            f.max_by("last_offset", f.struct("segment_base", "position")).alias("last"),
            f.max_by("file", "segment_base").alias("file"),
        )
        .join(f.broadcast(logs), ["replica", *_LOG])
        .where("last_base > last + 1")
        .select(
            "replica", *_LOG, "file", f.lit(None).cast("long").alias("position"), f.lit("gap").alias("kind"),
            (f.col("last") + 1).alias("expected"), f.col("last_base").alias("offset"),
        )
    )  # fmt: skip
    return within.unionByName(after)


def pairs_frame(ranges: DataFrame) -> DataFrame:
    """Return a row per pair of replicas of a partition (`a` < `b`). `from` to `to` (exclusive) is the range of offsets
    that both cover; it is empty if `from` equals `to`.

    `committed_to` is the lower high watermark, `cleaned_to` the higher cleaner checkpoint. `same_topic` is false if
    both have a topic id and the two differ.
    """
    from pyspark.sql import functions as f

    columns = ("topic_id", "high_watermark", "cleaned_to", "start", "end")
    one = ranges.select(*_LOG, f.col("replica").alias("a"), *(f.col(name).alias(f"{name}_a") for name in columns))
    other = ranges.select(*_LOG, f.col("replica").alias("b"), *(f.col(name).alias(f"{name}_b") for name in columns))
    both = one.join(other, list(_LOG)).where("a < b")
    is_same = "topic_id_a = topic_id_b or topic_id_a = '' or topic_id_b = ''"
    return (
        both.withColumn("same_topic", f.expr(is_same))
        .withColumn("from", f.greatest("start_a", "start_b"))
        .withColumn("to", f.greatest(f.least("end_a", "end_b"), "from"))
        .withColumn("committed_to", f.least("high_watermark_a", "high_watermark_b"))
        .withColumn("cleaned_to", f.greatest("cleaned_to_a", "cleaned_to_b"))
    )


def agreement_frame(batches: DataFrame, ranges: DataFrame) -> DataFrame:
    """Return a row per pair of replicas of the same topic id: compared range, agreed range, required range and first
    difference.

    The replicas agree on all offsets from `from` to `agrees_to` (exclusive). `must_agree_to` follows from the rules of
    this module; `is_violated` says whether the first difference is below it. Without a difference, `first_difference`
    and the columns that describe each side's batch at that offset are null.
    """
    from pyspark.sql import functions as f

    pairs = pairs_frame(ranges).where("same_topic").cache()
    compared = _compare_batches(batches, pairs).unionByName(_compare_records(batches, pairs))
    differs = ~f.col("is_equal")
    sides = f.struct("file_a", "position_a", "epoch_a", "file_b", "position_b", "epoch_b")
    found = compared.groupBy(*_PAIR).agg(
        f.max(f.when(f.col("epoch_a") == f.col("epoch_b"), f.col("offset"))).alias("matched"),
        f.min(f.when(differs, f.col("offset"))).alias("first_difference"),
        f.min_by(sides, f.when(differs, f.col("offset"))).alias("first"),
        f.count(f.when(differs, 1)).alias("differences"),
        f.count(f.when(~differs, 1)).alias("equal"),
    )  # fmt: skip
    must = f.least(f.greatest("committed_to", f.coalesce(f.col("matched") + 1, f.lit(0))), "to")
    return (
        pairs.join(found, list(_PAIR), "left")
        .fillna(0, ["differences", "equal"])
        .withColumn("must_agree_to", f.greatest(must, "from"))
        .withColumn("agrees_to", f.coalesce("first_difference", "to"))
        .withColumn("is_violated", f.coalesce(f.col("first_difference") < f.col("must_agree_to"), f.lit(False)))
        .select(
            *_PAIR, "from", "to", "agrees_to", "must_agree_to", "committed_to", "cleaned_to", "equal", "differences",
            "first_difference", "is_violated", "first.*",
        )
    )  # fmt: skip


def _compare_batches(batches: DataFrame, pairs: DataFrame) -> DataFrame:
    """Return a row per base offset at or above `cleaned_to`, with both sides and `is_equal`, which is also false if one
    side has no batch there.
    """
    from pyspark.sql import functions as f

    bounds = pairs.select(*_PAIR, "from", "to", "cleaned_to")
    within = (f.col("offset") >= f.greatest("from", "cleaned_to")) & (f.col("offset") < f.col("to"))
    some = batches.where("base_offset is not null").select(
        "replica", *_LOG, f.col("base_offset").alias("offset"), "leader_epoch", "digest", "file", "position"
    )
    return _full(some, bounds, within, f.coalesce(f.col("digest_a") == f.col("digest_b"), f.lit(False)))


def _compare_records(batches: DataFrame, pairs: DataFrame) -> DataFrame:
    """Return a row per offset below `cleaned_to` whose record both replicas still have, with both sides and
    `is_equal`.
    """
    from pyspark.sql import functions as f

    bounds = pairs.where("cleaned_to > from").select(*_PAIR, "from", "to", "cleaned_to")
    within = (f.col("offset") >= f.col("from")) & (f.col("offset") < f.least("to", "cleaned_to"))
    some = (
        batches.where("records is not null")
        .select("replica", *_LOG, "leader_epoch", "file", "position", f.explode("records").alias("record"))
        .select(
            "replica", *_LOG, f.col("record.offset").alias("offset"), "leader_epoch",
            f.col("record.digest").alias("digest"), "file", "position",
        )
    )  # fmt: skip
    both = _full(some, bounds, within, f.col("digest_a") == f.col("digest_b"))
    return both.where("is_equal is not null")


def _full(some: DataFrame, bounds: DataFrame, within: Column, is_equal: Column) -> DataFrame:
    """Join both sides of each pair by offset, with the file, position and leader epoch of each side, and `is_equal`."""
    from pyspark.sql import functions as f

    sides = []
    for side in ("a", "b"):
        named = some.withColumnRenamed("replica", side)
        kept = named.join(f.broadcast(bounds), [*_LOG, side]).where(within)
        sides.append(
            kept.groupBy(*_PAIR, "offset").agg(
                f.first("file").alias(f"file_{side}"),
                f.first("position").alias(f"position_{side}"),
                f.first("leader_epoch").alias(f"epoch_{side}"),
                f.first("digest").alias(f"digest_{side}"),
            )
        )
    both = sides[0].join(sides[1], [*_PAIR, "offset"], "full")
    columns = [f"{name}_{side}" for side in ("a", "b") for name in ("file", "position", "epoch")]
    return both.select(*_PAIR, "offset", *columns, is_equal.alias("is_equal"))
