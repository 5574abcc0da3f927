"""Readers of streams, called like Spark calls them, with a fake cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)
pytest.importorskip("pyspark.sql.streaming.datasource", reason="pyspark 4.1", exc_type=ImportError)

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.spark.offsets import DataLossError, InvalidOptionError
from kipmesh.spark.options import Mode, SourceOptions, parse_options
from kipmesh.spark.readers import KipmeshStreamReader, refuse_read_limits
from kipmesh.testing.fake_broker import FakeCluster

Json = dict[str, dict[str, int]]


def options(bootstrap: str = "127.0.0.1:1", /, **changes: Any) -> SourceOptions:
    strategy = {} if "subscribePattern" in changes or "assign" in changes else {"subscribe": "t"}
    raw = {"kafka.bootstrap.servers": bootstrap, "startingOffsets": "earliest", **strategy, **changes}
    return parse_options({name: str(value) for name, value in raw.items()}, Mode.STREAM)


@contextmanager
def query(cluster: FakeCluster, **changes: Any) -> Iterator[KipmeshStreamReader]:
    """Yield an unpickled reader, like in the process that Spark starts for a query."""
    reader = pickle.loads(pickle.dumps(KipmeshStreamReader(options(cluster.bootstrap, **changes))))
    try:
        yield reader
    finally:
        reader.stop()


def next_end(reader: KipmeshStreamReader, start: Json) -> Json:
    """Return the end of the next micro-batch, as read from the JSON of a checkpoint."""
    return dict(json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit()))))


def rows(reader: KipmeshStreamReader, start: Json, end: Json) -> list[str]:
    """Return the values of a micro-batch. Each task unpickles the reader and its partition."""
    values: list[str] = []
    for partition in reader.partitions(start, end):
        task, piece = pickle.loads(pickle.dumps((reader, partition)))
        for batch in task.read(piece):
            values += [value.decode() for value in batch.column("value").to_pylist()]
    return sorted(values)


def append(cluster: FakeCluster, topic: str, partition: int, *values: str) -> None:
    data = encode_batch([(None, value.encode()) for value in values], timestamp_ms=1_700_000_000_000)
    cluster.topics[topic].partitions[partition].append(data)


async def run_with_cluster(work: Callable[[FakeCluster], Any]) -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2)
        append(cluster, "t", 0, *(f"a{i}" for i in range(6)))
        append(cluster, "t", 1, *(f"b{i}" for i in range(3)))
        await asyncio.to_thread(work, cluster)


async def test_micro_batches_return_each_record_once() -> None:
    def work(cluster: FakeCluster) -> None:
        with query(cluster, maxOffsetsPerTrigger=6) as reader:
            start = reader.initialOffset()
            assert start == {"t": {"0": 0, "1": 0}}
            middle = next_end(reader, start)
            assert middle == {"t": {"0": 4, "1": 2}}
            end = next_end(reader, middle)
            assert end == reader.reportLatestOffset() == {"t": {"0": 6, "1": 3}}
            assert next_end(reader, end) == end
            assert rows(reader, start, middle) == ["a0", "a1", "a2", "a3", "b0", "b1"]
        with query(cluster, maxOffsetsPerTrigger=6) as restarted:
            assert rows(restarted, middle, end) == ["a4", "a5", "b2"]

    await run_with_cluster(work)


async def test_available_now_stops_at_log_ends_of_its_start() -> None:
    def work(cluster: FakeCluster) -> None:
        with query(cluster, minOffsetsPerTrigger=100) as reader:
            reader.prepareForTriggerAvailableNow()
            append(cluster, "t", 0, "later")
            end = next_end(reader, reader.initialOffset())
            assert end == {"t": {"0": 6, "1": 3}}
            assert next_end(reader, end) == end

    await run_with_cluster(work)


async def test_micro_batch_waits_for_min_offsets_per_trigger() -> None:
    def work(cluster: FakeCluster) -> None:
        with query(cluster, minOffsetsPerTrigger=4, maxOffsetsPerTrigger=8) as reader:
            assert reader.getDefaultReadLimit() == ReadMaxRows(8)
            first = next_end(reader, reader.initialOffset())
            assert next_end(reader, first) == first, (
                "one record is fewer than minOffsetsPerTrigger, and the delay has not passed"
            )
            all_available = reader.latestOffset(first, ReadAllAvailable())
            assert all_available == {"t": {"0": 6, "1": 3}}
            append(cluster, "t", 1, "b3", "b4", "b5")
            assert next_end(reader, first) == {"t": {"0": 6, "1": 6}}
        with query(cluster, minOffsetsPerTrigger=4, maxTriggerDelay="0s") as reader:
            assert reader.getDefaultReadLimit() == ReadMinRows(4)
            assert next_end(reader, first) == all_available | {"t": {"0": 6, "1": 6}}

    await run_with_cluster(work)


async def test_new_topic_is_read_from_its_first_offset() -> None:
    def work(cluster: FakeCluster) -> None:
        with query(cluster, subscribePattern="t|new-.*") as reader:
            first = next_end(reader, reader.initialOffset())
            cluster.create_topic("new-1", 1)
            append(cluster, "new-1", 0, "x", "y")
            cluster.create_topic("other", 1)
            second = next_end(reader, first)
            assert second == {"new-1": {"0": 2}, "t": {"0": 6, "1": 3}}
            assert rows(reader, first, second) == ["x", "y"]
            del cluster.topics["new-1"]
            with pytest.raises(DataLossError, match="deleted partitions: new-1-0"):
                next_end(reader, second)
        with query(cluster, subscribePattern="t|new-.*", failOnDataLoss="false") as reader:
            assert next_end(reader, second) == first

    await run_with_cluster(work)


async def test_error_of_deleted_topic_names_topic_and_option() -> None:
    def work(cluster: FakeCluster) -> None:
        with query(cluster) as reader:
            start = reader.initialOffset()
            end = next_end(reader, start)
            tasks = reader.partitions(start, end)
            del cluster.topics["t"]
            with pytest.raises(InvalidOptionError, match="option subscribe names a topic that does not exist"):
                next_end(reader, end)
            with pytest.raises(KafkaError) as caught:
                list(reader.read(tasks[0]))
            assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert "'t'" in str(caught.value)
        with query(cluster, assign='{"t":[0]}') as reader, pytest.raises(InvalidOptionError, match="option assign"):
            reader.initialOffset()

    await run_with_cluster(work)


async def test_start_beyond_log_end_names_the_option() -> None:
    def work(cluster: FakeCluster) -> None:
        beyond = '{"t":{"0":7,"1":3}}'
        with (
            query(cluster, startingOffsets=beyond) as reader,
            pytest.raises(DataLossError, match="option startingOffsets is 7 for t-0, which ends at offset 6"),
        ):
            reader.initialOffset()
        with query(cluster, startingOffsets=beyond, failOnDataLoss="false") as reader:
            assert reader.initialOffset() == {"t": {"0": 6, "1": 3}}

    await run_with_cluster(work)


def test_read_limits_are_rejected_without_pyspark_4_2() -> None:
    refuse_read_limits(options())
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"):
        with pytest.raises(InvalidOptionError, match=f"option {name} needs pyspark 4.2"):
            refuse_read_limits(options(**{name: 5}))


async def test_micro_batch_reads_all_records_on_pyspark_4_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    spec = importlib.util.find_spec("kipmesh.spark.readers")
    assert spec is not None
    assert spec.loader is not None
    older_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older_module)
    with pytest.raises(InvalidOptionError, match=r"option maxOffsetsPerTrigger needs pyspark 4\.2"):
        older_module.KipmeshStreamReader(options(maxOffsetsPerTrigger=5))

    def work(cluster: FakeCluster) -> None:
        reader = older_module.KipmeshStreamReader(options(cluster.bootstrap))
        start, end = reader.initialOffset(), reader.latestOffset()
        assert (start, end) == ({"t": {"0": 0, "1": 0}}, {"t": {"0": 6, "1": 3}})
        assert len(reader.partitions(start, end)) == 2
        reader.stop()

    await run_with_cluster(work)


async def test_max_tasks_limits_number_of_tasks() -> None:
    def work(cluster: FakeCluster) -> None:
        end = {"t": {"0": 6, "1": 3}}
        expected = [*(f"a{i}" for i in range(6)), *(f"b{i}" for i in range(3))]
        for changes, count in (({}, 2), ({"maxTasks": 1}, 1), ({"maxTasks": 2, "minPartitions": 2}, 2)):
            with query(cluster, **changes) as reader:
                start = reader.initialOffset()
                assert len(reader.partitions(start, end)) == count
                assert rows(reader, start, end) == expected

    await run_with_cluster(work)
