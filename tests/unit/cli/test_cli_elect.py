"""`kipmesh topic elect` with a fake cluster."""

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


def move_leaders(cluster: FakeCluster) -> None:
    """Create `t`. Broker 2 leads partitions 0 and 2 instead of broker 1, which is not in sync in partition 2."""
    topic = cluster.create_topic("t", 4, replicas=2)
    for number in (0, 2):
        cluster.move_leader("t", number, 2)
    topic.partitions[2].followers[1].is_in_sync = False


async def test_elect_accepts_partitions_topics_and_all() -> None:
    async with FakeCluster(2) as cluster:
        move_leaders(cluster)
        result = await elect(cluster, "t:0", "t:1")
        assert result.returncode == 0, result.stderr
        assert [line.split()[:3] for line in result.stdout.splitlines()] == [
            ["TOPIC", "PARTITION", "RESULT"],
            ["t", "0", "elected"],
            ["t", "1", "ELECTION_NOT_NEEDED:"],
        ]
        assert cluster.topics["t"].partitions[0].leader_id == 1
        result = await elect(cluster, "t", "--json")
        assert result.returncode == 1
        elections = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(election["partition"], election["error"]) for election in elections] == [
            (0, "ELECTION_NOT_NEEDED"),
            (1, "ELECTION_NOT_NEEDED"),
            (2, "PREFERRED_LEADER_NOT_AVAILABLE"),
            (3, "ELECTION_NOT_NEEDED"),
        ]
        cluster.topics["t"].partitions[2].followers[1].is_in_sync = True
        result = await elect(cluster, "--all", "--json")
        assert (result.returncode, [json.loads(line)["partition"] for line in result.stdout.splitlines()]) == (0, [2])
        result = await elect(cluster, "--all", "--unclean")
        assert (result.returncode, result.stdout) == (0, "no partition needs an election\n")


async def test_elect_reports_usage_and_topic_errors() -> None:
    async with FakeCluster(1) as cluster:
        cluster.create_topic("t")
        for arguments in ((), ("t", "--all"), (":1",), ("t:x",)):
            result = await elect(cluster, *arguments)
            assert result.returncode == 2, (arguments, result)
        result = await elect(cluster, "nope")
        assert result.returncode == 1
        assert "nope" in result.stderr
        result = await elect(cluster, "nope:0")
        assert result.returncode == 1
        assert "UNKNOWN_TOPIC_OR_PARTITION" in result.stdout


async def test_elect_leaders_retries_without_active_controller() -> None:
    async with FakeCluster(2) as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        move_leaders(cluster)
        cluster.inject("ElectLeaders", ErrorCode.NOT_CONTROLLER, times=2)
        cluster.inject("ElectLeaders", None)
        results = await admin.elect_leaders()
        assert {topic_partition: error and error.code for topic_partition, error in results.items()} == {
            TopicPartition("t", 0): None,
            TopicPartition("t", 2): ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        }
        assert await admin.elect_leaders(partitions=[]) == {}
        cluster.inject("ElectLeaders", ErrorCode.INVALID_REQUEST)
        with pytest.raises(KafkaError) as caught:
            await admin.elect_leaders(ElectionType.UNCLEAN)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


async def test_sync_client_elects_leaders() -> None:
    async with FakeCluster(2) as cluster:
        move_leaders(cluster)

        def work() -> dict[TopicPartition, KafkaError | None]:
            with sync.AdminClient(cluster.bootstrap) as admin:
                return admin.elect_leaders(ElectionType.PREFERRED, [("t", 0)])

        assert await asyncio.to_thread(work) == {TopicPartition("t", 0): None}
