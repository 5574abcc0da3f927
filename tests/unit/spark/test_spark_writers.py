"""Tasks of writes without Spark, with a fake cluster: records, row names and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)
pytest.importorskip("pyspark", exc_type=ImportError)

import pyarrow as pa

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.spark.cluster import ClusterConnection
from kipmesh.spark.offsets import InvalidOptionError, OffsetRange, TopicPartition
from kipmesh.spark.options import Mode, WriteOptions, parse_options, parse_write_options
from kipmesh.spark.planning import DataLoss
from kipmesh.spark.writers import rows_of, write_rows
from kipmesh.testing.fake_broker import FakeCluster

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def options(bootstrap: str = "127.0.0.1:1", **given: str) -> WriteOptions:
    return parse_write_options({"kafka.bootstrap.servers": bootstrap, **given}, Mode.BATCH)


def columns(**given: Any) -> Any:
    return pa.RecordBatch.from_pydict(given)


def read_rows(cluster: FakeCluster) -> list[dict[str, Any]]:
    """Return all records of topic t, decoded like in a Spark read."""
    from kipmesh.spark.decode import decode
    from kipmesh.spark.readers import arrow_schema

    given = {"subscribe": "t", "kafka.bootstrap.servers": cluster.bootstrap}
    schema = arrow_schema(include_headers=True, include_record_id=True)
    rows: list[dict[str, Any]] = []
    with ClusterConnection(parse_options(given, Mode.BATCH)) as connection:
        for topic_partition, end in connection.latest_offsets(connection.partitions()).items():
            wanted = OffsetRange(TopicPartition(*topic_partition), 0, end)
            if end:
                parts = decode(connection.fetch([wanted], DataLoss(fail=True)), schema)
                rows += [row for part in parts for row in part.to_pylist()]
    return rows


async def run_with_cluster(work: Callable[[FakeCluster], Any]) -> Any:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 3)
        return await asyncio.to_thread(work, cluster)


def test_rows_are_built_from_present_columns() -> None:
    batch = columns(
        topic=["a", "b"],
        key=["k", None],
        value=pa.array([b"x", None], pa.binary()),
        partition=pa.array([1, None], pa.int32()),
        headers=pa.array([[{"key": "h", "value": b"y"}], None], HEADERS),
        timestamp=pa.array([1_700_000_000_123_999, None], pa.timestamp("us", tz="UTC")),
        other=[1.0, 2.0],
    )
    assert rows_of(batch, options()) == [
        ("a", b"k", b"x", 1, 1_700_000_000_123, [("h", b"y")]),
        ("b", None, None, None, None, []),
    ]
    rows_without_headers = rows_of(batch, options(topic="t", includeHeaders="false"))
    assert [(row[0], row[5]) for row in rows_without_headers] == [("t", []), ("t", [])]
    assert rows_of(columns(value=["ü"]), options(topic="t")) == [("t", None, "ü".encode(), None, None, [])]


def test_row_requires_topic() -> None:
    with pytest.raises(InvalidOptionError, match="option topic is required, because a row"):
        rows_of(columns(topic=["a", None], value=["x", "y"]), options())


@pytest.mark.parametrize(
    ("header", "problem"), [(None, "a header that is null"), ({"key": None, "value": b"v"}, "whose key is null")]
)
@pytest.mark.parametrize("write_ids", ["true", "false"])
def test_header_requires_key(header: dict[str, Any] | None, problem: str, write_ids: str) -> None:
    batch = columns(value=["x", "y"], headers=pa.array([[{"key": "a", "value": None}], [header]], HEADERS))
    with pytest.raises(ValueError, match=f"the column headers has .*{problem}"):
        write_rows(options(topic="t", writeIds=write_ids), "b", 0, iter([batch]))
    assert len(rows_of(batch, options(topic="t", includeHeaders="false"))) == 2


def test_empty_task_opens_no_connection() -> None:
    empty = columns(value=pa.array([], pa.string()))
    assert write_rows(options(topic="t"), "b", 0, iter([empty, empty])).rows == 0


async def test_retried_task_writes_the_same_row_names() -> None:
    values = [f"v{i % 1500}" for i in range(2500)]

    def work(cluster: FakeCluster) -> list[dict[str, Any]]:
        write_options = options(cluster.bootstrap, topic="t")
        result = write_rows(write_options, "q/7", 3, iter([columns(value=values[:1200]), columns(value=values[1200:])]))
        assert result.rows == len(values)
        write_rows(write_options, "q/7", 3, iter([columns(value=values[::-1])]))
        write_rows(write_options, "q/8", 3, iter([columns(value=values[:1])]))
        return read_rows(cluster)

    rows = await run_with_cluster(work)
    assert len(rows) == 2 * len(values) + 1
    assert rows[0]["headers"][0] == {"key": "kipmesh.batch", "value": b"q/7"}
    value_by_id = {row["recordId"]: row["value"].decode() for row in rows}
    assert sorted(value_by_id.values()) == sorted([*values, values[0]])


async def test_row_names_replace_names_of_a_read_record() -> None:
    def work(cluster: FakeCluster) -> list[dict[str, Any]]:
        old_headers = [{"key": "kipmesh.batch", "value": b"old"}, {"key": "own", "value": None}]
        batch = columns(value=["x"], headers=pa.array([old_headers], HEADERS))
        write_rows(options(cluster.bootstrap, topic="t"), "new", 0, iter([batch]))
        write_rows(options(cluster.bootstrap, topic="t", writeIds="false"), "new", 0, iter([columns(value=["x"])]))
        return read_rows(cluster)

    rows = await run_with_cluster(work)
    (named,) = [row for row in rows if row["headers"]]
    assert [header["key"] for header in named["headers"]] == ["own", "kipmesh.batch", "kipmesh.row"]
    assert named["headers"][1]["value"] == b"new"


async def test_record_error_fails_the_task() -> None:
    def work(cluster: FakeCluster) -> None:
        cluster.inject("Produce", ErrorCode.INVALID_RECORD, times=100)
        with pytest.raises(KafkaError) as caught:
            write_rows(options(cluster.bootstrap, topic="t"), "b", 0, iter([columns(value=["x"])]))
        assert caught.value.code == ErrorCode.INVALID_RECORD

    await run_with_cluster(work)


async def test_missing_topic_fails_the_task() -> None:
    def work(cluster: FakeCluster) -> None:
        write_options = options(cluster.bootstrap, topic="nowhere", **{"kafka.max.block.ms": "300"})
        with pytest.raises(KafkaError, match="nowhere"):
            write_rows(write_options, "b", 0, iter([columns(value=["x"])]))

    await run_with_cluster(work)
