"""`kipmesh topic describe`, and `create --if-not-exists` of an existing topic, with a fake cluster."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from kipmesh.core.errors import ErrorCode
from kipmesh.messages import OngoingPartitionReassignment
from kipmesh.testing.fake_broker import FakeCluster
from tests.command import run_command_beside


async def describe(cluster: FakeCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await topic(cluster, "describe", *arguments)


async def topic(cluster: FakeCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await run_command_beside("topic", *arguments, "--bootstrap", cluster.bootstrap)


def objects(result: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, Any]]]:
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    return {entry["name"]: entry["partitions"] for entry in entries}


async def test_describe_shows_adding_and_removing_replicas_of_reassignments() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2, replicas=2)
        cluster.create_topic("u")
        result = await describe(cluster)
        assert (result.returncode, result.stderr) == (0, "")
        assert "ADDING" not in result.stdout
        cluster.reassigning.append(("t", OngoingPartitionReassignment(1, (3, 4, 2, 1), (3, 4), (2, 1))))
        result = await describe(cluster)
        assert (result.returncode, result.stderr) == (0, "")
        _, _, idle, moving, _, _, other, _ = result.stdout.splitlines()
        assert result.stdout.splitlines()[1].split()[-2:] == ["ADDING", "REMOVING"]
        assert idle.split()[-2:] == ["-", "-"]
        assert moving.split()[-2:] == ["3,4", "2,1"]
        assert other.split()[-2:] == ["WAITS", "FOR"]
        for names in ((), ("t", "u")):
            partitions_by_topic = objects(await describe(cluster, *names, "--json"))
            assert (
                partitions_by_topic["t"][1]["adding_replicas"],
                partitions_by_topic["t"][1]["removing_replicas"],
            ) == ([3, 4], [2, 1])
            assert not {"adding_replicas", "removing_replicas"} & (
                partitions_by_topic["t"][0].keys() | partitions_by_topic["u"][0].keys()
            )
        assert "adding_replicas" not in objects(await describe(cluster, "u", "--json"))["u"][0]


async def test_describe_without_active_controller_omits_reassignments() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.inject("ListPartitionReassignments", ErrorCode.REQUEST_TIMED_OUT, times=1000)
        result = await describe(cluster, "t", "--json")
        assert result.returncode == 0
        assert result.stderr == "kipmesh: no active controller: reassignments are not shown\n"
        assert len(objects(result)["t"]) == 1


async def test_create_if_not_exists_describes_existing_topic() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 3, replicas=2)
        cluster.inject("CreateTopics", ErrorCode.TOPIC_ALREADY_EXISTS, times=2)
        result = await topic(cluster, "create", "t", "--if-not-exists", "--json")
        assert (result.returncode, result.stderr) == (0, "")
        description = json.loads(result.stdout)
        assert (description.pop("topic_id") != "", description) == (
            True,
            {"name": "t", "num_partitions": 3, "replication_factor": 2, "is_new": False},
        )
        assert (await topic(cluster, "create", "t", "--if-not-exists")).stdout == "t exists\n"
