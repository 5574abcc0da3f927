"""One Spark session for all tests here (a JVM takes seconds), and a mesh of all nodes in this process."""

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
        pytest.skip("Spark needs Java 17 or newer, and there is none here")
    from kipmesh.spark.session import local_session, stop_session

    session = local_session("tests", tmp_path_factory.mktemp("spark"))
    yield session
    stop_session(session)


@pytest.fixture(scope="session")
def mesh(spark: SparkSession) -> Iterator[LocalCluster]:
    # After Spark, whose start forks: gRPC's threads come later.
    with LocalCluster(mode="single") as cluster:
        yield cluster


@pytest.fixture
def all_brokers_know(mesh: LocalCluster) -> Callable[[], None]:
    """Waits until each broker knows of the metadata what one of them does: a client waits for one, and asks another."""

    def wait() -> None:
        running = mesh._running
        assert isinstance(running, SingleCluster)
        brokers = [running.node_object(node.name) for node in mesh.nodes if node.name != "controller-1"]
        known = max(broker.hosted_replicas.image.offset for broker in brokers)
        deadline = time.monotonic() + 60
        while any(broker.hosted_replicas.image.offset < known for broker in brokers):
            assert time.monotonic() < deadline, "a broker does not hear of the metadata"
            time.sleep(0.005)

    return wait


@pytest.fixture
def new_topic(mesh: LocalCluster, all_brokers_know: Callable[[], None]) -> Callable[..., str]:
    """Makes topics with names of their own: new_topic(partitions)."""

    def make(partitions: int = 2, **configs: str) -> str:
        from kipmesh.client import NewTopic
        from kipmesh.client.sync import AdminClient

        name = f"topic-{next(_names)}"
        with AdminClient(mesh.bootstrap) as admin:
            # The records are of 2023: on a slow machine the brokers come round to deleting what is older than a week.
            admin.create_topics([NewTopic(name, partitions, 3, {"retention.ms": "-1", **configs})])
        all_brokers_know()
        return name

    return make


@pytest.fixture
def send(mesh: LocalCluster) -> Callable[..., None]:
    """Sends values v<first>..v<first + count - 1> with keys k<i>, round about the partitions."""

    def run(topic: str, count: int, *, first: int = 0, partitions: int = 2, compression: str = "none") -> None:
        from kipmesh.client.sync import Producer

        with Producer(mesh.bootstrap, compression_type=compression) as producer:
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
