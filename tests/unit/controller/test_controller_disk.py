"""Disk failures of a controller: failed writes and fsyncs, a full disk, and lost unsynced data."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from simulation.faulty_fs import Fault, FaultyFileSystem
from tests.unit.controller.controller_quorum import ControllerQuorum
from tests.unit.controller.controller_support import FakeBroker, LiveController

DIRECTORY = Path("/metadata")
LOG = "__cluster_metadata-0"


async def test_failed_fsync_stops_controller_without_acknowledging_decision() -> None:
    fs = FaultyFileSystem()
    async with LiveController(DIRECTORY, fs) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        end = broker.image.offset + 1
        fs.faults.append(Fault("sync", path=LOG, times=1))
        result = await controller.create("lost")
        assert result.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        with pytest.raises(KafkaError):
            await asyncio.wait_for(asyncio.shield(controller.node.failed), 60)
        assert not controller.node.ready
        # The controller serves no unsynced records and accepts no requests.
        response = await controller.call("Quorum", "Fetch", broker.fetch_request())
        assert response.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert broker.image.offset + 1 == end
        assert (await broker.heartbeat()).error_code == ErrorCode.NOT_CONTROLLER


async def test_failed_write_stops_controller() -> None:
    fs = FaultyFileSystem()
    async with LiveController(DIRECTORY, fs) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        fs.faults.append(Fault("write", path=LOG, torn_bytes=20))
        assert (await controller.create("lost")).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        with pytest.raises(KafkaError):
            await asyncio.wait_for(asyncio.shield(controller.node.failed), 60)


async def test_full_disk_fails_only_affected_operation() -> None:
    fs = FaultyFileSystem()
    async with LiveController(DIRECTORY, fs) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        fs.faults.append(Fault("write", error=errno.ENOSPC, path=LOG, torn_bytes=20))
        assert (await controller.create("first")).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert controller.node.ready
        assert (await broker.heartbeat()).error_code == 0
        assert (await controller.create("second")).error_code == 0
        await broker.catch_up()
        assert set(broker.image.topic_names) == {"second"}
        assert broker.image == controller.node.image
    async with LiveController(DIRECTORY, fs) as controller:
        assert set(controller.node.image.topic_names) == {"second"}


async def test_controller_becomes_active_after_full_disk_has_space() -> None:
    fs = FaultyFileSystem()
    fs.faults.append(Fault("write", error=errno.ENOSPC, path=".log", skip=1, times=2))  # after the LeaderChange
    async with LiveController(DIRECTORY, fs) as controller:
        assert not fs.faults
        assert controller.node.epoch == 1
        await FakeBroker(controller, 1).join()
        assert (await controller.create("t")).error_code == 0


async def test_quorum_survives_failed_fsync_of_active_controller(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path) as quorum:
        await quorum.join(1)
        broken = await quorum.active()
        await quorum.kill(broken)
        fs = FaultyFileSystem()
        await quorum.start(broken, fs=fs)
        await quorum.create("before")
        while await quorum.active() != broken:
            await quorum.stop(other := await quorum.active())
            await quorum.start(other)
        fs.faults.append(Fault("sync", path=LOG, times=100))
        await quorum.create("after")
        with pytest.raises(KafkaError):
            await asyncio.wait_for(asyncio.shield(quorum.nodes[broken].failed), 60)
        await quorum.kill(broken)
        image = quorum.nodes[await quorum.active()].image
        assert set(image.topic_names) == {"before", "after"}


@pytest.mark.parametrize("seed", range(12))
async def test_acknowledged_decisions_survive_crash(seed: int) -> None:
    rng = random.Random(seed)
    fs = FaultyFileSystem()
    controller = LiveController(DIRECTORY, fs)
    async with controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        acknowledged = set()
        for number in range(rng.randint(1, 6)):
            result = await controller.create(f"topic-{number}", rng.randint(1, 5))
            assert result.error_code == 0
            acknowledged.add(f"topic-{number}")
        pending = [asyncio.create_task(controller.create(f"late-{number}")) for number in range(3)]
        await asyncio.sleep(rng.random() * 0.004)
        await broker.catch_up()
        seen = set(broker.image.topic_names)
        fs.crash(rng)
        acknowledged |= {
            task.result().name
            for task in pending
            if task.done() and not task.exception() and not task.result().error_code
        }
        await asyncio.gather(*pending, return_exceptions=True)
    async with LiveController(DIRECTORY, fs) as controller:
        recovered = set(controller.node.image.topic_names)
        assert acknowledged | seen <= recovered <= acknowledged | seen | {"late-0", "late-1", "late-2"}
        for topic in controller.node.image.topics.values():
            assert topic.partitions, "a decision is recovered completely or not at all"
        broker.controller = controller
        await broker.catch_up()
        assert broker.image == controller.node.image


async def test_controller_refuses_directory_in_use(tmp_path: Path) -> None:
    async with LiveController(tmp_path):
        with pytest.raises(KafkaError, match="in use"):
            async with LiveController(tmp_path):
                pass
