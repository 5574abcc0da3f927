"""Fixtures of Spark tests: one Spark session, because a JVM takes seconds to start, and a cluster in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from kipmesh.cluster import LocalCluster
from kipmesh.cluster.single import SingleCluster
from kipmesh.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_names = itertools.count()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer")
    from kipmesh.spark.session import local_session, stop_session

    session = local_session("tests", tmp_path_factory.mktemp("spark"))
    yield session
    stop_session(session)


@pytest.fixture(scope="session")
def cluster(spark: SparkSession) -> Iterator[LocalCluster]:
    # Started after Spark, which forks: a fork must not copy gRPC's threads.
    with LocalCluster(mode="single") as running:
        yield running


@pytest.fixture
def wait_metadata(cluster: LocalCluster) -> Callable[[], None]:
    """Waits until all brokers have the same metadata: clients wait for one broker and send requests to another."""

    def wait() -> None:
        running = cluster._running
        assert isinstance(running, SingleCluster)
        brokers = [running.node_object(node.name) for node in cluster.nodes if node.name != "controller-1"]
        newest = max(broker.hosted_replicas.image.offset for broker in brokers)
        deadline = time.monotonic() + 60
        while any(broker.hosted_replicas.image.offset < newest for broker in brokers):
            assert time.monotonic() < deadline, "a broker lacks metadata"
            time.sleep(0.005)

    return wait


@pytest.fixture
def new_topic(cluster: LocalCluster, wait_metadata: Callable[[], None]) -> Callable[..., str]:
    """`new_topic(partitions)` creates a topic and returns its unique name."""

    def make(partitions: int = 2, **configs: str) -> str:
        from kipmesh.client import NewTopic
        from kipmesh.client.sync import AdminClient

        name = f"topic-{next(_names)}"
        with AdminClient(cluster.bootstrap) as admin:
            # Timestamps of the records are in 2023: the default retention would delete them on a slow machine.
            admin.create_topics([NewTopic(name, partitions, 3, {"retention.ms": "-1", **configs})])
        wait_metadata()
        return name

    return make


@pytest.fixture
def send(cluster: LocalCluster) -> Callable[..., None]:
    """Sends values v<first>..v<first + count - 1> with keys k<i> to each partition in turn."""

    def run(topic: str, count: int, *, first: int = 0, partitions: int = 2, compression: str = "none") -> None:
        from kipmesh.client.sync import Producer

        with Producer(cluster.bootstrap, compression_type=compression) as producer:
            for i in range(first, first + count):
                producer.send(
                    topic,
                    b"v%d" % i,
                    key=b"k%d" % i if i % 5 else None,
                    partition=i % partitions,
                    timestamp_ms=1_700_000_000_000 + i,
                    headers=[("number", b"%d" % i), ("none", None)] if i % 2 else (),
                )
            producer.flush()

    return run
