"""Spark's Kafka connector: batch and streaming with headers, timestamps, checkpoints and a killed broker.

The connector for the installed Spark version comes from Maven, as for `make bench-spark ARGS=--kafka`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers
from tests.clients import scenarios_of_tests as scenarios

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]
Open = Callable[..., drivers.Driver]
STREAM_TIMEOUT_S = 240
ROW = "key binary, value binary, partition int, headers array<struct<key: string, value: binary>>"


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    if not drivers.is_wanted("spark"):
        pytest.skip("tests of Spark's connector run with: make clients")
    from bench.kafka import KafkaMissingError
    from bench.spark_beside import start_session
    from kipmesh.spark.java import find_java
    from kipmesh.spark.session import stop_session

    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer")
    try:
        session = start_session(tmp_path_factory.mktemp("spark"))
    except KafkaMissingError as error:
        pytest.skip(str(error))
    yield session
    stop_session(session)


@pytest.fixture
def helper(spark: SparkSession, open_driver: Open) -> drivers.Driver:
    """Driver for administration and records with timestamps. Started after Spark, which forks."""
    return open_driver(drivers.CLIENTS["confluent-kafka"])


@pytest.fixture
def connection(cluster: clusters.Cluster) -> dict[str, str]:
    """Spark's connection options."""
    return {"kafka.bootstrap.servers": cluster.bootstrap}


def rows(first: int, count: int, partitions: int) -> list[tuple[Any, ...]]:
    """Return rows of key, value, partition and headers; some keys and headers are null."""
    return [
        (
            None if number % 5 == 0 else b"key-%d" % number,
            b"value-%d" % number,
            number % partitions,
            [("number", b"%d" % number), ("none", None)] if number % 3 == 0 else None,
        )
        for number in range(first, first + count)
    ]


def write(spark: SparkSession, connection: dict[str, str], topic: str, given: Sequence[tuple[Any, ...]]) -> None:
    """Write a batch with Spark, whose producer is idempotent by default."""
    frame = spark.createDataFrame(list(given), ROW).coalesce(1)
    frame.write.format("kafka").options(**connection).option("includeHeaders", "true").option("topic", topic).save()


def read(spark: SparkSession, connection: dict[str, str], topic: str, **more: str) -> DataFrame:
    """Read all records of the topic as a batch."""
    options = {**connection, "subscribe": topic, "includeHeaders": "true", **more}
    return spark.read.format("kafka").options(**options).load()


