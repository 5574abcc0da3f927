"""`kipmesh quorum describe`, asked of controllers that only know how to be described."""

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
    """Its answer may be changed while it runs."""

    def __init__(self, partition: m.DescribeQuorumPartition) -> None:
        self.partition = partition
        self.nodes: Sequence[m.NodeEndpoint] = ()
        self.asked = 0
        self.asked_again = asyncio.Event()

    async def describe_quorum(
        self, request: m.DescribeQuorumRequest, context: RequestContext
    ) -> m.DescribeQuorumResponse:
        self.asked += 1
        if self.asked > 1:
            self.asked_again.set()
        assert [(topic.topic_name, tuple(topic.partition_indexes)) for topic in request.topics] == [
            ("__cluster_metadata", (0,))
        ]
        topic = m.DescribeQuorumTopicResponse("__cluster_metadata", (self.partition,))
        return m.DescribeQuorumResponse(topics=(topic,), endpoints=self.nodes)


@asynccontextmanager
async def serving(*controllers: FakeController) -> AsyncIterator[list[int]]:
    servers = [Server(pipeline_of({"Quorum": controller})) for controller in controllers]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    for controller in controllers:
        controller.nodes = [m.NodeEndpoint(1001 + i, "127.0.0.1", port) for i, port in enumerate(ports)]
    yield ports
    for server in servers:
        await server.stop(0)


async def describe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await run_command_beside("quorum", "describe", *arguments)


async def test_a_follower_says_whom_to_ask() -> None:
    follower, leader = FakeController(REFUSED), FakeController(LED)
    async with serving(follower, leader) as ports:
        done = await describe("--bootstrap-controller", f"127.0.0.1:{ports[0]}", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {name: value for name, value in found.items() if not isinstance(value, list)} == {
        "state": "led",
        "leader_id": 1002,
        "leader_epoch": 7,
        "high_watermark": 98,
        "max_follower_lag": 100,
    }
    assert found["current_voters"][0] == {
        "replica_id": 1001,
        "log_end_offset": 95,
        "last_fetch_timestamp": 1_700_000_000_123,
        "last_caught_up_timestamp": 1_700_000_000_000,
        "status": "follower",
        "lag": 5,
    }
    assert [(one["replica_id"], one["status"], one["lag"]) for one in found["current_voters"]] == [
        (1001, "follower", 5),
        (1002, "leader", 0),
        (1003, "follower", 100),
    ]
    assert [(one["replica_id"], one["status"]) for one in found["observers"]] == [(1, "observer")]
    assert found["nodes"] == [
        {"node_id": 1001 + number, "host": "127.0.0.1", "port": port} for number, port in enumerate(ports)
    ]


async def test_the_table() -> None:
    async with serving(FakeController(LED)) as ports:
        done = await describe("--bootstrap-controller", f"127.0.0.1:{ports[0]},127.0.0.1:1")
    assert done.stdout.splitlines() == [
        "quorum led  leader 1002  epoch 7  high watermark 98",
        "NODE  STATUS    LOG END  LAG  LAST FETCH                LAST CAUGHT UP",
        "1001  follower  95       5    2023-11-14T22:13:20.123Z  2023-11-14T22:13:20.000Z",
        "1002  leader    100      0    2023-11-14T22:13:20.500Z  2023-11-14T22:13:20.500Z",
        "1003  follower  -1       100  -                         -",
        "1     observer  100      0    1970-01-01T00:00:00.005Z  1970-01-01T00:00:00.005Z",
    ]


async def test_the_highest_epoch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # A leader that was cut off answers, too, until it finds out. Both answers are waited for here.
    monkeypatch.setattr(quorum, "CALL_TIMEOUT_S", 60.0)
    old = FakeController(LED._replace(leader_id=1001, leader_epoch=6))
    async with serving(old, FakeController(LED)) as ports:
        found = await quorum.describe_quorum([f"127.0.0.1:{port}" for port in ports], timeout_s=60)
    assert (found.leader_id, found.leader_epoch) == (1002, 7)


async def test_an_election_is_waited_for() -> None:
    controller = FakeController(REFUSED._replace(leader_id=-1))
    async with serving(controller) as ports:
        asking = asyncio.create_task(
            describe("--bootstrap-controller", f"127.0.0.1:{ports[0]}", "--json", "--timeout", "60")
        )
        await controller.asked_again.wait()
        controller.partition = LED
        done = await asking
    assert json.loads(done.stdout)["leader_id"] == 1002


async def test_no_leader_and_nobody(tmp_path: Path) -> None:
    async with serving(FakeController(REFUSED._replace(leader_id=-1))) as ports:
        # Long enough for one answer; all of it is taken.
        asking = ("--bootstrap-controller", f"127.0.0.1:{ports[0]}", "--timeout", "6")
        done, as_json = await asyncio.gather(describe(*asking), describe(*asking, "--json"))
    assert (done.returncode, done.stdout) == (1, "quorum without a leader  leader -1  epoch 7  high watermark -1\n")
    assert json.loads(as_json.stdout)["max_follower_lag"] is None
    bad = ("nonsense", "127.0.0.1:1,host:", "host:99999")
    refused = await asyncio.gather(*[describe("--bootstrap-controller", one) for one in bad])
    for wrong, done in zip(bad, refused, strict=True):
        assert done.returncode == 2
        assert f"{wrong.rpartition(',')[2]!r} is not host:port" in done.stderr
    done = await describe("--bootstrap-controller", "127.0.0.1:1", "--timeout", "0.5")
    assert done.returncode == 1
    assert done.stderr == "kipmesh: NETWORK_EXCEPTION: no controller responded at 127.0.0.1:1 within 0.5 s\n"
    done = await describe("--dir", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "--bootstrap-controller" in done.stderr
    done = await describe("--bootstrap", "127.0.0.1:1", "--bootstrap-controller", "127.0.0.1:1")
    assert done.returncode == 2
