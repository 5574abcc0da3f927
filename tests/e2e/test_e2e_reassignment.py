"""Brokers leave and replicas move under load, as an operator does it: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.client import AdminClient
from tests.e2e.mesh_of_tests import Mesh, wait_for
from tests.e2e.writer_of_tests import Writer, check_nothing_lost, read_all

pytestmark = pytest.mark.slow

TOPIC = "t"
PARTITIONS = 4


def folders(mesh: Mesh, name: str) -> list[str]:
    """What a broker holds of the topic."""
    return sorted(path.name for path in (Path(mesh.node(name)["dir"]) / "data").glob(f"{TOPIC}-*"))


def broker_named(mesh: Mesh, name: str) -> int:
    return int(mesh.node(name)["node_id"])


async def command(mesh: Mesh, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """On a thread: the writer goes on."""
    return await asyncio.to_thread(lambda: mesh.run(*arguments, check=check))


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_for, condition, what)


def active(mesh: Mesh) -> str:
    """The name of the active controller."""
    found = json.loads(mesh.run("quorum", "describe", "--json").stdout.splitlines()[0])
    return next(str(node["name"]) for node in mesh.description["nodes"] if node["node_id"] == found["leader_id"])


@pytest.mark.timeout(600)
async def test_a_broker_is_drained_and_decommissioned_under_load(mesh: Mesh) -> None:
    mesh.local("up", "--leaders", "1", "--followers", "3", "--config", "broker.session.timeout.ms=6000")
    mesh.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS), "--replication-factor", "3")
    leaving = broker_named(mesh, "leader-1")  # it leads everything
    async with Writer(mesh.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        drained = await command(mesh, "broker", "drain", str(leaving), "--json")
        said = json.loads(drained.stdout)
        assert (said["broker_id"], said["total"], said["left"]) == (leaving, PARTITIONS, 0)
        await writer.until(2000)
        await until(
            lambda: not [name for name in folders(mesh, "leader-1") if not name.endswith("-delete")], "files gone"
        )
        refused = await command(mesh, "broker", "decommission", str(leaving), "--timeout", "5", check=False)
        assert (refused.returncode, "stop its process now" in refused.stderr) == (1, True)
        decommission = asyncio.create_task(command(mesh, "broker", "decommission", str(leaving), "--json"))
        await command(mesh, "local", "kill", "leader-1")
        assert json.loads((await decommission).stdout)["is_registered"] is False
        await writer.until(2000)
    check_nothing_lost(writer.acknowledged, await read_all(mesh.bootstrap, TOPIC))
    await asyncio.to_thread(mesh.wait_isr, TOPIC, 3)
    for one in mesh.describe(TOPIC)["partitions"]:
        assert leaving not in one["replica_nodes"]
        assert len(one["replica_nodes"]) == 3
    listed = [json.loads(line) for line in mesh.run("broker", "list", "--json").stdout.splitlines()]
    assert leaving not in [broker["node_id"] for broker in listed]
    assert sum(broker["replicas"] for broker in listed) == 3 * PARTITIONS
    assert sum(broker["leaders"] for broker in listed) == PARTITIONS
    # Each partition needs a broker of its own for each replica, and there are just three left.
    refused = mesh.run("broker", "drain", str(listed[0]["node_id"]), check=False)
    assert refused.returncode == 1
    assert "INVALID_REPLICATION_FACTOR" in refused.stderr


@pytest.mark.timeout(600)
async def test_a_reassignment_survives_a_failover_and_the_death_of_the_adding_broker(mesh: Mesh) -> None:
    few = "replica.fetch.max.bytes=10000"  # or else one fetch would bring everything, before any throttle holds
    mesh.local("up", "--controllers", "3", "--leaders", "1", "--followers", "2", "--config", few)
    mesh.run("topic", "create", TOPIC, "--partitions", "1", "--replication-factor", "2")
    (one,) = mesh.describe(TOPIC)["partitions"]
    brokers = {broker_named(mesh, name): name for name in ("leader-1", "follower-1", "follower-2")}
    (adding,) = set(brokers) - set(one["replica_nodes"])
    staying = one["replica_nodes"][0]
    async with Writer(mesh.bootstrap, TOPIC) as writer, AdminClient(mesh.bootstrap) as admin:
        await writer.until(3000)
        plan = f"0:{staying},{adding}"
        # So slow that it never ends while writes go on.
        await command(mesh, "topic", "reassign", TOPIC, "--replicas", plan, "--throttle", "1")
        assert list(await admin.list_partition_reassignments()) == [(TOPIC, 0)]
        await command(mesh, "local", "kill", await asyncio.to_thread(active, mesh))
        await until(lambda: TOPIC in mesh.run("topic", "reassign", "--list").stdout, "a new active controller")
        await command(mesh, "local", "kill", brokers[adding])
        await writer.until(1000)
        await command(mesh, "local", "start", brokers[adding])
        await writer.until(1000)
        listed = json.loads((await command(mesh, "topic", "reassign", "--list", "--json")).stdout)
        assert listed["adding_replicas"] == [adding]
        key = "follower.replication.throttled.rate"
        configured = (await command(mesh, "config", "describe", "broker", "all")).stdout.split()
        assert configured[-3:] == [key, "1", "DYNAMIC_DEFAULT_BROKER"]
        await command(mesh, "config", "alter", "broker", "all", "--delete", key)
        await admin.wait_reassigned([(TOPIC, 0)])
        await writer.until(1000)
    check_nothing_lost(writer.acknowledged, await read_all(mesh.bootstrap, TOPIC))

    def is_there() -> bool:
        """Once the broker that is asked has heard so, too."""
        (one,) = mesh.describe(TOPIC)["partitions"]
        return one["replica_nodes"] == [staying, adding] and sorted(one["isr_nodes"]) == sorted([staying, adding])

    await until(is_there, "replicas where they were sent")
    mesh.wait_identical(f"{TOPIC}-0", [brokers[staying], brokers[adding]])