def plain(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return rows in the form and order of `rows`."""
    found = []
    for row in frame.select("key", "value", "partition", "headers").collect():
        key, value = (None if field is None else bytes(field) for field in (row.key, row.value))
        headers = row.headers and [
            (header.key, None if header.value is None else bytes(header.value)) for header in row.headers
        ]
        found.append((key, value, row.partition, headers))
    return sorted(found, key=lambda each: int(each[1].rpartition(b"-")[2]))


def test_batch_is_written_and_read_back(
    spark: SparkSession, connection: dict[str, str], helper: drivers.Driver, topic: str
) -> None:
    scenarios.create(helper, topic, 3)
    sent = rows(0, 900, 3)
    write(spark, connection, topic, sent)
    found = read(spark, connection, topic)
    assert plain(found) == sent
    by_partition = found.groupBy("partition").agg({"offset": "max", "value": "count"}).collect()
    assert {tuple(row) for row in by_partition} == {(number, 299, 300) for number in range(3)}
    part = read(spark, connection, topic, startingOffsets=f'{{"{topic}": {{"0": 290, "1": -2, "2": 300}}}}')
    assert part.count() == 310


def test_timestamp_options_select_the_records_of_a_batch(
    spark: SparkSession, connection: dict[str, str], helper: drivers.Driver, topic: str
) -> None:
    """Timestamps apply to all or single partitions; the strategy `latest` applies without a matching record."""
    scenarios.create(helper, topic, 2)
    sent = scenarios.records(200, 2)
    helper("produce", topic=topic, records=sent)
    begin, end = sent[60]["timestamp"], sent[150]["timestamp"]

    def numbers(**options: str) -> list[int]:
        values = read(spark, connection, topic, **options).select("value").collect()
        return sorted(int(bytes(row.value).partition(b":")[0]) for row in values)

    assert numbers(startingTimestamp=str(begin)) == list(range(60, 200))
    assert numbers(startingTimestamp=str(begin), endingTimestamp=str(end)) == list(range(60, 150))
    by_partition = f'{{"{topic}": {{"0": {begin}, "1": {end}}}}}'
    wanted = [number for number in range(200) if number >= (60, 150)[number % 2]]
    assert numbers(startingOffsetsByTimestamp=by_partition) == wanted
    after = str(sent[-1]["timestamp"] + 1)
    assert numbers(startingTimestamp=after, startingOffsetsByTimestampStrategy="latest") == []


class Stream:
    """A streaming query from a topic into a directory, with a checkpoint."""

    def __init__(self, spark: SparkSession, connection: dict[str, str], topic: str, directory: Path) -> None:
        self._spark = spark
        self._options = {**connection, "subscribe": topic, "includeHeaders": "true", "startingOffsets": "earliest"}
        self._options["maxOffsetsPerTrigger"] = "100"
        self._directory = directory

    def start(self, **trigger: Any) -> Any:
        """Start the query from its checkpoint."""
        frame = self._spark.readStream.format("kafka").options(**self._options).load()
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self._directory / "checkpoint"))
        return writer.option("path", str(self._directory / "out")).trigger(**trigger).start()

    def run(self) -> None:
        """Process all available records and stop."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(STREAM_TIMEOUT_S), "the query did not end in time"

    def found(self) -> DataFrame:
        """Return the rows that the query has committed."""
        return self._spark.read.parquet(str(self._directory / "out"))


def test_stream_resumes_from_its_checkpoint(
    spark: SparkSession, connection: dict[str, str], helper: drivers.Driver, topic: str, tmp_path: Path
) -> None:
    """Three runs, the last without new records, write each record once."""
    scenarios.create(helper, topic, 3)
    stream = Stream(spark, connection, topic, tmp_path)
    sent = rows(0, 600, 3)
    write(spark, connection, topic, sent[:350])
    stream.run()
    assert plain(stream.found()) == sent[:350]
    write(spark, connection, topic, sent[350:])
    stream.run()
    stream.run()
    assert plain(stream.found()) == sent


def test_stream_survives_a_killed_broker(
    spark: SparkSession,
    connection: dict[str, str],
    breakable: clusters.Cluster,
    helper: drivers.Driver,
    topic: str,
    tmp_path: Path,
) -> None:
    """One query copies a topic, another reads the copy and is restarted after the leader was killed.

    The copy lacks no record, and the reader has each record of the copy once.
    """
    copy = f"{topic}-copy"
    for name in (topic, copy):
        scenarios.create(helper, name, 2)
    leader = scenarios.wait_in_sync(helper, topic, 2)[0]["leader"]
    reader = spark.readStream.format("kafka").options(**connection).option("subscribe", topic)
    source = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "50").load()
    copier = source.select("key", "value", "partition").writeStream.format("kafka").options(**connection)
    copier = copier.option("topic", copy).option("checkpointLocation", str(tmp_path / "copier"))
    stream = Stream(spark, connection, copy, tmp_path)
    sent = scenarios.records(500, 2, size=30)
    values = {scenarios.decoded(record["value"]) for record in sent}
    queries = [copier.trigger(processingTime="0 seconds").start(), stream.start(processingTime="0 seconds")]
    try:
        helper.begin("produce", topic=topic, records=sent, idempotent=True, pace_ms=20)
        clusters.wait_for("first copied records", lambda: len(read_values(stream)) > 20, STREAM_TIMEOUT_S)
        breakable.kill(leader)
        try:
            helper.result()
            queries[1].stop()
            queries[1] = stream.start(processingTime="0 seconds")
        finally:
            breakable.start(leader)
        clusters.wait_for("all records copied", lambda: len(set(read_values(stream))) == len(sent), STREAM_TIMEOUT_S)
    finally:
        for query in queries:
            query.stop()
    stream.run()
    found = Counter(read_values(stream))
    assert set(found) == values
    copied = Counter(bytes(row.value) for row in read(spark, connection, copy).select("value").collect())
    assert found == copied, "a record of the copy was read twice or is missing"
    offsets = stream.found().select("partition", "offset").collect()
    assert len(set(map(tuple, offsets))) == len(offsets)
    scenarios.wait_leaders_restored(helper, topic, copy)


def read_values(stream: Stream) -> list[bytes]:
    """Return the values of all rows so far."""
    from pyspark.errors import AnalysisException

    try:
        return [bytes(row.value) for row in stream.found().select("value").collect()]
    except AnalysisException:  # no row was written yet
        time.sleep(0.2)
        return []
