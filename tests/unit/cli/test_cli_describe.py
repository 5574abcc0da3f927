"""`kipmesh topic describe`, and what `create` says of a topic that there is, asked of brokers in memory."""

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


def objects(done: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, Any]]]:
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["name"]: each["partitions"] for each in found}


async def test_replicas_that_come_and_leave_are_shown_where_there_are_any() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2, replicas=2)
        cluster.create_topic("u")
        done = await describe(cluster)
        assert (done.returncode, done.stderr) == (0, "")
        assert "ADDING" not in done.stdout
        cluster.reassigning.append(("t", OngoingPartitionReassignment(1, (3, 4, 2, 1), (3, 4), (2, 1))))
        done = await describe(cluster)
        assert (done.returncode, done.stderr) == (0, "")
        _, _, idle, moving, _, _, other, _ = done.stdout.splitlines()
        assert done.stdout.splitlines()[1].split()[-2:] == ["ADDING", "REMOVING"]
        assert idle.split()[-2:] == ["-", "-"]
        assert moving.split()[-2:] == ["3,4", "2,1"]
        assert other.split()[-2:] == ["WAITS", "FOR"]
        for names in ((), ("t", "u")):
            found = objects(await describe(cluster, *names, "--json"))
            assert (found["t"][1]["adding_replicas"], found["t"][1]["removing_replicas"]) == ([3, 4], [2, 1])
            assert not {"adding_replicas", "removing_replicas"} & (found["t"][0].keys() | found["u"][0].keys())
        assert "adding_replicas" not in objects(await describe(cluster, "u", "--json"))["u"][0]


async def test_without_an_active_controller_the_rest_is_shown() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.inject("ListPartitionReassignments", ErrorCode.REQUEST_TIMED_OUT, times=1000)
        done = await describe(cluster, "t", "--json")
        assert done.returncode == 0
        assert done.stderr == "kipmesh: no active controller: reassignments are not shown\n"
        assert len(objects(done)["t"]) == 1


async def test_a_topic_that_there_is_already_is_told_as_a_new_one_is() -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 3, replicas=2)
        cluster.inject("CreateTopics", ErrorCode.TOPIC_ALREADY_EXISTS, times=2)
        done = await topic(cluster, "create", "t", "--if-not-exists", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert (told.pop("topic_id") != "", told) == (
            True,
            {"name": "t", "num_partitions": 3, "replication_factor": 2, "is_new": False},
        )
        assert (await topic(cluster, "create", "t", "--if-not-exists")).stdout == "t exists\n"
