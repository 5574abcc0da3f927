"""Batch reads: columns, ranges, tasks and error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kipmesh.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Send = Callable[..., None]
NewTopic = Callable[..., str]


@pytest.fixture
def read(spark: SparkSession, cluster: LocalCluster) -> Callable[..., DataFrame]:
    def load(**options: Any) -> DataFrame:
        reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load()

    return load


def values(frame: DataFrame) -> list[str]:
    return sorted((bytes(row.value).decode() for row in frame.select("value").collect()), key=lambda v: int(v[1:]))


def numbers(first: int, end: int) -> list[str]:
    return [f"v{i}" for i in range(first, end)]


def test_batch_has_the_columns_of_the_kafka_connector(
    read: Callable[..., DataFrame], new_topic: NewTopic, send: Send
) -> None:
    topic = new_topic()
    send(topic, 10)
    frame = read(subscribe=topic)
    assert [(f.name, f.dataType.simpleString(), f.nullable) for f in frame.schema] == [
        ("key", "binary", True),
        ("value", "binary", True),
        ("topic", "string", True),
        ("partition", "int", True),
        ("offset", "bigint", True),
        ("timestamp", "timestamp", True),
        ("timestampType", "int", True),
    ]
    rows = {bytes(row.value): row for row in frame.collect()}
    assert len(rows) == 10
    assert rows[b"v5"].key is None
    row = rows[b"v7"]
    assert (bytes(row.key), row.topic, row.partition, row.offset, row.timestampType) == (b"k7", topic, 1, 3, 0)
    assert row.timestamp.timestamp() == pytest.approx(1_700_000_000.007)


def test_include_headers_adds_a_headers_column(read: Callable[..., DataFrame], new_topic: NewTopic, send: Send) -> None:
    topic = new_topic()
    send(topic, 4)
    rows = {bytes(row.value): row.headers for row in read(subscribe=topic, includeHeaders="true").collect()}
    assert [(h.key, h.value and bytes(h.value)) for h in rows[b"v3"]] == [("number", b"3"), ("none", None)]
    assert rows[b"v2"] is None


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_batch_reads_every_compression(
    read: Callable[..., DataFrame], new_topic: NewTopic, send: Send, compression: str
) -> None:
    topic = new_topic()
    send(topic, 300, compression=compression)
    assert values(read(subscribe=topic)) == numbers(0, 300)


def test_offset_options_select_the_records(read: Callable[..., DataFrame], new_topic: NewTopic, send: Send) -> None:
    topic = new_topic()
    send(topic, 100)
    frame = read(
        subscribe=topic,
        startingOffsets=f'{{"{topic}":{{"0":10,"1":-2}}}}',
        endingOffsets=f'{{"{topic}":{{"0":12,"1":3}}}}',
    )
    assert values(frame) == ["v1", "v3", "v5", "v20", "v22"]


def test_timestamp_options_select_the_records(read: Callable[..., DataFrame], new_topic: NewTopic, send: Send) -> None:
    topic = new_topic()
    send(topic, 100)
    send(topic, 100, first=100)
    frame = read(subscribe=topic, startingTimestamp=1_700_000_000_050, endingTimestamp=1_700_000_000_150)
    assert values(frame) == numbers(50, 150)


def test_assign_and_patterns_select_partitions_and_topics(
    read: Callable[..., DataFrame], new_topic: NewTopic, send: Send
) -> None:
    first, second = new_topic(), new_topic()
    send(first, 10)
    send(second, 10, first=10)
    assert values(read(assign=f'{{"{first}":[1]}}')) == ["v1", "v3", "v5", "v7", "v9"]
    assert values(read(subscribePattern=f"{first}|{second}")) == numbers(0, 20)
    assert values(read(subscribe=f"{first},{second}")) == numbers(0, 20)


def test_large_offset_ranges_are_split_into_tasks(
    read: Callable[..., DataFrame], new_topic: NewTopic, send: Send
) -> None:
    topic = new_topic()
    send(topic, 1000)
    assert read(subscribe=topic).rdd.getNumPartitions() == 2
    split = read(subscribe=topic, minPartitions=7)
    assert split.rdd.getNumPartitions() >= 7
    assert values(split) == numbers(0, 1000)
    assert values(read(subscribe=topic, maxRecordsPerPartition=99)) == numbers(0, 1000)


def test_empty_topic_has_no_rows_in_sql(
    spark: SparkSession, read: Callable[..., DataFrame], new_topic: NewTopic
) -> None:
    frame = read(subscribe=new_topic())
    frame.createOrReplaceTempView("nothing")
    assert spark.sql("select count(*) from nothing").collect()[0][0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "option startingoffset is unknown"),
        ({"kafka.fetch.min.byte": "1"}, "option kafka.fetch.min.byte"),
        ({"startingOffsets": "latest"}, "option startingOffsets"),
        ({"endingOffsets": '{"x":{"0":1}}'}, "option endingOffsets must name exactly"),
        ({"subscribe": "no-such-topic"}, "no-such-topic"),
        ({"assign": '{"x":[0]}'}, "option subscribe"),
        ({"startingOffsets": '{"x":{"0":'}, "option startingOffsets must be earliest, latest or"),
        ({"endingOffsets": '{"x":{"0":"7"}}'}, "option endingOffsets must be at least -2 for x-0, got '7'"),
        ({"startingOffsetsByTimestamp": "[1]"}, "option startingOffsetsByTimestamp must be"),
    ],
)
def test_invalid_option_is_named_in_the_error(
    read: Callable[..., DataFrame], new_topic: NewTopic, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        read(**{"subscribe": new_topic(), **options}).count()


@pytest.mark.parametrize("side", ["starting", "ending"])
def test_error_for_an_offset_beyond_the_end_names_partition_and_option(
    read: Callable[..., DataFrame], new_topic: NewTopic, send: Send, side: str
) -> None:
    topic = new_topic()
    send(topic, 10)
    offsets = {f"{side}Offsets": f'{{"{topic}":{{"0":5,"1":9}}}}'}
    messages = {
        "starting": f"option startingOffsets must not exceed the end of the query, 5, for {topic}-1, got 9",
        "ending": rf"{topic}-1 ends at offset 5, requested end 9 \(options startingOffsets, endingOffsets\)",
    }
    with pytest.raises(Exception, match=messages[side]):
        read(subscribe=topic, **offsets).count()


def test_deleted_records_are_reported_as_data_loss(
    cluster: LocalCluster, read: Callable[..., DataFrame], new_topic: NewTopic, send: Send
) -> None:
    from kipmesh.client.sync import AdminClient

    topic = new_topic()
    send(topic, 100)
    with AdminClient(cluster.bootstrap) as admin:
        admin.delete_records({(topic, 0): 20})
    assert read(subscribe=topic).count() == 80
    from_zero = f'{{"{topic}":{{"0":0,"1":0}}}}'
    with pytest.raises(Exception, match="some data may have been lost"):
        read(subscribe=topic, startingOffsets=from_zero).count()
    assert read(subscribe=topic, startingOffsets=from_zero, failOnDataLoss="false").count() == 80
