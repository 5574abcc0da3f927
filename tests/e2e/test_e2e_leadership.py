"""A restarted preferred leader regains leadership while records are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from kipmesh.client import AdminClient, PartitionMetadata
from tests.e2e import writer_of_tests
from tests.e2e.cli_of_tests import ClusterCli
from tests.e2e.writer_of_tests import Writer, check_nothing_lost, read_all

TOPIC = "events"
PARTITIONS = 2
BROKERS = ["leader-1", "follower-1", "follower-2"]


@pytest.fixture(autouse=True)
def slow_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a few hundred records per second, which limits the records to read back."""
    monkeypatch.setattr(writer_of_tests, "BURST_RECORDS", 10)
    monkeypatch.setattr(writer_of_tests, "BURST_INTERVAL_S", 0.03)


def start(cluster: ClusterCli, *config: str) -> None:
    # The session outlasts pauses: only a killed broker is fenced, when its connection breaks.
    settings = ("broker.session.timeout.ms=15000", *config)
    cluster.local("up", *(text for setting in settings for text in ("--config", setting)))
    cluster.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS), "--replication-factor", "3")


async def described(cluster: ClusterCli) -> list[PartitionMetadata]:
    """Describe the partitions in this process, because commands are slow on a busy machine."""
    async with AdminClient(cluster.bootstrap) as admin:
        return list((await admin.describe_topics([TOPIC]))[0].partitions.values())


async def leaders(cluster: ClusterCli) -> set[int]:
    return {partition.leader_id for partition in await described(cluster)}


async def wait_until(cluster: ClusterCli, condition: Callable[[PartitionMetadata], bool]) -> None:
    """Wait until the condition holds for every partition."""
    async with asyncio.timeout(60):
        found = await described(cluster)
        while not all(map(condition, found)):
            await asyncio.sleep(0.2)
            found = await described(cluster)


async def wait_leader(cluster: ClusterCli, leader_id: int) -> None:
    await wait_until(cluster, lambda partition: partition.leader_id == leader_id)


async def wait_other_leader(cluster: ClusterCli, leader_id: int) -> None:
    await wait_until(cluster, lambda partition: partition.leader_id not in (-1, leader_id))


async def wait_isr(cluster: ClusterCli) -> None:
    await wait_until(cluster, lambda partition: len(partition.isr) == len(BROKERS))


async def restart_leader(cluster: ClusterCli, writer: Writer) -> int:
    """Kill the leader service, wait for new leaders, start it again, and return its broker id."""
    (preferred,) = await leaders(cluster)
    await writer.until(200)
    await asyncio.to_thread(cluster.local, "kill", "leader-1")
    await writer.until(200)
    await wait_other_leader(cluster, preferred)
    await asyncio.to_thread(cluster.local, "start", "leader-1")
    return preferred


async def check_all(cluster: ClusterCli, writer: Writer) -> None:
    await wait_isr(cluster)
    check_nothing_lost(writer.acknowledged, await read_all(cluster.bootstrap, TOPIC))
    for partition in range(PARTITIONS):
        await asyncio.to_thread(cluster.wait_identical, f"{TOPIC}-{partition}", BROKERS)


async def test_restarted_preferred_leader_regains_leadership_by_auto_rebalance(cluster: ClusterCli) -> None:
    await asyncio.to_thread(start, cluster, "leader.imbalance.check.interval.seconds=1")
    async with Writer(cluster.bootstrap, TOPIC) as writer:
        preferred = await restart_leader(cluster, writer)
        await wait_leader(cluster, preferred)
        await writer.until(200)
    await check_all(cluster, writer)


async def test_elect_command_returns_leadership_to_the_preferred_leader(cluster: ClusterCli) -> None:
    await asyncio.to_thread(start, cluster, "auto.leader.rebalance.enable=false")
    async with Writer(cluster.bootstrap, TOPIC) as writer:
        preferred = await restart_leader(cluster, writer)
        await wait_isr(cluster)
        await wait_other_leader(cluster, preferred)
        done = await asyncio.to_thread(cluster.run, "topic", "elect", "--all", "--json")
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(each["topic"], each["partition"], each["error"]) for each in found] == [
            (TOPIC, partition, "NONE") for partition in range(PARTITIONS)
        ]
        await wait_leader(cluster, preferred)
        await writer.until(200)
    done = await asyncio.to_thread(cluster.run, "topic", "elect", TOPIC)
    assert done.stdout.count("ELECTION_NOT_NEEDED") == PARTITIONS
    await check_all(cluster, writer)
