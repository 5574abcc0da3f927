"""Several streaming queries of one Spark that start at the same time."""

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
    """The map of environment variables that all queries of the source share."""
    session: Any = spark._jsparkSession
    return session.sessionState().dataSourceManager().lookupDataSource("kipmesh").dataSourceCls().envVars()


@pytest.mark.parametrize("own_session", [False, True], ids=["registered", "found by Spark"])
def test_queries_that_start_side_by_side_share_a_map_that_does_not_grow(
    own_session: bool,
    spark: SparkSession,
    mesh: LocalCluster,
    new_topic: Callable[..., str],
    send: Callable[..., None],
    tmp_path: Path,
) -> None:
    session = spark.newSession() if own_session else spark
    topic = new_topic()
    send(topic, 100)
    keys = set(shared_variables(session))
    reader = session.readStream.format("kipmesh").option("kafka.bootstrap.servers", mesh.bootstrap)
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
        assert query.awaitTermination(240), "it took too long"
        assert query.exception() is None
        assert sum(each.numInputRows for each in query.recentProgress) == 100
    assert len(queries) == QUERIES
    variables = shared_variables(session)
    assert set(variables) == keys  # a key that is added here could be added by two at once
    assert len(variables) == len(keys)
