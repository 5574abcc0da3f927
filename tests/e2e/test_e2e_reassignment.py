"""Operators drain brokers and reassign replicas under load: no acknowledged record is lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.client import AdminClient
from tests.e2e.cli_of_tests import ClusterCli, wait_for
from tests.e2e.writer_of_tests import Writer, check_nothing_lost, read_all

pytestmark = pytest.mark.slow

TOPIC = "t"
PARTITIONS = 4


def log_directories(cluster: ClusterCli, name: str) -> list[str]:
    """Return the names of the topic's log directories of a broker."""
    return sorted(path.name for path in (Path(cluster.node(name)["dir"]) / "data").glob(f"{TOPIC}-*"))


def node_id(cluster: ClusterCli, name: str) -> int:
    return int(cluster.node(name)["node_id"])


async def command(cluster: ClusterCli, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command on a thread, so that the writer keeps writing."""
    return await asyncio.to_thread(lambda: cluster.run(*arguments, check=check))


async def until(condition: Callable[[], bool], awaited: str) -> None:
    await asyncio.to_thread(wait_for, condition, awaited)


def active_controller(cluster: ClusterCli) -> str:
    found = json.loads(cluster.run("quorum", "describe", "--json").stdout.splitlines()[0])
    return next(str(node["name"]) for node in cluster.description["nodes"] if node["node_id"] == found["leader_id"])


@pytest.mark.timeout(600)
async def test_broker_is_drained_and_decommissioned_under_load(cluster: ClusterCli) -> None:
    cluster.local("up", "--leaders", "1", "--followers", "3", "--config", "broker.session.timeout.ms=6000")
    cluster.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS), "--replication-factor", "3")
    leaving = node_id(cluster, "leader-1")  # it leads all partitions
    async with Writer(cluster.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        drained = await command(cluster, "broker", "drain", str(leaving), "--json")
        outcome = json.loads(drained.stdout)
        assert (outcome["broker_id"], outcome["total"], outcome["left"]) == (leaving, PARTITIONS, 0)
        await writer.until(2000)
        await until(
            lambda: all(name.endswith("-delete") for name in log_directories(cluster, "leader-1")), "deletion of logs"
        )
        refused = await command(cluster, "broker", "decommission", str(leaving), "--timeout", "5", check=False)
        assert (refused.returncode, "stop its process now" in refused.stderr) == (1, True)
        decommission = asyncio.create_task(command(cluster, "broker", "decommission", str(leaving), "--json"))
        await command(cluster, "local", "kill", "leader-1")
        assert json.loads((await decommission).stdout)["is_registered"] is False
        await writer.until(2000)
    check_nothing_lost(writer.acknowledged, await read_all(cluster.bootstrap, TOPIC))
    await asyncio.to_thread(cluster.wait_isr, TOPIC, 3)
    for partition in cluster.describe(TOPIC)["partitions"]:
        assert leaving not in partition["replica_nodes"]
        assert len(partition["replica_nodes"]) == 3
    listed = [json.loads(line) for line in cluster.run("broker", "list", "--json").stdout.splitlines()]
    assert leaving not in [broker["node_id"] for broker in listed]
    assert sum(broker["replicas"] for broker in listed) == 3 * PARTITIONS
    assert sum(broker["leaders"] for broker in listed) == PARTITIONS
    # Each partition needs three brokers, and only three are left.
    refused = cluster.run("broker", "drain", str(listed[0]["node_id"]), check=False)
    assert refused.returncode == 1
    assert "INVALID_REPLICATION_FACTOR" in refused.stderr


@pytest.mark.timeout(600)
async def test_reassignment_survives_controller_failover_and_restart_of_the_adding_replica(cluster: ClusterCli) -> None:
    few = "replica.fetch.max.bytes=10000"  # a larger fetch would copy all records before the throttle applies
    cluster.local("up", "--controllers", "3", "--leaders", "1", "--followers", "2", "--config", few)
    cluster.run("topic", "create", TOPIC, "--partitions", "1", "--replication-factor", "2")
    (partition,) = cluster.describe(TOPIC)["partitions"]
    brokers = {node_id(cluster, name): name for name in ("leader-1", "follower-1", "follower-2")}
    (adding,) = set(brokers) - set(partition["replica_nodes"])
    staying = partition["replica_nodes"][0]
    async with Writer(cluster.bootstrap, TOPIC) as writer, AdminClient(cluster.bootstrap) as admin:
        await writer.until(3000)
        plan = f"0:{staying},{adding}"
        # The throttle is lower than the write rate: the reassignment cannot complete.
        await command(cluster, "topic", "reassign", TOPIC, "--replicas", plan, "--throttle", "1")
        assert list(await admin.list_partition_reassignments()) == [(TOPIC, 0)]
        await command(cluster, "local", "kill", await asyncio.to_thread(active_controller, cluster))
        await until(lambda: TOPIC in cluster.run("topic", "reassign", "--list").stdout, "a new active controller")
        await command(cluster, "local", "kill", brokers[adding])
        await writer.until(1000)
        await command(cluster, "local", "start", brokers[adding])
        await writer.until(1000)
        listed = json.loads((await command(cluster, "topic", "reassign", "--list", "--json")).stdout)
        assert listed["adding_replicas"] == [adding]
        key = "follower.replication.throttled.rate"
        configured = (await command(cluster, "config", "describe", "broker", "all")).stdout.split()
        assert configured[-3:] == [key, "1", "DYNAMIC_DEFAULT_BROKER"]
        await command(cluster, "config", "alter", "broker", "all", "--delete", key)
        await admin.wait_reassigned([(TOPIC, 0)])
        await writer.until(1000)
    check_nothing_lost(writer.acknowledged, await read_all(cluster.bootstrap, TOPIC))

    def is_reassigned() -> bool:
        (described,) = cluster.describe(TOPIC)["partitions"]
        isr = sorted(described["isr_nodes"])
        return described["replica_nodes"] == [staying, adding] and isr == sorted([staying, adding])

    await until(is_reassigned, "reassigned replicas in the metadata")
    cluster.wait_identical(f"{TOPIC}-0", [brokers[staying], brokers[adding]])
