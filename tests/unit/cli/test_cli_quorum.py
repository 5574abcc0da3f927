"""`kipmesh quorum describe` with fake controllers that implement DescribeQuorum only."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.client.admin import quorum
from kipmesh.core.errors import ErrorCode
from kipmesh.transport.grpc.server import RequestContext, Server
from kipmesh.transport.pipeline import pipeline_of
from tests.command import run_command_beside

VOTERS = (
    m.ReplicaState(1001, bytes(16), 95, 1_700_000_000_123, 1_700_000_000_000),
    m.ReplicaState(1002, bytes(16), 100, 1_700_000_000_500, 1_700_000_000_500),
    m.ReplicaState(1003, bytes(16), -1, -1, -1),
)
LED = m.DescribeQuorumPartition(0, 0, None, 1002, 7, 98, VOTERS, (m.ReplicaState(1, bytes(16), 100, 5, 5),))
REFUSED = m.DescribeQuorumPartition(0, ErrorCode.NOT_LEADER_OR_FOLLOWER, None, 1002, 7)


class FakeController:
    """Returns `partition`, which a test may replace during the run."""

    def __init__(self, partition: m.DescribeQuorumPartition) -> None:
        self.partition = partition
        self.nodes: Sequence[m.NodeEndpoint] = ()
        self.requests = 0
        self.is_retried = asyncio.Event()

    async def describe_quorum(
        self, request: m.DescribeQuorumRequest, context: RequestContext
    ) -> m.DescribeQuorumResponse:
        self.requests += 1
        if self.requests > 1:
            self.is_retried.set()
        assert [(topic.topic_name, tuple(topic.partition_indexes)) for topic in request.topics] == [
            ("__cluster_metadata", (0,))
        ]
        topic = m.DescribeQuorumTopicResponse("__cluster_metadata", (self.partition,))
        return m.DescribeQuorumResponse(topics=(topic,), endpoints=self.nodes)


@asynccontextmanager
async def serve(*controllers: FakeController) -> AsyncIterator[list[int]]:
    servers = [Server(pipeline_of({"Quorum": controller})) for controller in controllers]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    for controller in controllers:
        controller.nodes = [m.NodeEndpoint(1001 + i, "127.0.0.1", port) for i, port in enumerate(ports)]
    yield ports
    for server in servers:
        await server.stop(0)


async def describe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await run_command_beside("quorum", "describe", *arguments)


async def test_describe_follows_redirect_of_follower_to_leader() -> None:
    follower, leader = FakeController(REFUSED), FakeController(LED)
    async with serve(follower, leader) as ports:
        result = await describe("--bootstrap-controller", f"127.0.0.1:{ports[0]}", "--json")
    assert result.returncode == 0, result.stderr
    description: dict[str, Any] = json.loads(result.stdout)
    assert {name: value for name, value in description.items() if not isinstance(value, list)} == {
        "state": "led",
        "leader_id": 1002,
        "leader_epoch": 7,
        "high_watermark": 98,
        "max_follower_lag": 100,
    }
    assert description["current_voters"][0] == {
        "replica_id": 1001,
        "log_end_offset": 95,
        "last_fetch_timestamp": 1_700_000_000_123,
        "last_caught_up_timestamp": 1_700_000_000_000,
        "status": "follower",
        "lag": 5,
    }
    assert [
        (replica["replica_id"], replica["status"], replica["lag"]) for replica in description["current_voters"]
    ] == [
        (1001, "follower", 5),
        (1002, "leader", 0),
        (1003, "follower", 100),
    ]
    assert [(replica["replica_id"], replica["status"]) for replica in description["observers"]] == [(1, "observer")]
    assert description["nodes"] == [
        {"node_id": 1001 + number, "host": "127.0.0.1", "port": port} for number, port in enumerate(ports)
    ]


async def test_describe_prints_table_of_voters_and_observers() -> None:
    async with serve(FakeController(LED)) as ports:
        result = await describe("--bootstrap-controller", f"127.0.0.1:{ports[0]},127.0.0.1:1")
    assert result.stdout.splitlines() == [
        "metadata quorum: leader 1002, epoch 7, high watermark 98",
        "NODE  STATUS    LOG END  LAG  LAST FETCH                LAST CAUGHT UP",
        "1001  follower  95       5    2023-11-14T22:13:20.123Z  2023-11-14T22:13:20.000Z",
        "1002  leader    100      0    2023-11-14T22:13:20.500Z  2023-11-14T22:13:20.500Z",
        "1003  follower  -1       100  -                         -",
        "1     observer  100      0    1970-01-01T00:00:00.005Z  1970-01-01T00:00:00.005Z",
    ]


async def test_describe_prefers_response_with_highest_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    # A partitioned leader still responds until it resigns. Wait for both responses.
    monkeypatch.setattr(quorum, "CALL_TIMEOUT_S", 60.0)
    old = FakeController(LED._replace(leader_id=1001, leader_epoch=6))
    async with serve(old, FakeController(LED)) as ports:
        described = await quorum.describe_quorum([f"127.0.0.1:{port}" for port in ports], timeout_s=60)
    assert (described.leader_id, described.leader_epoch) == (1002, 7)


async def test_describe_waits_for_election() -> None:
    controller = FakeController(REFUSED._replace(leader_id=-1))
    async with serve(controller) as ports:
        running = asyncio.create_task(
            describe("--bootstrap-controller", f"127.0.0.1:{ports[0]}", "--json", "--timeout", "60")
        )
        await controller.is_retried.wait()
        controller.partition = LED
        result = await running
    assert json.loads(result.stdout)["leader_id"] == 1002


async def test_describe_reports_missing_leader_and_invalid_addresses(tmp_path: Path) -> None:
    async with serve(FakeController(REFUSED._replace(leader_id=-1))) as ports:
        # The timeout permits one response. The command uses all of it.
        running = ("--bootstrap-controller", f"127.0.0.1:{ports[0]}", "--timeout", "6")
        result, as_json = await asyncio.gather(describe(*running), describe(*running, "--json"))
    assert (result.returncode, result.stdout) == (1, "metadata quorum: no leader, epoch 7, high watermark -1\n")
    assert json.loads(as_json.stdout)["max_follower_lag"] is None
    invalid_addresses = {
        "nonsense": "'nonsense' is not host:port",
        "127.0.0.1:1,host:": "'host:' is not host:port",
        "host:99999": "'host:99999': the port must be between 1 and 65535, got 99999",
    }
    results = await asyncio.gather(*[describe("--bootstrap-controller", text) for text in invalid_addresses])
    for error, result in zip(invalid_addresses.values(), results, strict=True):
        assert result.returncode == 2
        assert error in result.stderr
    result = await describe("--bootstrap-controller", "127.0.0.1:1", "--timeout", "0.5")
    assert result.returncode == 1
    assert result.stderr == "kipmesh: NETWORK_EXCEPTION: no controller responded at 127.0.0.1:1 within 0.5 s\n"
    result = await describe("--dir", str(tmp_path))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "--bootstrap-controller" in result.stderr
    result = await describe("--bootstrap", "127.0.0.1:1", "--bootstrap-controller", "127.0.0.1:1")
    assert result.returncode == 2
