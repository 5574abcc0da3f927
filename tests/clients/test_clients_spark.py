"""Spark's own Kafka connector: batch and streaming, with headers, by time, again from a checkpoint, a broker killed.

The connector and what it needs come from Maven for the Spark that is installed, as for `make bench-spark ARGS=--kafka`.
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
        pytest.skip("Spark's connector is of the long form: make clients")
    from bench.kafka import KafkaMissingError
    from bench.spark_beside import start_session
    from kipmesh.spark.java import find_java
    from kipmesh.spark.session import stop_session

    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer, and there is none here")
    try:
        session = start_session(tmp_path_factory.mktemp("spark"))
    except KafkaMissingError as error:
        pytest.skip(str(error))
    yield session
    stop_session(session)


@pytest.fixture
def helper(spark: SparkSession, open_driver: Open) -> drivers.Driver:
    """Administers, and produces what Spark cannot: records with times. After Spark, whose start forks."""
    return open_driver(drivers.CLIENTS["confluent-kafka"])


@pytest.fixture
def there(cluster: clusters.Cluster) -> dict[str, str]:
    """Spark's options to find the cluster."""
    return {"kafka.bootstrap.servers": cluster.bootstrap}


def rows(first: int, count: int, partitions: int) -> list[tuple[Any, ...]]:
    """Keys (some none), values, partitions and headers (some none)."""
    return [
        (
            None if number % 5 == 0 else b"key-%d" % number,
            b"value-%d" % number,
            number % partitions,
            [("number", b"%d" % number), ("none", None)] if number % 3 == 0 else None,
        )
        for number in range(first, first + count)
    ]


def write(spark: SparkSession, there: dict[str, str], topic: str, given: Sequence[tuple[Any, ...]]) -> None:
    """A batch; the producer is idempotent, as Kafka's is by default."""
    frame = spark.createDataFrame(list(given), ROW).coalesce(1)
    frame.write.format("kafka").options(**there).option("includeHeaders", "true").option("topic", topic).save()


def read(spark: SparkSession, there: dict[str, str], topic: str, **more: str) -> DataFrame:
    """A batch of all that is there."""
    options = {**there, "subscribe": topic, "includeHeaders": "true", **more}
    return spark.read.format("kafka").options(**options).load()


def plain(frame: DataFrame) -> list[tuple[Any, ...]]:
    """As `rows` has them, in the order of their values' numbers."""
    found = []
    for row in frame.select("key", "value", "partition", "headers").collect():
        key, value = (None if each is None else bytes(each) for each in (row.key, row.value))
        headers = row.headers and [(one.key, None if one.value is None else bytes(one.value)) for one in row.headers]
        found.append((key, value, row.partition, headers))
    return sorted(found, key=lambda each: int(each[1].rpartition(b"-")[2]))


def test_batch_is_written_and_read_back(
    spark: SparkSession, there: dict[str, str], helper: drivers.Driver, topic: str
) -> None:
    """Written and read back: keys, values, headers; offsets of each partition without a gap."""
    scenarios.create(helper, topic, 3)
    sent = rows(0, 900, 3)
    write(spark, there, topic, sent)
    found = read(spark, there, topic)
    assert plain(found) == sent
    by_partition = found.groupBy("partition").agg({"offset": "max", "value": "count"}).collect()
    assert {tuple(each) for each in by_partition} == {(number, 299, 300) for number in range(3)}
    part = read(spark, there, topic, startingOffsets=f'{{"{topic}": {{"0": 290, "1": -2, "2": 300}}}}')
    assert part.count() == 310


def test_timestamps_choose_the_records_of_a_batch(
    spark: SparkSession, there: dict[str, str], helper: drivers.Driver, topic: str
) -> None:
    """From a time on, until another, and by partition; what has no such record starts at the end if that is wanted."""
    scenarios.create(helper, topic, 2)
    sent = scenarios.records(200, 2)
    helper("produce", topic=topic, records=sent)
    begin, end = sent[60]["timestamp"], sent[150]["timestamp"]

    def numbers(**options: str) -> list[int]:
        values = read(spark, there, topic, **options).select("value").collect()
        return sorted(int(bytes(each.value).partition(b":")[0]) for each in values)

    assert numbers(startingTimestamp=str(begin)) == list(range(60, 200))
    assert numbers(startingTimestamp=str(begin), endingTimestamp=str(end)) == list(range(60, 150))
    each = f'{{"{topic}": {{"0": {begin}, "1": {end}}}}}'
    wanted = [number for number in range(200) if number >= (60, 150)[number % 2]]
    assert numbers(startingOffsetsByTimestamp=each) == wanted
    after = str(sent[-1]["timestamp"] + 1)
    assert numbers(startingTimestamp=after, startingOffsetsByTimestampStrategy="latest") == []


