"""Writes: columns, topics, options, and repeated batches after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kipmesh.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Send = Callable[..., None]
NewTopic = Callable[..., str]
Read = Callable[..., "DataFrame"]


@pytest.fixture
def read(spark: SparkSession, cluster: LocalCluster) -> Read:
    def load(topic: str, **options: Any) -> DataFrame:
        reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
        return reader.options(subscribe=topic, **options).load()

    return load


def test_columns_are_written_as_records(
    spark: SparkSession, cluster: LocalCluster, read: Read, new_topic: NewTopic, send: Send
) -> None:
    source, target = new_topic(), new_topic()
    send(source, 20)
    frame = read(source, includeHeaders="true").drop("topic").filter("value != 'v3'")
    writer = frame.write.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
    writer.option("topic", target).option("kafka.compression.type", "zstd").mode("append").save()
    rows = {bytes(row.value): row for row in read(target, includeHeaders="true").collect()}
    assert rows.keys() == {b"v%d" % i for i in range(20) if i != 3}
    seven = rows[b"v7"]
    assert (bytes(seven.key), seven.partition, seven.timestamp.timestamp()) == (b"k7", 1, 1_700_000_000.007)
    assert [header.key for header in seven.headers] == ["number", "none", "kipmesh.batch", "kipmesh.row"]
    assert rows[b"v5"].key is None


def test_topic_column_selects_the_topic_of_each_row(
    spark: SparkSession, cluster: LocalCluster, read: Read, new_topic: NewTopic
) -> None:
    first, second = new_topic(), new_topic()
    topic = f"if(id % 2 = 0, '{first}', '{second}')"
    frame = spark.range(10).selectExpr(f"{topic} as topic", "cast(id as string) as value")
    writer = frame.write.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
    writer.option("writeIds", "false").mode("append").save()
    assert sorted(bytes(row.value) for row in read(first).collect()) == [b"0", b"2", b"4", b"6", b"8"]
    assert [row.headers for row in read(second, includeHeaders="true").collect()] == [None] * 5


@pytest.mark.parametrize(
    ("expression", "options", "mode", "message"),
    [
        ("id as value", {}, "append", "column value must be string or binary, got bigint"),
        ("'x' as key", {}, "append", "column value is missing"),
        ("'x' as value", {"topics": "t"}, "append", "option topics is unknown"),
        ("'x' as value", {}, "overwrite", "option mode must be append"),
        ("'x' as value", {"kafka.acks": "2"}, "append", "option kafka.acks must be all"),
    ],
)
def test_invalid_columns_and_options_are_named_in_the_error(
    spark: SparkSession, cluster: LocalCluster, expression: str, options: dict[str, str], mode: str, message: str
) -> None:
    writer = spark.range(1).selectExpr(expression).write.format("kipmesh").mode(mode)
    with pytest.raises(Exception, match=message):
        writer.options(**{"kafka.bootstrap.servers": cluster.bootstrap, "topic": "t", **options}).save()


def test_repeated_batch_has_the_same_record_ids(
    spark: SparkSession, cluster: LocalCluster, read: Read, new_topic: NewTopic, send: Send, tmp_path: Path
) -> None:
    """Simulate a query that is killed between the write of a batch and its entry in Spark's commit log."""
    source, target = new_topic(), new_topic()
    send(source, 500)

    def run() -> None:
        reader = spark.readStream.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
        stream = reader.option("subscribe", source).option("startingOffsets", "earliest")
        frame = stream.option("maxOffsetsPerTrigger", 300).load().selectExpr("key", "value")
        writer = frame.writeStream.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
        writer = writer.option("topic", target).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(280)

    run()
    assert read(target).count() == 500
    for file in (tmp_path / "checkpoint" / "commits").glob("*1*"):
        file.unlink()
    send(source, 100, first=500)
    run()
    assert read(target).count() == 800, "the second batch, of 200 records, must be written twice"
    once = read(target, includeRecordId="true").dropDuplicates(["recordId"])
    assert sorted(int(bytes(row.value)[1:]) for row in once.select("value").collect()) == list(range(600))
