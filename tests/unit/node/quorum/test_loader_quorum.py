"""Loaders on the nodes of a real quorum: equal images, local snapshots, and snapshots of the leader."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from tests.unit.node.quorum.loaded_quorum import LoadedQuorum
from tests.unit.node.quorum.loader_support import change, topic, topic_id
from tests.unit.node.quorum.quorum_support import until

SMALL = SnapshotLimits(0.0, 2000, 0)


async def test_nodes_create_and_clean_snapshots_and_have_equal_images(tmp_path: Path) -> None:
    """630-03, 630-05, 630-06."""
    async with LoadedQuorum(tmp_path, 3, 1, snapshots=SMALL) as quorum:
        leader = await quorum.active()
        end = 0
        for number in range(60):
            end = quorum.append_and_apply(leader, topic(number))
            if number % 10 == 9:
                await quorum.committed(leader, end)
        await quorum.applied_everywhere(end)
        image = quorum.loaded[leader.node_id].loader.image
        assert len(image.topics) == 60
        for loaded in quorum.loaded.values():
            assert loaded.loader.image == image
        await until(lambda: all(node.replica.log.log_start_offset > 0 for node in quorum.all))
        for node in quorum.all:
            latest = node.replica.latest_snapshot
            assert latest is not None
            assert node.replica.log.log_start_offset <= latest.end_offset <= node.driver.high_watermark
        assert not any(node.failures for node in quorum.all)


async def test_late_observer_loads_snapshot_of_leader(tmp_path: Path) -> None:
    async with LoadedQuorum(tmp_path, 3, 1, snapshots=SMALL, retention=RetentionLimits(1, 1)) as quorum:
        leader = await quorum.active()
        observer = quorum.observers[101]
        await quorum.loaded[101].loader.stop()
        await observer.kill()
        shutil.rmtree(observer.directory)
        end = 0
        for number in range(60):
            end = quorum.append_and_apply(leader, topic(number))
        await quorum.committed(leader, end)
        await until(lambda: leader.replica.log.log_start_offset > 0)
        await observer.boot()
        await quorum.applied_everywhere(end)
        loaded = quorum.loaded[101]
        assert observer.listener.of("installed")
        assert loaded.loader.image.topics == quorum.loaded[leader.node_id].loader.image.topics
        end = quorum.append_and_apply(leader, change(0, 2))
        await quorum.applied_everywhere(end)
        changed = loaded.loader.image.partition(topic_id(0), 0)
        assert changed is not None
        assert changed.leader == 2
        assert not any(node.failures for node in quorum.all)


async def test_restarted_node_continues_from_its_snapshot(tmp_path: Path) -> None:
    async with LoadedQuorum(tmp_path, 1, 0, snapshots=SMALL) as quorum:
        leader = await quorum.active()
        for number in range(60):
            end = quorum.append_and_apply(leader, topic(number))
        await quorum.committed(leader, end)
        await until(lambda: leader.replica.log.log_start_offset > 0)
        before = quorum.loaded[1].loader.image
        await quorum.loaded[1].loader.stop()
        await leader.stop()
        await leader.boot()
        leader = await quorum.active()
        assert quorum.loaded[1].loader.image.topics == before.topics
        assert quorum.loaded[1].loader.applied_end == leader.replica.log.log_end_offset == before.offset + 2


async def test_image_drops_uncommitted_records_of_deposed_leader(tmp_path: Path) -> None:
    async with LoadedQuorum(tmp_path, 3) as quorum:
        first = await quorum.active()
        end = quorum.append_and_apply(first, topic(1))
        await quorum.applied_everywhere(end)
        others = quorum.followers(first)
        for other in others:
            await quorum.loaded[other.node_id].loader.stop()
            await other.kill()
        # A long election timeout, so that the other voters elect one of themselves.
        first.driver.machine.config = replace(first.driver.machine.config, election_timeout_ms=600_000)
        quorum.append_and_apply(first, topic(2))
        lost = quorum.loaded[first.node_id].loader.image
        assert lost.topic_by_name("t2") is not None
        first.expire()
        await until(lambda: not first.driver.is_leader)
        for other in others:
            await other.boot()
        second = await quorum.active()
        assert second is not first
        end = quorum.append_and_apply(second, topic(3))
        await quorum.applied_everywhere(end)
        image = quorum.loaded[first.node_id].loader.image
        assert image is not lost
        assert list(image.topic_names) == ["t1", "t3"]
        assert not any(node.failures for node in quorum.all)