class Stream:
    """A query from a topic into a folder, which knows by its checkpoint where it was."""

    def __init__(self, spark: SparkSession, there: dict[str, str], topic: str, folder: Path) -> None:
        self._spark = spark
        self._options = {**there, "subscribe": topic, "includeHeaders": "true", "startingOffsets": "earliest"}
        self._options["maxOffsetsPerTrigger"] = "100"
        self._folder = folder

    def start(self, **trigger: Any) -> Any:
        """From where it was."""
        frame = self._spark.readStream.format("kafka").options(**self._options).load()
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self._folder / "checkpoint"))
        return writer.option("path", str(self._folder / "out")).trigger(**trigger).start()

    def run(self) -> None:
        """All that is there, and end."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(STREAM_TIMEOUT_S), "it took too long"

    def found(self) -> DataFrame:
        """What it wrote so far, by its own log of the files that count."""
        return self._spark.read.parquet(str(self._folder / "out"))


def test_a_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, there: dict[str, str], helper: drivers.Driver, topic: str, tmp_path: Path
) -> None:
    """In three runs, the last of which finds nothing new: exactly what was written, once."""
    scenarios.create(helper, topic, 3)
    stream = Stream(spark, there, topic, tmp_path)
    sent = rows(0, 600, 3)
    write(spark, there, topic, sent[:350])
    stream.run()
    assert plain(stream.found()) == sent[:350]
    write(spark, there, topic, sent[350:])
    stream.run()
    stream.run()
    assert plain(stream.found()) == sent


def test_stream_survives_a_killed_broker(
    spark: SparkSession,
    there: dict[str, str],
    breakable: clusters.Cluster,
    helper: drivers.Driver,
    topic: str,
    tmp_path: Path,
) -> None:
    """One query copies a topic into another, a second one reads that; the leader of both dies, and then the query is
    stopped and started again. The reader has each record of the copy once; the copy lacks none."""
    copy = f"{topic}-copy"
    for name in (topic, copy):
        scenarios.create(helper, name, 2)
    leader = scenarios.settled(helper, topic, 2)[0]["leader"]
    reader = spark.readStream.format("kafka").options(**there).option("subscribe", topic)
    source = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "50").load()
    copier = source.select("key", "value", "partition").writeStream.format("kafka").options(**there)
    copier = copier.option("topic", copy).option("checkpointLocation", str(tmp_path / "copier"))
    stream = Stream(spark, there, copy, tmp_path)
    sent = scenarios.records(500, 2, size=30)
    values = {scenarios.decoded(each["value"]) for each in sent}
    queries = [copier.trigger(processingTime="0 seconds").start(), stream.start(processingTime="0 seconds")]
    try:
        helper.begin("produce", topic=topic, records=sent, idempotent=True, pace_ms=20)
        clusters.wait_for("the copy has begun", lambda: len(read_values(stream)) > 20, STREAM_TIMEOUT_S)
        breakable.kill(leader)
        try:
            helper.result()
            queries[1].stop()
            queries[1] = stream.start(processingTime="0 seconds")
        finally:
            breakable.start(leader)
        clusters.wait_for("all of it has come", lambda: len(set(read_values(stream))) == len(sent), STREAM_TIMEOUT_S)
    finally:
        for query in queries:
            query.stop()
    stream.run()
    found = Counter(read_values(stream))
    assert set(found) == values
    there_now = Counter(bytes(each.value) for each in read(spark, there, copy).select("value").collect())
    assert found == there_now, "each record of the copy once"
    offsets = stream.found().select("partition", "offset").collect()
    assert len(set(map(tuple, offsets))) == len(offsets)
    scenarios.at_home(helper, topic, copy)


def read_values(stream: Stream) -> list[bytes]:
    """Of all rows so far."""
    from pyspark.errors import AnalysisException

    try:
        return [bytes(each.value) for each in stream.found().select("value").collect()]
    except AnalysisException:  # it has written nothing yet
        time.sleep(0.2)
        return []
