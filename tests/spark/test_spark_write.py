"""Writes to a real mesh: columns, restarts that repeat a batch, readers that ask for each row once."""

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
def read(spark: SparkSession, mesh: LocalCluster) -> Read:
    def load(topic: str, **options: Any) -> DataFrame:
        reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", mesh.bootstrap)
        return reader.options(subscribe=topic, **options).load()

    return load


def test_columns_become_records(
    spark: SparkSession, mesh: LocalCluster, read: Read, new_topic: NewTopic, send: Send
) -> None:
    source, target = new_topic(), new_topic()
    send(source, 20)
    frame = read(source, includeHeaders="true").drop("topic").filter("value != 'v3'")
    writer = frame.write.format("kipmesh").option("kafka.bootstrap.servers", mesh.bootstrap)
    writer.option("topic", target).option("kafka.compression.type", "zstd").mode("append").save()
    rows = {bytes(row.value): row for row in read(target, includeHeaders="true").collect()}
    assert rows.keys() == {b"v%d" % i for i in range(20) if i != 3}
    seven = rows[b"v7"]
    assert (bytes(seven.key), seven.partition, seven.timestamp.timestamp()) == (b"k7", 1, 1_700_000_000.007)
    assert [header.key for header in seven.headers] == ["number", "none", "kipmesh.batch", "kipmesh.row"]
    assert rows[b"v5"].key is None


def test_the_topic_may_be_a_column(spark: SparkSession, mesh: LocalCluster, read: Read, new_topic: NewTopic) -> None:
    one, other = new_topic(), new_topic()
    topic = f"if(id % 2 = 0, '{one}', '{other}')"
    frame = spark.range(10).selectExpr(f"{topic} as topic", "cast(id as string) as value")
    writer = frame.write.format("kipmesh").option("kafka.bootstrap.servers", mesh.bootstrap)
    writer.option("writeIds", "false").mode("append").save()
    assert sorted(bytes(row.value) for row in read(one).collect()) == [b"0", b"2", b"4", b"6", b"8"]
    assert [row.headers for row in read(other, includeHeaders="true").collect()] == [None] * 5


@pytest.mark.parametrize(
    ("expression", "options", "mode", "named"),
    [
        ("id as value", {}, "append", "column value must be string or binary, got bigint"),
        ("'x' as key", {}, "append", "column value is missing"),
        ("'x' as value", {"topics": "t"}, "append", "option topics is unknown"),
        ("'x' as value", {}, "overwrite", "option mode must be append"),
        ("'x' as value", {"kafka.acks": "2"}, "append", "option kafka.acks must be all"),
    ],
)
def test_wrong_columns_and_options_are_named(
    spark: SparkSession, mesh: LocalCluster, expression: str, options: dict[str, str], mode: str, named: str
) -> None:
    writer = spark.range(1).selectExpr(expression).write.format("kipmesh").mode(mode)
    with pytest.raises(Exception, match=named):
        writer.options(**{"kafka.bootstrap.servers": mesh.bootstrap, "topic": "t", **options}).save()


def test_a_batch_that_is_run_again_has_the_same_names(
    spark: SparkSession, mesh: LocalCluster, read: Read, new_topic: NewTopic, send: Send, tmp_path: Path
) -> None:
    """The query dies after a batch was written and before Spark knows: the log of commits lacks it."""
    source, target = new_topic(), new_topic()
    send(source, 500)

    def run() -> None:
        reader = spark.readStream.format("kipmesh").option("kafka.bootstrap.servers", mesh.bootstrap)
        stream = reader.option("subscribe", source).option("startingOffsets", "earliest")
        frame = stream.option("maxOffsetsPerTrigger", 300).load().selectExpr("key", "value")
        writer = frame.writeStream.format("kipmesh").option("kafka.bootstrap.servers", mesh.bootstrap)
        writer = writer.option("topic", target).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(280)

    run()
    assert read(target).count() == 500
    for file in (tmp_path / "checkpoint" / "commits").glob("*1*"):
        file.unlink()
    send(source, 100, first=500)
    run()
    assert read(target).count() == 800, "the second batch, of 200 records, is there twice"
    once = read(target, includeRecordId="true").dropDuplicates(["recordId"])
    assert sorted(int(bytes(row.value)[1:]) for row in once.select("value").collect()) == list(range(600))
