"""Full and failing disks of nodes of a metadata quorum."""

from __future__ import annotations

import asyncio
import errno
from collections import defaultdict
from pathlib import Path

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.storage.fs import StorageError
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.node.quorum.quorum_support import Node, Quorum, batch_of, until

LOG = "__cluster_metadata-0/0000"


class Disks(defaultdict[int, FaultyFileSystem]):
    """An in-memory file system for each node."""

    def __init__(self) -> None:
        super().__init__(FaultyFileSystem)


def quorum_on(disks: Disks, voters: int = 3) -> Quorum:
    return Quorum(Path("/data"), voters, fs_of=lambda node_id: disks[node_id])


async def test_full_disk_fails_only_affected_append() -> None:
    disks = Disks()
    async with quorum_on(disks) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a")
        disks[leader.node_id].fail("write", errno.ENOSPC, path=LOG, torn_bytes=20)
        with pytest.raises(KafkaError) as refused:
            leader.driver.append(batch_of(b"refused"), leader.driver.epoch)
        assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert leader.driver.is_leader
        assert leader.replica.log.log_end_offset == end
        await quorum.append(leader, b"b")
        await until(lambda: all(node.log_values == [b"a", b"b"] for node in quorum.all))
        assert not leader.failures


async def test_voter_with_full_disk_catches_up_when_space_is_free() -> None:
    disks = Disks()
    async with quorum_on(disks) as quorum:
        leader = await quorum.leader()
        full = quorum.followers(leader)[0]
        await quorum.append(leader, b"a")
        await until(lambda: full.log_values == [b"a"])
        disks[full.node_id].fail("write", errno.ENOSPC, path=LOG, times=3)
        await quorum.append(leader, b"b")
        await until(lambda: full.log_values == [b"a", b"b"])
        assert not full.failures


async def test_failed_fsync_stops_leader_and_quorum_elects_new_one() -> None:
    disks = Disks()
    async with quorum_on(disks) as quorum:
        first = await quorum.leader()
        await quorum.append(first, b"a")
        disks[first.node_id].fail("sync", path=LOG)
        first.driver.append(batch_of(b"b"), first.driver.epoch)
        await until(lambda: first.failures)
        assert isinstance(first.failures[0], StorageError)
        assert not first.driver.is_leader
        with pytest.raises(KafkaError):
            first.driver.append(batch_of(b"c"), first.driver.epoch)
        await first.kill()
        second = await quorum.leader()
        end = await quorum.append(second, b"d")
        assert second.log_values[0] == b"a"
        await first.boot()
        await until(lambda: first.driver.high_watermark >= end)
        assert first.log_values == second.log_values
        assert not first.failures


async def test_failed_write_stops_node_and_is_reported_once() -> None:
    disks = Disks()
    async with quorum_on(disks, 1) as quorum:
        leader = await quorum.leader()
        disks[leader.node_id].fail("write", path=LOG, times=5)
        for _ in range(3):
            with pytest.raises(KafkaError):
                leader.driver.append(batch_of(b"a"), leader.driver.epoch)
        assert len(leader.failures) == 1
        await leader.kill()


async def test_failed_write_of_election_stops_node_without_event() -> None:
    disks = Disks()
    quorum = quorum_on(disks)
    broken: list[Node] = []

    def break_disk(node: Node) -> None:
        if node.node_id == 2:
            disks[2].fail("sync", path="quorum-state")
            broken.append(node)

    quorum.on_boot = break_disk
    async with quorum:
        leader = await quorum.leader()
        await until(lambda: broken[0].failures)
        states = broken[0].listener.of("state")
        assert len(states) == 1, "only the event of the start"
        await quorum.append(leader, b"a")
        await broken[0].kill()


async def test_leader_epoch_checkpoint_is_retried_on_full_disk() -> None:
    disks = Disks()
    async with quorum_on(disks, 1) as quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        await leader.kill()
        disks[1].fail("write", errno.ENOSPC, path="leader-epoch-checkpoint", times=2)
        await leader.boot()
        await asyncio.wait_for(quorum.append(await quorum.leader(), b"b"), 20)
        assert not leader.failures
