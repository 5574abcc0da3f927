"""Streaming queries of one Spark session that start concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kipmesh.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(600)]

QUERIES = 3


def shared_variables(spark: SparkSession) -> Any:
    """Return the map of environment variables that all queries of the source share."""
    session: Any = spark._jsparkSession
    return session.sessionState().dataSourceManager().lookupDataSource("kipmesh").dataSourceCls().envVars()


@pytest.mark.parametrize("new_session", [False, True], ids=["registered-source", "source-found-by-spark"])
def test_concurrent_queries_do_not_change_the_shared_environment(
    new_session: bool,
    spark: SparkSession,
    cluster: LocalCluster,
    new_topic: Callable[..., str],
    send: Callable[..., None],
    tmp_path: Path,
) -> None:
    session = spark.newSession() if new_session else spark
    topic = new_topic()
    send(topic, 100)
    keys = set(shared_variables(session))
    reader = session.readStream.format("kipmesh").option("kafka.bootstrap.servers", cluster.bootstrap)
    frame = reader.option("subscribe", topic).option("startingOffsets", "earliest").load()
    queries: list[StreamingQuery] = []

    def start(number: int) -> None:
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / str(number)))
        queries.append(writer.trigger(availableNow=True).start())

    threads = [threading.Thread(target=start, args=(number,)) for number in range(QUERIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for query in queries:
        assert query.awaitTermination(240), "the query did not end in time"
        assert query.exception() is None
        assert sum(progress.numInputRows for progress in query.recentProgress) == 100
    assert len(queries) == QUERIES
    variables = shared_variables(session)
    assert set(variables) == keys  # concurrent queries could corrupt the map by adding a key
    assert len(variables) == len(keys)
