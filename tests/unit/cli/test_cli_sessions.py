"""`kipmesh sessions list` with a fake cluster."""

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
    partitions_of_request = [FetchPartition(index, partition_max_bytes=1000) for index in range(partitions)]
    request = FetchRequest(
        session_epoch=0, replica_id=replica_id, topics=[FetchTopic("t", topic.topic_id, partitions_of_request)]
    )
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


async def test_sessions_list_shows_sessions_of_all_brokers() -> None:
    ids: list[tuple[int, int]] = []
    async with cluster_with_sessions(ids) as cluster:
        result = await sessions("--bootstrap", cluster.bootstrap)
        as_json = await sessions("--bootstrap", cluster.bootstrap, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    row_by_session = {int(row[1]): row for row in rows(result.stdout)}
    assert [(int(row[0]), int(row[1])) for row in rows(result.stdout)] == sorted(ids)
    reader, follower, odd_name = [row_by_session[session_id] for _, session_id in ids]
    assert reader[2:5] == ["reader", "no", "3"]
    assert follower[2:5] == ["kipmesh-follower-1", "yes", "5"]
    assert odd_name[2:6] == ["odd", "name", "no", "1"]
    assert reader[-1] == "1"
    assert reader[-2] == "ago"
    sessions_listed = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [(session["broker_id"], session["session_id"]) for session in sessions_listed] == sorted(ids)
    (follower_session,) = [session for session in sessions_listed if session["client_id"] == "kipmesh-follower-1"]
    assert 0 <= follower_session["idle_ms"] <= follower_session["age_ms"]
    assert {
        name: value for name, value in follower_session.items() if name not in ("age_ms", "idle_ms", "session_id")
    } == {
        "broker_id": 2,
        "client_id": "kipmesh-follower-1",
        "replica_id": 1,
        "privileged": True,
        "partitions": 5,
        "dirty_partitions": follower_session["dirty_partitions"],
        "epoch": 1,
        "is_waiting": False,
    }


async def test_sessions_list_filters_by_broker() -> None:
    ids: list[tuple[int, int]] = []
    async with cluster_with_sessions(ids) as cluster:
        result = await sessions("--bootstrap", cluster.bootstrap, "--broker", "1")
        assert [row[:3] for row in rows(result.stdout)] == [["1", str(ids[0][1]), "reader"]]
        result = await sessions("--bootstrap", cluster.bootstrap, "--broker", "7")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "kipmesh: BROKER_NOT_AVAILABLE: broker 7 is not in the cluster\n"


async def test_sessions_list_reports_unreachable_broker() -> None:
    ids: list[tuple[int, int]] = []
    async with cluster_with_sessions(ids) as cluster:
        await cluster.brokers[1].stop()
        result = await sessions("--bootstrap", cluster.bootstrap, "--json")
    assert result.returncode == 1
    assert {json.loads(line)["broker_id"] for line in result.stdout.splitlines()} == {2}
    assert result.stderr.startswith("kipmesh: NETWORK_EXCEPTION: broker 1: ListFetchSessions to ")
    assert result.stderr.count("\n") == 1


async def test_names_are_escaped_and_durations_have_units() -> None:
    from kipmesh.cli.broker_commands import _duration
    from kipmesh.cli.common import printable

    assert printable("a\nb\x1b[2J") == r"'a\nb\x1b[2J'"
    assert printable("") == "-"
    assert [_duration(milliseconds) for milliseconds in (0, 1234, 59_940, 61_000, 7_384_000)] == [
        "0.0 s",
        "1.2 s",
        "59.9 s",
        "1 min 1 s",
        "2 h 3 min",
    ]
