"""A leader service dies and comes back, and its partitions come back to it, while records go on being acknowledged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from kipmesh.client import AdminClient, PartitionMetadata
from tests.e2e import writer_of_tests
from tests.e2e.mesh_of_tests import Mesh
from tests.e2e.writer_of_tests import Writer, check_nothing_lost, read_all

TOPIC = "events"
PARTITIONS = 2
BROKERS = ["leader-1", "follower-1", "follower-2"]


@pytest.fixture(autouse=True)
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred records a second, so that a test that takes long does not have many to read."""
    monkeypatch.setattr(writer_of_tests, "BURST_RECORDS", 10)
    monkeypatch.setattr(writer_of_tests, "BURST_INTERVAL_S", 0.03)


def start(mesh: Mesh, *config: str) -> None:
    # A broker that is killed is fenced because its connection broke: one that only stands still must not be.
    settings = ("broker.session.timeout.ms=15000", *config)
    mesh.local("up", *(text for setting in settings for text in ("--config", setting)))
    mesh.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS), "--replication-factor", "3")


async def described(mesh: Mesh) -> list[PartitionMetadata]:
    """In this process: a command takes long on a busy machine."""
    async with AdminClient(mesh.bootstrap) as admin:
        return list((await admin.describe_topics([TOPIC]))[0].partitions.values())


async def leaders(mesh: Mesh) -> set[int]:
    return {one.leader_id for one in await described(mesh)}


async def wait_until(mesh: Mesh, condition: Callable[[PartitionMetadata], bool]) -> None:
    """Until it holds of every partition."""
    async with asyncio.timeout(60):
        found = await described(mesh)
        while not all(map(condition, found)):
            await asyncio.sleep(0.2)
            found = await described(mesh)


async def wait_leader(mesh: Mesh, leader_id: int) -> None:
    await wait_until(mesh, lambda one: one.leader_id == leader_id)


async def wait_other_leader(mesh: Mesh, leader_id: int) -> None:
    """The broker that is asked may not have heard of what others have."""
    await wait_until(mesh, lambda one: one.leader_id not in (-1, leader_id))


async def wait_isr(mesh: Mesh) -> None:
    await wait_until(mesh, lambda one: len(one.isr) == len(BROKERS))


async def fail_and_return(mesh: Mesh, writer: Writer) -> int:
    """The leader service is killed and started again; its broker id."""
    (preferred,) = await leaders(mesh)
    await writer.until(200)
    await asyncio.to_thread(mesh.local, "kill", "leader-1")
    await writer.until(200)
    await wait_other_leader(mesh, preferred)
    await asyncio.to_thread(mesh.local, "start", "leader-1")
    return preferred


async def check_all(mesh: Mesh, writer: Writer) -> None:
    await wait_isr(mesh)
    check_nothing_lost(writer.acknowledged, await read_all(mesh.bootstrap, TOPIC))
    for partition in range(PARTITIONS):
        await asyncio.to_thread(mesh.wait_identical, f"{TOPIC}-{partition}", BROKERS)


async def test_leadership_comes_back_by_itself(mesh: Mesh) -> None:
    await asyncio.to_thread(start, mesh, "leader.imbalance.check.interval.seconds=1")
    async with Writer(mesh.bootstrap, TOPIC) as writer:
        preferred = await fail_and_return(mesh, writer)
        await wait_leader(mesh, preferred)
        await writer.until(200)
    await check_all(mesh, writer)


async def test_leadership_comes_back_by_command(mesh: Mesh) -> None:
    await asyncio.to_thread(start, mesh, "auto.leader.rebalance.enable=false")
    async with Writer(mesh.bootstrap, TOPIC) as writer:
        preferred = await fail_and_return(mesh, writer)
        await wait_isr(mesh)
        await wait_other_leader(mesh, preferred)
        done = await asyncio.to_thread(mesh.run, "topic", "elect", "--all", "--json")
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(one["topic"], one["partition"], one["error"]) for one in found] == [
            (TOPIC, partition, "NONE") for partition in range(PARTITIONS)
        ]
        await wait_leader(mesh, preferred)
        await writer.until(200)
    done = await asyncio.to_thread(mesh.run, "topic", "elect", TOPIC)
    assert done.stdout.count("ELECTION_NOT_NEEDED") == PARTITIONS
    await check_all(mesh, writer)
