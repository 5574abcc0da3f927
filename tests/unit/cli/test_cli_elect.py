"""`kipmesh topic elect`, asked of brokers in memory."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest

from kipmesh.client import AdminClient, ElectionType, TopicPartition, sync
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing.fake_broker import FakeCluster
from tests.command import run_command_beside

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20}


async def elect(cluster: FakeCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await run_command_beside("topic", "elect", "--bootstrap", cluster.bootstrap, *arguments)


def moved(cluster: FakeCluster) -> None:
    """Partitions 0 and 2 of `t` are led by 1 at first; now by 2, and 1 is behind in 2."""
    topic = cluster.create_topic("t", 4, replicas=2)
    for number in (0, 2):
        cluster.move_leader("t", number, 2)
    topic.partitions[2].followers[1].is_in_sync = False


async def test_by_name_and_all() -> None:
    async with FakeCluster(2) as cluster:
        moved(cluster)
        done = await elect(cluster, "t:0", "t:1")
        assert done.returncode == 0, done.stderr
        assert [line.split()[:3] for line in done.stdout.splitlines()] == [
            ["TOPIC", "PARTITION", "RESULT"],
            ["t", "0", "elected"],
            ["t", "1", "ELECTION_NOT_NEEDED:"],
        ]
        assert cluster.topics["t"].partitions[0].leader_id == 1
        done = await elect(cluster, "t", "--json")
        assert done.returncode == 1
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(each["partition"], each["error"]) for each in found] == [
            (0, "ELECTION_NOT_NEEDED"),
            (1, "ELECTION_NOT_NEEDED"),
            (2, "PREFERRED_LEADER_NOT_AVAILABLE"),
            (3, "ELECTION_NOT_NEEDED"),
        ]
        cluster.topics["t"].partitions[2].followers[1].is_in_sync = True
        done = await elect(cluster, "--all", "--json")
        assert (done.returncode, [json.loads(line)["partition"] for line in done.stdout.splitlines()]) == (0, [2])
        done = await elect(cluster, "--all", "--unclean")
        assert (done.returncode, done.stdout) == (0, "no partition needs an election\n")


async def test_what_is_wrong_is_said() -> None:
    async with FakeCluster(1) as cluster:
        cluster.create_topic("t")
        for arguments in ((), ("t", "--all"), (":1",), ("t:x",)):
            done = await elect(cluster, *arguments)
            assert done.returncode == 2, (arguments, done)
        done = await elect(cluster, "nope")
        assert done.returncode == 1
        assert "nope" in done.stderr
        done = await elect(cluster, "nope:0")
        assert done.returncode == 1
        assert "UNKNOWN_TOPIC_OR_PARTITION" in done.stdout


async def test_the_client_asks_again_while_nobody_is_active() -> None:
    async with FakeCluster(2) as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        moved(cluster)
        cluster.inject("ElectLeaders", ErrorCode.NOT_CONTROLLER, times=2)
        cluster.inject("ElectLeaders", None)
        results = await admin.elect_leaders()
        assert {where: error and error.code for where, error in results.items()} == {
            TopicPartition("t", 0): None,
            TopicPartition("t", 2): ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        }
        assert await admin.elect_leaders(partitions=[]) == {}
        cluster.inject("ElectLeaders", ErrorCode.INVALID_REQUEST)
        with pytest.raises(KafkaError) as caught:
            await admin.elect_leaders(ElectionType.UNCLEAN)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


async def test_the_blocking_client() -> None:
    async with FakeCluster(2) as cluster:
        moved(cluster)

        def work() -> dict[TopicPartition, KafkaError | None]:
            with sync.AdminClient(cluster.bootstrap) as admin:
                return admin.elect_leaders(ElectionType.PREFERRED, [("t", 0)])

        assert await asyncio.to_thread(work) == {TopicPartition("t", 0): None}
