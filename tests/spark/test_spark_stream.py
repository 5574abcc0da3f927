"""Streaming reads: restarts, limits, new partitions, deleted topics and data loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kipmesh.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(600)]

Send = Callable[..., None]
NewTopic = Callable[..., str]
Run = Callable[..., "StreamingQuery"]


@pytest.fixture
def run(spark: SparkSession, cluster: LocalCluster, tmp_path: Path) -> Run:
    """Runs a query to the end of its topic, into tmp_path/out with the checkpoint in tmp_path/checkpoint."""

    def start(topic: str, **options: Any) -> StreamingQuery:
        reader = spark.readStream.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
        for name, value in {"subscribe": topic, "startingOffsets": "earliest", **options}.items():
            reader = reader.option(name, value)
        writer = reader.load().writeStream.format("parquet").option("path", str(tmp_path / "out"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        assert query.awaitTermination(280), "the query did not end in time"
        return query

    return start


def written(spark: SparkSession, tmp_path: Path) -> list[int]:
    rows = spark.read.parquet(str(tmp_path / "out")).select("value").collect()
    return sorted(int(bytes(row.value)[1:]) for row in rows)


def checkpointed(tmp_path: Path) -> dict[str, Any]:
    files = [file for file in (tmp_path / "checkpoint" / "offsets").iterdir() if file.name.isdigit()]
    newest = max(files, key=lambda file: int(file.name))
    return dict(json.loads(newest.read_text().splitlines()[-1]))


def test_restarted_query_resumes_from_its_checkpoint(
    spark: SparkSession, run: Run, new_topic: NewTopic, send: Send, tmp_path: Path
) -> None:
    topic = new_topic()
    send(topic, 500)
    run(topic)
    assert checkpointed(tmp_path) == {topic: {"0": 250, "1": 250}}
    send(topic, 300, first=500)
    run(topic)
    assert written(spark, tmp_path) == list(range(800))
    assert checkpointed(tmp_path) == {topic: {"0": 400, "1": 400}}
    run(topic)
    assert written(spark, tmp_path) == list(range(800))


def test_max_offsets_per_trigger_limits_each_batch(
    spark: SparkSession, run: Run, new_topic: NewTopic, send: Send, tmp_path: Path
) -> None:
    topic = new_topic()
    send(topic, 1000)
    query = run(topic, maxOffsetsPerTrigger=300)
    rows = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    assert rows == [300, 300, 300, 100]
    assert written(spark, tmp_path) == list(range(1000))


def test_new_partitions_are_read_from_their_beginning(
    cluster: LocalCluster,
    spark: SparkSession,
    run: Run,
    new_topic: NewTopic,
    send: Send,
    wait_metadata: Callable[[], None],
    tmp_path: Path,
) -> None:
    from kipmesh.client.sync import AdminClient

    topic = new_topic()
    send(topic, 100)
    run(topic)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_partitions({topic: 4})
    wait_metadata()
    send(topic, 100, first=100, partitions=4)
    run(topic)
    assert written(spark, tmp_path) == list(range(200))


def test_records_deleted_before_they_are_read_are_data_loss(
    cluster: LocalCluster, spark: SparkSession, run: Run, new_topic: NewTopic, send: Send, tmp_path: Path
) -> None:
    from kipmesh.client.sync import AdminClient

    topic = new_topic()
    send(topic, 100)
    run(topic)
    send(topic, 100, first=100)
    with AdminClient(cluster.bootstrap) as admin:
        admin.delete_records({(topic, 0): 60})
    with pytest.raises(Exception, match="some data may have been lost"):
        run(topic)
    run(topic, failOnDataLoss="false")
    assert written(spark, tmp_path) == [i for i in range(200) if i < 100 or i % 2 or i >= 120]


def test_error_names_a_topic_deleted_between_two_runs(
    cluster: LocalCluster, run: Run, new_topic: NewTopic, send: Send, wait_metadata: Callable[[], None]
) -> None:
    from kipmesh.client.sync import AdminClient

    topic, other = new_topic(), new_topic()
    send(topic, 10)
    run(f"{topic},{other}")
    with AdminClient(cluster.bootstrap) as admin:
        admin.delete_topics([other])
    wait_metadata()
    with pytest.raises(Exception, match=f"option subscribe names a topic that does not exist.*{other}"):
        run(f"{topic},{other}")


def test_query_fails_and_names_a_topic_deleted_while_it_runs(
    spark: SparkSession, cluster: LocalCluster, new_topic: NewTopic, send: Send, tmp_path: Path
) -> None:
    from kipmesh.client.sync import AdminClient

    topic = new_topic()
    send(topic, 10)
    reader = spark.readStream.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
    frame = reader.option("subscribe", topic).option("startingOffsets", "earliest").load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        query.processAllAvailable()
        assert query.isActive
        with AdminClient(cluster.bootstrap) as admin:
            admin.delete_topics([topic])
        with pytest.raises(Exception, match=f"option subscribe names a topic that does not exist.*{topic}"):
            query.awaitTermination(240)
    finally:
        query.stop()


def test_error_for_a_starting_offset_beyond_the_end_names_the_option(run: Run, new_topic: NewTopic, send: Send) -> None:
    topic = new_topic()
    send(topic, 10)
    with pytest.raises(Exception, match=f"option startingOffsets is 6 for {topic}-1, which ends at offset 5"):
        run(topic, startingOffsets=f'{{"{topic}":{{"0":5,"1":6}}}}')


def test_streaming_query_refuses_ending_offsets(run: Run, new_topic: NewTopic) -> None:
    with pytest.raises(Exception, match="option endingOffsets belongs to batch queries"):
        run(new_topic(), endingOffsets="latest")
