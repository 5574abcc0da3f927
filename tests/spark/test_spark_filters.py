"""Filter pushdown: the same rows with and without it, and fewer offsets read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from kipmesh.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(600)]

SETTING = "spark.sql.python.filterPushdown.enabled"
AT = "cast(1700000000 + {ms} / 1000.0 as timestamp)"


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[Callable[[bool], None]]:
    def set_enabled(enabled: bool) -> None:
        spark.conf.set(SETTING, str(enabled).lower())

    yield set_enabled
    set_enabled(True)


@pytest.fixture
def frame(
    spark: SparkSession, cluster: LocalCluster, new_topic: Callable[..., str], send: Callable[..., None]
) -> DataFrame:
    """300 records in three partitions; the second hundred repeats the timestamps of the first."""
    topic = new_topic(3)
    for first in (0, 0, 100):
        send(topic, 100, first=first, partitions=3)
    source = spark.read.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
    return source.option("subscribe", topic).option("pushFilters", "true").load()


def rows(frame: DataFrame) -> list[tuple[int, int, bytes]]:
    return sorted((row.partition, row.offset, bytes(row.value)) for row in frame.collect())


def is_left_to_spark(frame: DataFrame, column: str) -> bool:
    plan = frame._jdf.queryExecution().executedPlan().toString()
    return any(column in line for line in plan.splitlines() if " Filter (" in line)


NOTHING = "offset > 1000"
CONDITIONS = [
    ("partition = 1", "partition"),
    ("partition in (0, 2) and offset >= 30 and offset < 40", "offset"),
    ("partition <> 1 and topic like 'topic-%'", "partition"),
    ("offset in (3, 7, 90)", ""),
    (f"timestamp >= {AT.format(ms=150)}", ""),
    (f"timestamp > {AT.format(ms=20)} and timestamp <= {AT.format(ms=30)}", ""),
    (f"timestamp = {AT.format(ms=120)} or offset = 2", ""),
    (NOTHING, "offset"),
    ("cast(value as string) = 'v7' and offset < 50", "offset"),
]


@pytest.mark.parametrize(("condition", "column"), CONDITIONS)
def test_pushed_down_filters_return_the_same_rows(
    frame: DataFrame, pushdown: Callable[[bool], None], condition: str, column: str
) -> None:
    pushdown(False)
    without_pushdown = frame.where(condition)
    expected = rows(without_pushdown)
    pushdown(True)
    with_pushdown = frame.where(condition)
    assert rows(with_pushdown) == expected
    assert (len(expected) > 0) is (condition != NOTHING)
    if column:
        assert is_left_to_spark(without_pushdown, column)
        assert not is_left_to_spark(with_pushdown, column)


def test_pushdown_reduces_tasks_and_rows_of_the_source(
    spark: SparkSession, frame: DataFrame, pushdown: Callable[[bool], None]
) -> None:
    def tasks(condition: str, enabled: bool) -> int:
        pushdown(enabled)
        return int(frame.where(condition).rdd.getNumPartitions())

    assert tasks("partition = 1", False) == 3
    assert tasks("partition = 1", True) == 1
    late = f"partition = 1 and timestamp >= {AT.format(ms=150)}"
    assert read_offsets(frame.where(late), pushdown, False) == 100
    assert read_offsets(frame.where(late), pushdown, True) == 17


def test_frame_with_several_filters_returns_all_rows_of_each(
    spark: SparkSession, cluster: LocalCluster, new_topic: Callable[..., str], send: Callable[..., None]
) -> None:
    topic = new_topic()
    send(topic, 100)
    assert spark.conf.get(SETTING) == "true"
    source = spark.read.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
    frame = source.option("subscribe", topic).load()
    assert frame.where("partition = 1").count() == 50
    assert frame.count() == 100
    both = frame.where("partition = 0 and offset < 20").union(frame.where("partition = 1"))
    assert {row[0]: row[1] for row in both.groupBy("partition").count().collect()} == {0: 20, 1: 50}


def read_offsets(frame: DataFrame, pushdown: Callable[[bool], None], enabled: bool) -> int:
    """Return the number of rows of the scan before Spark's filters, by Spark's metric."""
    pushdown(enabled)
    execution = frame.select("offset")._jdf.queryExecution()
    execution.executedPlan().executeCollect()
    scan = execution.executedPlan()
    while scan.children().size() > 0:
        scan = scan.children().apply(0)
    return int(scan.metrics().apply("numOutputRows").value())
