"""`kipmesh sessions list`, asked of brokers in memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kipmesh.messages import FetchPartition, FetchRequest, FetchTopic
from kipmesh.testing.fake_broker import FakeCluster
from kipmesh.transport.grpc.client import ConnectionPool
from tests.command import run_command_beside


async def sessions(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await run_command_beside("sessions", "list", *arguments)


async def open_session(
    cluster: FakeCluster, client_id: str, node_id: int, partitions: int, replica_id: int = -1
) -> int:
    pool = ConnectionPool(client_id)
    topic = cluster.topics["t"]
    asked = [FetchPartition(each, partition_max_bytes=1000) for each in range(partitions)]
    request = FetchRequest(session_epoch=0, replica_id=replica_id, topics=[FetchTopic("t", topic.topic_id, asked)])
    try:
        response = await pool.get(f"127.0.0.1:{cluster.brokers[node_id].port}").call("Broker", "Fetch", request, 5)
    finally:
        await pool.close()
    session_id: int = response.session_id
    assert session_id > 0
    return session_id


@asynccontextmanager
async def cluster_with_sessions(ids: list[tuple[int, int]]) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 5)
        ids.append((1, await open_session(cluster, "reader", 1, 3)))
        ids.append((2, await open_session(cluster, "kipmesh-follower-1", 2, 5, replica_id=1)))
        ids.append((2, await open_session(cluster, "odd name", 2, 1)))
        yield cluster


def rows(text: str) -> Sequence[list[str]]:
    title, *lines = text.splitlines()
    assert title.split() == ["BROKER", "SESSION", "CLIENT", "PRIVILEGED", "PARTITIONS", "AGE", "LAST", "USED", "EPOCH"]
    return [line.split() for line in lines]


async def test_all_brokers() -> None:
    ids: list[tuple[int, int]] = []
    async with cluster_with_sessions(ids) as cluster:
        done = await sessions("--bootstrap", cluster.bootstrap)
        as_json = await sessions("--bootstrap", cluster.bootstrap, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = {int(row[1]): row for row in rows(done.stdout)}
    assert [(int(row[0]), int(row[1])) for row in rows(done.stdout)] == sorted(ids)
    reader, follower, odd = [found[session_id] for _, session_id in ids]
    assert reader[2:5] == ["reader", "no", "3"]
    assert follower[2:5] == ["kipmesh-follower-1", "yes", "5"]
    assert odd[2:6] == ["odd", "name", "no", "1"]
    assert reader[-1] == "1"
    assert reader[-2] == "ago"
    listed = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [(one["broker_id"], one["session_id"]) for one in listed] == sorted(ids)
    (one,) = [one for one in listed if one["client_id"] == "kipmesh-follower-1"]
    assert 0 <= one["idle_ms"] <= one["age_ms"]
    assert {name: value for name, value in one.items() if name not in ("age_ms", "idle_ms", "session_id")} == {
        "broker_id": 2,
        "client_id": "kipmesh-follower-1",
        "replica_id": 1,
        "privileged": True,
        "partitions": 5,
        "dirty_partitions": one["dirty_partitions"],
        "epoch": 1,
        "is_waiting": False,
    }


async def test_one_broker() -> None:
    ids: list[tuple[int, int]] = []
    async with cluster_with_sessions(ids) as cluster:
        done = await sessions("--bootstrap", cluster.bootstrap, "--broker", "1")
        assert [row[:3] for row in rows(done.stdout)] == [["1", str(ids[0][1]), "reader"]]
        done = await sessions("--bootstrap", cluster.bootstrap, "--broker", "7")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kipmesh: BROKER_NOT_AVAILABLE: broker 7 is not in the cluster\n"


async def test_a_broker_that_does_not_answer() -> None:
    ids: list[tuple[int, int]] = []
    async with cluster_with_sessions(ids) as cluster:
        await cluster.brokers[1].stop()
        done = await sessions("--bootstrap", cluster.bootstrap, "--json")
    assert done.returncode == 1
    assert {json.loads(line)["broker_id"] for line in done.stdout.splitlines()} == {2}
    assert done.stderr.startswith("kipmesh: NETWORK_EXCEPTION: broker 1: ListFetchSessions to ")
    assert done.stderr.count("\n") == 1


async def test_names_stay_on_their_line() -> None:
    from kipmesh.cli.broker_commands import _duration
    from kipmesh.cli.common import printable

    assert printable("a\nb\x1b[2J") == r"'a\nb\x1b[2J'"
    assert printable("") == "-"
    assert [_duration(each) for each in (0, 1234, 59_940, 61_000, 7_384_000)] == [
        "0.0 s",
        "1.2 s",
        "59.9 s",
        "1 min 1 s",
        "2 h 3 min",
    ]
