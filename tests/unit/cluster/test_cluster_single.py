"""Clusters in this process, and the fixtures of the pytest plugin."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kipmesh.client import NewTopic, Producer
from kipmesh.client.sync import AdminClient, Consumer
from kipmesh.cluster import ClusterError, LocalCluster
from kipmesh.core.errors import InvalidConfigError


def test_cluster_leaves_no_directory_listener_or_thread() -> None:
    threads = set(threading.enumerate())
    with LocalCluster(mode="single") as cluster:
        directory = cluster.dir
        addresses = [node.grpc for node in cluster.nodes if node.grpc is not None]
        assert len(addresses) == 4
        assert cluster.bootstrap == ",".join(addresses[1:])
        assert directory.is_dir()
    assert not directory.exists()
    for address in addresses:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0

    def remaining_threads() -> list[threading.Thread]:  # gRPC has one poller per process
        return [
            thread for thread in threading.enumerate() if thread not in threads and "_poll_wrapper" not in thread.name
        ]

    deadline = time.monotonic() + 30
    while remaining_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert remaining_threads() == []
    with pytest.raises(ClusterError, match="not up"):
        _ = cluster.bootstrap
    cluster.down()


def test_given_directory_is_kept(tmp_path: Path) -> None:
    with LocalCluster(mode="single", followers=0, dir=tmp_path / "mesh"):
        pass
    assert (tmp_path / "mesh" / "leader-1" / "data" / "meta.properties").is_file()


async def test_brokers_can_be_killed_stopped_and_started() -> None:
    # A killed node is detected by its broken connection. A slow machine does not exceed the session timeout.
    config = {"broker.session.timeout.ms": 60_000, "broker.heartbeat.interval.ms": 100}
    with LocalCluster(mode="single", config=config) as cluster:
        async with Producer(cluster.bootstrap) as producer:
            from kipmesh.client import AdminClient

            async with AdminClient(cluster.bootstrap) as admin:
                await admin.create_topics([NewTopic("t", 1, 3)])
            await (await producer.send("t", b"1"))
            cluster.kill("leader-1")
            with pytest.raises(ClusterError, match="leader-1 is not running"):
                cluster.kill("leader-1")
            await (await producer.send("t", b"2"))
            cluster.start("leader-1")
            with pytest.raises(ClusterError, match="already running"):
                cluster.start("leader-1")
            cluster.stop("follower-1")
            await (await producer.send("t", b"3"))
            cluster.start("follower-1")
        with pytest.raises(ClusterError, match="pause needs"):
            cluster.pause("leader-1")
        with pytest.raises(ClusterError, match="unknown node 'x'"):
            cluster.kill("x")
        assert read(cluster.bootstrap, "t", 3) == [b"1", b"2", b"3"]


def test_controllers_can_be_killed_stopped_and_started() -> None:
    with LocalCluster(mode="single", controllers=3, followers=0) as cluster, AdminClient(cluster.bootstrap) as admin:
        controllers = {node.node_id: node.name for node in cluster.nodes if node.name.startswith("controller")}
        assert list(controllers) == [1001, 1002, 1003]

        def create(name: str) -> None:
            admin.create_topics([NewTopic(name)])

        create("first")
        active = controllers[admin.describe_quorum().leader_id]
        cluster.kill(active)
        create("second")
        assert controllers[admin.describe_quorum().leader_id] != active
        cluster.start(active)
        cluster.stop(controllers[admin.describe_quorum().leader_id])
        create("third")
        for name in controllers.values():
            with suppress(ClusterError):
                cluster.kill(name)
        for name in controllers.values():  # the first cannot be elected alone
            cluster.start(name)
        create("fourth")
        assert [topic.name for topic in admin.list_topics()] == ["first", "fourth", "second", "third"]


def read(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    with Consumer(bootstrap) as consumer:
        consumer.assign([(topic, 0)])
        consumer.seek_to_beginning()
        values: list[bytes | None] = []
        while len(values) < count:
            records = consumer.poll(timeout_ms=60_000)
            assert records
            values += [record.value for record in records]
    return values


def test_invalid_settings_start_no_threads() -> None:
    threads = threading.active_count()
    with pytest.raises(InvalidConfigError, match="unknown configuration key"):
        LocalCluster(mode="single", config={"no.key": 1}).up()
    with pytest.raises(InvalidConfigError, match=r"log\.segment\.bytes"):
        LocalCluster(mode="single", config={"log.segment.bytes": "x"}).up()
    with pytest.raises(ValueError, match="'both'"):
        LocalCluster(mode="both")  # type: ignore[arg-type]
    assert threading.active_count() <= threads + 1


def test_pytest_fixtures_provide_bootstrap_and_topics(
    kipmesh_bootstrap: str, kipmesh_topic: Callable[..., str], kipmesh_topic_prefix: str
) -> None:
    name = kipmesh_topic("orders", partitions=2, retention_ms="60000")
    assert name == kipmesh_topic_prefix + "orders"
    assert kipmesh_topic_prefix.startswith("test_pytest_fixtures_provide_bootstrap_and_topics-")
    with Consumer(kipmesh_bootstrap) as consumer:
        assert len(consumer.partitions_for(name).partitions) == 2


def test_pytest_plugin_imports_no_heavy_modules() -> None:
    import subprocess

    code = "import sys, kipmesh.cluster.pytest_plugin\nprint({'grpc', 'pydantic', 'structlog'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert result.stdout == "set()\n"
